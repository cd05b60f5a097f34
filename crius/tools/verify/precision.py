"""``crius verify precision``: compares the loss curve in each low precision with the curve in high precision."""

import importlib.util
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from crius.config.facts import Facts
from crius.config.layout import Layout, parse_layout
from crius.config.load import did_you_mean
from crius.config.run import RunConfig, replace_fields
from crius.config.training import FORMATS, QuantizeConfig
from crius.errors import ConfigError, EnvironmentError
from crius.plugins import REQUIREMENTS, install_line
from crius.tools.verify import matrix, worker
from crius.tools.verify.matrix import LayoutCase
from crius.tools.verify.options import Formats
from crius.tools.verify.parameters import Shards
from crius.tools.verify.run import LayoutRow, LayoutTable, row_of
from crius.tools.verify.worker import WorkerTask

CURVES = "precision.json"
PICTURE = "precision.png"

PLAIN: dict[str, dict[str, Any]] = {
    dtype: {"training.mixed_precision_param": dtype} for dtype in ("float32", "bfloat16")
}
"""High precisions: one is the reference, and others may be compared with it."""

LAYERS = {name: "MXFP8Linear" if name == "mxfp8" else "Float8Linear" for name in FORMATS}
"""Class names of the converted layers of each format (``crius.quantize.backend``)."""

SHOWN = 5
"""Number of steps in the table, evenly from the first to the last."""


