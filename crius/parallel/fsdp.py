"""FSDP2 for every data-parallel layout: shards, replicas of shards (HSDP), plain replicas (DDP) and one process.

DDP is a mesh of replicas with one shard each, and one process is a mesh of one rank: ``fully_shard`` serves all
layouts. Like the other passes it is left out where it would change nothing: for one rank whose weights need no cast.
"""

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common
from torch.distributed.tensor import Shard

from crius.config.layout import Layout
from crius.config.parallelism import ParallelismConfig
from crius.config.run import RunConfig
from crius.config.training import TrainingConfig
from crius.models.plan import ShardingPlan
from crius.parallel.mesh import Mesh
from crius.parallel.reproducible import (
    HashedReduceScatter,
    PlainReduceScatter,
    TreeAccumulation,
    TreeReduceScatter,
    describe_trees,
    install_trees,
)
from crius.shards import local_tensor, num_shards

MESH_PER_PARAMETER = hasattr(fsdp_common, "ShardPlacementResult")
"""Whether the parameters of one FSDP unit can have different meshes. Torch 2.11 lacks this."""


@dataclass(frozen=True)
class FsdpUnit:
    """Modules that are gathered together, and what FSDP does with their gathered weights after the forward.

    Attributes:
        modules: names of the modules.
        reshard_after_forward: True: weights are freed; False: kept; a number: resharded to that many ranks.
        reason: reason of the choice, in a few words.
        numel: number of elements of its gathered weights on one tensor-parallel rank.
    """

    modules: tuple[str, ...]
    reshard_after_forward: bool | int
    reason: str
    numel: int


def needs_fsdp(layout: Layout, config: RunConfig) -> bool:
    """Whether FSDP has anything to do: split, sum, cast or offload weights, or round or expose their gradients.

    Otherwise it would still copy every weight twice per microbatch and every gradient once.
    """
    training = config.training
    casts = training.mixed_precision_param != training.dtype and not config.lora.is_on  # LoRA casts its base before
    stored, reduce = (getattr(torch, name) for name in (training.dtype, training.mixed_precision_reduce))
    accumulates_apart = training.gradient_sync == "deferred" and reduce != stored
    rounds_gradients = reduce.itemsize < stored.itemsize  # a wider gradient is cast back before it is added
    return (
        layout.num_ranks > 1
        or casts
        or accumulates_apart
        or rounds_gradients
        or training.enable_cpu_offload
        or training.reproducible
        or config.sdc.recompute_interval > 0
        or config.quantize.dense.float8.enable_fsdp_float8_all_gather
    )


def plan_units(plan: ShardingPlan, model: nn.Module, parallelism: ParallelismConfig) -> list[FsdpUnit]:
    """The FSDP units of ``model``, which may be one pipeline stage, with the reshard choice of each."""
    groups = []
    for group in plan.expand_units(name for name, _ in model.named_modules() if name):
        here = tuple(name for name in group if next(model.get_submodule(name).parameters(), None) is not None)
        groups += [here] if here else []
    first_names = [name for name, _ in model.named_children()]
    last = max(groups, key=lambda group: max(first_names.index(name.split(".")[0]) for name in group))
    return [FsdpUnit(group, *_reshard(parallelism, group == last), _numel(model, group)) for group in groups]


def _numel(model: nn.Module, names: tuple[str, ...]) -> int:
    parameters = {p for name in names for p in model.get_submodule(name).parameters()}  # a tied weight counts once
    return sum(local_tensor(p).numel() for p in parameters)


def describe_units(
    units: list[FsdpUnit], layout: Layout, parallelism: ParallelismConfig, training: TrainingConfig
) -> list[str]:
    """One log line for each reshard choice: its units, its cost and its reason."""
    groups: dict[tuple[bool | int, str], list[FsdpUnit]] = {}
    mode = parallelism.reshard_after_forward_mode
    if layout.fsdp == 1:
        return [f"reshard_after_forward {mode}: no communication, each rank has whole weights"]
    for unit in units:
        groups.setdefault((unit.reshard_after_forward, unit.reason), []).append(unit)
    lines = []
    for (kept, reason), members in groups.items():
        names = ["+".join(unit.modules) for unit in members]
        shown = ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])
        size = sum(unit.numel for unit in members) * getattr(torch, training.mixed_precision_param).itemsize / 2**20
        cost = {
            True: "gathered twice per microbatch, no gathered weights are kept",
            False: f"gathered once per {'step' if mode == 'never' or layout.pp > 1 else 'microbatch'}, "
            f"{size:,.1f} MiB are kept gathered",
        }
        what = cost[kept] if isinstance(kept, bool) else f"gathered twice, {size / kept:,.1f} MiB kept in {kept} parts"
        lines.append(f"reshard_after_forward {mode}: {shown}: {what} ({reason})")
    return lines


