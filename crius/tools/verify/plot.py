"""The figure of ``crius verify precision``. Needs matplotlib."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot_curves(
    path: Path, reference: str, curves: Mapping[str, Sequence[float]], tolerance: float, title: str
) -> None:
    """Write a PNG: all curves above, and below them how far each is from the reference, step by step.

    Args:
        path: of the PNG.
        reference: the name of the curve that the others are compared with.
        curves: loss of each step by name; one that ended early is shorter.
        tolerance: relative, drawn as a band.
        title: what was trained.
    """
    figure = Figure(figsize=(8, 5.6))
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.6))
    expected = curves[reference]
    top.plot(range(1, len(expected) + 1), expected, color="0.75", linewidth=5, label=f"{reference} (reference)")
    for index, (name, curve) in enumerate((name, curve) for name, curve in curves.items() if name != reference):
        style = {"color": f"C{index}", "linewidth": 1.1, "label": name}
        top.plot(range(1, len(curve) + 1), curve, **style)
        bottom.plot(range(1, len(curve) + 1), gaps_percent(curve, expected), **style)
    bottom.axhspan(-100 * tolerance, 100 * tolerance, color="0.93", zorder=0)
    top.set_ylabel("loss (nats a token)")
    top.set_title(title, fontsize=10)
    top.legend(frameon=False, fontsize=9)
    bottom.set_ylabel(f"gap to {reference} (%)")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110, format="png")


def gaps_percent(curve: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Of each step that both have; NaN where one is not finite."""
    pairs = zip(curve, expected, strict=False)
    return [100 * (got / want - 1) if math.isfinite(got) and math.isfinite(want) else math.nan for got, want in pairs]
