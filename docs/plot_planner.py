"""Plot planned against measured figures of the rows that were not fitted on: python docs/plot_planner.py [FOLDER].

Reads ``benchmarks/planner/judged.json`` and ``judged_memory.json``, which ``benchmarks/fit_planner.py --write`` and
``fit_planner_memory.py --write`` leave, and writes planner_tps.png and planner_memory.png.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from planner.measurements import Measurement, read_measurements  # noqa: E402

DATA = ROOT / "benchmarks" / "planner"
GIB = 2**30


def scatter(out: Path, title: str, unit: str, points: dict[str, list[tuple[float, float, bool]]], band: float) -> None:
    """One colour a family; filled: dense models, open: models with experts; the band: within ``band`` of the truth."""
    figure, axes = plt.subplots(figsize=(6.4, 5.6))
    every = [value for family in points.values() for measured, planned, _ in family for value in (measured, planned)]
    ends = [0.8 * min(every), 1.25 * max(every)]
    axes.plot(ends, ends, color="0.4", linewidth=1)
    axes.fill_between(ends, [x * (1 - band) for x in ends], [x * (1 + band) for x in ends], color="0.9")
    for index, (family, found) in enumerate(sorted(points.items())):
        for experts in (False, True):
            pairs = [(measured, planned) for measured, planned, has_experts in found if has_experts == experts]
            face = {"facecolors": "none" if experts else f"C{index}", "edgecolors": f"C{index}"}
            label = f"{family}, experts" if experts else family
            if pairs:
                axes.scatter(*zip(*pairs, strict=True), s=18, linewidths=0.8, label=label, **face)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel=f"measured, {unit}", ylabel=f"planned, {unit}")
    axes.set_title(f"{title}; band: within {100 * band:.0f} %", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=100)


def judged(rows: list[Measurement], file: Path, what: str) -> dict[str, list[tuple[float, float, bool]]]:
    """Measured and planned figures by family, of rows that were judged."""
    ratios = json.loads(file.read_text())["rows"]
    points: dict[str, list[tuple[float, float, bool]]] = {}
    for row in rows:
        measured = row.tokens_per_second if what == "tps" else (row.memory_bytes or 0) / GIB
        if row.name in ratios and measured:
            points.setdefault(row.family, []).append((measured, measured * ratios[row.name], row.has_experts))
    return points


def main(folder: str = str(ROOT / "docs")) -> None:
    """Write both plots."""
    rows, _ = read_measurements(DATA / "measurements.csv")
    speed = judged(rows, DATA / "judged.json", "tps")
    scatter(Path(folder) / "planner_tps.png", "tokens/s of a GPU, rows not fitted on", "tokens/s", speed, 0.2)
    memory = judged(rows, DATA / "judged_memory.json", "memory")
    scatter(Path(folder) / "planner_memory.png", "peak memory, rows not fitted on", "GiB", memory, 0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
