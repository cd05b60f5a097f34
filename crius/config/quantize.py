"""``[quantize]``: low-precision matmuls."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]


@dataclass(frozen=True, kw_only=True)
class Float8Config:
    """float8 matmuls (torchao; formats E4M3 and E5M2 of arXiv:2209.05433)."""

    enable: bool = False
    """Run dense linear layers in float8."""

    recipe: Float8Recipe = "tensorwise"
    """How values are scaled into float8. tensorwise: one scale for a tensor, the fastest. rowwise: one for each row,
    more exact. rowwise_with_gw_hp: rowwise, and the gradient of the weight in high precision, the most exact."""

    enable_fsdp_float8_all_gather: bool = False
    """Gather sharded weights in float8: half the bytes of bfloat16. tensorwise only."""

    precompute_scale: bool = False
    """Compute the scales of all gathered weights at once after each update, with one collective in place of one for
    each weight. Needs enable_fsdp_float8_all_gather."""

    emulate: bool = False
    """Round to float8 but multiply in high precision: right numbers at no speed. Happens by itself on a device that has
    no float8 matmuls."""


@dataclass(frozen=True, kw_only=True)
class MXFP8Config:
    """MXFP8 matmuls: float8 with one power-of-two scale for 32 elements (OCP Microscaling Formats 1.0)."""

    enable: bool = False
    """Run dense linear layers in MXFP8."""

    emulate: bool = False
    """Round to MXFP8 but multiply in high precision: right numbers at no speed. Happens by itself on a device that has
    no MXFP8 matmuls."""


@dataclass(frozen=True, kw_only=True)
class DenseQuantizeConfig:
    """Dense linear layers."""

    float8: Float8Config = field(default_factory=Float8Config)
    mxfp8: MXFP8Config = field(default_factory=MXFP8Config)

    exclude: tuple[str, ...] = ()
    """Linear layers to keep in high precision, beside the output layer: names such as output, attention.wk or
    layers.0; * stands for anything within one part of a name."""

    include: tuple[str, ...] = ()
    """Linear layers to convert although they would be kept by default: sensitive ones and small ones. Names as for
    exclude. An error where the dims of one do not divide."""

    auto_filter: Literal["auto", "on", "off"] = "auto"
    """Keep layers that are too small to gain anything. auto: where the device has such matmuls; not where they are
    emulated, which gains nothing anyway."""

    pad_inner_dim: bool = False
    """Pad layers whose dims do not divide with zeros instead of keeping them in high precision. Costs memory and
    time."""


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Low precision by kind of layer."""

    dense: DenseQuantizeConfig = field(default_factory=DenseQuantizeConfig)


FORMATS: dict[str, dict[str, Any]] = {
    **{
        f"float8_{recipe}": {"quantize.dense.float8.enable": True, "quantize.dense.float8.recipe": recipe}
        for recipe in get_args(Float8Recipe)
    },
    "mxfp8": {"quantize.dense.mxfp8.enable": True},
}
"""Each low precision by the name that receipts give it, and what sets it."""

SET_BY_FORMAT = tuple(dict.fromkeys(name for changes in FORMATS.values() for name in changes))
"""Settings that a format decides."""
