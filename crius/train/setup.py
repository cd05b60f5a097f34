"""Setup of a process of a run, and decisions for its machine: logs, kernels, the profiler, dtypes."""

import contextlib
import functools
import json
import logging
import platform
import shutil
import socket
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._dynamo.callback import callback_handler
from torch.profiler import ProfilerAction, ProfilerActivity, profile

import crius
from crius.config.operation import ProfilerConfig
from crius.config.resolve import (
    USABLE,
    auto_dtype,
    caps_scores,
    has_mask,
    keeps_probabilities,
    leaves_open,
    varlen_obstacle,
)
from crius.config.run import RunConfig, replace_fields
from crius.config.toml_file import flatten
from crius.data.corpus import Corpus
from crius.data.sample_log import source_digest
from crius.data.show import coloured, takes_colour
from crius.errors import ConfigError
from crius.host import Machine, free_host_bytes
from crius.kernels import choice
from crius.launch.status import status
from crius.metrics.device import machine_of
from crius.metrics.sinks import FIT
from crius.models.description import ModelDescription
from crius.parallel.runtime import World
from crius.redact import printable, redact
from crius.run_file import RunFile
from crius.train.build import Job
from crius.train.inputs import describe_known_model
from crius.waiting import LINE

log = logging.getLogger("crius.train")

STARTS = "starts.jsonl"

MARKED = "is_marked"
"""Attribute of a log record with conversations or text that is trained on: marked in files, coloured on a terminal."""

HEADLINE = "is_headline"
"""Attribute of a log record that stands on a terminal for all lines of the start."""

_MEMORY_EVENTS = 100_000
"""Events of CUDA's allocator that are kept: some steps of a large model, and a file of tens of MB."""


