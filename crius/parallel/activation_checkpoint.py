"""Activation checkpointing: what a block keeps for its backward, and what it computes again there.

A block's ``forward`` is wrapped, not the block: parameter names stay, and the hooks of FSDP, which hang on the call of
the module, run once. Recomputation runs the same kernels on the same inputs, so that losses and gradients stay the same
to the last bit (eager).
"""

import difflib
import re
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from crius.config.training import ActivationCheckpointConfig
from crius.errors import ConfigError
from crius.models.moe import MixtureOfExperts
from crius.models.plan import ShardingPlan, match

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
ContextFn = Callable[[], Contexts]

EVERY_OTHER = "matmul_every_other"
_MATMULS = (
    *("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default", "aten.linear.default"),
    *("crius.mkldnn_linear.default", "crius.grouped_mm.default"),
    *("aten._scaled_mm.default", "aten._scaled_mm_v2.default"),
    *("aten._grouped_mm.default", "aten._scaled_grouped_mm.default", "aten._scaled_grouped_mm_v2.default"),
)
# by name, not by object: some exist in some versions of torch only, or once a module of it is imported
CATEGORIES: Mapping[str, tuple[str, ...]] = {
    "attention": (
        "crius.attend.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_fused_attention_overrideable.default",
        "aten._flash_attention_forward.default",
        "aten._efficient_attention_forward.default",
        "torch_attn._varlen_attn.default",
        "flex_attention",  # a higher-order op
    ),
    "matmul": _MATMULS,
    EVERY_OTHER: _MATMULS,
    "reduce_scatter": (
        "_c10d_functional.reduce_scatter_tensor.default",
        "_c10d_functional.reduce_scatter_tensor_coalesced.default",
    ),
}
_CHOICES = ("aten.topk.default", "aten._local_scalar_dense.default")
_COUNTS = (
    *("_c10d_functional.all_to_all_single.default", "_c10d_functional.wait_tensor.default"),
    *("_c10d_functional.all_reduce.default", "aten._to_copy.default"),
)
"""A layer with experts keeps its choices in every mode, and what ops of ``_COUNTS`` make of whole numbers. Routed in
another way, a recomputed layer would have other shapes, or silently another gradient; and the host would wait for the
numbers of rows once more. Rows themselves travel again."""

_OP_NAME = re.compile(r"(\w+)\.(\w+)\.(\w+)")


@dataclass(frozen=True)
class CheckpointedBlocks:
    """What was checkpointed.

    Attributes:
        count: blocks that recompute something; in mode memory_budget those that the compiler may let do so.
        total: blocks of this part of the model.
        description: what stays and what is recomputed.
    """

    count: int
    total: int
    description: str
    _matches: Counter[str] = field(default_factory=Counter, repr=False, compare=False)

    def matches(self) -> dict[str, int]:
        """Entry of ``save_ops`` to how many results of it a block keeps, the most over blocks; empty in other modes.

        All are 0 before the first forward with gradients. A compiled block counts when it is traced.
        """
        return dict(self._matches)


