"""``crius verify crash``: every state that a crash can leave in the folder of a writer, and the writer's next start."""

import contextlib
import importlib
import itertools
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from crius.checkpoint.folder import FEWEST
from crius.errors import ConfigError, CriusError
from crius.tools.verify.crash_record import Journal, Tree, state_of, tree_of, watch
from crius.tools.verify.crash_states import Crash, crashes, in_other_orders
from crius.tools.verify.worker import speak_to
from crius.train.checkpoints import Checkpoints
from crius.train.loop import Loop

_STEP = re.compile(r"checkpoints/step-[0-9]+(/|$)")
_NEW = re.compile(rb'^{"digest": "[^"]*"|import-[0-9a-f]{8}|"written":[0-9.]+')
"""What each start writes anew: id and hash of an import, time of a report."""
_FILES = {
    "text.txt": "A crash shows what is on the disk. " * 50,
    "chat.jsonl": '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
    "tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "</s>": 2}, "merges": []}}',
    "chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
_TRAIN = (
    "train --job.run_dir out --steps 2 --seq_len 8 --batch 2 --model.num_layers 1 --model.dim 8 --model.num_heads 2 "
    "--model.num_kv_heads 1 --model.vocab_size 257 --data.source text --data.path text.txt --data.cache_dir cache "
    "--tokenizer.path byte --training.device cpu --validation.interval 0 --checkpoint.interval 1 "
    "--metrics.enable_report false"
)
_BASE = f"{_TRAIN} --job.run_dir base"
_LORA = f"{_TRAIN} --checkpoint.init_from base --lora.rank 2"


class Writer(NamedTuple):
    """What writes into the folder ``out``.

    Attributes:
        command: its command line, which is also that of the next start.
        before: command lines that write what it reads.
        first: command line whose result it replaces.
        layout: flags for several ranks. The next start is on one rank.
        start: function that the command calls with the start of its work; empty: the command is tried as a whole.
        drawn: states to resume to the end of a run.
        target: what it makes at once in ``out``; empty: it trains.
        most: states to try, of those drawn by seed.
    """

    command: str
    before: Sequence[str] = ()
    first: str = ""
    layout: str = ""
    start: str = "crius.train.job.run"
    drawn: int = 20
    target: str = ""
    most: int = 10_000


def _maker(command: str, *before: str, target: str = "made", start: str = "", **named: Any) -> Writer:
    return Writer(f"{command} out/{target}", before, target=target, start=start, **named)


_PREPARE = "data prepare --num_workers 1 --data.source"
SIGNAL = "signal"
"""Writer that gets SIGTERM after a step."""
SWEEP = "sweep"
WRITERS = {
    # removes a checkpoint
    "train": Writer(f"{_TRAIN} --steps 3 --checkpoint.keep_last 2 --metrics.enable_report true"),
    SIGNAL: Writer(f"{_TRAIN} --checkpoint.interval 0 --checkpoint.enable"),
    "fsdp2": Writer(_TRAIN, layout="--layout fsdp2", drawn=10),
    "lora": Writer(_LORA, [_BASE]),
    "experts": Writer(f"{_TRAIN} --model.name qwen3_moe", layout="--layout fsdp2_ep2", drawn=10),
    "pipeline": Writer(f"{_TRAIN} --model.num_layers 2", layout="--layout pp2", drawn=10),
    "import": _maker("import model", _BASE, "export base model"),
    "export": _maker("export base", _BASE),
    "adapters": _maker("export lora", _BASE, f"{_LORA} --job.run_dir lora"),
    "text": _maker(f"{_PREPARE} text --data.path text.txt --tokenizer.path byte", start="crius.data.prepare.prepare"),
    "chat": _maker(
        f"{_PREPARE} jsonl --data.format chat --data.path chat.jsonl --tokenizer.path .",
        start="crius.data.prepare.prepare",
        most=80,  # each starts two processes that render
    ),
    "report": _maker(
        "report base --out",
        _BASE,
        f"{_BASE} --job.run_dir other",
        target="report.html",
        first="report other --out out/report.html",
    ),
    SWEEP: Writer(
        f"{_TRAIN.replace('train', 'sweep', 1)} --checkpoint.interval 0 --checkpoint.enable --optimizer.lr 1e-3,2e-3",
        start="crius.cli.sweep.note_trials",
        drawn=5,
    ),
}
"""Writers by name."""

Main = Callable[[Sequence[str]], int]
Call = partial[Any]
"""A function and the arguments that it is called with."""


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
            trial = CrashTrial(Path(folder), name, main, random.Random(seed))
            problem = trial.problem()
        facts = ", ".join(f"{what} {count}" for what, count in trial.counts.items())
        sys.stdout.write(f"{name}: {facts}, CPU s {sum(os.times()[:4]) - began:.1f}: {problem or 'ok'}\n")
        sys.stdout.flush()
        if problem:
            code = 1
    return code


class _Chosen(Exception):
    """A start of a run has chosen its checkpoint: its path, or an empty text."""


class CrashTrial:
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
        self._writer = WRITERS[name]
        self._main = main
        self._drawn = drawn
        self._whole: Tree = {}  # and checkpoints that were removed
        self._made: list[Tree] = []

    def problem(self) -> str:
        """The first state that is not recovered, and why; empty if all are."""
        for name, text in _FILES.items():
            (self._folder / name).write_text(text)
        self._out.mkdir()
        commands = [words for words in (self._writer.first, self._writer.command) if words]
        for words in self._writer.before:
            self._forked(partial(self._end, words))
        for words in commands if self._writer.target else ():
            self._forked(partial(self._end, words))
            self._made.append(self._tree())
        self._fill({})
        journal = Journal(self._out)
        self._forked(partial(self._recorded, commands), lambda told: journal.note(*told))
        for held in journal.held:
            os.close(held)
        if not journal.records:
            return "nothing is written"
        states = list(self._states(journal))
        chosen = self._drawn.sample(range(len(states)), min(self._writer.most, len(states)))
        states = [states[number] for number in sorted(chosen)]
        self.counts["tried"] = len(states)
        problem = self._forked(partial(self._started, states))
        if problem != "":
            return problem or "the start ended at once"
        return "" if self._writer.target else self._resumed(states)

    def _end(self, words: str) -> int:
        if self._writer.target:
            sys.modules["transformers"] = None  # type: ignore[assignment] # does not compare logits, which takes seconds
        if self._name == SWEEP:
            _replace("crius.tools.report.sweep.train", self._train)
        return self._main(shlex.split(words))

    def _train(self, call: Call) -> int:
        """Train a run of a sweep in a fork of this process."""
        child = os.fork()
        if not child:
            os._exit(self._main(["train", *call.args[0]]))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _recorded(self, commands: Sequence[str]) -> None:
        if self._name == SIGNAL:
            step = _then(Loop._step, lambda loop: os.kill(os.getpid(), signal.SIGTERM))
            Loop._step = step  # type: ignore[method-assign, assignment]
        watch(self._tell)
        for words in commands:
            self._end(f"{words} {self._writer.layout}")

    def _states(self, journal: Journal) -> Iterator[Crash]:
        """The different states to try."""
        self.counts["records"] = sum(bool(record.changes) for record in journal.records)
        seen = set()
        end: Tree = {}
        found = crashes(journal.records, journal.root)
        if self._writer.layout:
            found = itertools.chain(found, in_other_orders(journal.records, journal.root, self._drawn))
        for state in found:
            self.counts[state.kind] += 1
            if state.kind == "prefix":
                end = state.tree
                self._whole |= _steps(end)
            key = frozenset(state.tree.items()), state.durable
            if key not in seen:
                seen.add(key)
                yield state
        self._whole |= end
        self.counts["different"] = len(seen)

    def _started(self, states: Sequence[Crash]) -> None:
        """Tell of the first state in which a start takes or leaves what is wrong; an empty text: there is none."""
        logging.disable()
        Checkpoints.find = _then(Checkpoints.find, _choose)  # type: ignore[method-assign, assignment]
        start: Call = partial(self._end, self._writer.command)

        def try_all(start: Call) -> None:
            check = self._problem_of_made if self._writer.target else self._problem_of_run
            if self._name == SWEEP:
                check = self._problem_of_sweep
            problem = ""
            for state in states:
                self._fill(state.tree)
                if problem := check(state, start):
                    problem = f"{state.what}: {problem}"
                    break
            self._tell(problem)

        if self._writer.start:
            self._fill({})
            _replace(self._writer.start, try_all)
            start()
        else:
            try_all(start)

    def _problem_of_made(self, state: Crash, start: Call) -> str:
        finished = _still(self._made[-1])
        there = {path: data for path, data in _still(state.tree).items() if Path(path).parts[0] == self._writer.target}
        if there and there not in map(_still, self._made):
            return f"{self._writer.target} is there, but not all of it"
        problem = ""
        try:
            code = start()
        except CriusError as error:
            code = error.exit_code
            problem = error.what
        if code in (1, 2) and there != finished:
            return f"the next start is refused: {problem}"
        tree = _still(self._tree())
        wrong = sorted(path for path in tree | finished if tree.get(path) != finished.get(path))
        return f"the next start leaves a wrong {wrong[0]}" if wrong else ""

    def _problem_of_run(self, state: Crash, start: Call) -> str:
        try:
            start()
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

    def _problem_of_sweep(self, state: Crash, start: Call) -> str:
        chosen = []
        report = importlib.import_module("crius.tools.report.sweep")
        report.train = lambda words, stops, log: chosen.append(words)  # type: ignore[attr-defined]
        trials = start.args[1]
        try:
            start()
        except CriusError as error:
            return f"the next start is refused: {error.what}"
        report.train_all(trials, (), is_quiet=False)
        tree = self._tree()
        for trial in (trial for trial in trials if trial.words not in chosen):
            steps = {path: data for path, data in self._whole.items() if path.startswith(f"{trial.folder.name}/check")}
            if not steps.items() <= tree.items():
                return f"{trial.folder} counts as finished without its checkpoint"
        wrong = [path for path in tree if path.startswith(".") and tree[path] != self._whole.get(path, b"")]
        return f"the next start leaves a wrong {wrong[0]}" if wrong else ""

    def _resumed(self, states: Sequence[Crash]) -> str:
        """The first of some states in which the run ends with other bits."""
        tried = [Crash("", "", {}, ()), *self._drawn.sample(states, min(self._writer.drawn, len(states)))]
        self.counts["resumed"] = len(tried) - 1
        ends = list[object]()
        self._forked(partial(self._ended, tried), ends.append)
        wrong = [state.what for state, bits in zip(tried, ends, strict=True) if bits != ends[0]]
        return f"{wrong[0]}: the run ends with other bits" if wrong else ""

    def _ended(self, states: Sequence[Crash]) -> None:
        """Tell the bits of the tensors at the end of a run that starts in each state. The command is parsed once."""

        def end_each(start: Call) -> Any:
            for state in states:
                self._fill(state.tree)
                child = os.fork()
                if not child:
                    return start()
                os.waitpid(child, 0)
                self._tell(self._bits())
            os._exit(0)

        is_sweep = self._name == SWEEP
        _replace(self._writer.start if is_sweep else "crius.launch.environment.joined_placement", end_each)
        self._end(f"{self._writer.command} {self._writer.layout}")

    def _bits(self) -> object:
        tensors = {Path(path): data for path, data in self._tree().items() if path.endswith(".safetensors")}
        newest = max((path.parent.name for path in tensors), default="")
        return [tensors[path] for path in sorted(tensors) if path.parent.name == newest]

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


def _replace(place: str, call: Callable[[Call], object]) -> None:
    """Give each call of the function at ``place``, with its arguments, to ``call``."""
    module, _, name = place.rpartition(".")
    old = getattr(importlib.import_module(module), name)
    setattr(sys.modules[module], name, lambda *words, **named: call(partial(old, *words, **named)))


def _still(tree: Tree) -> Tree:
    """``tree`` without what each start writes anew."""
    return {path: data and _NEW.sub(b"", data) for path, data in tree.items()}


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
