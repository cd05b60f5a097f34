"""``crius bench startup``: time that a person waits for help, for an error, and for the first step of a training."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from crius.config.operation import CheckpointConfig
from crius.config.run import RunConfig, replace_fields
from crius.config.toml_file import command_line_flags, to_toml
from crius.errors import ConfigError, EnvironmentError
from crius.table import aligned
from crius.tools.bench.machine import Machine
from crius.tools.bench.result import Samples, show

Parts = dict[str, float]
"""Seconds by name."""

_CLOCK = "crius.cli.app"  # starts the clock of summary.json after its imports
_TRAINER = "crius.train.job"
_IMPORT = re.compile(r"^import time:\s+(\d+) \|\s+\d+ \| +(\S+)$", re.MULTILINE)


@dataclasses.dataclass
class StartupRow:
    """One command, started again each time.

    Attributes:
        name: its name.
        command: words after the name of the Python.
        code: expected exit code.
        prepare: called before each start, outside of the time.
        parts: called after each run; the command's own report of its time.
        wall: seconds from the start of the process to its end.
        cpu: CPU seconds of the process and of the processes that it waited for.
        samples_of: samples of each part.
    """

    name: str
    command: Sequence[str]
    code: int = 0
    prepare: Callable[[], None] = lambda: None
    parts: Callable[[str], Parts] = lambda stderr: {}
    wall: Samples = dataclasses.field(default_factory=Samples)
    cpu: Samples = dataclasses.field(default_factory=Samples)
    samples_of: dict[str, Samples] = dataclasses.field(default_factory=dict)

    def start(self, *, counts: bool = True) -> None:
        """Start the command and wait for its end.

        Raises:
            EnvironmentError: it exits with another code.
        """
        self.prepare()
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            begin = time.perf_counter()
            process = subprocess.Popen([sys.executable, *self.command], stdout=output, stderr=errors)
            _, status, usage = os.wait4(process.pid, 0)
            wall = time.perf_counter() - begin
            process.returncode = os.waitstatus_to_exitcode(status)
            errors.seek(0)
            said = errors.read().decode(errors="replace")
        if process.returncode != self.code:
            raise EnvironmentError(
                f"python {' '.join(self.command)} exits with {process.returncode}, not {self.code}.",
                why=said.strip()[-2000:],
                fix="correct the reported error, then measure again",
            )
        if not counts:
            return
        self.wall.seconds.append(wall)
        self.cpu.seconds.append(usage.ru_utime + usage.ru_stime)
        for name, seconds in self.parts(said).items():
            self.samples_of.setdefault(name, Samples()).seconds.append(seconds)

    def as_dict(self) -> dict[str, object]:
        """For the JSON."""
        return {
            "name": self.name,
            "wall": self.wall.as_dict(),
            "cpu": self.cpu.as_dict(),
            "parts_ms": {name: [1e3 * value for value in part.seconds] for name, part in self.samples_of.items()},
        }


def startup(config: RunConfig, *, repeat: int = 5, as_json: bool = False) -> int:
    """Start each command ``repeat`` times, in turns, each in a process of its own, and print medians.

    Every command runs once before that, uncounted: afterwards files are in the page cache, bytecode is written and the
    corpus is tokenised. A training runs one step, without validation; with ``compile.enable`` once with an empty and
    once with a full cache of compiled kernels.

    Args:
        config: the run to train; its rules have been checked.
        repeat: rounds.
        as_json: print JSON instead of tables.

    Returns:
        0.

    Raises:
        ConfigError: there is no round.
        EnvironmentError: a command fails.
    """
    if repeat < 1:
        raise ConfigError(f"--repeat {repeat} is not positive.", where="command line", fix="--repeat 5")
    with tempfile.TemporaryDirectory(prefix="crius-startup-") as folder:
        rows = [*_short_rows(), *_train_rows(config, Path(folder))]
        for row in rows:
            row.start(counts=False)
        for _ in range(repeat):
            for row in rows:
                row.start()
    _print(rows, as_json)
    return 0


def _short_rows() -> list[StartupRow]:
    crius = ("-m", "crius")
    return [
        StartupRow("python that does nothing", ("-c", "pass")),
        StartupRow("crius --help", (*crius, "--help")),
        StartupRow("crius train --help", (*crius, "train", "--help")),
        StartupRow("crius config show", (*crius, "config", "show")),
        StartupRow("crius train, a wrong flag", (*crius, "train", "--training.stepz", "3"), code=2),
        StartupRow("crius train, a wrong value", (*crius, "train", "--training.steps", "0"), code=2),
        StartupRow("python that imports torch", ("-c", "import torch")),
    ]


def _train_rows(config: RunConfig, folder: Path) -> list[StartupRow]:
    """One step of ``config``, as ``crius train`` makes it, in folders that are removed before each start."""

    def row(name: str, cache: Path | None, *, is_cold: bool = False) -> StartupRow:
        run_dir = folder / f"run-{name}"
        file = folder / f"{name}.toml"
        changes: dict[str, Any] = {"training.steps": 1, "training.epochs": -1, "validation.interval": 0}
        changes |= {"checkpoint": CheckpointConfig(enable=False)}
        changed = replace_fields(config, changes | ({"compile.cache_dir": str(cache)} if cache else {}))
        file.write_text(to_toml(changed), encoding="utf-8")

        def prepare() -> None:
            shutil.rmtree(run_dir, ignore_errors=True)
            if is_cold and cache:
                shutil.rmtree(cache, ignore_errors=True)

        given = (*command_line_flags(changed), "--job.run_dir", str(run_dir))
        command = ("-X", "importtime", "-m", "crius", "train", "--config", str(file), *given)
        return StartupRow(f"crius train, {name}", command, prepare=prepare, parts=lambda said: _parts(said, run_dir))

    if not config.compile.enable:
        return [row("one step", None)]
    return [
        row("one step, cold compile cache", folder / "cold", is_cold=True),
        row("one step, warm compile cache", folder / "warm"),
    ]


def _parts(stderr: str, run_dir: Path) -> Parts:
    """Times of imports, from ``python -X importtime``, and of all else, from ``summary.json``, in the order of a run.

    Imports count up to the end of the trainer's import; a later import is part of the work that needs it.
    """
    names = _IMPORT.findall(stderr)  # each module after the modules that it imports
    where = {name: number for number, (_, name) in enumerate(names)}
    seconds_of = [(name, int(microseconds) / 1e6) for microseconds, name in names]
    early = sum(seconds for _, seconds in seconds_of[: where[_CLOCK] + 1])
    later = seconds_of[where[_CLOCK] + 1 : where[_TRAINER] + 1]
    of_torch = sum(seconds for name, seconds in later if name.split(".")[0] == "torch")
    others = sum(seconds for _, seconds in later) - of_torch
    summary = json.loads((run_dir / "summary.json").read_bytes())
    seconds: Parts = dict(summary["seconds"])
    known = ("initialise", "data", "compile", "compute")
    return {
        "imports: the command line": early,
        "imports: torch": of_torch,
        "imports: all others": others,
        "config, corpus, ranks, weights": seconds["initialise"] - of_torch - others,
        "first batch": seconds.get("data", 0.0),
        "compile": seconds.get("compile", 0.0),
        "first step": seconds.get("compute", 0.0),
        "reports and other": sum(value for name, value in seconds.items() if name not in known),
        "until the first step is done": early + sum(seconds.get(name, 0.0) for name in known),
    }


def _print(rows: list[StartupRow], as_json: bool) -> None:
    machine = Machine.of(torch.device("cpu"))
    record = {"machine": machine.as_dict(), "argv": sys.argv[1:], "rows": [row.as_dict() for row in rows]}
    table = [("", "wall s", "spread", "CPU s")]
    for row in rows:
        table.append((row.name, f"{row.wall.median:.3f}", f"{row.wall.spread:.0%}", f"{row.cpu.median:.3f}"))
        table += [(f"  {name}", f"{part.median:.3f}", "", "") for name, part in row.samples_of.items()]
    head = f"{machine}; medians of {len(rows[0].wall.seconds)} processes each, in turns"
    show(as_json, record, [head, *aligned(table, left=(0,))])