def apply_activation_checkpoint(
    model: nn.Module, plan: ShardingPlan, config: ActivationCheckpointConfig, compile_enabled: bool
) -> CheckpointedBlocks:
    """Wrap the ``forward`` of the modules that ``plan.block`` names, in place.

    Comes after tensor and context parallelism, whose communication is recomputed with the rest, and before compile and
    FSDP.

    Args:
        model: the whole model, or one pipeline stage of it; blocks are counted from 1 over all stages.
        plan: names the block.
        config: the section, its mode decided.
        compile_enabled: blocks are compiled afterwards.

    Raises:
        ConfigError: an entry of ``save_ops`` is no category and no op of this torch, or mode memory_budget without
            compile.
    """
    numbered = {name: module for name, module in model.named_modules() if match(plan.block, name)}
    blocks = list(numbered.values())
    is_budget = config.mode == "memory_budget"
    functorch_config.activation_memory_budget = config.memory_budget if is_budget else 1.0  # 1.0: torch's own
    if config.mode in (None, "none"):
        return CheckpointedBlocks(0, len(blocks), "all activations stay")
    if is_budget:
        return _memory_budget(len(blocks), config.memory_budget, compile_enabled)
    attention_stays = compile_enabled and any(_is_split_on_cpu(block) for block in blocks)
    note = "; attention stays too, which torch cannot recompute in such a graph on a CPU" * attention_stays
    routed = {block for block in blocks if any(isinstance(part, MixtureOfExperts) for part in block.modules())}
    choices = "; choices and counts of experts stay too" * bool(routed)
    if config.mode == "selective" and config.selective_option == "op":
        matches = Counter(dict.fromkeys(config.save_ops, 0))
        for block in blocks:
            _wrap(block, _selective_contexts(config.save_ops, matches, attention_stays, routes=block in routed))
        kept = ", ".join(config.save_ops) or "nothing"
        note *= "attention" not in config.save_ops
        return CheckpointedBlocks(len(blocks), len(blocks), f"of each block stay: {kept}{note}{choices}", matches)
    assert config.mode in ("full", "selective"), config.mode  # auto is one of the others by now: choices.decide
    every = 1 if config.mode == "full" else int(config.selective_option)
    # by its number in the whole model, so that it is the same block under every layout
    wrapped = [block for name, block in numbered.items() if (int(name.rpartition(".")[2]) + 1) % every == 0]
    for block in wrapped:
        routes = block in routed
        keeps = routes or attention_stays
        _wrap(block, _selective_contexts((), Counter(), attention_stays, routes=routes) if keeps else None)
    which = "every block" if every == 1 else f"one block of {every}"
    return CheckpointedBlocks(len(wrapped), len(blocks), f"{which} keeps its input only{note}{choices}")


def _is_split_on_cpu(block: nn.Module) -> bool:
    """Whether tensor or expert parallelism on CPUs splits ``block``.

    The attention of such a block, compiled, cannot be recomputed: in torch 2.13 at least, the partitioner takes the
    kernel for one that draws random numbers, and adds the state of the CPU's generator to the outputs of the graph
    behind the mesh of the DTensors, where the runtime does not expect a tensor.
    """
    split = (parameter for parameter in block.parameters() if isinstance(parameter, DTensor))
    return any(parameter.device_mesh.device_type == "cpu" for parameter in split)


def _memory_budget(num_blocks: int, budget: float, compile_enabled: bool) -> CheckpointedBlocks:
    if not compile_enabled:
        raise ConfigError(
            "activation_checkpoint.mode memory_budget needs torch.compile.",
            where="--activation_checkpoint.mode",
            why="its partitioner chooses what to recompute",
            fix="--compile.enable",
        )
    if hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size"):
        # under tensor parallelism it would end at the device mesh, the only such object, whose size it cannot compute
        functorch_config.unsafe_treat_script_objects_as_zero_size = True
    # at 1 the partitioner keeps whatever is cheaper to keep
    return CheckpointedBlocks(
        num_blocks * (budget < 1), num_blocks, f"the compiler keeps {budget:g} of the activations"
    )


def _wrap(block: nn.Module, context_fn: ContextFn | None) -> None:
    assert "forward" not in vars(block), "activation checkpointing comes before compile"
    keeps_rng = any(isinstance(module, _DropoutNd) and module.p > 0 for module in block.modules())
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": keeps_rng}
    if context_fn is not None:
        options["context_fn"] = context_fn
    block._checkpoint_options = options  # type: ignore[assignment]
    # a method, not a closure: torch.compile shares one graph among all blocks whose attributes are alike
    block.forward = types.MethodType(_checkpointed_forward, block)


def _checkpointed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(type(self).forward, self, *args, **self._checkpoint_options, **kwargs)  # type: ignore[arg-type]