class _ConsoleHandler(logging.Handler):
    """Prints to the current ``sys.stdout``, so that a progress bar can redirect it.

    A closed terminal or a full disk does not end the run: lines that cannot be printed are lost.

    Args:
        is_brief: whether headlines stand for the start, until which only warnings and marked text are printed.
    """

    _has_failed = False

    def __init__(self, is_brief: bool = False) -> None:
        super().__init__()
        self._is_brief = is_brief
        self._is_start = is_brief

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is printed."""
        is_headline = getattr(record, HEADLINE, False)
        if is_headline:
            self._is_start = False
            return self._is_brief
        return not self._is_start or record.levelno >= logging.WARNING or getattr(record, MARKED, False)

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        LINE.erase()
        try:
            text = self.format(record)
            if getattr(record, HEADLINE, False):
                name, text = text.split(maxsplit=1)
                text = f"{name:<7} {text}"[: shutil.get_terminal_size().columns]
                if takes_colour(sys.stdout):
                    text = f"\x1b[1m{text[:7]}\x1b[0m{text[7:]}"
            elif getattr(record, MARKED, False) and takes_colour(sys.stdout):
                text = coloured(text)
            elif sys.stdout.isatty():
                columns = shutil.get_terminal_size().columns
                fit = getattr(record, FIT, None)
                fold = textwrap.TextWrapper(columns, subsequent_indent="    ")
                text = fit(columns) if fit else "\n".join(map(fold.fill, text.splitlines()))
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True  # before the warning, which comes here too
                log.warning("standard output cannot be written (%s): its lines are lost", error.strerror or error)


class _FileHandler(logging.Handler):
    """Adds lines to a log file of the run folder."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is added: headlines repeat others."""
        return not getattr(record, HEADLINE, False)

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = RunFile(path, self._warn, "its lines are lost, and the run continues")

    def emit(self, record: logging.LogRecord) -> None:
        """Add one line."""
        self._file.append(self.format(record) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def _warn(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"warning: {text}\n")


class _Formatter(logging.Formatter):
    """Removes secrets and control characters from lines and from their tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """The line that is printed."""
        return printable(redact(super().format(record)))


def start_logging(rank: int, run_dir: Path, is_own_file: bool, notes: Sequence[str] | None = None) -> None:
    """Route the lines of the ``crius`` loggers.

    Args:
        rank: rank 0 logs; other ranks only warn, with their rank and host in front.
        run_dir: run folder; rank 0's lines also go to ``logs/rank-0.log``.
        is_own_file: whether standard output of this rank already is its own log file.
        notes: headlines stand for the start on a terminal, and these lines begin the log file; None: all is printed.
    """
    logger = logging.getLogger("crius")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = False
    logger.setLevel(logging.INFO if rank == 0 or is_own_file else logging.WARNING)
    prefix = "" if rank == 0 else f"[rank {rank}, host {socket.gethostname()}] "
    handlers: list[logging.Handler] = [_ConsoleHandler(notes is not None and sys.stdout.isatty())]
    if not is_own_file:
        handlers.append(_FileHandler(run_dir / "logs" / f"rank-{rank}.log"))
    for handler in handlers:
        handler.setFormatter(_Formatter(prefix.replace("%", "%%") + "%(message)s"))
        logger.addHandler(handler)
    for line in notes or ():
        log.info("%s", line)


def run_kernels(config: RunConfig, device: torch.device) -> choice.Choice:
    """The kernels that ``config`` uses on ``device``.

    Args:
        config: the run.
        device: device of this process; a GPU without an index stands for one that is not here.

    Raises:
        ConfigError: a kernel that is asked for by name does not run there.
    """
    asked = config.kernels
    model = describe_known_model(config)
    is_at_hand = device.type == "cuda" and device.index is not None
    return choice.resolve(
        asked.linear,
        asked.pointwise,
        asked.attention,
        device_type=device.type,
        capability=torch.cuda.get_device_capability(device) if is_at_hand else None,
        cudnn=torch.backends.cudnn.version() if is_at_hand else None,
        has_mask=has_mask(config, model),
        no_varlen=varlen_obstacle(config, model),
        is_split=config.parallelism.context_parallel_degree > 1,
        keeps_probabilities=keeps_probabilities(config, model),
        caps_scores=caps_scores(model),
    )


def most_documents(config: RunConfig) -> int:
    """Most documents of a row for which this process's attention goes by the ends of documents; 0: never."""
    order = choice.current().attention
    if "varlen" not in order or config.model.attention_mask != "document":
        return 0
    # each document takes a block of memory and of threads, whatever its length under training.reproducible the kernel
    # of a row must not depend on the other rows of its rank
    always = order == ("varlen",) or config.training.reproducible
    return config.training.seq_len if always else max(1, config.training.seq_len // TOKENS_PER_DOCUMENT)


TOKENS_PER_DOCUMENT = 64
"""Tokens per document, on average over a row, from which on attention goes by the ends of documents by default."""


class Compilations:
    """The compilations in this process, in whatever phase of the run they come.

    Attributes:
        seconds: seconds that they took.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._interrupted: list[tuple[str, float]] = []  # phase in which a compilation began, and when

    def watch(self) -> None:
        """Count each compilation, and tell the watchdog while it runs: a late one takes 20 to 60 s on a GPU."""
        if self._begin not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)

    def _begin(self, *_: object) -> None:
        self._interrupted.append((status.phase, time.monotonic()))
        status.update(phase="compile")

    def _end(self, *_: object) -> None:
        phase, began = self._interrupted.pop()
        self.seconds += time.monotonic() - began
        status.update(phase=phase)


COMPILATIONS = Compilations()


def record_memory(config: ProfilerConfig, device: torch.device) -> None:
    """Record what CUDA's allocator does, if asked for. Call it before any memory is allocated."""
    if config.memory_snapshot and device.type == "cuda":
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MEMORY_EVENTS)


def write_memory_snapshot(path: Path) -> None:
    """Write the allocator's record, for pytorch.org/memory_viz. If it cannot be written, it is lost with a warning."""
    _keep("memory snapshot", path, torch.cuda.memory._dump_snapshot)


def _keep(what: str, path: Path, write: Callable[[str], object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(str(path))
        log.info("%s: %s", what, path)
    except (OSError, RuntimeError) as error:
        log.warning("%s %s cannot be written and is lost: %s", what, path, error)


def place_in_window(config: ProfilerConfig, index: int) -> int:
    """Steps from the start of a window to step ``index`` of this process, from 0; negative before a window."""
    place = index + 1 - config.start_step
    if place >= 0 and config.interval:
        place %= config.interval
        return place if place < config.num_steps else place - config.interval
    return place


def _action(config: ProfilerConfig, index: int) -> ProfilerAction:
    """Action of the profiler in a step: it warms up in the step before a window, if there is one."""
    place = place_in_window(config, index)
    if 0 <= place < config.num_steps:
        return ProfilerAction.RECORD_AND_SAVE if place == config.num_steps - 1 else ProfilerAction.RECORD
    return ProfilerAction.WARMUP if place == -1 else ProfilerAction.NONE


class _Marks:
    """NVTX ranges, one for each phase of a step. Ranges belong to a thread, so beats of other threads, and beats within
    a phase, are ignored."""

    def __init__(self) -> None:
        self._last: tuple[int | None, str] | None = None

    def __call__(self, step: int | None, phase: str) -> None:
        if threading.current_thread() is threading.main_thread() and (step, phase) != self._last:
            self._last = (step, phase)
            torch.cuda.nvtx.range_pop()  # of the phase before; without a range it does nothing
            torch.cuda.nvtx.range_push(f"{phase} {step}")


@contextmanager
def profiler(config: ProfilerConfig, run_dir: Path, rank: int, device_type: str) -> Iterator[Callable[[int], None]]:
    """Gives a function to call after each step with its number, which writes the records of each window of steps.

    Args:
        config: what to record, and when.
        run_dir: gets ``traces/step-N/rank-R.json`` and ``rank-R.memory.pickle``.
        rank: rank of this process.
        device_type: ``cuda`` or ``cpu``, where snapshots of CUDA's memory and NVTX ranges have no effect.
    """
    on_gpu = device_type == "cuda"
    first = 0
    index = 0

    def file(ending: str) -> Path:
        return run_dir / "traces" / f"step-{first}" / f"rank-{rank}.{ending}"

    def write(trace: profile) -> None:
        if first:  # the run may end before the first step of a window
            _keep("trace", file("json"), trace.export_chrome_trace)

    def step(number: int) -> None:
        nonlocal first, index
        place = place_in_window(config, index)
        first = number if place == 0 else first
        index = index + 1
        was_at_work = _action(config, index - 1) is not ProfilerAction.NONE
        with status.during("profiler"):  # it starts CUPTI, or writes the trace: 5 to 60 s on a GPU
            if active:
                active.step()
            if config.memory_snapshot and on_gpu and place == config.num_steps - 1:
                write_memory_snapshot(file("memory.pickle"))
        if was_at_work or _action(config, index) is not ProfilerAction.NONE:
            status.limit_seconds = 0.0  # in the next step the ranks wait for the slowest trace
        first = 0 if place == config.num_steps - 1 else first

    warnings.filterwarnings("ignore", ".*Profiler clears events at the end of each cycle")
    with contextlib.ExitStack() as stack:
        if config.nvtx and on_gpu:
            stack.enter_context(status.listening(_Marks()))
        active = config.enable and stack.enter_context(
            profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
                schedule=functools.partial(_action, config),
                on_trace_ready=write,
                record_shapes=config.record_shapes,
                with_stack=config.with_stack,
            )
        )
        yield step if config.enable or config.memory_snapshot else lambda number: None


class Fit(Protocol):
    """Recomputation and microbatch of a run that leaves them to the memory of its ranks."""

    def __call__(
        self, config: RunConfig, facts: ModelDescription, machine: Machine, budget: float
    ) -> tuple[dict[str, Any], str]:
        """Decide: dotted fields with their values, and the reason.

        Args:
            config: the run.
            facts: description of its model.
            machine: machine of the run.
            budget: bytes of a rank that the plan may use.
        """


def decide(config: RunConfig, facts: ModelDescription, machine: Machine, ranks: World, fit: Fit | None) -> RunConfig:
    """``config`` with the recomputation and the microbatch that its ranks agree on; logs the dtype that they compute
    in.

    Args:
        config: the run, resolved; its rules have been checked.
        facts: description of its model.
        machine: machine of this rank.
        ranks: all ranks; the first decides for all, for the least memory of any.
        fit: decides what is left open; without it nothing is recomputed.

    Raises:
        ConfigError: another rank computes in another dtype, or compiles and this rank does not.
    """
    for name in ("training.mixed_precision_param", "compile.enable"):
        _check_alike(config, name, ranks)
    dtype, why = auto_dtype(on_gpu=machine.on_gpu)
    stored = config.training.dtype
    param = config.training.mixed_precision_param
    log.info("precision: %s weights, computed in %s; auto is %s here, on %s", stored, param, dtype, why)
    if not leaves_open(config, on_gpu=machine.on_gpu):
        return config
    name = "activation_checkpoint.mode"
    changes: dict[str, Any] = {name: "none"} if config.activation_checkpoint.mode == "auto" else {}
    if fit:
        changes, why = ranks.gather_json(fit(config, facts, machine, USABLE * _memory(ranks)))[0]
        if why:
            log.info("%s", why)
    return replace_fields(config, changes)


def _check_alike(config: RunConfig, name: str, ranks: World) -> None:
    """Refuse ranks that differ in a setting that each machine decides: they would hang, or compute other numbers."""
    found: list[str] = ranks.gather_json(str(flatten(config)[name]).lower())
    if len(set(found)) == 1:
        return
    first = ", ".join(f"{value} on {found.count(value)}, first rank {found.index(value)}" for value in sorted({*found}))
    raise ConfigError(
        f"{name} differs between ranks: {first}.",
        where=f"--{name}",
        why="each machine decides a setting that is not given, by its own hardware",
        fix=f"give the same value on all ranks, e.g. --{name} {found[0]}",
    )


def _memory(ranks: World) -> float:
    """Bytes that a rank can have: memory of its GPU, or its share of the host's free memory; the least of any rank."""
    if ranks.device.type == "cuda":
        own = float(torch.cuda.get_device_properties(ranks.device).total_memory)
        return min(ranks.gather_json(own))
    free = ranks.gather_json([platform.node(), free_host_bytes()])
    neighbours = Counter(host for host, _ in free)
    return min(nbytes / neighbours[host] for host, nbytes in free)


def note_start(job: Job, run_dir: Path, corpus: Corpus, step: int) -> None:
    """Add a line to ``starts.jsonl``; for rank 0.

    Args:
        job: the run.
        run_dir: folder of the run.
        corpus: data of the run.
        step: number of steps that were done before this start. 0: the run begins, and earlier lines are not its own.
    """
    model = job.config.model
    facts = job.facts
    layout = job.mesh.layout
    start = {
        "time": time.time(),
        "step": step,
        "crius": crius.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "device": machine_of(job.ranks.device, layout.num_ranks, layout.num_ranks).name,
        "ranks": layout.num_ranks,
        "layout": str(replace(layout, accum=job.sizes.accumulation)),
        "model": f"{model.name}/{model.flavor}",
        "parameters": facts.num_parameters,
        "active_parameters": facts.num_active_parameters,
        "data": list(corpus.description),
        "data_hash": source_digest(corpus.train.identity),
        "tokenizer": corpus.tokenizer.name,
        "tokenizer_hash": corpus.tokenizer.fingerprint,
    }
    file = RunFile(run_dir / STARTS, log.warning, "the report will miss this start of the run")
    file.append(json.dumps(start) + "\n")
    file.close()
