"""Runs of a sweep: their values, their folders, and their training in turn. No torch."""

import contextlib
import csv
import dataclasses
import functools
import hashlib
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crius.config.rules import plain_name
from crius.config.run import RunConfig
from crius.config.toml_file import flatten
from crius.errors import ConfigError
from crius.launch.stop import Stop, ask_for_signal
from crius.redact import printable
from crius.run_file import open_log, write_whole
from crius.table import aligned
from crius.tools.report.runs import RunRow, RunState, is_run, rank, run_row, short_names, shown, tail
from crius.untrusted import object_below
from crius.waiting import waiting

RUN_DIR = "job.run_dir"
FILE = ".sweep.json"
PROGRAM = [sys.executable, "-m", "crius"]
_POLL_SECONDS = 0.1
_TOLD_BYTES = 1500
_WIDEST = ("00.0000", "*00.0000", "0,000.0", "finished")
"""Last bytes of the output of a run that failed, which are printed, and cells of the table as wide as they become."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a sweep: its values by setting, its folder, and its flags for ``crius train``."""

    values: Mapping[str, str]
    folder: Path
    words: list[str]

    @property
    def label(self) -> str:
        """The values, as text for people."""
        return " ".join(f"{name}={value}" for name, value in self.values.items())


def plan_trials(flags: Sequence[str]) -> tuple[Path, list[Trial]]:
    """Folder of a sweep, and its runs in the order in which they are trained.

    Raises:
        ConfigError: no setting has several values, or a value is empty or given twice.
    """
    fixed = list[str]()
    axes = dict[str, list[str]]()
    run_dir = name_of_sweep = ""
    for name, value, words in _pairs(flags):
        values = _values(name, value)
        if name == RUN_DIR:
            run_dir = value
        elif len(values) > 1:
            axes[name] = values
        else:
            fixed += words if value == values[0] else [f"--{name}={values[0]}"]
            name_of_sweep = value if name == "job.name" else name_of_sweep
    if not axes:
        raise ConfigError(
            "no setting has several values.",
            where="command line",
            why="a comma separates the values of one setting, and a flag given twice counts once, with its last value",
            fix="--optimizer.lr 1e-3,3e-3; crius train trains one run",
        )
    leaves = [name.rpartition(".")[2] for name in axes]
    labels = leaves if len(set(leaves)) == len(leaves) else list(axes)
    digest = hashlib.sha256(json.dumps([_by_name(fixed), axes]).encode()).hexdigest()[:8]
    folder = Path(run_dir or Path("runs") / (name_of_sweep or plain_name("-".join(["sweep", *leaves, digest]))))
    trials = list[Trial]()
    taken = set[str]()
    for chosen in itertools.product(*axes.values()):
        name = plain_name("_".join(part for pair in zip(labels, chosen, strict=True) for part in pair))
        name = f"{name}_{len(trials)}" if name in taken else name
        taken.add(name)
        own = [f"--{setting}={value}" for setting, value in zip(axes, chosen, strict=True)]
        words = [*fixed, *own, f"--{RUN_DIR}={folder / name}"]
        trials.append(Trial(values=dict(zip(axes, chosen, strict=True)), folder=folder / name, words=words))
    return folder, trials


