"""The Python interface: train, read a run, load a model. Errors are exceptions of ``crius.errors``; nothing exits."""

import contextlib
import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crius import errors
from crius.config.run import RunConfig
from crius.errors import ConfigError, CriusError
from crius.metrics.record import Record, Sink, StepMetrics, ValidationMetrics
from crius.tools.report.history import Columns, RunHistory, read_run
from crius.tools.report.runs import history_state
from crius.untrusted import open_below, parse_json

if TYPE_CHECKING:
    import torch

    from crius.config.facts import Facts
    from crius.launch.environment import Placement
    from crius.models.decoder import Decoder
    from crius.train.loop import Loop


class Run(RunHistory):
    """A run, read from its folder by ``load_run``. It is not updated while the run trains.

    Attributes:
        path: the run folder.
        settings: dotted names and values of ``run.toml``.
        validations: columns of each validation set, by its name; ``""`` is the set without a name.
        starts: one mapping for each start of the run: versions, host, device, layout, hashes of the data.
        incidents: contents of the files in ``incidents/``, by name.
        summary: ``summary.json``; None before the run has ended.
    """

    @property
    def metrics(self) -> Columns:
        """Columns of the reported steps: from the name of a field of ``StepMetrics`` to its values; None: no value.

        ``pandas.DataFrame(run.metrics)`` makes a table of the columns.
        """
        return self.steps

    @property
    def state(self) -> str:
        """``running``, ``finished``, ``stopped``, ``preempted`` or ``failed``; read again at each access."""
        return history_state(self).word

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.state}, {len(self.steps.get('step', ()))} reported steps)"


def load_run(path: str | os.PathLike[str]) -> Run:
    """The run in the folder ``path``, as it is now; no torch is imported.

    Raises:
        ConfigError: ``path`` is not a run folder.
        EnvironmentError: its files cannot be read.
    """
    with _located("load_run"):
        return Run(**vars(read_run(Path(path))))


def load_model(
    path: str | os.PathLike[str],
    step: int | None = None,
    device: "str | torch.device" = "cpu",
    dtype: "str | torch.dtype | None" = None,
) -> "Decoder":
    """A trained model: an ``nn.Module`` in eval mode that maps token ids ``(B, T)`` to logits ``(B, T, V)``.

    Args:
        path: run folder, checkpoint, Hugging Face folder, or name on the hub. Adapters of a LoRA run are merged.
        step: step of the checkpoint of a run; None: the newest complete checkpoint.
        device: device of the weights.
        dtype: dtype of the weights, such as ``torch.bfloat16``; None: bfloat16 on a GPU, else float32.

    Raises:
        ConfigError: there is no such model, no checkpoint of that step, or no such device.
        CheckpointError: the weights are damaged.
    """
    import torch

    from crius.interop.hub import located
    from crius.interop.weights import open_weights
    from crius.tools.generate.source import build_decoder, choose_kernels

    name = "auto" if dtype is None else str(dtype).removeprefix("torch.")
    if name not in ("auto", "float16", "bfloat16", "float32", "float64"):
        raise ConfigError(f"dtype {dtype} cannot compute.", where="load_model", fix="dtype=torch.bfloat16")
    try:
        place = torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(f"device {device} cannot be used.", where="load_model", why=why, fix='device="cpu"') from None
    source = located(os.fspath(path), "load_model")
    weights = open_weights(source if step is None else _checkpoint(source, step), "load_model")
    choose_kernels(place, "torch")
    return build_decoder(weights, name, place).requires_grad_().eval()


def _checkpoint(path: str, step: int) -> str:
    from crius.checkpoint.names import step_name
    from crius.checkpoint.whereabouts import find_checkpoints

    folder = find_checkpoints(path, "load_model").folder
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise ConfigError(f"step {step!r} is not an integer.", where="load_model", fix="step=4")
    if step not in (steps := folder.steps()):
        there = ", ".join(map(str, steps)) or "no step"
        raise ConfigError(f"{path} has no checkpoint of step {step}.", where="load_model", fix=f"it has {there}")
    return f"{folder.disk.where}/{step_name(step)}"


