"""``[quantize]``: low-precision matmuls."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Float8Config:
    """float8 matmuls."""

    enable: bool = False
    """Run dense linear layers in float8."""


@dataclass(frozen=True, kw_only=True)
class MXFP8Config:
    """MXFP8 matmuls: float8 with one scale for 32 elements."""

    enable: bool = False
    """Run dense linear layers in MXFP8."""


@dataclass(frozen=True, kw_only=True)
class DenseQuantizeConfig:
    """Dense linear layers."""

    float8: Float8Config = field(default_factory=Float8Config)
    mxfp8: MXFP8Config = field(default_factory=MXFP8Config)


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Low precision by kind of layer."""

    dense: DenseQuantizeConfig = field(default_factory=DenseQuantizeConfig)
