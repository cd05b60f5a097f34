"""Which linear layers run in low precision, and why the others do not: by name, shape and layout, without torch."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from crius.config.param_groups import fits, fits_any
from crius.config.run import RunConfig
from crius.config.training import DenseQuantizeConfig
from crius.errors import PlanError
from crius.table import aligned

FLOAT8_BLOCK = 16
"""Dims of a float8 matmul are multiples of this: a row of 16 bytes, which ``torch._scaled_mm`` checks on a GPU."""

MXFP8_BLOCK = 32
"""Elements that share a scale (OCP Microscaling Formats 1.0, section 5.2). Each dim is contracted over in one of the
three matmuls of forward and backward, so each dim must consist of whole blocks."""

# Layers up to these sizes are slower in float8 than in bfloat16: torchao 0.18, torchao/float8/float8_linear_utils.py
# (_auto_filter_for_tensorwise, _auto_filter_for_rowwise), measured on H100; the tables behind them are in
# https://github.com/pytorch/ao/tree/main/torchao/float8#performance.
TENSORWISE_SMALL_OUT, TENSORWISE_SMALL_IN = 1024, 4096  # small if both are
ROWWISE_SMALL_OUT, ROWWISE_SMALL_IN = 2048, 1024  # small if either is
ROWWISE_MODEST_OUT, ROWWISE_MODEST_IN = 4096, 2048  # small if both are

LAYER_NUMBER = r"(?<=\.)\d+(?=\.|$)"
"""Pattern of a layer's number in a name."""

TOO_SMALL = "too small to gain"
SENSITIVE = "sensitive"

WHOLE_STYLES = ("router", "experts")
"""Styles of modules that every rank has whole."""

# dim of the weight (out_features, in_features) that a tensor-parallel style splits
_SPLIT_DIM = {"colwise": 0, "colwise_heads": 0, "logits": 0, "rowwise": 1}


@dataclass(frozen=True, kw_only=True)
class LinearChoice:
    """Precision of one linear layer.

    Attributes:
        name: as in the model.
        shape: ``(out_features, in_features)`` of the whole layer.
        local: shape that one rank multiplies after tensor-parallel sharding; the largest, if the ranks' shapes differ.
        padded: ``local``, rounded up to whole blocks if it is padded with zeros; else ``local``.
        is_converted: whether the layer runs in low precision.
        reason: why a kept layer is kept; how a converted layer is padded, or empty.
    """

    name: str
    shape: tuple[int, int]
    local: tuple[int, int]
    padded: tuple[int, int]
    is_converted: bool
    reason: str


def is_enabled(dense: DenseQuantizeConfig) -> bool:
    """Whether any linear layer is to run in low precision."""
    return dense.float8.enable or dense.mxfp8.enable


def kind(dense: DenseQuantizeConfig) -> Literal["float8", "mxfp8"]:
    """The low precision that is enabled; only one can be (see ``rules_quantize``)."""
    return "mxfp8" if dense.mxfp8.enable and not dense.float8.enable else "float8"


def block(dense: DenseQuantizeConfig) -> int:
    """Unit of the dims of a matmul: each dim must be a multiple of it."""
    return MXFP8_BLOCK if kind(dense) == "mxfp8" else FLOAT8_BLOCK


def split(name: str, plan: Any, num_kv_heads: int, degree: int) -> tuple[int, int]:
    """Number of parts that tensor parallelism splits ``(out_features, in_features)`` of the linear layer ``name`` into.

    Raises:
        PlanError: Crius does not know how the style of the layer's row in ``plan`` splits a linear layer.
    """
    return parts(plan.style_of(name), num_kv_heads, degree)


