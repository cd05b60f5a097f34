"""``crius verify chaos``: ranks are killed at random again and again, and the run ends as it would have without
kills."""

import contextlib
import dataclasses
import functools
import math
import os
import random
import shutil
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import CheckpointFolder
from crius.config.facts import Facts
from crius.config.run import RunConfig
from crius.data.sample_log import samples_path
from crius.launch.crew import CrewAttempt
from crius.launch.status import PHASES
from crius.tools.verify import survival
from crius.tools.verify.equality import Equality
from crius.tools.verify.options import Chaotic
from crius.tools.verify.starts import Start, all_starts, num_threads, tolerance_of
from crius.tools.verify.survival import KILLED, UNDISTURBED, Course, Findings, Life

START_SHARE = 0.35
"""Share of the moments that lie before the steps of an attempt."""
COLD_SHARE = 6
"""If kernels are compiled, one of this many kills comes during the first compilation."""
_STEP_PHASES = ("data", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Draw:
    """Random choices for one attempt: numbers in [0, 1), so that they do not depend on the progress of the run.

    Attributes:
        is_timed: whether it is killed from outside at a moment; otherwise at a phase of a step.
        place: choice of the phase, or of the moment.
        step: choice among the possible steps.
        rank: choice of the rank to kill.
        start: choice of the way to start.
        is_cold: whether it starts without compiled kernels and is killed during their compilation, at ``place``.
    """

    is_timed: bool
    place: float
    step: float
    rank: float
    start: float
    is_cold: bool = field(default=False, kw_only=True)


def drawn(kills: int, seed: int, *, compiles: bool = False) -> list[Draw]:
    """The draws of the attempts to kill, half of them by the clock, and of the attempt after them.

    The places of each half are spread evenly, so that chance leaves out no phase.

    Args:
        kills: number of kills.
        seed: seed of all draws.
        compiles: whether the run compiles with inductor: one kill in ``COLD_SHARE``, at least one, then comes during
            it.
    """
    chance = random.Random(seed)

    def draw(is_timed: bool, number: int = 0, count: int = 1) -> Draw:
        place, step, rank, start = (chance.random() for _ in range(4))
        return Draw(is_timed, (number + place) / count, step, rank, start)

    halves = ((True, kills // 2), (False, kills - kills // 2))
    draws = [draw(is_timed, number, count) for is_timed, count in halves for number in range(count)]
    chance.shuffle(draws)
    last = draw(False)
    cold = chance.sample(range(kills), max(1, kills // COLD_SHARE)) if compiles else ()
    return [*(dataclasses.replace(kill, is_cold=number in cold) for number, kill in enumerate(draws)), last]


def pick(values: Sequence[Any], share: float) -> Any:
    """The element of ``values`` at the relative position ``share``, in [0, 1)."""
    return values[int(share * len(values))]


@dataclass(frozen=True)
class CalmPace:
    """Times of the undisturbed run.

    Attributes:
        start: seconds until its first step could begin.
        step: average seconds of a step with its follow-up work.
        compile: seconds of compilation, from an empty cache.
    """

    start: float
    step: float
    compile: float = 0.0

    @classmethod
    def of(cls, life: Life, steps: int) -> "CalmPace":
        """The times in the ledger of a run that reached its end."""
        seconds = life.summary["seconds"]
        start = seconds["initialise"] + seconds.get("load", 0.0)
        return cls(start, max(0.0, life.seconds - start) / steps, seconds.get("compile", 0.0))


class Killer:
    """Kills one rank of each attempt until all kills are done, but lets the run make progress.

    Kill k comes at the latest in the step at the share (k + 1) / kills of the run, or in the first step after the
    newest checkpoint. So each attempt is killed before it ends, and the last kills may come at the last steps.

    Args:
        draws: one for each kill, and one more.
        starts: ways to start an attempt.
        folder: folder of the run.

    Attributes:
        pace: times of the undisturbed run; set before the first attempt.
        started: how each attempt was started.
    """

    def __init__(self, draws: Sequence[Draw], starts: Sequence[Start], folder: Path) -> None:
        self._draws = draws
        self._starts = starts
        self._folder = folder
        self.pace = CalmPace(0.0, 0.0)
        self._samples = samples_path(folder, 0)
        self._size = 0
        self._from = 0.0
        self._delay = math.inf
        self._rank = 0
        self._timer: threading.Timer | None = None
        self.started: list[Start] = []
        self.num_cold = sum(draw.is_cold for draw in draws)

    @property
    def num_kills(self) -> int:
        """Number of kills to come."""
        return len(self._draws) - 1

    def course(self, calm: Course) -> Course:
        """The course of the run, from the course of the undisturbed one."""
        return dataclasses.replace(
            calm,
            folder=self._folder,
            restarts=self.num_kills,
            assignment=self.assignment,
            on_poll=self.on_poll,
            on_failure=self.on_failure,
        )

    def assignment(self, number: int) -> tuple[RunConfig, int, str]:
        """See ``Course``."""
        draw = self._draws[number]
        start = pick(self._starts, draw.start)
        self.started.append(start)
        self._size = self._logged()
        self._from = time.monotonic()
        self._delay = math.inf
        if number == self.num_kills:
            return start.config, start.num_ranks, ""
        self._rank = pick(range(start.num_ranks), draw.rank)
        first, last = self._span(number, start.config.training.steps)
        if draw.is_cold:
            shutil.rmtree(start.config.compile.cache_dir, ignore_errors=True)
            self._from = math.inf
            self._delay = draw.place * self.pace.compile
            place = f"step={first},phase=optimizer"  # in case the machine is faster now
        elif draw.is_timed:
            if draw.place < START_SHARE:
                self._delay = draw.place / START_SHARE * self.pace.start
            else:
                self._from = math.inf
                share = (draw.place - START_SHARE) / (1 - START_SHARE)
                self._delay = share * (last - first + 2) * self.pace.step  # the first step takes longer
            place = f"step={last},phase=data"  # in case the moment is too late
        else:
            place = _place(draw, first, last, start.config)
        return start.config, start.num_ranks, f"kill:{place},rank={self._rank},attempt={number}"

    def on_poll(self, number: int, pids: Mapping[int, int]) -> None:
        """See ``Supervision``: start the clock of an attempt, from its start or from when it is ready for its steps."""
        if self._from == math.inf and self._logged() > self._size:
            self._from = time.monotonic()  # the first line of an attempt in the sample log
        if self._timer or self._delay == math.inf or self._from == math.inf or self._rank not in pids:
            return
        seconds = max(0.0, self._from + self._delay - time.monotonic())
        self._timer = threading.Timer(seconds, _kill, [pids[self._rank]])
        self._timer.daemon = True
        self._timer.start()

    def on_failure(self, attempt: CrewAttempt) -> None:
        """See ``Supervision``."""
        self.close()

    def close(self) -> None:
        """Stop the clock, because process ids of an ended attempt may soon belong to other processes."""
        if self._timer:
            self._timer.cancel()
            self._timer.join()
            self._timer = None

    def _span(self, number: int, steps: int) -> tuple[int, int]:
        """The first step of an attempt, and the last step that it may reach."""
        saved = CheckpointFolder(open_disk(str(self._folder / "checkpoints"))).steps()
        first = (saved[-1] if saved else 0) + 1
        return first, max(first, steps * (number + 1) // self.num_kills)

    def _logged(self) -> int:
        """Bytes in the sample log."""
        return self._samples.stat().st_size if self._samples.exists() else 0


def _place(draw: Draw, first: int, last: int, config: RunConfig) -> str:
    """Phase and step of a planted kill."""
    interval = config.checkpoint.interval
    steps = config.training.steps
    saves = [step for step in range(first, last + 1) if step == steps or (interval and step % interval == 0)]
    phase = pick(("start", "load", *_STEP_PHASES, *(("save",) if saves else ())), draw.place)
    if phase in ("start", "load"):
        return f"phase={phase}"
    return f"step={pick(saves if phase == 'save' else range(first, last + 1), draw.step)},phase={phase}"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def chaos(facts: Facts, folder: Path, options: Chaotic, *, as_json: bool = False) -> int:
    """Run the real job undisturbed, and once more with one rank killed in each of ``kills`` attempts, and compare.

    Half of the kills come when a rank reaches a phase of a step, half from outside at random moments, some during
    compilation. The seed decides all choices; the state of the run at a moment depends on the machine.

    Args:
        facts: facts about the run on this machine.
        folder: folder of both runs, and of the kernels that they compile.
        options: each attempt gets one of the layouts, the undisturbed run the first; see ``tolerance_of``.
        as_json: print JSON instead of lines.

    Returns:
        0; 1 if the runs differ, a kill did not happen, a process is left, or a run did not end.

    Raises:
        CriusError: the run is refused, an option is wrong, or the data is bad.
        SystemExit: a signal ended it; 130 or 143.
    """
    starts = [
        start.with_own_cache(folder / "compile")
        for start in all_starts(facts, options.steps, world_sizes=options.world_sizes, layouts=options.layouts)
    ]
    first = Course(
        config=starts[0].config,
        num_ranks=starts[0].num_ranks,
        folder=folder / UNDISTURBED,
        seconds=options.timeout,
        threads=num_threads(facts, starts),
    )
    draws = drawn(options.kills, options.seed, compiles=any(start.compiles for start in starts))
    with contextlib.closing(Killer(draws, starts, folder / KILLED)) as killer:

        def second(calm: Life) -> Course:
            killer.pace = CalmPace.of(calm, options.steps)
            return killer.course(first)

        conclude = functools.partial(_conclude, killer, options.seed)
        not_ended = "the run did not reach its end; kills: {kills}"
        return survival.compare_runs("chaos", first, second, conclude, not_ended, as_json, tolerance_of(starts))


def _conclude(killer: Killer, seed: int, calm: Life, killed: Life, equality: Equality) -> Findings:
    came = killed.kills()
    absent = [f"only {len(came)} of {killer.num_kills} kills happened"] if len(came) != killer.num_kills else []
    absent += survival.processes_left(killed)
    counts = Counter(attempt.phase for attempt in came)
    phases = {phase: counts[phase] for phase in PHASES if counts[phase]}
    recovery_seconds = [recovery["seconds"] for recovery in killed.recoveries]
    fields = {
        "seed": seed,
        "kills": len(came),
        "kills_by_phase": phases,
        "cold_starts": killer.num_cold,
        "restarts": len(killed.failures),
        "num_ranks": [start.num_ranks for start in killer.started],
        "layouts": [start.layout for start in killer.started if start.layout],
        "recovery_seconds": recovery_seconds,
    }
    by_size = sorted(killer.started, key=lambda start: start.num_ranks)
    sizes = ", ".join(f"{name} {number}" for name, number in Counter(start.name for start in by_size).items())
    mean = f"{statistics.fmean(recovery_seconds):.1f} s" if recovery_seconds else "-"
    lines = [
        f"{len(killer.started)} starts ({sizes}), {len(recovery_seconds)} times a new step before the next kill, "
        f"{mean} after the failure on average",
        f"{equality.steps_again} steps repeated; {killed.seconds:.1f} s with kills, {survival.costs(calm, killed)}",
    ]
    survived = f"{len(came)} kills survived ({', '.join(f'{name} {count}' for name, count in phases.items())})"
    return absent, fields, lines, "; ".join([f"{survived}, {equality.verdict()}", *absent])
