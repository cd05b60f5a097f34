"""The section ``sweep``: one change of a base config at a time, each with its gain. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_models import TINY, Case, Entry, Group, run_group
from gpu_sections import Place, Report, Section

from crius.tools.bench.turns import median_ratio

# 1B with a quarter of its layers and of its vocabulary: small steps, so that what the host does shows too
BASE = Case("1B, 4 layers", "1b", 4, 128_256 // 4, 4096, 2)
WAVE = 7
"""Contestants that live at the same time, the base among them: about 12 GiB each where all logits are kept."""
WAVE_SECONDS = 50.0
"""A wave that would have less than this is not begun."""


@dataclass(frozen=True)
class Change:
    """One change of the base config.

    Attributes:
        topic: what is compared.
        flags: of Crius.
        on_cpu: a CPU can do it; else a rehearsal leaves it out.
        may_fail: whether it runs is reported, not claimed.
    """

    topic: str
    flags: tuple[str, ...]
    on_cpu: bool = False
    may_fail: bool = False

    @property
    def name(self) -> str:
        """Its flags."""
        return " ".join(self.flags)


CHANGES = (
    Change("attention", ("--kernels.attention", "cudnn")),
    Change("attention", ("--kernels.attention", "flash")),
    Change("attention", ("--kernels.attention", "efficient")),
    Change("loss", ("--kernels.linear_cross_entropy", "off"), on_cpu=True),
    Change("loss", ("--compile.loss",)),
    Change("loss", ("--kernels.linear_cross_entropy", "off", "--compile.loss")),
    Change("recompute", ("--activation_checkpoint.mode", "selective")),
    Change("recompute", ("--activation_checkpoint.mode", "full")),
    Change("compile", ("--compile.no_enable",)),
    Change("optimizer", ("--optimizer.implementation", "foreach"), on_cpu=True),
    Change("float8", ("--quantize.dense.float8.enable", "--quantize.dense.float8.recipe", "tensorwise")),
    Change("compile", ("--compile.backend", "cudagraphs"), may_fail=True),
)
"""In the order of their priority."""

NO_CHANGE = Entry("base", "crius")
_MODES = {"none": "base", "selective": CHANGES[6].name, "full": CHANGES[7].name}


def sweep(place: Place, report: Report) -> None:
    """Attention, loss, recompute, compile and optimizer: each change of the base config alone, with its gain."""
    case = TINY if place.tiny else BASE
    changes = [change for change in CHANGES if change.on_cpu or place.device == "cuda"]
    report.note(f"base: {' '.join(case.flags(place))}")
    peaks: dict[str, float] = {}
    failed: list[str] = []
    for start in range(0, len(changes), WAVE - 1):
        wave = changes[start : start + WAVE - 1]
        if place.device == "cuda" and report.left() < WAVE_SECONDS:
            names = ", ".join(change.name for change in wave)
            report.note(f"not run, {max(0.0, report.left()):.0f} s of the section are left: {names}")
            continue
        entries = [NO_CHANGE, *(Entry(one.name, "crius", flags=one.flags, may_fail=one.may_fail) for one in wave)]
        group = run_group(place, report, Group(case, f"wave {start // (WAVE - 1) + 1}"), entries)
        failed += [entry.name for entry in entries if group.of(entry.name) is None and not entry.may_fail]
        peaks |= rows_of(report, group, wave)
    report.check("every change that was begun and has to run ran", not failed, ", ".join(failed) or "all")
    judge_peaks(report, peaks, is_gpu=place.device == "cuda")


def rows_of(report: Report, group: Group, wave: Sequence[Change]) -> dict[str, float]:
    """A row for each change: how much faster it is than the base in the same rounds. Returns peaks in GiB by name."""
    base = group.of(NO_CHANGE.name)
    peaks: dict[str, float] = {}
    topics = {NO_CHANGE.name: "base"} | {change.name: change.topic for change in wave}
    for name, topic in topics.items():
        outcome = group.of(name)
        if outcome is None:
            failure = group.outcomes[name].failure or "the base failed"
            report.row(topic=topic, change=name, failed=failure.splitlines()[0])
            continue
        peaks[name] = max(float(turn.get("peak_gib", 0.0)) for turn in outcome.turns)
        gain = median_ratio(base, outcome, "wall_seconds") - 1 if base else None
        report.row(
            topic=topic,
            change=name,
            milliseconds=round(1e3 * outcome.samples().median, 3),
            spread_percent=round(100 * outcome.samples().spread, 1),
            gain_percent=round(100 * gain, 1) if gain is not None else None,
            peak_gib=round(peaks[name], 2),
            samples=outcome.samples().seconds,
        )
    return peaks


def judge_peaks(report: Report, peaks: dict[str, float], *, is_gpu: bool) -> None:
    """Recomputing more takes less memory; said of the modes that ran."""
    modes = {mode: peaks[name] for mode, name in _MODES.items() if name in peaks}
    for less, more in (("selective", "none"), ("full", "selective")):
        if less in modes and more in modes:
            # the resident set of a CPU process is not the activations'
            passed = modes[less] < modes[more] if is_gpu else None
            claim = f"peak memory of {less} recomputing is below that of {more}"
            report.check(claim, passed, f"{modes[less]:.2f} and {modes[more]:.2f} GiB")


SWEEP: dict[str, tuple[Section, float]] = {"sweep": (sweep, 75)}
