"""Time that a person waits for help, for an error, and for the first step of a training.

    python -m benchmarks.startup [--repeat N] [flags of crius train]

Each command is a process of its own. All run once before: afterwards files are in the page cache, bytecode is written
and the corpus is tokenised. A training runs one step, without validation; with ``--compile.enable`` once with an empty
and once with a full cache of compiled kernels. The lines below it say where its time went: imports from
``python -X importtime``, all else from the run's ``summary.json``; an import within a phase is part of the phase.
"""

import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.command import end_with, facts_from, parse, parser_of, positive
from benchmarks.rows import Row, measure, report
from crius.cli.app import refuse_given
from crius.errors import EnvironmentError
from crius.tools.bench.machine import BenchMachine

_CLOCK = "crius.cli.app"  # starts the clock of summary.json after its imports
_TRAINER = "crius.train.job"
_IMPORT = re.compile(r"^import time:\s+(\d+) \|\s+\d+ \| +(\S+)$", re.MULTILINE)
_CRIUS = ("-m", "crius")
SHORT = (
    ("python that does nothing", 0, ("-c", "pass")),
    ("crius --help", 0, (*_CRIUS, "--help")),
    ("crius train --help", 0, (*_CRIUS, "train", "--help")),
    ("crius config show", 0, (*_CRIUS, "config", "show")),
    ("crius train, a wrong flag", 2, (*_CRIUS, "train", "--training.stepz", "3")),
    ("crius train, a wrong value", 2, (*_CRIUS, "train", "--training.steps", "0")),
    ("python that imports torch", 0, ("-c", "import torch")),
)
"""Name, exit code, and words after the name of the Python."""


def start(command: Sequence[str], code: int = 0, said: Path | None = None) -> float:
    """Start a command and wait for its end; its stderr goes to the file ``said``. Returns 1, for one start.

    Raises:
        EnvironmentError: it exits with another code.
    """
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != code:
        raise EnvironmentError(
            f"python {' '.join(command)} exits with {done.returncode}, not {code}.", why=done.stderr.strip()[-2000:]
        )
    if said:
        said.write_text(done.stderr, encoding="utf-8")
    return 1.0


def train_rows(flags: Sequence[str], folder: Path, *, compiles: bool) -> list[Row]:
    """One step of a run, as ``crius train`` makes it, in folders that are removed before each start."""

    def row(name: str, removed: Sequence[Path] = ()) -> Row:
        run_dir = folder / f"run-{name}"
        said = folder / f"said-{name}"
        last = ["--training.steps", "1", "--training.epochs", "-1", "--validation.interval", "0"]
        last += ["--checkpoint.no_enable", "--job.run_dir", str(run_dir)]
        last += ["--compile.cache_dir", str(folder / name)] if compiles else []
        command = ("-X", "importtime", *_CRIUS, "train", *flags, *last)

        def prepare() -> None:
            for path in (run_dir, *removed):
                shutil.rmtree(path, ignore_errors=True)

        return Row(
            f"crius train, one step{f', {name} compile cache' if compiles else ''}",
            functools.partial(start, command, said=said),
            prepare,
            lambda: parts_of(said.read_text(encoding="utf-8"), run_dir),
        )

    return [row("cold", [folder / "cold"]), row("warm")] if compiles else [row("eager")]


def parts_of(stderr: str, run_dir: Path) -> dict[str, float]:
    """Milliseconds of imports and of all else, in the order of a run.

    Imports count up to the end of the trainer's import; a later import is part of the work that needs it.
    """
    names = _IMPORT.findall(stderr)  # each module after the modules that it imports
    where = {name: number for number, (_, name) in enumerate(names)}
    imports = [(name, int(microseconds) / 1e3) for microseconds, name in names]
    early = sum(taken for _, taken in imports[: where[_CLOCK] + 1])
    later = imports[where[_CLOCK] + 1 : where[_TRAINER] + 1]
    of_torch = sum(taken for name, taken in later if name.split(".")[0] == "torch")
    others = sum(taken for _, taken in later) - of_torch
    summary = json.loads((run_dir / "summary.json").read_bytes())
    phases = {name: 1e3 * seconds for name, seconds in summary["seconds"].items()}
    first = {name: phases.pop(name, 0.0) for name in ("initialise", "data", "compile", "compute")}
    return {
        "imports: the command line": early,
        "imports: torch": of_torch,
        "imports: all others": others,
        "config, corpus, ranks, weights": first["initialise"] - of_torch - others,
        "first batch": first["data"],
        "compile": first["compile"],
        "first step": first["compute"],
        "reports and other": sum(phases.values()),
        "until the first step is done": early + sum(first.values()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=positive, default=5, help="rounds")
    options, flags = parse(parser, argv)
    config = facts_from(flags).config
    refuse_given(("job.run_dir", "job.name"), "each training has a folder of its own, which is removed")
    rows = [Row(name, functools.partial(start, command, code)) for name, code, command in SHORT]
    with tempfile.TemporaryDirectory(prefix="crius-startup-") as folder:
        rows += train_rows(flags, Path(folder), compiles=config.compile.enable)
        measure(rows, options.repeat)
    report(options, "startup", rows, BenchMachine.of(torch.device("cpu")), "starts")
    return 0


if __name__ == "__main__":
    end_with(main)