def run(config: RunConfig | Mapping[str, Any] | None = None, *, recipe: str = "", sinks: Sequence[Sink] = ()) -> Run:
    """Train as ``crius train`` does, and return the run. The run resumes if its folder has checkpoints.

    A run of one rank trains in this process. A run of several ranks is a ``crius train`` in a child process.
    Ctrl-C, or a notebook's interrupt, saves and ends the run. Its state is then ``stopped``.

    The state of this process, such as torch's default dtype, has no effect on the curve.

    Args:
        config: all settings, or dotted names with values, such as ``{"model.num_layers": 2, "job.run_dir": "runs/a"}``;
            a list for a setting that takes several. The short forms of the command line work, such as ``steps``, and so
            does ``config``: a file with settings that the other ones change, such as the ``run.toml`` of another run.
        recipe: name of a recipe that ``config`` changes; empty: ``llama3_debug``, as on the command line.
        sinks: sinks in this process that get each record when it is written. They are closed at the end. An error of a
            sink ends the run.

    Raises:
        ConfigError: settings are wrong or exclude each other; the message names all of them.
        EnvironmentError: this process trains already, or has a process group.
        CriusError: the run failed; the class is that of the failure, such as ``NonFiniteError``.
    """
    from crius.cli.from_python import FILE, check_arguments, words_of
    from crius.cli.settings import run_of
    from crius.cli.train import prepared
    from crius.launch.environment import joined_placement

    check_arguments(config, sinks)
    if recipe and isinstance(config, RunConfig):
        raise ConfigError("recipe excludes a whole RunConfig.", fix="leave out recipe, or give a mapping")
    if joined_placement(os.environ):
        raise ConfigError("crius.run starts its ranks itself.", where="torchrun, srun", fix="torchrun -m crius train")
    with tempfile.TemporaryDirectory(prefix="crius-run-") as scratch, contextlib.ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.close)
        words = words_of({} if config is None else config, recipe, Path(scratch))
        with _located("crius.run", str(Path(scratch) / FILE)):
            facts, folder = prepared(run_of(*words), 0, None)
            if facts.num_ranks > 1:
                _train_apart(words, folder, sinks)
            else:
                _train_here(facts, folder, sinks)
    return load_run(folder)


@contextlib.contextmanager
def _located(where: str, file: str = "command line") -> Iterator[None]:
    """Errors from ``file`` say that they are from ``where``, and name keys in place of flags."""
    from crius.cli.from_python import with_keys

    try:
        yield
    except CriusError as error:
        raise with_keys(error, file, where) from None


def _train_here(facts: "Facts", folder: Path, sinks: Sequence[Sink]) -> None:
    """Train as the only rank, in this process."""
    from crius.cli.train import own, run_tools
    from crius.in_process import only_run, process_as_before
    from crius.launch.crew import attempt
    from crius.launch.environment import single_placement
    from crius.launch.report import report_path
    from crius.launch.stop import STOPPED
    from crius.train import job

    raised: list[BaseException] = []
    tools = run_tools(facts.config, folder)

    def prepare(loop: "Loop") -> "Loop":
        loop.reports.sinks += sinks
        return tools.prepare(loop)

    def train(placement: "Placement") -> None:
        try:
            job.run(facts.config, folder, started, placement, tools=dataclasses.replace(tools, prepare=prepare))
        except BaseException as error:
            raised.append(error)
            raise

    with contextlib.ExitStack() as stack:
        started = time.monotonic()
        stack.enter_context(only_run())
        own(facts, folder, None, stack)
        report_path(folder / "logs", 0).unlink(missing_ok=True)
        stack.enter_context(process_as_before())
        # of the launcher "local": a second interrupt must not end this process
        place = dataclasses.replace(single_placement(), launcher="local", log_dir=folder / "logs")
        attempt(train, place)
    has_stopped = bool(raised) and isinstance(raised[0], SystemExit) and raised[0].code in STOPPED
    if raised and not has_stopped:
        raise raised[0]


