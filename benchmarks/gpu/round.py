"""One call of a command: its time, its programs, its results. No torch here."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.gpu.host import ROOT
from benchmarks.gpu.record import Record, error_in

END_SECONDS = 5.0
"""What a program that is out of time has to write what it found; then it is killed."""
LEAST_SECONDS = 5.0
"""A program is not started with less than this."""
DRY_SCALE = 8.0
"""Limits are those of a GPU and 16 cores; a dry run has whatever CPU there is, which may be busy."""

FEW_LINES = 12
"""Lines that the log keeps of a program that passed; of one that failed it keeps ``MANY_LINES``."""
MANY_LINES = 80


@dataclass(frozen=True)
class Done:
    """A program that has ended.

    Attributes:
        code: exit code; None if its time ran out.
        output: what it printed.
        seconds: wall time.
    """

    code: int | None
    output: str
    seconds: float

    @property
    def why(self) -> str:
        """Why it failed, in a line."""
        ending = "out of time" if self.code is None else f"exit code {self.code}"
        return f"{ending}: {error_in(self.output)}"


@dataclass
class Round:
    """What the steps of a command need.

    Attributes:
        record: the results.
        python: Python with torch.
        device: cuda, or cpu in a dry run.
        work: scratch folder of this call alone.
        environ: variables of all programs.
        end: monotonic time at which the call ends.
        parallel: programs that run at the same time.
    """

    record: Record
    python: str
    device: str
    work: Path
    environ: dict[str, str]
    end: float
    parallel: int
    step: str = ""
    _groups: set[int] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock)

    @property
    def is_dry(self) -> bool:
        """Whether this is a rehearsal with tiny sizes on a CPU."""
        return self.device == "cpu"

    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def row(self, check: str, ok: bool | None, detail: str = "", seconds: float = 0.0, **figures: Any) -> None:
        """Add a row of the current step."""
        self.record.row(self.step, check, ok, detail, seconds, figures)

    def cannot(self, check: str, why: str) -> None:
        """A row of something that could not run: not known in a dry run, a failure on a GPU."""
        self.row(check, None if self.is_dry else False, why)

    def folder(self, *names: str) -> Path:
        """A folder of this call for ``names``."""
        path = self.work.joinpath(*(re.sub(r"\W+", "-", name) for name in names))
        path.mkdir(parents=True, exist_ok=True)
        return path

    def call(self, name: str, arguments: Sequence[str], limit: float, environ: dict[str, str] | None = None) -> Done:
        """Run Python with ``arguments`` in the repository root, for ``limit`` seconds at most, or until the call ends.

        The process group is ended whatever happens, first by SIGINT, so that a program can write what it has.
        """
        limit = min(DRY_SCALE * limit if self.is_dry else limit, self.left() - END_SECONDS)
        if limit < LEAST_SECONDS:
            return Done(None, "no time was left", 0.0)
        log = self.folder("output") / f"{re.sub(r'[^A-Za-z0-9]+', '-', f'{self.step} {name}')}.log"
        begin = time.monotonic()
        with log.open("wb") as sink, self._started(arguments, {**self.environ, **(environ or {})}, sink) as process:
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
        done = Done(code, log.read_text(encoding="utf-8", errors="replace"), time.monotonic() - begin)
        title = f"{self.step} {name}: {'passed' if code == 0 else done.why}, {' '.join(arguments)}"
        self.record.log(title, done.output, FEW_LINES if code == 0 else MANY_LINES)
        return done

    @contextlib.contextmanager
    def _started(self, arguments: Sequence[str], environ: dict[str, str], sink: Any) -> Iterator[subprocess.Popen]:
        process = subprocess.Popen(
            [self.python, *arguments],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with self._lock:
            self._groups.add(process.pid)
        try:
            if self.left() <= 0:  # stopped while it started
                os.killpg(process.pid, signal.SIGKILL)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with self._lock:
                self._groups.discard(process.pid)

    def stop(self) -> None:
        """End all programs now, and start no others."""
        self.end = 0.0
        with self._lock:
            groups = list(self._groups)
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


@dataclass(frozen=True)
class Step:
    """A part of a command.

    Attributes:
        run: adds its rows to the round; the first line of its docstring says what it shows.
        seconds: what it takes on a GPU, an estimate; a step with less than half of it left is not begun.
    """

    run: Callable[[Round], None]
    seconds: float

    @property
    def purpose(self) -> str:
        """What it shows, in a line."""
        return (self.run.__doc__ or "").strip().splitlines()[0]


LEAST_SHARE = 0.5


def run_steps(this: Round, steps: dict[str, Step], chosen: Sequence[str]) -> list[str]:
    """Run the ``chosen`` steps in turn; whatever goes wrong in one ends it alone. Returns those that were not begun."""
    dropped = []
    for name in chosen:
        step = steps[name]
        this.step = name
        if this.left() < LEAST_SHARE * step.seconds:
            dropped.append(name)
            this.cannot("not begun", f"{max(0.0, this.left()):.0f} s were left, it takes {step.seconds:.0f} s")
            continue
        print(f"=== {name}: {step.purpose} {this.left():.0f} s are left", flush=True)
        begin = time.monotonic()
        try:
            step.run(this)
        except Exception as error:
            this.row("ended early", False, f"{type(error).__name__}: {error}", time.monotonic() - begin)
    return dropped


def json_in(output: str) -> Any:
    """The JSON object that a verb printed, from between warnings of libraries; None without one."""
    start = output.find("{\n")
    end = output.rfind("}") + 1
    try:
        return json.loads(output[start:end]) if start >= 0 else None
    except ValueError:
        return None
