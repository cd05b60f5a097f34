"""Conclusions from the times of ``crius bench quantize``: which shapes gain, which lose, and which flags follow."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from crius.config.run import RunConfig
from crius.config.training import FORMATS
from crius.table import aligned
from crius.tools.bench.machine import BenchMachine
from crius.tools.bench.result import Samples, show

HIGH = "bfloat16"
"""Precision that the formats are compared with: ``nn.Linear``."""

MODES = ("eager", "compiled")


@dataclass
class Shape:
    """One shape of linear layers, as a rank multiplies it.

    Attributes:
        layers: number of layers by name, without their numbers.
        kept: layers that stay in high precision in any case, with the reason.
        times: samples of forward and backward, by format and mode.
    """

    out_features: int
    in_features: int
    layers: dict[str, int] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    times: dict[tuple[str, str], Samples] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """``(out x in)``."""
        return f"{self.out_features} x {self.in_features}"

    def speedup(self, name: str, mode: str) -> float | None:
        """Speedup over bfloat16 in the same mode; None if the format cannot run in this shape."""
        times = self.times.get((name, mode))
        return self.times[HIGH, mode].median / times.median if times else None

    def seconds(self, name: str, mode: str, *, gains_only: bool) -> float:
        """Seconds of all layers of this shape: convertible layers in the format, the others in bfloat16.

        Args:
            name: name of a format.
            mode: eager or compiled.
            gains_only: convert only if that is faster.
        """
        high = self.times[HIGH, mode].median
        speedup = self.speedup(name, mode)
        low = high if speedup is None or (gains_only and speedup <= 1) else self.times[name, mode].median
        return sum(count * (high if layer in self.kept else low) for layer, count in self.layers.items())


@dataclass(frozen=True)
class Totals:
    """Seconds of all linear layers of the model, forward and backward once.

    Attributes:
        high: in bfloat16.
        all_converted: in the format, for all layers that can be converted.
        gains_only: in the format only where it is faster.
        losing: names of the layers where it is not faster.
    """

    high: float
    all_converted: float
    gains_only: float
    losing: tuple[str, ...]


def totals(shapes: Sequence[Shape], name: str, mode: str) -> Totals:
    """Totals of one format over the whole model."""
    losing = [
        layer
        for shape in shapes
        if (shape.speedup(name, mode) or 2) <= 1
        for layer in shape.layers
        if layer not in shape.kept
    ]
    return Totals(
        high=sum(shape.times[HIGH, mode].median * sum(shape.layers.values()) for shape in shapes),
        all_converted=sum(shape.seconds(name, mode, gains_only=False) for shape in shapes),
        gains_only=sum(shape.seconds(name, mode, gains_only=True) for shape in shapes),
        losing=tuple(losing),
    )


def recommended_flags(shapes: Sequence[Shape], formats: Sequence[str], mode: str) -> list[str]:
    """Flags of the format with the least total, without losing layers; none if bfloat16 is as fast."""
    found = {name: totals(shapes, name, mode) for name in formats}
    best = min(found, key=lambda name: found[name].gains_only)
    if found[best].gains_only >= found[best].high:
        return []
    flags = []
    for setting, value in FORMATS[best].items():
        flags += [f"--{setting}"] if value is True else [f"--{setting}", str(value)]
    flags += ["--quantize.dense.auto_filter", "off"]  # the times decide, not the sizes
    for layer in found[best].losing:
        flags += ["--quantize.dense.exclude", layer]
    return flags + (["--compile.enable"] if mode == "compiled" else [])


def report(
    config: RunConfig,
    shapes: Sequence[Shape],
    formats: Sequence[str],
    modes: Sequence[str],
    tokens: int,
    machine: BenchMachine,
    *,
    emulated: bool,
    as_json: bool,
) -> None:
    """Print the table, the totals and the flags, or all as JSON. Emulation recommends nothing."""
    flags = [] if emulated else recommended_flags(shapes, formats, modes[-1])
    model = f"{config.model.name}/{config.model.flavor}"
    degree = config.parallelism.tensor_parallel_degree
    record = {
        "verb": "bench quantize",
        "machine": machine.as_dict(),
        "model": model,
        "tensor_parallel_degree": degree,
        "tokens": tokens,
        "emulated": emulated,
        "rows": [_json_row(shape, name, mode) for shape in shapes for name, mode in shape.times],
        "totals": [
            {"format": name, "mode": mode, **_json_totals(totals(shapes, name, mode))}
            for mode in modes
            for name in formats
        ],
        "recommended": flags,
    }
    rows = [_cells(shape, formats, mode) for mode in modes for shape in shapes]
    rows += [_total_cells(shapes, formats, mode, only) for mode in modes for only in (False, True)]
    header = ["out x in", "mode", f"{HIGH} ms", "spread", *formats, ""]
    lines = [
        str(machine),
        f"{model}, tensor_parallel_degree {degree}, {tokens} tokens: forward and backward of a linear layer, times "
        f"faster than {HIGH}",
        *aligned([header, *rows], left=(0, len(header) - 1)),
        "",
        *_conclusion(shapes, flags, emulated),
    ]
    show(as_json, record, lines)


def _conclusion(shapes: Sequence[Shape], flags: Sequence[str], emulated: bool) -> list[str]:
    kept = [f"{layer} ({reason})" for shape in shapes for layer, reason in shape.kept.items()]
    lines = [
        "one layer: medians in turns, ! marks a format that loses; total: all layers of the model, converted wherever "
        "the dims allow it, and only where it gains",
        *([f"always in {HIGH}: {', '.join(kept)}"] if kept else []),
    ]
    if emulated:
        return [*lines, "emulated: the emulation's time, which is not a speed of the format: no flags follow from it"]
    return [*lines, f"recommended: {' '.join(flags)}" if flags else f"recommended: {HIGH}; no format is faster"]


def _cells(shape: Shape, formats: Sequence[str], mode: str) -> list[str]:
    high = shape.times[HIGH, mode]
    layers = ", ".join(f"{name} x {count}" for name, count in shape.layers.items())
    cells = []
    for name in formats:
        speedup = shape.speedup(name, mode)
        if speedup is None:
            cells.append("-")
        else:
            mark = "!" if speedup <= 1 else " "
            cells.append(f"{speedup:.2f}{mark}")
    return [shape.label, mode, f"{1e3 * high.median:.3f}", f"{high.spread:.1%}", *cells, layers]


def _total_cells(shapes: Sequence[Shape], formats: Sequence[str], mode: str, only: bool) -> list[str]:
    found = [totals(shapes, name, mode) for name in formats]
    ratios = [total.high / (total.gains_only if only else total.all_converted) for total in found]
    cells = [f"{ratio:.2f}{'!' if ratio < 1 else ' '}" for ratio in ratios]
    return ["total", mode, f"{1e3 * found[0].high:.3f}", "", *cells, "where it gains" if only else "all converted"]


def _json_row(shape: Shape, name: str, mode: str) -> dict[str, Any]:
    speedup = shape.speedup(name, mode)
    return {
        "out_features": shape.out_features,
        "in_features": shape.in_features,
        "layers": shape.layers,
        "kept": shape.kept,
        "format": name,
        "mode": mode,
        **shape.times[name, mode].as_dict(),
        "speedup": speedup,
        "loses": name != HIGH and speedup is not None and speedup <= 1,
    }


def _json_totals(total: Totals) -> dict[str, Any]:
    return {
        "bfloat16_ms": 1e3 * total.high,
        "all_converted_ms": 1e3 * total.all_converted,
        "gains_only_ms": 1e3 * total.gains_only,
        "losing": list(total.losing),
    }