def _train_apart(words: Sequence[str], folder: Path, sinks: Sequence[Sink]) -> None:
    """Train in a child process and print its lines. This process may have threads or a GPU, so it cannot be forked."""
    from crius.cli.app import imports
    from crius.launch.stop import STOPPED

    command = [sys.executable, "-m", "crius", "train", *words, "--job.run_dir", str(folder), *imports()]
    records = _NewRecords(folder)
    lines = deque[str](maxlen=100)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout
    try:
        with _interrupts_go_to(process):
            while line := process.stdout.readline():
                sys.stdout.write(line)
                lines.append(line)
                records.give(sinks)  # a record is in its file before its line is printed
    finally:
        if process.poll() is None:  # a sink has failed: save, and end
            process.terminate()
        process.communicate()  # a child that waits for its lines to be read would never end
        code = process.returncode
    if code and code not in STOPPED:
        raise _error_of("".join(lines), folder, code)


@contextlib.contextmanager
def _interrupts_go_to(process: "subprocess.Popen[str]") -> Iterator[None]:
    """While this is open, an interrupt of this process asks ``process`` to stop, and breaks off nothing here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: process.send_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _error_of(output: str, folder: Path, code: int) -> CriusError:
    """The error that a child printed last."""
    found = list(re.finditer(r"^(?:(\w+Error): |FAILED )(.*\n(?:[ \[].*\n)*)", output, re.MULTILINE))
    if not found:
        return CriusError(f"the run in {folder} ended with exit code {code}.", why=output[-500:].strip())
    kind = getattr(errors, found[-1][1] or "", CriusError)
    error: CriusError = kind(found[-1][2].strip())
    return error


class _NewRecords:
    """The records that a run adds to its ``metrics.jsonl``, each once, even if a restart repeats steps."""

    def __init__(self, folder: Path) -> None:
        self._starts = folder / "starts.jsonl"
        self._metrics = folder / "metrics.jsonl"
        self._num_starts = len(_lines_of(self._starts, 0))
        self._place = 0
        self._file = 0
        self._step = -1
        self._seen = set[str]()

    def give(self, sinks: Sequence[Sink]) -> None:
        """Give the new records to the sinks."""
        for told in self._new() if sinks else ():
            kind = StepMetrics if "loss" in told else ValidationMetrics
            names = {field.name for field in dataclasses.fields(kind)}
            # metrics.jsonl has null for a number that is not finite, and for one that is not known
            must = ("loss", "grad_norm", "val_loss", "val_perplexity", "val_bits_per_byte")
            values: dict[str, Any] = {name: told[name] for name in names & {*told}}
            values |= {name: math.nan for name in must if name in values and values[name] is None}
            record: Record = kind(**values)
            for sink in sinks:
                sink.write(record)

    def _new(self) -> Iterator[dict[str, Any]]:
        starts = [parse_json(line)["step"] for line in _lines_of(self._starts, 0)[self._num_starts :]]
        if not starts:
            return  # what is there is of before
        with contextlib.suppress(FileNotFoundError):
            found = self._metrics.stat()
            if found.st_ino != self._file or found.st_size < self._place:  # a restart leaves out what comes again
                self._file = found.st_ino
                self._place = 0
        for line in _lines_of(self._metrics, self._place):
            self._place += len(line)
            try:
                told = parse_json(line)
                told["step"] += 0  # a number
            except (ValueError, KeyError, TypeError):
                continue  # a damaged line, which reports count
            kind = "loss" if "loss" in told else f"validation {told.get('val_set')}"
            if told["step"] > max(self._step, starts[0]):
                self._step = told["step"]
                self._seen = set()
            if told["step"] == self._step and kind not in self._seen:
                self._seen.add(kind)
                yield told


def _lines_of(path: Path, place: int) -> list[bytes]:
    """The complete lines of a file from a byte offset."""
    try:
        with open_below(path.parent, path.name) as file:
            file.seek(place)
            return [line for line in file if line.endswith(b"\n")]
    except FileNotFoundError:
        return []
