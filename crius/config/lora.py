"""``[lora]``: low-rank adapters of frozen linear layers, and which layers get an adapter. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from crius.config.param_groups import fits, fits_any

NF4_BLOCK = 64
NF4_SCALES = 256
"""Numbers that share a scale in nf4, and scales that share a second scale (Dettmers et al. 2023, arXiv:2305.14314)."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA (arXiv:2106.09685): a linear layer becomes ``W x + scale * B (A x)``, W frozen."""

    rank: int = 0
    """Rows of each A and columns of each B. Only A and B are trained. 0: LoRA is off, and all weights are trained."""

    alpha: float = 16.0
    """The adapter's result is multiplied by alpha / rank, so that the learning rate need not change with the rank."""

    targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, as patterns such as attention.wq, feed_forward.* or layers.3. Empty: all
    linear layers of the blocks. The embedding and the output layer never get an adapter."""

    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, so that high ranks learn as fast as low ones (arXiv:2312.03732)."""

    base: Literal["keep", "int8", "nf4"] = "keep"
    """Format of the frozen linear layers of the blocks. keep: training.mixed_precision_param. int8: one scale per row.
    nf4: 4 bits, one scale per 64 numbers (arXiv:2305.14314); layers that do not divide into whole blocks are kept. int8
    and nf4 need torchao, and exclude tensor parallelism."""

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained in place of the weights."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """Factor of the adapters' result."""
        return scale_of(self.rank, self.alpha, rslora=self.rslora)


def scale_of(rank: int, alpha: float, *, rslora: bool) -> float:
    """Factor of the result of adapters of ``rank``."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def saved_lora(settings: Mapping[str, Any]) -> LoraConfig:
    """The section ``[lora]`` in the settings of a checkpoint. Older checkpoints get the defaults.

    Args:
        settings: values by dotted name.

    Raises:
        ValueError: a value is not one that Crius writes; the message names it.
    """
    found = {name: settings.get(f"lora.{name}", default) for name, default in vars(LoraConfig()).items()}
    found["targets"] = tuple(found["targets"]) if isinstance(found["targets"], list | tuple) else found["targets"]
    kinds = {"rank": int, "alpha": int | float, "targets": tuple, "rslora": bool, "base": str}
    for name, kind in kinds.items():
        value = found[name]
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise ValueError(f"lora.{name} is {ascii(value)[:80]}")
    if not all(isinstance(pattern, str) for pattern in found["targets"]) or not math.isfinite(found["alpha"]):
        raise ValueError("lora.targets or lora.alpha is not a value that a run has")
    return LoraConfig(**found)


def block_linears(model: Any) -> dict[str, tuple[int, int]]:
    """``(out_features, in_features)`` of the linear layers that may have an adapter: the linear layers of the blocks.

    Args:
        model: its ``crius.models.description.ModelDescription``.
    """
    block = model.plan.block.removesuffix("*")
    return {name: shape for name, shape in model.linears.items() if name.startswith(block)}


def target_names(lora: LoraConfig, model: Any) -> tuple[str, ...]:
    """The linear layers of ``model`` that get an adapter, in the model's order. Empty if LoRA is off."""
    if not lora.is_on:
        return ()
    names = block_linears(model)
    return tuple(name for name in names if not lora.targets or fits_any(lora.targets, name))


def unmatched(lora: LoraConfig, model: Any) -> list[str]:
    """The patterns of ``lora.targets`` that match no linear layer of the blocks of ``model``."""
    names = block_linears(model)
    return [pattern for pattern in lora.targets if not any(fits(pattern, name) for name in names)]


def is_quantized(lora: LoraConfig, shape: tuple[int, ...]) -> bool:
    """Whether the frozen base keeps a linear layer of ``shape`` ``(out_features, in_features)`` in fewer bits."""
    return lora.is_on and (lora.base == "int8" or (lora.base == "nf4" and not indivisible(shape)))


def indivisible(shape: tuple[int, ...]) -> str:
    """Why a weight of ``shape`` cannot be kept in nf4; empty if it can."""
    unit = NF4_BLOCK * NF4_SCALES
    rest = math.prod(shape) % unit
    return f"{' x '.join(map(str, shape))} mod {unit} = {rest}" if rest else ""
