"""How parameters start: a rule per name pattern, drawn by ``crius.parallel.init``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """Every element is ``value``."""

    value: float


@dataclass(frozen=True)
class Normal:
    """Elements drawn from N(0, std^2) and clamped to ``limit`` standard deviations (Llama 3 code: 3)."""

    std: float
    limit: float = 3.0


Init = Constant | Normal
