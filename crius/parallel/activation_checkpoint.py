"""Activation checkpointing: a block keeps some results for its backward and computes the others again there.

The ``forward`` of a block is wrapped, not the block. So parameter names stay, and FSDP's hooks, which are attached to
the call of the module, run once. Recomputation runs the same kernels on the same inputs, so losses and gradients stay
the same to the last bit (eager).
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
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.baddbmm.default",
    "aten.linear.default",
    "crius.mkldnn_linear.default",
    "crius.grouped_mm.default",
    "aten._scaled_mm.default",
    "aten._scaled_mm_v2.default",
    "aten._grouped_mm.default",
    "aten._scaled_grouped_mm.default",
    "aten._scaled_grouped_mm_v2.default",
)
# names, not objects: some ops exist only in some versions of torch, or only after one of its modules is imported
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
    "_c10d_functional.all_to_all_single.default",
    "_c10d_functional.wait_tensor.default",
    "_c10d_functional.all_reduce.default",
    "aten._to_copy.default",
)
"""A layer with experts keeps its choices in every mode, and the integer results of the ops of ``_COUNTS``. A layer that
is recomputed with another routing would have other shapes, or silently another gradient. The host would also wait once
more for the numbers of rows. Rows themselves are exchanged again."""

_OP_NAME = re.compile(r"(\w+)\.(\w+)\.(\w+)")


@dataclass(frozen=True)
class CheckpointedBlocks:
    """The result of activation checkpointing.

    Attributes:
        count: blocks that recompute something; in mode memory_budget, blocks in which the compiler may recompute.
        total: blocks of this part of the model.
        description: text for the log: the results that are kept and recomputed.
    """

    count: int
    total: int
    description: str
    _matches: Counter[str] = field(default_factory=Counter, repr=False, compare=False)

    def matches(self) -> dict[str, int]:
        """For each entry of ``save_ops``, the most results that a block keeps for it; empty in other modes.

        All are 0 before the first forward with gradients. A compiled block is counted when it is traced.
        """
        return dict(self._matches)


def apply_activation_checkpoint(
    model: nn.Module, plan: ShardingPlan, config: ActivationCheckpointConfig, compile_enabled: bool
) -> CheckpointedBlocks:
    """Wrap the ``forward`` of the modules that match ``plan.block``, in place.

    Call this after tensor and context parallelism, whose communication is recomputed too, and before compile and FSDP.

    Args:
        model: the whole model, or one pipeline stage of it. Blocks are counted from 1 over all stages.
        plan: sharding plan with the pattern of the blocks.
        config: the section, with a resolved mode.
        compile_enabled: whether blocks are compiled afterwards.

    Raises:
        ConfigError: an entry of ``save_ops`` is neither a category nor an op of this torch, or the mode is
            memory_budget without compile.
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
    note = ""
    if attention_stays:
        note = "; attention is kept too: torch cannot recompute it in such a graph on a CPU"
    routed = {block for block in blocks if any(isinstance(part, MixtureOfExperts) for part in block.modules())}
    choices = "; choices and counts of experts are kept too" if routed else ""
    if config.mode == "selective" and config.selective_option == "op":
        matches = Counter(dict.fromkeys(config.save_ops, 0))
        for block in blocks:
            _wrap(block, _selective_contexts(config.save_ops, matches, attention_stays, routes=block in routed))
        kept = ", ".join(config.save_ops) or "nothing"
        note *= "attention" not in config.save_ops
        return CheckpointedBlocks(len(blocks), len(blocks), f"each block keeps: {kept}{note}{choices}", matches)
    assert config.mode in ("full", "selective"), config.mode  # auto was resolved before: choices.decide
    every = 1 if config.mode == "full" else int(config.selective_option)
    # by the number in the whole model, so that the same blocks are wrapped under every layout
    wrapped = [block for name, block in numbered.items() if (int(name.rpartition(".")[2]) + 1) % every == 0]
    for block in wrapped:
        routes = block in routed
        keeps = routes or attention_stays
        _wrap(block, _selective_contexts((), Counter(), attention_stays, routes=routes) if keeps else None)
    which = "every block" if every == 1 else f"one block of {every}"
    return CheckpointedBlocks(len(wrapped), len(blocks), f"{which} keeps only its input{note}{choices}")


