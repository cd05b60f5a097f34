"""The end of a run: where its time went, how its plan did, and ``summary.json``."""

import json
import logging
import signal
from pathlib import Path

from crius.metrics.ledger import TimeLedger
from crius.metrics.record import ValidationMetrics
from crius.run_file import write_run_file
from crius.train.agreement import Preempted
from crius.train.state import TrainState
from crius.train.tools import Watch

SUMMARY = "summary.json"

log = logging.getLogger("crius.train")


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
    watch: Watch | None,
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
