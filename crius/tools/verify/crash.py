"""``crius verify crash``: every state that a crash can leave in the folder of a writer, and the writer's next start."""

import contextlib
import logging
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from crius.checkpoint.folder import FEWEST
from crius.config.run import RunConfig
from crius.errors import ConfigError, CriusError
from crius.launch.environment import single_placement
from crius.tools.verify.crash_record import Journal, Tree, state_of, tree_of, watch
from crius.tools.verify.crash_states import Crash, crashes
from crius.tools.verify.worker import speak_to
from crius.train import job
from crius.train.checkpoints import Checkpoints
from crius.train.loop import Loop

DRAWN = 20
"""States of a run that are resumed to its end."""
_STEP = re.compile(r"checkpoints/step-[0-9]+(/|$)")
_TRAIN = (
    "train --job.run_dir out --steps 2 --seq_len 8 --batch 2 --model.num_layers 1 --model.dim 8 --model.num_heads 2 "
    "--model.num_kv_heads 1 --model.vocab_size 257 --data.source text --data.path text.txt --data.cache_dir cache "
    "--tokenizer.path byte --training.device cpu --validation.interval 0 --checkpoint.interval 1"
)
_LAYOUTS = {"fsdp2": "--layout fsdp2", "experts": "--layout fsdp2_ep2", "pipeline": "--layout pp2"}
"""Flags for several ranks of writers. The next start is on one rank."""
SIGNAL = "signal"
"""Writer that gets SIGTERM after a step."""
WRITERS = {
    "train": f"{_TRAIN} --steps 3 --checkpoint.keep_last 2",  # removes a checkpoint
    SIGNAL: f"{_TRAIN} --checkpoint.interval 0 --checkpoint.enable",
    "fsdp2": _TRAIN,
    "experts": f"{_TRAIN} --model.name qwen3_moe",
    "pipeline": f"{_TRAIN} --model.num_layers 2",
}
"""Command lines that write into the folder ``out``."""

Main = Callable[[Sequence[str]], int]


def crash(main: Main, *, writers: str = "", seed: int = 1) -> int:
    """Try every state that a crash can leave, and print a line for each writer.

    Args:
        main: runs a command line of Crius.
        writers: names of ``WRITERS`` joined by commas; empty: all.
        seed: seed of the states that are resumed to the end.

    Returns:
        0; 1 if a state is not recovered.

    Raises:
        ConfigError: there is no such writer.
    """
    code = 0
    for name in writers.split(",") if writers else WRITERS:
        if name not in WRITERS:
            what = f"there is no writer {name!r}."
            raise ConfigError(what, where="--writers", fix=f"--writers {','.join(WRITERS)}")
        began = sum(os.times()[:4])
        with tempfile.TemporaryDirectory() as folder:
            trial = Trial(Path(folder), name, main, random.Random(seed))
            problem = trial.problem()
        facts = ", ".join(f"{what} {count}" for what, count in trial.counts.items())
        sys.stdout.write(f"{name}: {facts}, CPU s {sum(os.times()[:4]) - began:.1f}: {problem or 'ok'}\n")
        sys.stdout.flush()
        if problem:
            code = 1
    return code


class _Chosen(Exception):
    """A start of a run has chosen its checkpoint: its path, or an empty text."""