def _selective_contexts(
    save_ops: Sequence[str], matches: Counter[str], attention_stays: bool, *, routes: bool = False
) -> ContextFn:
    """What ``checkpoint`` calls before each forward of a block; counts into ``matches``.

    Args:
        save_ops: what stays.
        matches: how many results each entry of it keeps.
        attention_stays: attention, too.
        routes: the block has experts.

    Raises:
        ConfigError: see ``resolve_save_ops``.
    """
    anyway = dict.fromkeys(CATEGORIES["attention"], "") if attention_stays else {}
    categories = {**anyway, **resolve_save_ops(save_ops)}

    def contexts() -> Contexts:
        return create_selective_checkpoint_contexts(_Policy(categories, matches, routes=routes))

    # no cache_hash on it: from its cache, torch would take a graph without asking the policy, which then counts nothing
    return contexts


class _Policy:
    """What stays in one forward of one block.

    Up to torch 2.12 it is asked again in the recomputation, whose matmuls are counted apart: early stopping may end it
    sooner, but not reorder it.
    """

    def __init__(self, categories: Mapping[str, str], matches: Counter[str], *, routes: bool) -> None:
        self._categories, self._matches, self._routes = categories, matches, routes
        self._found: Counter[str] = Counter()
        self._matmuls: Counter[bool] = Counter()

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        category = self._categories.get(str(op))
        if category is None and self._routes and _is_routing(str(op), args):
            return CheckpointPolicy.MUST_SAVE
        if category is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        again = bool(getattr(context, "is_recompute", False))
        if category == EVERY_OTHER:
            self._matmuls[again] += 1
            if self._matmuls[again] % 2 == 0:  # the first stays, the second is recomputed, the third stays, ...
                return CheckpointPolicy.PREFER_RECOMPUTE
        if category and not again:
            self._found[category] += 1
            self._matches[category] = max(self._matches[category], self._found[category])
        return CheckpointPolicy.MUST_SAVE


def _is_routing(op: str, args: Sequence[Any]) -> bool:
    """Whether an op of a layer with experts chooses experts or counts their rows."""
    is_whole = bool(args) and isinstance(args[0], torch.Tensor) and not args[0].is_floating_point()
    return op in _CHOICES or (op in _COUNTS and is_whole)


def resolve_save_ops(save_ops: Sequence[str]) -> dict[str, str]:
    """Name of each op whose result stays, to the entry of ``save_ops`` that says so.

    Raises:
        ConfigError: an entry is no category and no op of this torch, is there twice, or is covered by another.
    """
    resolved: dict[str, str] = {}
    for entry in save_ops:
        names = CATEGORIES.get(entry, (entry,))
        if entry not in CATEGORIES and not _is_op(entry):
            raise _unknown(entry)
        for name in names:
            if name in resolved:
                raise ConfigError(
                    f"activation_checkpoint.save_ops names {name} twice, by {resolved[name]} and by {entry}.",
                    where="--activation_checkpoint.save_ops",
                    fix=f"leave out {entry} or {resolved[name]}",
                )
            resolved[name] = entry
    return resolved


def _is_op(name: str) -> bool:
    parts = _OP_NAME.fullmatch(name)
    packet = getattr(getattr(torch.ops, parts[1]), parts[2], None) if parts else None
    return parts is not None and packet is not None and parts[3] in packet.overloads()


def _unknown(entry: str) -> ConfigError:
    known = [*CATEGORIES]
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, op = name.partition("::")
        known.append(f"{namespace}.{op}" if "." in op else f"{namespace}.{op}.default")
    overloads = [name for name in known if name.startswith(f"{entry}.")]
    near = sorted(overloads, key=len)[:3] or difflib.get_close_matches(entry, known, n=3, cutoff=0.6)
    return ConfigError(
        f"activation_checkpoint.save_ops has {entry}, which is no category and no op of torch {torch.__version__}.",
        where="--activation_checkpoint.save_ops",
        why=f"categories are {', '.join(CATEGORIES)}; ops are written as namespace.name.overload",
        fix=f"did you mean {' or '.join(near)}?" if near else "e.g. aten.mm.default",
    )