def _pairs(flags: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Name, value and words of each flag. A flag without a value has an empty value."""
    words = list(flags)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if equals or not words or words[0].startswith("--") or not word.startswith("--"):
            yield name, value, [word]
            continue
        value = words.pop(0)
        while value.endswith(",") and words and not words[0].startswith("--"):  # 1e-3, 2e-3
            value += words.pop(0)
        yield name, value, [word, value]


def _by_name(flags: Sequence[str]) -> list[list[str]]:
    """The words of each flag, by name. Flags of one name keep their order."""
    return [words for _, _, words in sorted(_pairs(flags), key=lambda pair: pair[0])]


def _values(name: str, text: str) -> list[str]:
    """The values of a setting. Lists, JSON and text in double quotes keep their commas.

    Raises:
        ConfigError: a value is empty or given twice.
    """
    takes_list = isinstance(flatten(RunConfig()).get(name), tuple)
    if takes_list or name.startswith("job.") or text[:1] in ("[", "{") or "," not in text:
        return [text]
    values = [value.strip() for value in next(csv.reader([text], skipinitialspace=True))]
    distinct = {_number(value): value for value in reversed(values) if value}
    if len(distinct) < len(values):
        what = "an empty value" if "" in values else "a value twice"
        fix = f"--{name} " + ",".join(
            [*distinct.values()][::-1] if len(distinct) > 1 else [*distinct.values(), "ANOTHER"]
        )
        raise ConfigError(f"--{name} {text} has {what}.", where="command line", fix=fix)
    return values


def _number(text: str) -> float | str:
    """The number that ``text`` is, or the text."""
    try:
        return float(text)
    except ValueError:
        return text


def note_trials(folder: Path, trials: Sequence[Trial]) -> None:
    """Record the flags of each run in the folder of the sweep. A sweep that is continued may add runs.

    Raises:
        ConfigError: a run there is not one of this sweep or has other flags, another process trains one, or the folder
            cannot be written.
    """
    noted = (object_below(folder, FILE) or {}).items()
    known = {
        name: words for name, words in noted if isinstance(words, list) and all(isinstance(word, str) for word in words)
    }
    flags = {trial.folder.name: trial.words[:-1] for trial in trials}  # the last one is the folder
    fix = f"give another --{RUN_DIR}"
    strangers = [path for path in (folder, *(folder / name for name in flags if name not in known)) if is_run(path)]
    if strangers:
        what = f"{strangers[0]} is a run that this sweep did not start."
        raise ConfigError(what, where=f"--{RUN_DIR}", why="a sweep trains all of its runs", fix=fix)
    if others := [name for name in flags if _by_name(known.get(name, flags[name])) != _by_name(flags[name])]:
        before = " ".join(map(str, known[others[0]]))
        raise ConfigError(
            f"{folder} has a sweep with other flags: {others[0]} had {before}.",
            where=f"--{RUN_DIR}",
            why="the runs of one sweep differ only in its values",
            fix=f"{fix}, or the earlier flags",
        )
    if busy := [trial for trial in trials if run_row(trial.folder).state.word == "running"]:
        what = f"another process trains {busy[0].folder}."
        raise ConfigError(what, where=f"--{RUN_DIR}", fix=f"wait until it has ended, or {fix}")
    try:
        write_whole(folder / FILE, json.dumps(known | flags, indent=2) + "\n", is_durable=True)
    except OSError as error:
        what = f"the folder {folder} of the sweep cannot be written: {error.strerror}."
        raise ConfigError(what, where=f"--{RUN_DIR}", fix=f"give another --{RUN_DIR}") from None


def train_all(trials: Sequence[Trial], stops: Sequence[Stop], *, is_quiet: bool) -> list[RunRow]:
    """Train the runs that are not finished, and print a line for each. A signal makes the run save and ends the sweep.

    Args:
        trials: runs of the sweep.
        stops: signals to this process so far.
        is_quiet: whether to print to stderr.

    Returns:
        The state of each run. A run may have failed before it had a folder.
    """
    output = sys.stderr if is_quiet else sys.stdout
    table = [[*short_names(trials[0].values), "loss", "val loss", "seconds", "state", "run"]]
    table += [[*trial.values.values(), *_WIDEST, str(trial.folder)] for trial in trials]
    left = (*range(len(trials[0].values)), len(table[0]) - 2, len(table[0]) - 1)
    lines = [aligned(table, left=left)[0]]
    rows = list[RunRow]()
    for trial in trials:
        row = run_row(trial.folder)
        seconds = None
        failure = list[str]()
        if row.state.word != "finished" and not stops:
            output.write("".join(f"{line}\n" for line in lines))
            output.flush()
            lines = []
            began = time.monotonic()
            log = trial.folder.parent / "logs" / f"{trial.folder.name}.log"
            code = train(trial.words, stops, log)
            seconds = time.monotonic() - began
            row = run_row(trial.folder)
            if code and not stops:
                text = b"\n".join(tail(log.parent, log.name, _TOLD_BYTES)).decode(errors="replace")
                told = re.split(r"^(?=\w+Error: )", text, flags=re.MULTILINE)[-1].splitlines()
                failure = [f"  {printable(line)}" for line in [*told, f"all of its output: {log}"]]
                row = row if is_run(trial.folder) else dataclasses.replace(row, state=RunState("failed"))
        rows.append(row)
        is_best = rank(rows).best == len(rows) - 1
        cells = [
            *trial.values.values(),
            shown(row.loss, "{:.4f}"),
            shown(row.val_loss, "*{:.4f}" if is_best else "{:.4f}"),
            shown(seconds, "{:,.1f}"),
            str(row.state),
            str(trial.folder),
        ]
        lines += [aligned([*table, cells], left=left)[-1], *failure]
    output.write("".join(f"{line}\n" for line in lines))
    output.flush()
    return rows


def train(words: Sequence[str], stops: Sequence[Stop], log: Path | None = None) -> int:
    """Run ``crius train`` as a process of its own, which gets the signals to this process; returns its exit code.

    Args:
        words: flags of ``crius train``.
        stops: signals to this process so far.
        log: file that its output is added to; None: it prints.
    """
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(open_log(log)) if log else None
        process = subprocess.Popen(
            [*PROGRAM, "train", *words],
            stdout=output,
            stderr=output,
            preexec_fn=functools.partial(ask_for_signal, signal.SIGTERM),  # if this process is killed, the run saves
        )
        if log:
            stack.enter_context(waiting(f"{log.stem} trains"))
        num_sent = 0
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
            for stop in stops[num_sent:]:
                process.send_signal(stop.signal)
            num_sent = len(stops)
    return process.returncode