def _reshard(parallelism: ParallelismConfig, is_last: bool) -> tuple[bool | int, str]:
    mode = parallelism.reshard_after_forward_mode
    if isinstance(mode, int):
        return mode, f"the config asks for groups of {mode} ranks"
    if mode != "default":
        return mode == "always", f"the config asks for {mode}"
    if parallelism.pipeline_parallel_degree > 1:
        return False, "a pipeline would gather them again for every microbatch"
    if is_last:
        return False, "its backward comes next"
    return True, "frees its weights until the backward"


def shard(
    model: nn.Module,
    units: list[FsdpUnit],
    mesh: Mesh,
    training: TrainingConfig,
    experts: Collection[nn.Parameter] = (),
    *,
    casts: bool = True,
) -> None:
    """Shard ``model`` in place. Gradients are summed over ranks, never averaged: the loss is already normalised.

    Without ``casts``, weights are gathered in their own dtype: a frozen base has the dtype of the activations, and the
    layers cast their adapters. Under ``training.reproducible``, FSDP does not know the replicas, and ``GradientSync``
    sums over them. ``experts`` are parameters that are sharded over a mesh of their own if the layout has one.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param) if casts else None,
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,  # the only float inputs of a block are activations and cos and sin of the angles
    )
    axes = mesh.shards if training.reproducible else mesh.fsdp
    on_gpu = axes.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=on_gpu) if training.enable_cpu_offload else OffloadPolicy()
    place = _placement(experts, mesh) if experts else None
    apart = experts if mesh.experts and not MESH_PER_PARAMETER else ()  # in FSDP units of their own
    wrap = functools.partial(fully_shard, mp_policy=precision, offload_policy=offload)
    previous: list[nn.Module] = []
    for unit in units:
        modules = [model.get_submodule(name) for name in unit.modules]
        wrap_unit = functools.partial(wrap, reshard_after_forward=unit.reshard_after_forward, shard_placement_fn=place)
        nested = [part for part in modules[0].modules() if any(p in apart for p in part.parameters(recurse=False))]
        for part in nested:
            wrap_unit(part, mesh=mesh.experts)
        wrap_unit(modules, mesh=axes)
        for part in nested:
            _join(part, modules[0], previous)
        previous = modules[:1]
    wrap(model, mesh=axes)
    sizes = [mesh.size() for mesh in (axes, mesh.experts) if mesh]
    for module in fsdp_modules(model) if max(sizes) > 1 else ():  # with one rank, FSDP would divide by the factor
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # Gloo cannot pre-multiply; a sum is NCCL's fast path too


def _placement(experts: Collection[nn.Parameter], mesh: Mesh) -> Callable[[nn.Parameter], Any]:
    """How FSDP splits each parameter of a unit: ``experts`` over ``mesh.experts``, along dim 1 if there are too few."""
    axes = mesh.experts
    info: fsdp_common.FSDPMeshInfo | None = None
    if axes is not None and axes.ndim == 2:
        info = fsdp_common.HSDPMeshInfo(axes, shard_mesh_dim=1, replicate_mesh_dim=0)
    elif axes is not None:
        info = fsdp_common.FSDPMeshInfo(axes, shard_mesh_dim=0)
    ranks = (axes or mesh.shards).size(-1)

    def place(parameter: nn.Parameter) -> Any:
        if parameter not in experts:
            return None
        placement = Shard(0 if local_tensor(parameter).shape[0] >= ranks else 1)
        return fsdp_common.ShardPlacementResult(placement, info) if info and MESH_PER_PARAMETER else placement

    return place


def _join(part: nn.Module, block: nn.Module, previous: list[Any]) -> None:
    """Gather and free the FSDP unit ``part`` together with the unit ``block`` around it, as if they were one unit.

    The hooks of ``part`` run around ``block``: inside of a compiled ``block`` they would break its graph.

    Args:
        part: module in ``block``.
        block: module whose hooks run before those of ``part``.
        previous: module of the unit before, if any. For its backward FSDP would prefetch only what it gathered last.
    """
    assert isinstance(part, FSDPModule)
    state: Any = part._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    block.register_forward_pre_hook(state._pre_forward, with_kwargs=True)
    block.register_forward_hook(state._post_forward)
    part.set_modules_to_backward_prefetch(previous)


def end_backward_at_adapters(model: nn.Module, units: list[FsdpUnit], embedding: str) -> None:
    """Prevent FSDP from gathering units again whose backward is not needed: all units before the first trained weight.

    Args:
        model: the sharded model. A stage without the embedding returns the gradient of its input, so it needs all of
            its backward.
        units: units of the model, in the order of the forward.
        embedding: name of the embedding module.
    """
    if not any(embedding in unit.modules for unit in units):
        return
    for unit in units:
        modules = [model.get_submodule(name) for name in unit.modules]
        if any(parameter.requires_grad for module in modules for parameter in module.parameters()):
            return
        if len(unit.modules) == 1:  # else the unit is the embedding together with the output layer
            for module in fsdp_modules(modules[0]):
                module.set_unshard_in_backward(False)


def show_gradients(
    model: nn.Module, units: list[FsdpUnit], mesh: Mesh, training: TrainingConfig
) -> dict[str, HashedReduceScatter]:
    """Make FSDP expose the gradient of each unit of a sharded model, as this rank has it before it is summed.

    Returns the new reduce-scatters, by the names of the units' modules, in the order of the forward pass.
    """
    shown = {}
    for unit in units:
        inner = TreeReduceScatter(mesh.layout.cp) if training.reproducible else PlainReduceScatter()
        # its modules share one state
        name = "+".join(unit.modules)
        module = model.get_submodule(unit.modules[0])
        for index, group in enumerate(param_groups(module)):  # experts may be in a second group
            shown[f"{name}/experts" if index else name] = scatter = HashedReduceScatter(inner)
            group._reduce_scatter_comm = scatter
    return shown


def param_groups(module: nn.Module) -> list[Any]:
    """FSDP's parameter groups of one unit. Parameters on one mesh are one group, gathered and summed together."""
    groups: list[Any] = []
    for part in fsdp_modules(module):
        state: Any = part._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)  # only in versions of torch with a mesh per parameter
        groups += [state._fsdp_param_group] if several is None else several
    return [group for group in groups if group]


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules of ``model`` that FSDP manages, including the root."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