class Trial:
    """The crashes of one writer.

    Args:
        folder: an empty folder.
        name: name of the writer.
        main: see ``crash``.
        drawn: random numbers.

    Attributes:
        counts: numbers of records, of states of each kind, and of different states that were tried.
    """

    _tell: Callable[[Any], None]

    def __init__(self, folder: Path, name: str, main: Main, drawn: random.Random) -> None:
        self.counts = Counter[str]()
        self._folder = folder
        self._out = folder / "out"
        self._name = name
        self._main = main
        self._drawn = drawn
        self._whole: Tree = {}  # and checkpoints that were removed

    def problem(self) -> str:
        """The first state that is not recovered, and why; empty if all are."""
        (self._folder / "text.txt").write_text("A crash shows what is on the disk. " * 50)
        self._out.mkdir()
        journal = Journal(self._out)
        self._forked(self._recorded, journal.note)
        for held in journal.held:
            os.close(held)
        states = list(self._states(journal))
        problem = self._forked(partial(self._started, states))
        if problem != "":
            return problem or "the start ended at once"
        wanted = self._bits({})
        for state in self._drawn.sample(states, min(DRAWN, len(states))):
            if self._bits(state.tree) != wanted:
                return f"{state.what}: the run ends with other bits"
        return ""

    def _end(self) -> None:
        self._main(shlex.split(f"{WRITERS[self._name]} {_LAYOUTS.get(self._name, '')}"))

    def _recorded(self) -> None:
        if self._name == SIGNAL:
            step = _then(Loop._step, lambda loop: os.kill(os.getpid(), signal.SIGTERM))
            Loop._step = step  # type: ignore[method-assign, assignment]
        watch(self._tell)
        self._end()

    def _states(self, journal: Journal) -> Iterator[Crash]:
        """The different states to try."""
        self.counts["records"] = sum(bool(record.changes) for record in journal.records)
        seen = set()
        end: Tree = {}
        for state in crashes(journal.records, journal.root):
            self.counts[state.kind] += 1
            if state.kind == "prefix":
                end = state.tree
                self._whole |= _steps(end)
            key = frozenset(state.tree.items()), state.durable
            if key not in seen:
                seen.add(key)
                yield state
        self._whole |= end
        self.counts["tried"] = len(seen)

    def _started(self, states: Sequence[Crash]) -> None:
        """Tell of the first state in which a start takes or leaves what is wrong; an empty text: there is none."""
        run = job.run

        def try_all(config: RunConfig, *words: Any, **named: Any) -> None:
            logging.disable()
            Checkpoints.find = _then(Checkpoints.find, _choose)  # type: ignore[method-assign, assignment]
            problem = ""
            for state in states:
                if problem := self._problem_of(state, partial(run, config)):
                    problem = f"{state.what}: {problem}"
                    break
            self._tell(problem)

        setattr(job, "run", try_all)  # noqa: B010
        self._fill({})
        self._main(shlex.split(WRITERS[self._name]))

    def _problem_of(self, state: Crash, run: Callable[..., None]) -> str:
        self._fill(state.tree)
        try:
            run(Path("out"), time.monotonic(), single_placement())
        except _Chosen as chosen:
            taken = str(chosen)
        except CriusError as error:
            return f"the next start is refused: {error.what}"
        tree = self._tree()
        steps = [path for path in _steps(tree) if path.count("/") == 1]
        if taken != max(steps, default="") or not {*state.durable[-FEWEST:]} <= {*steps}:
            return f"the next start takes {taken!r} of {steps}, committed were {state.durable}"
        whole = {path: data for path, data in _steps(self._whole).items() if path.startswith(tuple(steps))}
        if _steps(tree) != whole:
            return "a checkpoint is not what was committed"
        left = sorted(path for path in tree.keys() - self._whole.keys() if not path.startswith("logs/"))
        return f"{left[0]} is left" if left else ""

    def _bits(self, tree: Tree) -> object:
        """Bits of the tensors at the end of a run that starts in a state."""
        self._fill(tree)
        self._forked(self._end)
        there = self._tree()
        newest = max(_steps(there), default="").rpartition("/")[0]
        return [there[path] for path in sorted(there) if path.startswith(newest) and path.endswith(".safetensors")]

    def _tree(self) -> Tree:
        return tree_of(state_of(self._out), self._out.stat().st_ino)

    def _fill(self, tree: Tree) -> None:
        """Replace what is in the folder."""
        shutil.rmtree(self._out)
        self._out.mkdir()
        for name, data in tree.items():
            if data is None:
                (self._out / name).mkdir()
            else:
                (self._out / name).write_bytes(data)

    def _forked(self, work: Callable[[], object], note: Callable[[Any], object] = bool) -> Any:
        """What ``work`` tells last in a forked process, whose output goes to a file; ``note`` gets all of it."""
        here, there = multiprocessing.Pipe()

        def tell(message: Any) -> None:
            there.send(message)
            there.recv()

        def child() -> None:
            os.chdir(self._folder)
            speak_to(self._folder / "console.log")
            work()

        self._tell = tell
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        there.close()
        told = None
        with contextlib.suppress(EOFError):
            while True:
                told = here.recv()
                note(told)
                here.send(None)
        process.join()
        return told


def _steps(tree: Tree) -> Tree:
    """The checkpoints in a run folder."""
    return {path: data for path, data in tree.items() if _STEP.match(path)}


def _choose(checkpoints: Checkpoints) -> None:
    raise _Chosen(f"checkpoints/{checkpoints.found.name}" if checkpoints.found else "")


def _then(call: Callable[[Any], None], after: Callable[[Any], None]) -> Callable[[Any], None]:
    """``call``, and then ``after``."""

    def both(argument: Any) -> None:
        call(argument)
        after(argument)

    return both
