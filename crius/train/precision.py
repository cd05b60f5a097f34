"""What a run does to linear layers in low precision, on the device at hand or on one that is stood in for."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from crius.config.low_precision import TOO_SMALL, LinearChoice, is_enabled, kind, linear_choices, summary, table
from crius.config.quantize import DenseQuantizeConfig
from crius.config.run import RunConfig
from crius.models.description import ModelDescription
from crius.parallel.mesh import Mesh
from crius.quantize.convert import Converted, convert, precompute_scales
from crius.quantize.device import missing_matmuls


@dataclass(frozen=True)
class LowPrecision:
    """Which linear layers run in low precision, and how.

    Attributes:
        dense: the section.
        choices: of all linear layers of the whole model.
        emulated: why matmuls are emulated; empty where the device does them.
    """

    dense: DenseQuantizeConfig
    choices: list[LinearChoice]
    emulated: str

    def convert(self, part: nn.Module, shard_degree: int) -> Converted:
        """Swap the chosen layers of a part of the model, whose weights FSDP will split over ``shard_degree`` ranks."""
        emulate = bool(self.emulated)
        return convert(part, self.choices, self.dense, emulate=emulate, shard_degree=shard_degree)

    @property
    def how(self) -> str:
        """Recipe and emulation, in a few words."""
        recipe = self.dense.float8.recipe if kind(self.dense) == "float8" else "blocks of 32"
        parts = [recipe, f"emulated: {self.emulated}" if self.emulated else "", self.advice]
        return "; ".join(filter(None, parts))

    @property
    def advice(self) -> str:
        """What to do where the filter of small layers leaves nothing to convert; empty where something is."""
        is_filtered = any(choice.reason == TOO_SMALL for choice in self.choices)
        is_empty = not any(choice.is_converted for choice in self.choices)
        return "--quantize.dense.auto_filter off converts small layers too" if is_filtered and is_empty else ""

    def lines(self) -> list[str]:
        """What becomes of each linear layer, as a table; the counts are the effect's to tell."""
        *rows, total = table(self.choices)
        rows.append(total.removeprefix(f"{summary(self.choices)}; "))
        if self.dense.pad_inner_dim and all(choice.padded == choice.local for choice in self.choices):
            rows.append("pad_inner_dim: no layer has to be padded; tokens are, where they are no whole blocks")
        return [f"{kind(self.dense)}: {line}" for line in rows]


def keep_scales(config: RunConfig, parts: Sequence[nn.Module], mesh: Mesh) -> None:
    """Call after each update: scales of weights that are gathered in float8, where they are to be computed at once."""
    float8 = config.quantize.dense.float8
    if float8.enable and float8.precompute_scale:
        precompute_scales(parts, mesh.fsdp.get_group("fsdp"))


def low_precision(config: RunConfig, facts: ModelDescription, device_type: str) -> LowPrecision | None:
    """Of a run on this process's device; None where no low precision is on."""
    dense = config.quantize.dense
    if not is_enabled(dense):
        return None
    missing = missing_matmuls(kind(dense), device_type)
    asked = getattr(dense, kind(dense)).emulate
    return planned(config, facts, accelerated=not missing, emulated="as asked" if asked else missing)


def planned(config: RunConfig, facts: ModelDescription, *, accelerated: bool, emulated: str) -> LowPrecision:
    """Of a run whose device is known.

    Args:
        config: the run, with some low precision on.
        facts: sizes of the model.
        accelerated: whether the device has such matmuls.
        emulated: why they are emulated; empty where they are not.
    """
    plan = facts.plan
    return LowPrecision(config.quantize.dense, linear_choices(config, facts, plan, accelerated=accelerated), emulated)