class GradientSync:
    """Decides when the gradients of a step's microbatches are synchronised, and how long gathered weights are kept.

    Args:
        model: the model, laid out on ``mesh``. Without FSDP (see ``needs_fsdp``) there is nothing to synchronise.
        parallelism: the section.
        training: the section.
        mesh: needed under ``training.reproducible``.
    """

    def __init__(
        self, model: nn.Module, parallelism: ParallelismConfig, training: TrainingConfig, mesh: Mesh | None = None
    ) -> None:
        self._model = model if isinstance(model, FSDPModule) else None
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        self._numel = sum(p.numel() // (num_shards(p, "tp") * num_shards(p, "ep")) for p in trained)
        self._trees: list[TreeAccumulation] = []
        if training.reproducible:
            assert mesh is not None
            self._trees = install_trees(model, mesh)
            self._sharded = list(model.parameters())  # listed now: gathered parameters later take their names
        self._mode = "auto" if training.gradient_sync == "default" else training.gradient_sync
        self._reduce_dtype = getattr(torch, training.mixed_precision_reduce)
        self._keep_weights = parallelism.reshard_after_forward_mode == "never"

    def describe(self, layout: Layout, num_microbatches: int) -> str:
        """The collectives of a step of ``num_microbatches`` on this layout, and their memory, for the log."""
        if self._trees:
            return describe_trees(layout, num_microbatches)
        scatters = 1 if self._mode == "deferred" else num_microbatches
        reduces = num_microbatches if self._mode == "immediate" else 1
        counts = []
        if layout.fsdp > 1:
            counts.append(f"{scatters} reduce-scatter")
        if layout.dp_replicate > 1:
            counts.append(f"{reduces} all-reduce")
        unsharded = self._numel * self._reduce_dtype.itemsize / 2**20
        kept = {
            "immediate": "only sharded gradients are kept",
            "deferred": f"{unsharded:,.1f} MiB of unsharded gradients are kept until the last microbatch",
            "auto": "only sharded gradients are kept (auto: least memory without repeated all-reduce)",
        }[self._mode]
        return f"{' + '.join(counts) or 'no collective'} per unit and step, {kept}"

    def start_microbatch(self, is_last: bool) -> None:
        """Call this before the forward of each microbatch."""
        if self._trees:
            for parameter in self._sharded:
                parameter.grad = None  # the gradient of the previous microbatch is in the trees
            for tree in self._trees:
                tree.is_last = is_last
        elif self._model is None:
            return  # one rank: nothing to synchronise
        elif self._mode == "deferred":
            self._model.set_requires_gradient_sync(is_last)
        elif self._mode == "auto":
            self._model.set_requires_all_reduce(is_last)
        if self._model is not None and self._keep_weights:
            self._model.set_reshard_after_backward(is_last)
