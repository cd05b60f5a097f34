"""How far a run is: what its ranks agree on after a step, what a restart cost, and its summary."""

import contextlib
import json
import logging
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crius.config.layout import Layout
from crius.errors import LayoutError
from crius.launch.environment import Placement
from crius.launch.stop import StopRequest
from crius.metrics.ledger import TimeLedger
from crius.metrics.record import PlanSink, ValidationMetrics
from crius.parallel.runtime import World
from crius.run_file import write_run_file
from crius.train.state import TrainState

log = logging.getLogger("crius.train")


SECONDS = 1.0
"""About how long several ranks train until they agree again."""

MOST_STEPS = 100
"""Steps until they agree again, at most: they may become slower."""


@dataclass(frozen=True)
class Decision:
    """What the ranks agreed on after a step.

    Attributes:
        stop: number of the signal that asks to stop; 0 for none.
        save: time for a checkpoint.
        give_up: too many saves failed.
    """

    stop: int
    save: bool
    give_up: bool


NOTHING = Decision(stop=0, save=False, give_up=False)


class Agreement:
    """What the ranks agree on, before the first step and then: one alone after each, several about each ``SECONDS``.

    Each time they also agree on the number of steps until they do so again, from the pace of the slowest.

    Args:
        num_ranks: of the run.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._steps, self._wait = 0, 0
        self._since = time.monotonic()

    def ask(self, stop: int | None, save: bool, give_up: bool) -> Decision:
        """The greatest of what the ranks say, the same on all; ``NOTHING`` after steps at which they do not ask.

        One small collective on the host. On a GPU the host is ahead of the device here, so that this costs no time.

        Args:
            stop: number of the signal that asks to stop.
            save: time for a checkpoint.
            give_up: too many saves failed.
        """
        if self._num_ranks == 1:
            return Decision(stop or 0, save, give_up)
        self._steps = min(self._steps + 1, self._wait)  # none before the first time
        if self._steps < self._wait:
            return NOTHING
        elapsed = max(time.monotonic() - self._since, 1e-6)
        wait = max(1, min(MOST_STEPS, int(self._steps / elapsed * SECONDS)))
        found, has_to_save, gives_up, least = _greatest([stop or 0, save, give_up, -wait], self._num_ranks)
        self._steps, self._wait, self._since = 0, -least, time.monotonic()
        return Decision(found, bool(has_to_save), bool(gives_up))


class Preempted(Exception):
    """The run was asked to stop.

    Args:
        signal: number of the signal that asked.
        step: the last one that was done; where the run saves, it is saved.
    """

    def __init__(self, signal: int, step: int) -> None:
        super().__init__(signal, step)
        self.signal, self.step = signal, step


def stop_number(request: StopRequest | None, num_ranks: int) -> int:
    """Number of the signal that asks one of the ranks to stop, the same on all; 0 for none, or where none is caught."""
    return 0 if request is None else _greatest([request.number or 0], num_ranks)[0]


def _greatest(words: list[int], num_ranks: int) -> list[int]:
    """Elementwise maximum over the ranks. One small collective on the host."""
    if num_ranks == 1:
        return words
    tensor = torch.tensor(words, dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def one_layout(layout: Layout, ranks: World) -> Layout:
    """``layout``, the same on all ranks. Others would hang: their flags, or what ``parallelism.auto`` found, differ.

    Raises:
        LayoutError: a rank has another layout than the others.
    """
    found: list[str] = ranks.gather_json(str(layout))
    if len(set(found)) > 1:
        first = "; ".join(f"{text} on {found.count(text)}, first rank {found.index(text)}" for text in sorted({*found}))
        raise LayoutError(
            f"the layout differs between ranks: {first}.",
            where="[parallelism]",
            why="each host reads its own flags and files; parallelism.auto looks at its own GPUs",
            fix="give all hosts the same degrees: crius config show prints those that parallelism.auto finds",
        )
    return layout


ATTEMPTS = "attempts.json"
LEDGER = "ledger.json"
RECOVERIES = "recoveries.jsonl"
"""In the folder of the logs: a line for each failure that the run has recovered from."""


class Recovery:
    """The failure before this attempt.

    Args:
        placement: of this process; its launcher noted the attempts.
        ledger: of this attempt; takes over that of the one before.
    """

    def __init__(self, placement: Placement, ledger: TimeLedger) -> None:
        self._ledger = ledger
        self._begin = time.monotonic()
        scratch = placement.scratch
        self._last = _last_attempt(scratch) if scratch and placement.attempt else None
        if scratch and self._last:
            ledger.take_over(scratch / LEDGER, self._last["ended"])
        if scratch and placement.rank == 0:
            ledger.mirror_to(scratch / LEDGER)
        self._attempt = placement.attempt
        self._file = placement.log_dir / RECOVERIES if placement.rank == 0 and placement.log_dir else None
        self._resumed = 0

    def resumed(self, step: int, kept: dict[str, float]) -> None:
        """Call when the checkpoint is loaded.

        Args:
            step: of it.
            kept: the ledger in it, if it is of this command.
        """
        self._resumed = step
        if self._last:
            self._ledger.lose(kept)

    def step(self, number: int) -> None:
        """Call after each step; says so when the first new one is done."""
        if not self._last or number < self._last["step"]:
            return
        last, self._last = self._last, None
        if self._file is None:
            return
        found = {
            "attempt": self._attempt,
            "step": number,
            "seconds": time.monotonic() - last["failed"],
            "process_seconds": self._begin - last["failed"],
            "load_seconds": self._ready - self._begin,
            "steps_again": max(0, number - self._resumed - 1),
            "goodput": self._ledger.goodput(),
        }
        log.info(
            "recovered: step %(step)d done %(seconds).1f s after the failure: processes %(process_seconds).1f s, model "
            "and checkpoint %(load_seconds).1f s, %(steps_again)d steps again; goodput %(percent).1f %%",
            found | {"percent": 100 * found["goodput"]},
        )
        with contextlib.suppress(OSError), self._file.open("a", encoding="utf-8") as file:  # a full disk ends no run
            file.write(json.dumps(found) + "\n")

    def ready(self) -> None:
        """Call when the first step begins."""
        self._ready = time.monotonic()


def _last_attempt(scratch: Path) -> dict[str, Any] | None:
    try:
        attempts = json.loads((scratch / ATTEMPTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return attempts[-1] if attempts else None


SUMMARY = "summary.json"


def is_complete(run_dir: Path, step: int, steps: int) -> bool:
    """Whether the run in ``run_dir`` has ended, with its last validation, after the last of ``steps`` steps.

    Args:
        run_dir: folder of the run.
        step: steps that are done.
        steps: of the run.
    """
    try:
        summary = json.loads((run_dir / SUMMARY).read_text(encoding="utf-8"))
        return step >= steps and summary["steps"] == step and summary["stopped_by"] is None
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_summary(
    run_dir: Path,
    ledger: TimeLedger,
    state: TrainState,
    validation: ValidationMetrics | None,
    watch: PlanSink | None,
    stopped: Preempted | None,
) -> None:
    """Log where the time went and how the plan did, and write ``summary.json``; for rank 0."""
    log.info("time: %s", ledger.summary())
    if watch and (line := watch.line()):
        log.info("plan: %s", line)
    summary = {
        "steps": state.step,
        "stopped_by": signal.Signals(stopped.signal).name if stopped else None,
        "tokens": state.tokens,
        "skipped_steps": state.skipped_steps,
        "rolled_back_steps": state.rolled_back_steps,
        "val_loss": validation.val_loss if validation else None,
        "val_bits_per_byte": validation.val_bits_per_byte if validation else None,
        "wall_seconds": ledger.wall(),
        "seconds": ledger.parts(),
        "goodput": ledger.goodput(),
        "plan": watch.as_dict() if watch else None,
    }
    write_run_file(run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n", log.warning)
    if validation:
        log.info("final validation: loss %.4f, %.4f bits per byte", validation.val_loss, validation.val_bits_per_byte)
