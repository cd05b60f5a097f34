"""Options of ``crius verify``, a dataclass for each verb. No torch."""

from dataclasses import dataclass
from typing import Annotated

from crius.config.arguments import Option, Positive, positive
from crius.config.layout import parse_layout


def _check_layouts(layouts: str) -> None:
    for layout in layouts.split(",") if layouts else ():
        parse_layout(layout)


Layouts = Annotated[str, Option(check=_check_layouts)]


@dataclass(frozen=True, kw_only=True)
class OnLayouts:
    """Layouts that do the same."""

    layouts: Layouts = ""
    """Layouts joined by commas, such as fsdp2_tp2,pp4+gpipe. Empty: a table of them."""

    nproc: int = 8
    """Most ranks of a layout, if --layouts is not given."""

    timeout: Positive = 300
    """Seconds that one layout may take."""


@dataclass(frozen=True, kw_only=True)
class Trained(OnLayouts):
    """Layouts that train."""

    steps: Positive = 3
    """Steps to train; the first three are compared."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Kills at given steps."""

    steps: Positive = 20
    """Steps to train."""

    kill_at: str = "7,13"
    """Steps at which a rank is killed, joined by commas."""

    layouts: Layouts = ""
    """Layouts joined by commas, such as fsdp2_ep2,tp2,1, which the starts get in turn; losses may then differ by a
    tolerance. Empty: always the layout of the run."""

    timeout: Positive = 600
    """Seconds that each of the two runs may take."""


@dataclass(frozen=True, kw_only=True)
class Chaotic:
    """Kills at random moments."""

    kills: Positive = 25
    """Number of kills."""

    seed: int = 1
    """Seed of the ranks, steps, phases and moments."""

    steps: Positive = 40
    """Steps to train."""

    world_sizes: str = ""
    """Numbers of ranks joined by commas; each start gets one at random, as replicas and shards. With
    --training.reproducible. Empty: always those of the run."""

    layouts: Layouts = ""
    """Layouts joined by commas, such as fsdp2_ep2,tp2; each start gets one at random, and losses may then differ by a
    tolerance. Empty: always the layout of the run."""

    timeout: Positive = 1800
    """Seconds that each of the two runs may take."""


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Formats of the matmuls."""

    formats: str = ""
    """Formats joined by commas: float8_tensorwise, float8_rowwise, float8_rowwise_with_gw_hp, mxfp8, and float32 or
    bfloat16. Empty: the low precisions."""

    steps: Positive = 200
    """Steps to train."""

    layout: Layouts = "1"
    """Layout that trains, such as fsdp2; 1 is one device."""

    tolerance: Annotated[float, Option(check=positive)] = 0.02
    """Largest difference of the final loss, as a share of it."""

    plot: str = ""
    """PNG file of the curves. Empty: precision.png in the run folder."""

    timeout: Positive = 1800
    """Seconds that one format may take."""