def _is_split_on_cpu(block: nn.Module) -> bool:
    """Whether tensor or expert parallelism on CPUs splits ``block``.

    The attention of such a block cannot be recomputed when it is compiled. In torch 2.13 at least, the partitioner
    takes its kernel for an op with random numbers and adds the state of the CPU's generator to the outputs of the
    graph. It adds it after the mesh of the DTensors, where the runtime does not expect a tensor.
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
        # under tensor parallelism the partitioner would fail at the device mesh, whose size it cannot compute
        functorch_config.unsafe_treat_script_objects_as_zero_size = True
    # with a budget of 1 the partitioner recomputes nothing
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
    # a method, not a closure: torch.compile shares one graph among all blocks with equal attributes
    block.forward = types.MethodType(_checkpointed_forward, block)


def _checkpointed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(type(self).forward, self, *args, **self._checkpoint_options, **kwargs)  # type: ignore[arg-type]


def _selective_contexts(
    save_ops: Sequence[str], matches: Counter[str], attention_stays: bool, *, routes: bool = False
) -> ContextFn:
    """The function that ``checkpoint`` calls before each forward of a block. It counts kept results into ``matches``.

    Args:
        save_ops: entries of ``save_ops``, whose results are kept.
        matches: number of kept results of each entry.
        attention_stays: whether results of attention are kept too.
        routes: whether the block has experts.

    Raises:
        ConfigError: see ``resolve_save_ops``.
    """
    anyway = dict.fromkeys(CATEGORIES["attention"], "") if attention_stays else {}
    categories = {**anyway, **resolve_save_ops(save_ops)}

    def contexts() -> Contexts:
        return create_selective_checkpoint_contexts(_Policy(categories, matches, routes=routes))

    # without cache_hash: with it, torch would take a graph from its cache without calling the policy, which counts
    return contexts


class _Policy:
    """Decides which results are kept in one forward of one block.

    Up to torch 2.12 it is called again in the recomputation. Matmuls are counted separately there: early stopping may
    end the recomputation sooner, but does not change its order.
    """

    def __init__(self, categories: Mapping[str, str], matches: Counter[str], *, routes: bool) -> None:
        self._categories = categories
        self._matches = matches
        self._routes = routes
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
            if self._matmuls[again] % 2 == 0:  # the first is kept, the second is recomputed, the third is kept, ...
                return CheckpointPolicy.PREFER_RECOMPUTE
        if category and not again:
            self._found[category] += 1
            self._matches[category] = max(self._matches[category], self._found[category])
        return CheckpointPolicy.MUST_SAVE


def _is_routing(op: str, args: Sequence[Any]) -> bool:
    """Whether an op of a layer with experts chooses experts or counts rows."""
    is_whole = bool(args) and isinstance(args[0], torch.Tensor) and not args[0].is_floating_point()
    return op in _CHOICES or (op in _COUNTS and is_whole)


def resolve_save_ops(save_ops: Sequence[str]) -> dict[str, str]:
    """Map the name of each op whose result is kept to its entry of ``save_ops``.

    Raises:
        ConfigError: an entry is neither a category nor an op of this torch, is repeated, or is part of another entry.
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
        f"activation_checkpoint.save_ops has {entry}, which is neither a category nor an op of torch "
        f"{torch.__version__}.",
        where="--activation_checkpoint.save_ops",
        why=f"categories are {', '.join(CATEGORIES)}; an op is written as namespace.name.overload",
        fix=f"did you mean {' or '.join(near)}?" if near else "e.g. aten.mm.default",
    )
