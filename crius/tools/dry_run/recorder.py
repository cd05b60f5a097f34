"""One dispatch mode that sees every operator of a step, with the phase and the block of the model that it belongs to.

FLOPs are those of the multiplications that run, with recomputed ones, counted as in the model's own
``flops_per_token``: a causal query sees the keys up to its own, and the backward of attention is twice its forward,
although the kernels compute the scores again. Element-wise operators do not count.
"""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from crius.tools.dry_run.memory import Bytes, MemoryTimeline

_SHAPE_QUESTION = "_propagate_tensor_meta_non_cached"  # the uncached part
_PLAIN = (Tensor, nn.Parameter, FakeTensor)

_ATTENTION = "_scaled_dot_product_"
_VARLEN = "torch_attn::_varlen_attn"

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "send", "recv")

Formula = Callable[[torch._ops.OpOverload, tuple[Any, ...], Mapping[str, Any], Any], int]

ENDS = 2
"""Number of blocks, and of microbatches, at either end that have a name of their own: FSDP works one block ahead, and
the first ones meet another state than the others."""

Key = tuple[str, ...]
"""A phase, a place among the microbatches and a place among the blocks."""


def places(index: int, count: int) -> list[str]:
    """Names of ``index`` that do not depend on ``count``: its distance from either end, if that is small.

    The memory between the ends is linear in the index, so that its largest value is next to one of the ends.
    """
    front = [f"{index}"] if index < ENDS else []
    back = [f"{index - count}"] if count - index <= ENDS else []
    return front + back or ["between"]


