"""The console: aligned plain lines, and on a terminal a bar with the remaining time below them."""

import contextlib
import logging
import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from crius.metrics.record import Record, StepMetrics

log = logging.getLogger("crius.metrics")


class ConsoleSink:
    """Logs each record as one line.

    Args:
        steps: steps of the run.
        total_memory_gib: memory of the device, None where it is not known.
        show_bar: show the bar where standard output is a terminal.
    """

    def __init__(self, steps: int, total_memory_gib: float | None, show_bar: bool) -> None:
        self._steps = steps
        self._total = total_memory_gib
        self._bar: Progress | None = None
        if show_bar and sys.stdout.isatty():
            self._bar = Progress(  # obeys NO_COLOR and moves what is printed meanwhile above itself
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                transient=True,
                console=Console(soft_wrap=True),  # a step line stays one line, also in a narrow terminal
            )
            self._task = self._bar.add_task("train", total=steps)
            self._bar.start()

    def write(self, record: Record) -> None:
        """Log one line; a step also moves the bar."""
        if isinstance(record, StepMetrics):
            log.info("%s", self._step_line(record))
            if self._bar:
                with contextlib.suppress(OSError):  # the terminal may be gone
                    self._bar.update(self._task, completed=record.step)
        else:
            log.info(
                "validation at step %d  loss %.4f  perplexity %.3f  bits_per_byte %.4f  (%d samples, %.1f s)",
                record.step,
                record.val_loss,
                record.val_perplexity,
                record.val_bits_per_byte,
                record.val_samples,
                record.val_seconds,
            )

    def _step_line(self, record: StepMetrics) -> str:
        width = len(str(self._steps))
        mfu = "n/a" if record.mfu is None else f"{record.mfu:.1%}"
        total = "" if self._total is None else f"/{self._total:.0f}"
        data = record.data_seconds / record.step_seconds if record.step_seconds else 0.0
        lost = (("skipped", record.skipped_steps), ("rolled_back", record.rolled_back_steps))
        return "  ".join(
            (
                f"step {record.step:>{width}}/{self._steps}",
                f"loss {record.loss:.4f}",
                f"grad_norm {record.grad_norm:.3f}",
                f"lr {record.lr:.1e}",
                f"tokens/s/rank {record.tokens_per_second_per_rank:,.0f}",
                f"mfu {mfu}",
                f"mem {record.memory_gib:.2f}{total} GiB",
                f"data {data:.1%}",
                *(f"{name} {count}" for name, count in lost if count),
            )
        )

    def close(self) -> None:
        """Take the bar away."""
        if self._bar:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._bar.stop()