@dataclass(frozen=True)
class Judge:
    """Comparison of a curve with the reference's.

    Attributes:
        steps: steps of a complete curve.
        tolerance: largest relative gap at the end of the curve.
    """

    steps: int
    tolerance: float

    @property
    def shown(self) -> list[int]:
        """Steps in the table."""
        return list(dict.fromkeys(max(1, i * self.steps // (SHOWN - 1)) for i in range(SHOWN)))

    @property
    def columns(self) -> list[str]:
        """Columns of the table."""
        return ["converted", "kept", *(f"step {step}" for step in self.shown), "tail", "gap %", "last %", "largest %"]

    def values(self, result: Mapping[str, Any], expected: Sequence[float]) -> dict[str, str]:
        """Values by column, as shown; a curve that ended early has no values after its end."""
        curve = result["loss"]
        found = {"converted": str(result["converted"]), "kept": str(result["kept"])}
        found |= {f"step {step}": f"{curve[step - 1]:.4f}" for step in self.shown if step <= len(curve)}
        if len(curve) == self.steps == len(expected):
            gaps = self.gaps(curve, expected)
            found["tail"] = f"{tail_mean(curve):.4f}"
            found |= {f"{name} %": f"{100 * gap:+.2f}" for name, gap in gaps.items()}
        return found

    def gaps(self, curve: Sequence[float], expected: Sequence[float]) -> dict[str, float]:
        """Relative gaps: of the mean over the tail, of the last step, and the largest of all steps; NaN stays NaN."""
        every = [got / want - 1 for got, want in zip(curve, expected, strict=True)]
        largest = math.nan if any(map(math.isnan, every)) else max(every, key=abs)
        return {"gap": tail_mean(curve) / tail_mean(expected) - 1, "last": every[-1], "largest": largest}

    def complaint(self, name: str, result: Mapping[str, Any], expected: Sequence[float]) -> str:
        """Error of a curve; empty if there is none."""
        curve = result["loss"]
        converted = result["converted"]
        planned = result["planned"]
        if name in FORMATS and not converted:
            return f"no linear layer was converted: the curve is not {name}'s; see the table in the log"
        if converted != planned:
            return f"{converted} linear layers were converted, {planned} were to be"
        # losses alone do not show it: with power-of-two scales, as in rowwise too, most roundings equal MXFP8's
        if name in FORMATS and any(layer != LAYERS[name] for layer in result["layers"]):
            return f"layers are {', '.join(result['layers'])} and not {LAYERS[name]}"
        if result["ended"] or not all(map(math.isfinite, curve)):
            return result["ended"] or "a loss is not finite"
        gaps = self.gaps(curve, expected)
        beyond = [f"{key} {100 * gaps[key]:+.2f} %" for key in ("gap", "last") if not abs(gaps[key]) <= self.tolerance]
        return f"{' and '.join(beyond)} beyond {100 * self.tolerance:g} %" if beyond else ""


def tail_mean(curve: Sequence[float]) -> float:
    """Mean over the last tenth of the steps, at least one: a step's loss depends on its batch."""
    return statistics.fmean(curve[-max(1, len(curve) // 10) :])


def precision(facts: Facts, folder: Path, options: Formats, *, as_json: bool = False) -> int:
    """Train the run in high precision and in each format on the same data from the same weights, and compare the loss.

    The reference has the run's ``training.mixed_precision_param`` and no low precision; the formats add low-precision
    matmuls. All curves are written next to the logs as JSON, and as a picture.

    Args:
        facts: facts about the run on this machine.
        folder: folder of the logs, with one folder per format.
        options: the tolerance is the largest relative gap of the loss, of the last step and of the mean over the last
            tenth.
        as_json: print JSON instead of a table.

    Returns:
        0; 1 if a format differs by more than the tolerance, converts nothing, or fails; 2 if one of ``formats`` is
            refused.

    Raises:
        CriusError: the reference is refused, a format or the layout cannot be read, matplotlib is missing, or the data
            is bad.
        SystemExit: a signal ended it; 130 or 143.
    """
    picture = _picture(options.plot, folder)
    placed = parse_layout(options.layout)
    config = matrix.bare(facts.config, [placed], options.steps)
    reference = config.training.mixed_precision_param
    cases = {name: _case(facts, config, placed, name) for name in _chosen(options.formats, reference)}
    cases[reference].check(with_data=True)
    judge = Judge(options.steps, options.tolerance)
    table = LayoutTable(judge.columns, list(cases), as_json, label="format")
    results: dict[str, Mapping[str, Any]] = {}
    for name, case in cases.items():
        table.add(_row(name, case, reference, judge, folder, options.timeout, results))
    _conclude(table, config, reference, results, judge, folder / CURVES, picture)
    return table.exit_code(is_asked=bool(options.formats))


def _chosen(formats: str, reference: str) -> list[str]:
    """The reference first, then each format once."""
    names = formats.split(",") if formats else list(FORMATS)
    known = [*FORMATS, *PLAIN]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{name or 'an empty word'} is not a format{did_you_mean(name, known)}",
                where="--formats",
                fix=f"use some of {', '.join(known)}",
            )
    return list(dict.fromkeys([reference, *names]))


def _picture(plot: str, folder: Path) -> Path:
    """Path of the PNG, after a check that it can be drawn."""
    picture = Path(plot) if plot else folder / PICTURE
    if picture.suffix != ".png":
        raise ConfigError(f"{picture} is not a PNG.", where="--plot", fix=f"--plot {picture.with_suffix('.png')}")
    if importlib.util.find_spec("matplotlib") is None:
        raise EnvironmentError(
            "the picture of the curves needs matplotlib, which is not installed.",
            where="crius verify precision",
            fix=install_line(REQUIREMENTS["matplotlib"]),
        )
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentError(
            f"{picture.parent} cannot be created: {error.strerror}.", where="--plot", fix="give another folder"
        ) from None
    return picture


def _case(facts: Facts, config: RunConfig, layout: Layout, name: str) -> LayoutCase:
    """The run in one format; a high precision ignores ``[quantize]``."""
    if name in FORMATS:
        off = {"quantize.dense.float8.enable": False, "quantize.dense.mxfp8.enable": False}
        changes = off | FORMATS[name]
    else:
        changes = {"quantize": QuantizeConfig()} | PLAIN[name]
    return matrix.case(facts, replace_fields(config, changes), layout)


def _row(
    name: str,
    case: LayoutCase,
    reference: str,
    judge: Judge,
    folder: Path,
    timeout: int,
    results: dict[str, Mapping[str, Any]],
) -> LayoutRow:
    """Train one format, add its curve to ``results``, and judge it."""
    is_reference = name == reference

    def task_of(config: RunConfig) -> WorkerTask:
        return WorkerTask(config, folder / name, timeout, Shards(folder, is_whole=True))

    def held_against(result: dict[str, Any]) -> tuple[dict[str, str], str, bool]:
        expected = (result if is_reference else results[reference])["loss"]
        wrong = judge.complaint(name, result, expected)
        return judge.values(result, expected), wrong or result["how"], bool(wrong)

    row, result = row_of(
        name,
        case,
        worker.curve,
        task_of,
        held_against,
        is_reference=is_reference,
        lacks_reference=not is_reference and reference not in results,
    )
    if result and not (is_reference and row.status == "FAIL"):
        results[name] = result
    return row


def _conclude(
    table: LayoutTable,
    config: RunConfig,
    reference: str,
    results: Mapping[str, Mapping[str, Any]],
    judge: Judge,
    curves: Path,
    picture: Path,
) -> None:
    """Write the curves and the picture, and print the meaning of the columns."""
    model = f"{config.model.name}/{config.model.flavor}"
    losses = {name: result["loss"] for name, result in results.items()}
    legend = [
        "",
        f"reference: {reference} matmuls; a format: the same run, its converted linear layers in that format",
        "converted, kept: linear layers of the model that was trained; tail: mean loss of the last tenth of the steps",
        f"gap: of the tail; last: of the last step; both at most {100 * judge.tolerance:g} %; largest: of any step",
    ]
    if reference in losses:
        batch = f"{config.training.global_batch_size} sequences of {config.training.seq_len} tokens"
        plot_curves(picture, reference, losses, judge.tolerance, f"{model}, {judge.steps} steps of {batch}")
        legend.append(f"picture: {picture}")
    findings = {
        "verb": "precision",
        "model": model,
        "steps": judge.steps,
        "seq_len": config.training.seq_len,
        "global_batch_size": config.training.global_batch_size,
        "lr": config.optimizer.lr,
        "seed": config.debug.seed,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "reference": reference,
        "tolerance": judge.tolerance,
        "gaps": {
            name: judge.gaps(curve, losses[reference])
            for name, curve in losses.items()
            if len(curve) == judge.steps and reference in losses
        },
        "curves": losses,
    }
    curves.write_text(table.document(**findings), encoding="utf-8")
    table.close([*legend, f"curves: {curves}"], **findings)


def plot_curves(
    path: Path, reference: str, curves: Mapping[str, Sequence[float]], tolerance: float, title: str
) -> None:
    """Write a PNG: all curves above, and below them the distance of each from the reference, step by step.

    Args:
        path: path of the PNG.
        reference: name of the reference curve.
        curves: loss of each step by name; a curve that ended early is shorter.
        tolerance: relative, drawn as a band.
        title: title of the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

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
    top.set_ylabel("loss (nats per token)")
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
    """Gap of each step that both have, in percent; NaN if one is not finite."""
    pairs = zip(curve, expected, strict=False)
    return [100 * (got / want - 1) if math.isfinite(got) and math.isfinite(want) else math.nan for got, want in pairs]
