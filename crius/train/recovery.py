"""A run that starts again after a failure: what that cost, and how long it took until there was something new."""

import contextlib
import json
import logging
import time
from pathlib import Path
from typing import Any

from crius.launch.environment import Placement
from crius.metrics.ledger import TimeLedger

ATTEMPTS = "attempts.json"
LEDGER = "ledger.json"
RECOVERIES = "recoveries.jsonl"
"""In the folder of the logs: a line for each failure that the run has recovered from."""

log = logging.getLogger("crius.train")


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
