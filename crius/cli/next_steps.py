"""The last lines of ``crius train``: what it left, and commands that continue from there and work as printed."""

import contextlib
import dataclasses
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import CheckpointFolder
from crius.checkpoint.names import step_name
from crius.cli.app import COMMAND, emit, script, started, train_verb
from crius.config.command_line import last_of_each
from crius.config.facts import Facts
from crius.config.rules import RULES
from crius.config.run import RunConfig, replace_fields
from crius.data.show import openings
from crius.errors import CriusError
from crius.launch.environment import Placement
from crius.launch.report import read_report
from crius.launch.stop import STOPPED
from crius.redact import redact
from crius.train.inputs import checkpoint_folder, open_run_corpus

_LEFT = ("metrics.jsonl", "summary.json", "run.toml", "samples.jsonl", "report.html", "logs/")
"""Files that a run leaves in its folder, if they can be written."""

_CODE = "def "
"""Begins a text of the standard library."""
_SHARD = "parallelism.data_parallel_shard_degree"


def say_next(facts: Facts, folder: Path, placement: Placement | None, code: int) -> None:
    """Print where the run and its newest checkpoint are, and commands to type next.

    Args:
        facts: of the run.
        folder: folder of the run.
        placement: place of this process; None: started here.
        code: exit code of the run; after a failure only the saved step is printed.
    """
    run = facts.config
    has_failed = bool(code) and code not in STOPPED
    if has_failed and not (run.checkpoint.is_enabled and (folder / "run.toml").exists()):
        return
    present = ", ".join(
        name for name in _LEFT if ((folder / name).is_dir() if name.endswith("/") else (folder / name).is_file())
    )
    emit(_wrapped(f"run folder: {folder}{present and f' ({present})'}"))
    is_terminal = sys.stdout.isatty()
    saved = _saved(run, folder)
    is_refused = has_failed and _is_refused(folder)
    emit("saved: nothing that can be loaded" if is_refused else f"saved: {saved or 'nothing'}")
    if code:
        if saved and not is_refused and not (folder / "tune.json").exists():  # crius tune prints its own command
            command = continued(run, folder, placement)
            emit(
                f"continue from there:\n{_folded(command)}"
                if sys.stdout.isatty()
                else f"continue from there: {command}"
            )
    elif run.model.flavor == "debug" and placement is None:
        rows = list(_next_commands(facts, folder))
        width = max(len(what) for what, _ in rows)
        emit("try next:")
        for what, command in rows:
            emit(f"  {what}\n{_folded(command)}" if is_terminal else f"  {what:<{width}}   {command}")


def _wrapped(text: str) -> str:
    """A text in lines of a terminal's width; elsewhere one line."""
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(text, columns, subsequent_indent="    ") if sys.stdout.isatty() else text


