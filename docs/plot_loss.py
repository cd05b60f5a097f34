"""Plot the loss of one or more runs, and how far apart they are: python docs/plot_loss.py OUT.png RUN [RUN ...]."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt


def read(run: Path) -> dict[int, float]:
    """Step to loss of a run folder."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def main(out: str, *runs: str) -> None:
    """Draw the curves over each other; below them the relative difference to the first."""
    curves = {Path(run).name: read(Path(run)) for run in runs}
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 5.2), height_ratios=(3, 1.4))
    (first, reference), *others = curves.items()
    top.plot(list(reference), list(reference.values()), color="0.75", linewidth=6, label=first)
    for index, (name, curve) in enumerate(others):
        style = {"color": f"C{index}", "linestyle": ("-", "--", ":")[index % 3]}
        top.plot(list(curve), list(curve.values()), linewidth=1.3, label=name, **style)
        gaps = {step: abs(loss - reference[step]) / reference[step] for step, loss in curve.items()}
        bottom.plot(list(gaps), [max(gap, 1e-17) for gap in gaps.values()], linewidth=1, label=name, **style)
    top.set_ylabel("loss (nats per token)")
    top.legend(frameon=False)
    bottom.set_yscale("log")
    bottom.set_ylabel(f"relative difference\nto {first}")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
