"""Weights & Biases, with torchtitan's tag names. Importing this module needs the package wandb."""

import contextlib
import logging
import os
import queue
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from crius.metrics.record import Record, scalars_of
from crius.untrusted import SMALL, text_below

log = logging.getLogger("crius.metrics")

ID = "wandb_id.txt"
"""File in the run folder with the id of the run at W&B."""

PATIENCE = 30.0
"""Seconds that W&B gets to log in, and at the end of the run to send the remaining records."""

_SILENT = 2.0  # seconds of waiting that need no line in the log
_MOST_WAITING = 10_000


class WandbSink:
    """Sends the records of a run to W&B from a separate thread. W&B can neither delay nor end the run.

    The variables ``WANDB_PROJECT`` (else: crius), ``WANDB_ENTITY``, ``WANDB_MODE`` and so on are W&B's own. Nothing
    asks for a key: ``wandb login`` does. The x axis of records is the step, so that repeated
    steps of a restart are drawn at the right place.

    Args:
        run_dir: folder of the run and of W&B's files. All starts and resumes of a run are one run at W&B. A new run in
            the folder of a finished run is another run at W&B.
        settings: settings of the run, by dotted name, without secrets.
        total_memory_gib: memory of the device in GiB; None: unknown.
        resumed_step: step from which the run resumes. 0: a new run.
    """

    def __init__(
        self, run_dir: Path, settings: Mapping[str, Any], total_memory_gib: float | None, resumed_step: int = 0
    ) -> None:
        self._total = total_memory_gib
        self._records: queue.Queue[Record | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(
            target=self._send, args=(run_dir, dict(settings), resumed_step), name="wandb", daemon=True
        )
        self._thread.start()

    def write(self, record: Record) -> None:
        """Hand over one record. It is dropped if W&B lags behind by thousands of records."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._records.put_nowait(record)

    def close(self) -> None:
        """Wait a limited time until W&B has taken the remaining records."""
        with contextlib.suppress(queue.Full):
            self._records.put(None, timeout=1)
            self._thread.join(_SILENT)
            if self._thread.is_alive():
                log.info("waiting up to %.0f s for W&B to take the remaining records", PATIENCE)
                self._thread.join(PATIENCE - _SILENT)
        if self._thread.is_alive():
            log.warning("W&B did not take all records in %.0f s: wandb sync sends them", PATIENCE)

    def _send(self, run_dir: Path, settings: dict[str, Any], resumed_step: int) -> None:
        try:
            wandb.setup(wandb.Settings(silent=True))  # neither prompts for a key nor prints between our lines
            run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "crius",
                id=_identity(run_dir, resumed_step),
                name=os.environ.get("WANDB_NAME") or run_dir.resolve().name,
                resume="allow",
                dir=run_dir,
                config=settings,
                settings=wandb.Settings(console="off", init_timeout=PATIENCE),
            )
            log.info("W&B: %s", run.url or f"run {run.id} in {run_dir / 'wandb'}, {run.settings.mode}")
            run.define_metric("*", step_metric="step")
            while (record := self._records.get()) is not None:
                run.log({"step": record.step, **scalars_of(record, self._total)})
            run.finish()
        except BaseException as error:  # errors of W&B, in a thread that nobody waits for
            log.warning("W&B failed and gets no more records: %s: %s", type(error).__name__, error)


def _identity(run_dir: Path, resumed_step: int) -> str:
    """The id of the run, kept in its folder. A new id if the previous run in the folder has ended."""
    file = run_dir / ID
    has_ended = not resumed_step and (run_dir / "summary.json").exists()
    with contextlib.suppress(OSError):
        if not has_ended and (kept := text_below(run_dir, ID, SMALL).strip()):
            return kept
    new = secrets.token_hex(6)
    file.write_text(f"{new}\n", encoding="utf-8")
    return new