def _folded(command: str) -> str:
    """A command in lines of a terminal's width, which a shell reads as one."""
    room = shutil.get_terminal_size().columns - 2  # for " \\"
    lines = ["   "]
    for word in re.findall(r"(?:'[^']*'|\S)+", command):
        if len(lines[-1]) + 1 + len(word) > room:
            lines.append("     ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines)


def _is_refused(folder: Path) -> bool:
    """Whether the run ended because none of its checkpoints can be loaded: the same command would end the same way."""
    report = read_report(folder / "logs", 0)
    return report is not None and report.exception == "CheckpointError" and report.step is None


def _steps(run: RunConfig, folder: Path) -> list[int]:
    """The steps that the run has saved, ascending."""
    return CheckpointFolder(open_disk(checkpoint_folder(run, folder))).steps() if run.checkpoint.is_enabled else []


def _saved(run: RunConfig, folder: Path) -> str:
    """The newest saved step of the run, in words; empty if none is saved."""
    place = checkpoint_folder(run, folder)
    try:
        steps = _steps(run, folder)
    except CriusError as error:  # the run has ended, and its exit code is known
        return f"in {redact(place)}, which cannot be listed now: {redact(error.what)}"
    return f"step {steps[-1]} in {redact(place)}/{step_name(steps[-1])}" if steps else ""


def continued(run: RunConfig, folder: Path, placement: Placement | None, *more: str) -> str:
    """The command that continues the run, for a shell.

    Args:
        run: the run.
        folder: folder of the run.
        placement: place of this process; None: started here.
        more: flags in addition to those of this command.
    """
    flags = [*more, *([] if _is_named(run) else ["--job.run_dir", str(folder)])]
    if placement is None:
        return command(*flags)
    if placement.launcher == "torchrun" and placement.world_size == placement.local_world_size:
        program = [sys.argv[0]] if script() == "train.py" else ["-m", "crius", "train"]
        start = ["torchrun", "--standalone", "--nproc_per_node", str(placement.world_size), *program]
        return _joined([*start, *_flags(*flags)])
    return _joined(["the", "command", "of", "before,", "with", *flags])


def command(*more: str) -> str:
    """This command with flags on top, for a shell; if a flag is given twice, the last one counts."""
    return started("train", *_flags(*more))


def _flags(*more: str) -> list[str]:
    # a run that was allowed to begin again is not allowed it once more
    words = last_of_each([*COMMAND[1:], *more], train_verb().arguments())
    return [word for word in words if not word.startswith("--checkpoint.restart")]


def _is_named(run: RunConfig) -> bool:
    return bool(run.job.run_dir or run.job.name)


def _keeps_own(run: RunConfig) -> bool:
    """Whether the same run in another folder starts from step 0: its checkpoints, if any, are in its run folder."""
    folder = Path(checkpoint_folder(run, Path("run")))
    return not run.checkpoint.is_enabled or (folder.is_relative_to("run") and ".." not in folder.parts)


def _joined(words: list[str]) -> str:
    return redact(shlex.join(words))


def _next_commands(facts: Facts, folder: Path) -> Iterator[tuple[str, str]]:
    """Commands that a new user may want, with their purpose."""
    run = facts.config
    flags = [flag for flag in _flags() if flag != "--strict"]
    show = "every setting and its origin", started("config", "show", *flags)
    done = 0  # may be more than this command asked for, if an earlier start went further
    with contextlib.suppress(CriusError):
        done = max(_steps(run, folder), default=0)
    longer = "--training.steps", str(2 * max(run.training.steps, done))
    if run.training.epochs > 0:
        longer = "--training.epochs", str(2 * run.training.epochs)
    number, layout = _workers(facts) if _keeps_own(run) else (0, [])
    if number:
        elsewhere = ["--job.run_dir", f"{folder}-{number}-workers"] if _is_named(run) else []
        yield f"the same curve on {number} workers", command(*layout, *elsewhere)
    else:
        yield show
    if run.checkpoint.is_enabled:
        yield "this run, twice as long", continued(run, folder, None, *longer)
        where = checkpoint_folder(run, folder)
        yield "the saved model, byte by byte", started("checkpoint", "verify", where)
        source = str(folder if _keeps_own(run) else where)
        if run.data.format == "chat":
            yield "talk to it", started("chat", source)
        else:
            yield (
                "text from it",
                started("generate", source, "--prompt", _prompt(facts, folder), "--temperature", "0.7"),
            )
    else:
        yield "twice as long", command(*longer)
        if number:
            yield show


def _prompt(facts: Facts, folder: Path) -> str:
    """The first words of held-out text: a model of German text answers German."""
    run = facts.config
    if run.data.source != "huggingface":  # a stream would be read again
        with contextlib.suppress(CriusError, OSError, ValueError):
            [opening] = openings(open_run_corpus(run, facts.data_parallel_ranks, folder), 1)
            return opening.text or _CODE
    return _CODE


def _workers(facts: Facts) -> tuple[int, list[str]]:
    """A number of workers above one that the run allows, and the flags for it; 0 if there is none."""
    for number in (4, 2) if facts.num_ranks == 1 else ():
        placed = replace_fields(facts.config, {_SHARD: number})
        more = dataclasses.replace(facts, config=placed, num_ranks=number, local_ranks=number, asked_ranks=0)
        if not any(True for rule in RULES for _ in rule(more)):
            return number, [f"--{_SHARD}", str(number)]
    return 0, []
