"""``crius verify resume``: compares a run that is killed and resumes from its checkpoints with an undisturbed run."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crius.config.facts import Facts
from crius.errors import ConfigError
from crius.tools.verify.equality import Equality
from crius.tools.verify.options import Resumed
from crius.tools.verify.starts import Start, all_starts, num_threads, tolerance_of
from crius.tools.verify.survival import (
    KILLED,
    UNDISTURBED,
    Course,
    Findings,
    Life,
    compare_runs,
    costs,
    processes_left,
)

PHASES = ("data", "forward", "backward", "optimizer")
"""Phases of the kills, in turn."""
INTERVALS = (5, 4, 3, 7, 6, 2)
"""Steps between checkpoints if the run has no interval: every kill then costs some steps, but not all."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL to a rank at a step of an attempt, with a layout if one was asked for."""

    attempt: int
    step: int
    phase: str
    rank: int
    layout: str = ""

    @property
    def fault(self) -> str:
        """The kill in the grammar of ``CRIUS_FAULT``."""
        return f"kill:step={self.step},phase={self.phase},rank={self.rank},attempt={self.attempt}"


def resume(facts: Facts, folder: Path, options: Resumed, *, as_json: bool = False) -> int:
    """Run the real job undisturbed, and once more with a rank killed at each step of ``kill_at``, and compare.

    After each kill the launcher restarts all ranks, and they continue from their newest checkpoint. Loss and gradient
    norm of every step, and weights and optimizer state of the last checkpoint, must be the same to the last bit, and
    each sample must be trained on once. Over a change of layout losses may differ as much as ``verify parity`` allows.

    Args:
        facts: facts about the run on this machine.
        folder: folder of both runs.
        options: the kills come in the phases ``PHASES`` and on the ranks in turn, the undisturbed run has the first of
            the layouts.
        as_json: print JSON instead of a table.

    Returns:
        0; 1 if something differs, a kill did not happen, or a run did not reach its end.

    Raises:
        CriusError: the run is refused, ``kill_at`` cannot be read, or the data is bad.
        SystemExit: a signal ended it; 130 or 143.
    """
    at = _steps(options)
    starts = all_starts(facts, options.steps, layouts=options.layouts, interval=_interval(at))
    turns = _turns(starts, len(at) + 1)
    kills = [
        Kill(number, step, PHASES[number % len(PHASES)], number % start.num_ranks, start.layout)
        for number, (step, start) in enumerate(zip(at, turns, strict=False))
    ]
    first = Course(
        config=starts[0].config,
        num_ranks=starts[0].num_ranks,
        folder=folder / UNDISTURBED,
        seconds=options.timeout,
        threads=num_threads(facts, starts) if options.layouts else None,
    )
    faults = [*(kill.fault for kill in kills), ""]
    second = dataclasses.replace(
        first,
        folder=folder / KILLED,
        restarts=len(kills),
        assignment=lambda number: (turns[number].config, turns[number].num_ranks, faults[number]),
    )
    conclude = functools.partial(_conclude, kills)
    not_ended = "the killed run did not reach its end"
    return compare_runs("resume", first, lambda calm: second, conclude, not_ended, as_json, tolerance_of(starts))


def _turns(starts: Sequence[Start], count: int) -> list[Start]:
    """Start of each of ``count`` attempts.

    Raises:
        ConfigError: a start has no turn.
    """
    if len(starts) > count:
        raise ConfigError(
            f"{len(starts)} --layouts for {count} starts.",
            where="command line",
            why="each start takes the next layout, and there is one more start than kills",
            fix=f"{len(starts) - 1} steps in --kill_at, or {count} layouts",
        )
    return [starts[number % len(starts)] for number in range(count)]


def _interval(steps: list[int]) -> int:
    """Steps between checkpoints: one is before the first kill and, if possible, none is right before a kill."""
    first = min(steps)
    fitting = (n for n in INTERVALS if n < first and all((step - 1) % n for step in steps))
    return next(fitting, max(1, min(INTERVALS[0], first - 1)))


def _steps(options: Resumed) -> list[int]:
    """The steps of ``--kill_at``, in order."""
    steps = options.steps
    words = options.kill_at.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= steps for word in words):
        raise ConfigError(
            f"--kill_at {options.kill_at!r} is not a list of steps of this run.",
            where="command line",
            why=f"it has steps 1 to {steps}",
            fix=f"--kill_at {','.join(map(str, sorted({max(1, steps // 3), max(1, 2 * steps // 3)})))}",
        )
    return sorted(map(int, words))


def _conclude(kills: list[Kill], calm: Life, killed: Life, equality: Equality) -> Findings:
    came = [(attempt.attempt, attempt.rank) for attempt in killed.kills()]
    absent = [f"the kill at step {kill.step} did not happen" for kill in kills if (kill.attempt, kill.rank) not in came]
    absent += processes_left(killed)
    recoveries = {recovery["attempt"] - 1: recovery for recovery in killed.recoveries}
    rows = [_row(kill, recoveries.get(kill.attempt)) for kill in kills]
    layouts = any(kill.layout for kill in kills)
    lines = [f"{'step':>4}  {'phase':<9}  {'rank':>4}  {'steps again':>11}  {'recovery s':>10}"]
    if layouts:
        lines[0] += "  layout"
    for row in rows:
        numbers = [_shown(row["steps_again"]), _shown(row["recovery_seconds"])]
        lines.append(f"{row['step']:>4}  {row['phase']:<9}  {row['rank']:>4}  {numbers[0]:>11}  {numbers[1]:>10}")
        if layouts:
            lines[-1] += f"  {row['layout']}"
    lines.append(f"{killed.seconds:.1f} s with the kills, {costs(calm, killed)}")
    verdict = equality.verdict() if not absent else f"{equality.verdict()}, but {'; '.join(absent)}"
    return absent, {"kills": rows}, lines, verdict


def _row(kill: Kill, recovery: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "step": kill.step,
        "phase": kill.phase,
        "rank": kill.rank,
        "layout": kill.layout,
        "steps_again": recovery["steps_again"] if recovery else None,
        "recovery_seconds": recovery["seconds"] if recovery else None,
    }


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.1f}"
