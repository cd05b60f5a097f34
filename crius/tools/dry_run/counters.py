"""FLOPs and bytes of single operators: what ``torch.utils.flop_counter`` knows, and what it does not.

FLOPs are those of the multiplications that run, recomputed ones too, counted as in the model's own ``flops_per_token``:
a causal query sees the keys up to its own, and the backward of attention is twice its forward, although the kernels
compute the scores again. Element-wise operators do not count.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_ATTENTION = "_scaled_dot_product_"

_COLLECTIVES = {  # how operators of c10d and of its functional twin begin, without underscores around the name
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
}


def flops(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """FLOPs of one operator, 0 where it multiplies no matrices."""
    counted = _FORMULAS.get(func)
    if counted is None:
        counted = _FORMULAS[func] = _formula(func)
    return counted(func, args, kwargs, result)


Formula = Callable[[torch._ops.OpOverload, tuple[Any, ...], Mapping[str, Any], Any], int]


def _formula(func: torch._ops.OpOverload) -> Formula:
    name = func._schema.name.removeprefix("aten::")
    if name.startswith(_ATTENTION):
        return _attention
    if name == "_grouped_mm":
        return _grouped
    known = flop_registry.get(func.overloadpacket)
    if known is None:
        return lambda func, args, kwargs, result: 0
    return lambda func, args, kwargs, result: int(known(*args, **kwargs, out_val=result))


def _attention(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False), **kwargs)
    query, key, value = named["query"], named["key"], named["value"]
    (*batch, queries, width), keys = query.shape, key.shape[-2]
    pairs = queries * keys
    if named.get("is_causal"):  # query i sees the keys up to i
        short = min(queries, keys)
        pairs = short * (short + 1) // 2 + (queries - short) * keys
    forward = 2 * math.prod(batch) * pairs * (width + value.shape[-1])
    return forward * (2 if func._schema.name.endswith("backward") or "_backward" in func._schema.name else 1)


def _grouped(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Every row of the ragged operand is multiplied once, in whatever group it is."""
    left, right = args[0], args[1]
    if left.dim() == 2 and right.dim() == 2:  # ragged inner dim: a weight gradient for each group
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * int(result.numel()) * left.shape[-1]


_FORMULAS: dict[torch._ops.OpOverload, Formula] = {}


def collective(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> tuple[str, str, int] | None:
    """Kind, name of the group and bytes of a collective; None for other operators.

    The bytes are those of the whole message of one rank: what a gather gives, what any other collective takes. About
    ``(n - 1) / n`` of them cross the wire in a ring of n ranks, twice that for an all-reduce.
    """
    if func.namespace not in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        return None
    name = func._schema.name.split("::")[1].strip("_")
    kind = next((kind for start, kind in _COLLECTIVES.items() if name.startswith(start)), None)
    if kind is None:
        return None  # waits, barriers
    tensors = [size for value in (*args, *kwargs.values()) for size in _sizes(value)]
    tensors += _sizes(result)
    # a gather gives the largest of its tensors, a scatter takes it, the others have one size
    return kind, _group_name((*args, *kwargs.values())), max(tensors, default=0)


def _sizes(value: Any) -> list[int]:
    """Bytes of a tensor; of a list of tensors, which is one message in parts, their sum."""
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