def linear_choices(config: RunConfig, model: Any, plan: Any, *, accelerated: bool) -> list[LinearChoice]:
    """All linear layers of the whole model, in its order, each with its precision.

    Args:
        config: the run.
        model: its ``crius.models.description.ModelDescription``.
        plan: its ``crius.models.plan.ShardingPlan``.
        accelerated: whether the device has low-precision matmuls; emulated ones gain no speed.

    Raises:
        PlanError: Crius does not know how a style of the plan splits a linear layer.
    """
    dense = config.quantize.dense
    degree = config.parallelism.tensor_parallel_degree
    is_emulated = not accelerated or getattr(dense, kind(dense)).emulate
    is_filtered = dense.auto_filter == "on" or (dense.auto_filter == "auto" and not is_emulated)
    return [
        _choose(
            dense,
            name,
            shape,
            split(name, plan, model.num_kv_heads, degree),
            is_sensitive=any(_is_row(pattern, name) for pattern in plan.sensitive),
            is_filtered=is_filtered,
        )
        for name, shape in model.linears.items()
    ]


def converts_output(choices: Iterable[LinearChoice], plan: Any) -> bool:
    """Whether the output layer runs in low precision.

    Args:
        choices: all linear layers of the model.
        plan: its ``crius.models.plan.ShardingPlan``.
    """
    rows = [row for row, style in plan.tensor_parallel.items() if style == "logits"]
    return any(choice.is_converted and any(_is_row(row, choice.name) for row in rows) for choice in choices)


def indivisible(shape: tuple[int, int], parts: tuple[int, int], unit: int) -> str:
    """Dims of a rank's share that are not multiples of ``unit``, with the division; empty if there are none.

    Args:
        shape: ``(out_features, in_features)`` of the whole layer.
        parts: number of parts that each of the two dims is split into.
        unit: unit of the dims.
    """
    return "; ".join(
        f"{side} {text}"
        for side, size, count in zip(("out", "in"), shape, parts, strict=True)
        if (text := _remainder(size, count, unit))
    )


def summary(choices: Sequence[LinearChoice]) -> str:
    """``56 converted, 1 kept: output (sensitive)``; layers that are kept for the same reason are counted together."""
    kept: dict[str, list[str]] = {}
    for choice in choices:
        if not choice.is_converted:
            kept.setdefault(choice.reason, []).append(choice.name)
    counts = f"{sum(choice.is_converted for choice in choices)} converted, {sum(map(len, kept.values()))} kept"
    groups = ", ".join(_group(reason, names) for reason, names in kept.items())
    return f"{counts}: {groups}" if groups else counts


def table(choices: Sequence[LinearChoice]) -> list[str]:
    """Lines to log: layers that differ only in their number share a row; the last line has the totals."""
    rows: dict[tuple[object, ...], tuple[LinearChoice, int]] = {}
    for choice in choices:
        key = (numberless(choice.name), choice.shape, choice.local, choice.is_converted, choice.reason)
        rows[key] = (choice, rows[key][1] + 1 if key in rows else 1)
    is_split = any(choice.local != choice.shape for choice in choices)
    cells = [["layer", "count", "out x in", *["per rank"] * is_split, "precision", "reason"]]
    for choice, count in rows.values():
        name = numberless(choice.name) if count > 1 else choice.name
        local = [_times(choice.local)] * is_split
        precision = "converted" if choice.is_converted else "kept"
        cells.append([name, f"x {count}", _times(choice.shape), *local, precision, choice.reason])
    return [*aligned(cells, left=None), _totals(choices)]


def numberless(name: str) -> str:
    """``layers.*.attention.wq`` of ``layers.0.attention.wq``."""
    return re.sub(LAYER_NUMBER, "*", name)


