"""What the launcher does about a run that fails: how it is supervised, and when starting again is worth it."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from crius.config.operation import LaunchConfig, WatchdogConfig
from crius.launch.environment import Placement
from crius.launch.report import Blame, Failure, write_json


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """How a run that can resume is looked after.

    Attributes:
        launch: how often to restart, and the time to save after a signal.
        watchdog: how long a rank may stay in one phase.
        assignment: the job of a rank and the number of ranks, of an attempt; None: the same in each attempt.
        on_poll: called with the attempt and the process ids of its live ranks, about ten times a second.
        on_failure: called with each attempt that failed and is counted, before a next one starts.
    """

    launch: LaunchConfig
    watchdog: WatchdogConfig
    assignment: Callable[[int], tuple[Callable[[Placement], None], int]] | None = None
    on_poll: Callable[[int, Mapping[int, int]], None] | None = None
    on_failure: "Callable[[Attempt], None] | None" = None


@dataclass(frozen=True)
class Attempt:
    """One start of all workers, and its end.

    Attributes:
        attempt: 0 is the first start.
        started: seconds of ``time.monotonic``.
        ended: the same clock, when the last worker was gone.
        step: the highest step that any rank reached, the one being computed; 0 before step 1.
        cause: the headline of what ended it.
        rank: whose failure that was.
        phase: that it was in.
        failed: the same clock, when that was noticed; the others may have gone on until ``ended``.
    """

    attempt: int
    started: float
    ended: float
    step: int
    cause: str
    rank: int = 0
    phase: str = "start"
    failed: float = 0.0


@dataclass
class History:
    """The failed attempts of one command.

    Attributes:
        attempts: in their order.
        furthest: the highest step of all attempts; -1 while there is none.
        in_a_row: failures since a step was reached that is newer than those before.
    """

    attempts: list[Attempt] = field(default_factory=list)
    furthest: int = -1
    in_a_row: int = 0

    def add(self, attempt: Attempt) -> None:
        """Count a failed attempt."""
        self.attempts.append(attempt)
        self.in_a_row = 1 if attempt.step > self.furthest else self.in_a_row + 1
        self.furthest = max(self.furthest, attempt.step)

    def write(self, scratch: Path) -> None:
        """Write ``attempts.json``."""
        write_json(scratch / "attempts.json", [asdict(attempt) for attempt in self.attempts])


def reason_to_stop(root: Failure, history: History, launch: LaunchConfig) -> str:
    """Why the run is not started again after ``root`` failed; empty where it is.

    A ``CriusError`` says what the user has to mend, so it would come again; a device that computes wrong numbers or a
    rank that hangs is for a person to look at.
    """
    if root.blame is Blame.ERROR and root.rendered:
        return "it would fail again"
    if history.in_a_row >= launch.max_failures_at_step:
        where = f"at step {history.furthest}" if history.furthest > 0 else "before step 1"
        return f"{history.in_a_row} failures in a row {where} (launch.max_failures_at_step)"
    if len(history.attempts) > launch.max_restarts:
        return f"launch.max_restarts {launch.max_restarts}"
    return ""
