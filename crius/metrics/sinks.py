"""Sinks of the records of a run: one class per sink, listed in ``build_sinks``."""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeElapsedColumn
from rich.text import Text

from crius import plugins
from crius.config.operation import MetricsConfig
from crius.metrics.record import Record, Sink, StepMetrics, ValidationMetrics
from crius.new_folder import PARTIAL
from crius.run_file import RunFile, open_log
from crius.untrusted import open_below, parse_json

log = logging.getLogger("crius.metrics")


FIT = "fit"
"""Attribute of a log record: a function that fits its line into a terminal. Files and pipes get the whole line."""

_BAR_COLUMNS = 110
"""Least columns of a terminal at which the live line has a bar."""

_LESS_IMPORTANT = (
    "data",
    "load",
    "dead",
    "mfu",
    "mem",
    "alloc_retries",
    "lr",
    "grad_norm",
    "tokens/s",
    "skipped",
    "rolled_back",
    "(",
    "bits_per_byte",
    "perplexity",
)
"""First words of the fields that are left out, in this order, if a terminal is too narrow."""


def fitted(fields: Iterable[str], width: int) -> str:
    """The fields as one line of at most ``width`` columns. If they do not fit, less important fields are left out."""
    kept = list(fields)
    for name in _LESS_IMPORTANT:
        if len("  ".join(kept)) <= width:
            break
        kept = [field for field in kept if not field.startswith(name)]
    return "  ".join(kept)[:width]


class _LiveLine(ProgressColumn):
    """Step, loss, tokens/s and remaining time, in the current width of the terminal."""

    def render(self, task: Task) -> Text:
        """See ``rich.progress.ProgressColumn``."""
        left = "-" if task.time_remaining is None else timedelta(seconds=round(task.time_remaining))
        clock = () if task.fields["beside"] > 1 else (str(timedelta(seconds=round(task.elapsed or 0))),)
        fields = (f"step {task.completed:.0f}/{task.total:.0f}", *clock, *task.fields["shown"], f"left {left}")
        return Text(fitted(fields, shutil.get_terminal_size().columns - task.fields["beside"]), no_wrap=True)


class ConsoleSink:
    """Logs each record as one aligned line. On a terminal, a live line with loss and remaining time is below.

    Args:
        steps: steps of the run.
        total_memory_gib: memory of the device in GiB; None: unknown.
        show_bar: whether to show the live line if standard output is a terminal.
    """

    def __init__(self, steps: int, total_memory_gib: float | None, show_bar: bool) -> None:
        self._steps = steps
        self._total = total_memory_gib
        self._bar: Progress | None = None
        if show_bar and sys.stdout.isatty():
            has_bar = shutil.get_terminal_size().columns >= _BAR_COLUMNS
            self._bar = Progress(  # obeys NO_COLOR; other output is printed above it
                _LiveLine(),
                *((BarColumn(), TimeElapsedColumn()) if has_bar else ()),
                transient=True,
                console=Console(soft_wrap=True),  # a longer line above it stays one line
                speed_estimate_period=math.inf,  # records may be minutes apart
            )
            self._task = self._bar.add_task("train", total=steps, shown=(), beside=50 if has_bar else 1)
            self._bar.start()

    def write(self, record: Record) -> None:
        """Log one line. A step also updates the live line."""
        fields = self._step_fields(record) if isinstance(record, StepMetrics) else _validation_fields(record)
        log.info("%s", "  ".join(fields), extra={FIT: functools.partial(fitted, fields)})
        if self._bar and isinstance(record, StepMetrics):
            shown = (f"loss {record.loss:.4f}", f"tokens/s {record.tokens_per_second:,.0f}")
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._bar.update(self._task, completed=record.step, shown=shown)

    def _step_fields(self, record: StepMetrics) -> list[str]:
        width = len(str(self._steps))
        mfu = "n/a" if record.mfu is None else f"{record.mfu:.1%}"
        total = "" if self._total is None else f"/{self._total:.0f}"
        data = record.data_seconds / record.step_seconds if record.step_seconds else 0.0
        lost = (
            ("alloc_retries", record.num_alloc_retries),
            ("skipped", record.skipped_steps),
            ("rolled_back", record.rolled_back_steps),
        )
        load = record.load_max_over_mean
        return [
            f"step {record.step:>{width}}/{self._steps}",
            f"loss {record.loss:.4f}",
            f"grad_norm {record.grad_norm:.3f}",
            f"lr {record.lr:.1e}",
            f"tokens/s/rank {record.tokens_per_second_per_rank:,.0f}",
            f"mfu {mfu}",
            f"mem {record.memory_gib:.2f}{total} GiB",
            f"data {data:.1%}",
            *(() if load is None else (f"load {load:.2f}", f"dead {record.dead_experts:.0f}")),
            *(f"{name} {count}" for name, count in lost if count),
        ]

    def close(self) -> None:
        """Remove the live line."""
        if self._bar:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._bar.stop()


def _validation_fields(record: ValidationMetrics) -> list[str]:
    name = f"validation of {record.val_set}" if record.val_set else "validation"
    return [
        f"{name} at step {record.step}",
        f"loss {record.val_loss:.4f}",
        f"perplexity {record.val_perplexity:.3f}",
        f"bits_per_byte {record.val_bits_per_byte:.4f}",
        f"({record.val_samples} samples, {record.val_seconds:.1f} s)",
    ]


