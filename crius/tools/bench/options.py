"""Options of ``crius bench quantize``. No torch."""

from dataclasses import dataclass

from crius.config.arguments import Positive


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What is timed."""

    gpu: str = "here"
    """GPU to use: here is the first of this machine."""

    tokens: Positive = 8192
    """Tokens that a layer multiplies: those of a rank's microbatch."""

    repeat: Positive = 7
    """Rounds; each round times everything that is compared."""

    formats: str = ""
    """Out of float8_tensorwise, float8_rowwise, float8_rowwise_with_gw_hp and mxfp8, joined by commas. Empty: all that
    the device has matmuls for."""

    modes: str = ""
    """eager, compiled, or both joined by a comma. Empty: both."""

    emulated: bool = False
    """Time the emulation if there are no such matmuls; it is not the format's speed."""