def _choose(
    dense: DenseQuantizeConfig,
    name: str,
    shape: tuple[int, int],
    parts: tuple[int, int],
    *,
    is_sensitive: bool,
    is_filtered: bool,
) -> LinearChoice:
    unit = block(dense)
    local = _largest_share(shape, parts)
    rounded = (-(-local[0] // unit) * unit, -(-local[1] // unit) * unit)
    uneven = indivisible(shape, parts, unit)
    excluded = fits_any(dense.exclude, name)
    included = fits_any(dense.include, name)
    kept = ""
    if excluded:
        kept = f"excluded by {excluded}"
    elif not included and is_sensitive:
        kept = SENSITIVE
    elif uneven and not dense.pad_inner_dim:
        kept = uneven
    elif is_filtered and not included and _is_small(dense, local):
        kept = TOO_SMALL
    padding = f"padded {_times(local)} -> {_times(rounded)}" if uneven else ""
    padded = local if kept else rounded
    return LinearChoice(
        name=name, shape=shape, local=local, padded=padded, is_converted=not kept, reason=kept or padding
    )


def _is_small(dense: DenseQuantizeConfig, local: tuple[int, int]) -> bool:
    """Whether a layer is slower in low precision, by torchao's measurements.

    Nobody measured rowwise_with_gw_hp or MXFP8, which also scale along rows or parts of rows: the limits of rowwise are
    used. rowwise_with_gw_hp gains at most as much as rowwise, because one of its three matmuls stays in high precision.
    """
    out_features, in_features = local
    if kind(dense) == "float8" and dense.float8.recipe == "tensorwise":
        return out_features <= TENSORWISE_SMALL_OUT and in_features <= TENSORWISE_SMALL_IN
    if out_features <= ROWWISE_SMALL_OUT or in_features <= ROWWISE_SMALL_IN:
        return True
    return out_features <= ROWWISE_MODEST_OUT and in_features <= ROWWISE_MODEST_IN


def parts(style: str, num_kv_heads: int, degree: int) -> tuple[int, int]:
    """Number of parts that a style splits ``(out_features, in_features)`` into.

    Args:
        style: the layer's row of the sharding plan; empty if there is no row and the layer is not split.
        num_kv_heads: key/value heads of the model; if there are fewer of them than ranks, each rank computes one.
        degree: tensor-parallel ranks.

    Raises:
        PlanError: Crius does not know how the style splits a linear layer.
    """
    if degree <= 1 or style in ("", *WHOLE_STYLES):
        return 1, 1
    if style not in _SPLIT_DIM:
        what = f"the style {style} does not say which dim of a linear layer it splits."
        raise PlanError(what, fix=f"add it to {__name__}, or use one of {', '.join(_SPLIT_DIM)}")
    count = min(degree, num_kv_heads) if style == "colwise_heads" else degree
    return (count, 1) if _SPLIT_DIM[style] == 0 else (1, count)


def _largest_share(shape: tuple[int, int], parts: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // parts[0]), -(-shape[1] // parts[1])


def _is_row(pattern: str, name: str) -> bool:
    """Whether a pattern of a sharding plan, which stands for whole names, fits ``name``."""
    return pattern.count(".") == name.count(".") and fits(pattern, name)


def _remainder(size: int, count: int, unit: int) -> str:
    """``2256 / 8 = 282, 282 mod 16 = 10``; empty if every rank's share is a multiple of ``unit``."""
    most = -(-size // count)
    shares = (most, max(0, size - most * (count - 1)))  # of the first rank and of the last
    wrong = next((share for share in shares if share % unit), 0)
    if not wrong:
        return ""
    division = f"{size} / {count} = {' and '.join(map(str, dict.fromkeys(shares)))}, " if count > 1 else ""
    return f"{division}{wrong} mod {unit} = {wrong % unit}"


def _group(reason: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} ({reason})"
    words = {TOO_SMALL: "too small"}.get(reason, f"with {reason}" if " mod " in reason else reason)
    return f"{len(names)} {words} ({', '.join(dict.fromkeys(name.rpartition('.')[2] for name in names))})"


def _totals(choices: Sequence[LinearChoice]) -> str:
    converted = [choice for choice in choices if choice.is_converted]
    padded = [choice for choice in converted if choice.padded != choice.local]
    share = _weights(choice.shape for choice in converted) / max(1, _weights(choice.shape for choice in choices))
    line = f"{summary(choices)}; converted: {share:.1%} of the linear layers' weights and FLOPs"
    if padded:
        extra = _weights(choice.padded for choice in padded) - _weights(choice.local for choice in padded)
        own = extra / _weights(choice.local for choice in padded)
        whole = extra / _weights(choice.local for choice in choices)
        line += f"; padding adds {own:.1%} to the weights and FLOPs of {len(padded)} of them, {whole:.2%} to all layers"
    return line


def _weights(shapes: Iterable[tuple[int, int]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _times(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]}"