class JsonlSink:
    """Writes ``metrics.jsonl`` of a run folder: one JSON object per record, at full precision, flushed at once.

    The file of another run is kept as ``metrics.N.jsonl``.

    Args:
        run_dir: folder of the run.
        resumed_step: step after which the file continues. Records of later steps, which the run repeats, and lines that
            cannot be read are moved to ``metrics.lost.jsonl``. 0: a new run.
    """

    def __init__(self, run_dir: Path, resumed_step: int = 0) -> None:
        path = run_dir / "metrics.jsonl"
        if resumed_step and path.exists():
            try:
                _go_back(path, resumed_step)
            except OSError as error:
                log.warning("%s keeps records of repeated steps: it cannot be written (%s)", path, error.strerror)
        elif path.exists():
            number = 1
            while (kept := run_dir / f"metrics.{number}.jsonl").exists():
                number += 1
            path.rename(kept)
        self._file = RunFile(path, log.warning, "its records are lost, and the run continues")

    def write(self, record: Record) -> None:
        """Write one line."""
        values = dataclasses.asdict(record)
        values |= values.pop("sources", {})
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()  # JSON has no NaN
            if (name, value) != ("val_set", "")
        }
        self._file.append(json.dumps(finite) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _go_back(path: Path, step: int) -> None:
    """Keep the records up to ``step`` in a file; move away later records and lines that cannot be read.

    A last line that a crash cut off is normal; a damaged complete line is reported.
    """
    kept: list[bytes] = []
    lost: list[bytes] = []
    damaged = mended = 0
    with open_below(path.parent, path.name) as lines:
        for line in lines:
            whole = line.rstrip() + b"\n"  # even if it ends with another character than a line's end
            at = _step_of(whole)
            (kept if at is not None and at <= step else lost).append(whole)
            mended += whole != line
            damaged += at is None and (line.endswith(b"\n") or b"}" in line)
    if not (lost or mended):
        return
    aside = path.with_name("metrics.lost.jsonl")
    if damaged:
        what = "1 damaged line was" if damaged == 1 else f"{damaged} damaged lines were"
        log.warning("%s: %s moved to %s, whose records are missing", path, what, aside.name)
    if lost:
        with open_log(aside) as file:
            file.buffer.writelines(lost)
    partial = path.with_name(f"{path.name}{PARTIAL}cut")
    partial.write_bytes(b"".join(kept))
    partial.replace(path)


def _step_of(line: bytes) -> int | None:
    """The step of a record; None if the line is incomplete."""
    try:
        step = parse_json(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int and line.endswith(b"\n") else None


class ForeignSink:
    """A sink of an installed package. It cannot end a run: if it fails, a warning is logged and it gets no more
    records.

    The entry point of the group ``crius.sinks`` is called with the folder of the run and the step that it resumes from,
    and returns a ``Sink``.

    Args:
        name: name of the entry point.
        run_dir: folder of the run.
        resumed_step: see ``build_sinks``.
    """

    def __init__(self, name: str, run_dir: Path, resumed_step: int) -> None:
        self._name = name
        self._sink: Sink | None = None
        build = plugins.load(plugins.SINKS, name)
        with self._let_go_where_it_fails():
            self._sink = build(run_dir, resumed_step)  # type: ignore[misc]

    def write(self, record: Record) -> None:
        """See ``Sink``."""
        with self._let_go_where_it_fails():
            if self._sink is not None:
                self._sink.write(record)

    def close(self) -> None:
        """See ``Sink``."""
        with self._let_go_where_it_fails():
            if self._sink is not None:
                self._sink.close()

    @contextlib.contextmanager
    def _let_go_where_it_fails(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # of code outside Crius
            failed = self._sink
            self._sink = None
            with contextlib.suppress(Exception, SystemExit):
                if failed is not None:
                    failed.close()
            log.warning(
                "metrics.sinks %s failed and gets no more records: %s: %s", self._name, type(error).__name__, error
            )


def build_sinks(
    config: MetricsConfig,
    run_dir: Path,
    steps: int,
    total_memory_gib: float | None,
    resumed_step: int = 0,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> list[Sink]:
    """The sinks of rank 0: always metrics.jsonl and the console; trackers and sinks of packages on request.

    Args:
        config: section ``metrics``.
        run_dir: folder of the run.
        steps: number of steps of the run.
        total_memory_gib: memory of the device in GiB; None: unknown.
        resumed_step: step from which the run resumes. Its records are kept; later steps are repeated. 0: a new run.
        settings: settings of the run, by dotted name, for trackers that keep them.
    """
    sinks: list[Sink] = [
        JsonlSink(run_dir, resumed_step),
        ConsoleSink(steps, total_memory_gib, config.enable_progress_bar),
    ]
    if config.enable_tensorboard:
        from crius.metrics.tensorboard import TensorBoardSink  # noqa: PLC0415  needs an optional package

        sinks.append(TensorBoardSink(run_dir, total_memory_gib, resumed_step))
    if config.enable_wandb:
        from crius.metrics.wandb import WandbSink  # noqa: PLC0415  needs an optional package

        sinks.append(WandbSink(run_dir, settings, total_memory_gib, resumed_step))
    return [*sinks, *(ForeignSink(name, run_dir, resumed_step) for name in dict.fromkeys(config.sinks))]