class Recorder(TorchDispatchMode):
    """Memory, FLOPs and collectives in its context, by phase.

    Args:
        groups: name of each process group to its mesh axis.
    """

    def __init__(self, groups: Mapping[str, str]) -> None:
        super().__init__()
        self.timeline = MemoryTimeline()
        self.flops: Counter[tuple[str, str]] = Counter()
        self.collectives: dict[tuple[str, str], Counter[tuple[str, str, str]]] = defaultdict(Counter)
        self._groups = groups
        self._is_shape_question = False
        self._phase = "setup"
        self._microbatch = (0, 1)
        self._began = self._before = 0  # start of this phase, and of the one before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor or an unfinished result: it comes again as its local tensor
        kwargs = kwargs or {}
        if self._is_shape_question:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        now = self._phase, str(self._microbatch[0])
        self.flops[now] += flops(func, args, kwargs, result)
        found = collective(func, args, kwargs, result)
        if found is not None:
            kind, group, nbytes = found
            axis = self._groups.get(group, "other ranks")
            self.collectives[now].update({(kind, axis, "count"): 1, (kind, axis, "bytes"): nbytes})
        for item in tree_iter(result):
            if type(item) in _PLAIN:  # the storage of a wrapper is a fiction
                self.timeline.see(item)
        return result

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record everything that runs in the context."""
        with self, self.timeline.watching_resizes(), self._past_shape_questions():
            yield

    @contextmanager
    def _past_shape_questions(self) -> Iterator[None]:
        """Leave out shape questions: DTensor learns the shape of a result by running the operator on whole tensors."""
        original = getattr(ShardingPropagator, _SHAPE_QUESTION)

        def asked(propagator: ShardingPropagator, *args: Any, **kwargs: Any) -> Any:
            self._is_shape_question = True
            try:
                return original(propagator, *args, **kwargs)
            finally:
                self._is_shape_question = False

        setattr(ShardingPropagator, _SHAPE_QUESTION, asked)
        try:
            yield
        finally:
            setattr(ShardingPropagator, _SHAPE_QUESTION, original)

    def phase(self, name: str, microbatch: int = 0, count: int = 1) -> None:
        """Begin a phase: of the step, or of one of ``count`` microbatches."""
        if self._phase in ("forward", "input"):
            self.timeline.mark_living("activations", self._began)
        elif self._phase in ("backward", "sync"):
            self.timeline.mark_living("gradients", self._began)
        elif self._phase == "weight":  # storages that outlive both halves: FSDP sums gradients in the first
            self.timeline.mark_living("gradients", self._before, over="activations")
        self._before = self._began
        self._phase = name
        self._microbatch = (microbatch, count)
        self._began = self.timeline.now
        self.block("head")

    def block(self, name: str) -> None:
        """Begin a block of the model in the phase: its index and the number of blocks, or ``head`` or ``tail``."""
        self.timeline.segment(self._phase, *map(str, self._microbatch), name)

    def watch(self, blocks: Sequence[nn.Module]) -> None:
        """Make the repeated blocks of a model begin themselves, in forward and backward."""
        names = ["head", *(f"{index}/{len(blocks)}" for index in range(len(blocks))), "tail"]
        for index, module in enumerate(blocks):

            def enter(module: nn.Module, inputs: tuple[Any, ...], index: int = index) -> None:
                if self._phase == "forward":
                    self._name_backward(inputs[0], names[index])
                    self.block(names[index + 1])

            module.register_forward_pre_hook(enter)
        if blocks:

            def leave(module: nn.Module, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
                if self._phase == "forward":  # a block with counters returns its counts too
                    self._name_backward(output[0] if isinstance(output, tuple) else output, names[-2])
                    self.block("tail")

            blocks[-1].register_forward_hook(leave)

    def _name_backward(self, tensor: Tensor, name: str) -> None:
        """Begin the block ``name`` of the backward when the gradient of ``tensor``, its output, arrives."""
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: self.block(name))

    def peaks(self) -> tuple[dict[Key, Bytes], dict[Key, Bytes]]:
        """Live bytes at the start of each phase of a microbatch, and at the peak of each place in it."""
        starts: dict[Key, Bytes] = {}
        peaks: dict[Key, Bytes] = {}
        for (phase, microbatch, count, block), start, peak in self.timeline.peaks():
            number, _, total = block.partition("/")
            blocks = places(int(number), int(total)) if total else [block]
            for place in places(int(microbatch), int(count)):
                starts.setdefault((phase, place), start)
                for name in blocks:
                    key = (phase, place, name)
                    if key not in peaks or peak.total() > peaks[key].total():
                        peaks[key] = peak
        return starts, peaks


def flops(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """FLOPs of one operator, 0 if it multiplies no matrices."""
    return _formula(func)(func, args, kwargs, result)


@functools.cache
def _formula(func: torch._ops.OpOverload) -> Formula:
    name = func._schema.name.removeprefix("aten::")
    if name.startswith((_ATTENTION, _VARLEN)):
        return _attention
    if name == "_grouped_mm":
        return _grouped
    known = flop_registry.get(func.overloadpacket)
    if known is None:
        return lambda func, args, kwargs, result: 0
    return lambda func, args, kwargs, result: int(known(*args, **kwargs, out_val=result))


def _attention(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False), **kwargs)
    query = named["query"]
    key = named["key"]
    value = named["value"]
    if func._schema.name.startswith(_VARLEN):  # documents are taken for whole sequences
        query, key, value = (x.unflatten(0, (-1, named["max_q"])).transpose(1, 2) for x in (query, key, value))
    *batch, queries, width = query.shape
    keys = key.shape[-2]
    pairs = queries * keys
    if named.get("is_causal"):  # query i sees the keys up to i
        short = min(queries, keys)
        pairs = short * (short + 1) // 2 + (queries - short) * keys
    forward = 2 * math.prod(batch) * pairs * (width + value.shape[-1])
    return forward * (2 if func._schema.name.endswith("backward") or "_backward" in func._schema.name else 1)


def _grouped(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """FLOPs of a grouped matmul: every row of the ragged operand is multiplied once, in any group."""
    left = args[0]
    right = args[1]
    if left.dim() == 2 and right.dim() == 2:  # ragged inner dim: a weight gradient for each group
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * int(result.numel()) * left.shape[-1]


def collective(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> tuple[str, str, int] | None:
    """Kind, name of the group and bytes of a collective; None for other operators.

    The bytes are those of the whole message of one rank: the result of a gather, the input of any other collective.
    About ``(n - 1) / n`` of them cross the wire in a ring of n ranks, twice as many for an all-reduce.
    """
    if func.namespace not in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        return None
    name = func._schema.name.split("::")[1].replace("_", "")  # c10d and its functional twin differ in underscores
    kind = next((kind for kind in COLLECTIVES if name.startswith(kind.replace("-", ""))), None)
    if kind is None:
        return None  # waits, barriers
    tensors = [size for value in (*args, *kwargs.values()) for size in _sizes(value)]
    tensors += _sizes(result)
    # a gather returns the largest of its tensors, a scatter takes it, the others have one size
    return kind, _group_name((*args, *kwargs.values())), max(tensors, default=0)


def _sizes(value: Any) -> list[int]:
    """Bytes of a tensor, or of all tensors in a list, which is one message in parts."""
    if isinstance(value, Tensor):
        return [value.numel() * value.itemsize]
    if isinstance(value, (list, tuple)):
        parts = [size for item in value for size in _sizes(item)]
        return [sum(parts)] if parts else []
    return []


def _group_name(values: tuple[Any, ...]) -> str:
    """Name of the process group among the arguments of a collective."""
    for value in values:
        if isinstance(value, str) and value not in ("sum", "avg", "max", "min", "product"):
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return str(dist.ProcessGroup.unbox(value).group_name)
    return ""
