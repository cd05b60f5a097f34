"""Small faults in the code, drawn from a seed, and whether the tests of their room see them.

``python -m tests.mutants --seed 1`` plants five in each room, one after the other, and runs the tests of ``ROOMS``:
about 25 minutes of one core. ``--rooms optim data`` and ``--count 2`` take less, ``--list`` only prints the draw.

The tests run on a copy of the checkout, so that no fault is ever in the checkout itself. What was seen is added to
``tests/mutants.toml``; a draw that was interrupted continues there. A fault that no test saw has an empty ``seen``:
write a test that sees it and plant it again (``--again``), or write into ``reason`` why it changes nothing.
"""

import argparse
import ast
import collections
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.rooms import LEFT_OUT, LONG, ROOMS

ROOT = Path(__file__).parent.parent
FOUND = ROOT / "tests/mutants.toml"
SECONDS = 600
"""Seconds after which the tests of a fault count as hung, on a busy machine."""
CPU_SECONDS = 100
"""CPU seconds after which a process of theirs does."""
MEMORY = 8 << 30
"""Bytes of such a process; a fault may ask for any number."""

SWAPS = {"sum": "mean", "mean": "sum", "max": "min", "min": "max", "amax": "amin", "any": "all", "all": "any"}
TURNED = {ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
TURNED |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
OFF_BY_ONE = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
LOGS = {"log", "_log", "status", "warnings"}
WORDS = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
"""What only words depend on, or what has no other form."""
QUIET = {
    "strict": "a zip asserts that lengths are equal",
    "maxsize": "how many results a cache keeps",
    "stacklevel": "which line a warning names",
    "non_blocking": "whether the host waits for a copy that later work waits for anyway",
    "daemon": "whether the end of Python waits for a thread, which is joined",
    "timeout": "how long a dead peer is waited for",
}
"""Arguments that no result depends on, with what does."""
PORTIONS = {
    *("_BATCH", "_BATCH_CHARACTERS", "_BLOCK", "_CPU_TOKENS", "_GPU_TOKENS", "_LOGIT_BYTES", "_RANGE_BYTES"),
    *("_READ_BYTES", "CHUNK_CHARACTERS", "CHUNK_CONVERSATIONS", "CHUNK_PIECES", "PIECE_BYTES"),
    *("_LARGE_BYTES", "_MOST_BYTES", "_TRIM_BYTES"),
}
"""Constants that say how much is read, computed or given back to the system at a time: on which no result depends."""


class Change(NamedTuple):
    """A text that replaces another in a file. Places are bytes."""

    kind: str
    line: int
    start: int
    stop: int
    text: str


class Mutant(NamedTuple):
    """A change of a file, with the line before and after."""

    room: str
    file: str
    change: Change
    was: str
    now: str


def changes_in(text: str) -> list[Change]:
    """All changes that the generator knows for a module."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def change(kind: str, first: ast.AST, last: ast.AST, new: str) -> Change:
        start = starts[first.lineno - 1] + first.col_offset
        stop = starts[last.end_lineno - 1] + last.end_col_offset
        return Change(kind, first.lineno, start, stop, new)

    found = []
    for node in nodes(ast.parse(text)):
        found += [change(*words) for words in replacements(node, text)]
    return found


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of messages, annotations and decorators."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if (
                isinstance(child, ast.AST)
                and not isinstance(child, WORDS)
                and not is_log(child)
                and not is_quiet(child)
            ):
                yield from nodes(child)


def is_log(node: ast.AST) -> bool:
    called = getattr(node, "func", None)
    return isinstance(called, ast.Attribute) and getattr(called.value, "id", "") in LOGS


def is_quiet(node: ast.AST) -> bool:
    """Whether ``node`` is an argument of ``QUIET``, a constant ``..._SECONDS``, how long something is waited for, or a
    number of ``PORTIONS``.
    """
    if isinstance(node, ast.Assign):
        name = getattr(node.targets[0], "id", "")
        return name.endswith("SECONDS") or (name in PORTIONS and not isinstance(node.value, ast.Dict))
    return isinstance(node, ast.keyword) and node.arg in QUIET


def replacements(node: ast.AST, text: str) -> Iterator[tuple[str, ast.AST, ast.AST, str]]:
    """Kind, first and last node of what is replaced, and what stands there then."""
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        yield "constant", node, node, str(other_number(node.value))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left = ast.unparse(node.left)
        right = ast.unparse(node.comparators[0])
        for table in (TURNED, OFF_BY_ONE):
            if type(node.ops[0]) in table:
                yield "comparison", node, node, f"{left} {table[type(node.ops[0])]} {right}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div) and is_number(node):
        yield "term", node, node, f"({ast.unparse(node.left)})"
    if isinstance(node, ast.Call):
        yield from of_call(node)
    if isinstance(node, ast.FunctionDef) and isinstance(node.returns, ast.Constant) and node.returns.value is None:
        for statement in node.body:
            if not is_word(statement):
                yield "return", statement, statement, "return"


def is_word(statement: ast.stmt) -> bool:
    """Whether a statement only is a docstring or a line of the log."""
    return isinstance(statement, ast.Expr) and (isinstance(statement.value, ast.Constant) or is_log(statement.value))


def other_number(value: bool | int | float) -> bool | int | float:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else 2 * value or 1.0


def is_number(node: ast.BinOp) -> bool:
    """Whether no side is a text."""
    texts = (ast.JoinedStr, ast.Constant)
    sides = [part for side in (node.left, node.right) for part in ast.walk(side) if isinstance(part, texts)]
    return not any(isinstance(part, ast.JoinedStr) or isinstance(part.value, str) for part in sides)


def of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST, ast.AST, str]]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name == "detach":
        yield "detach", node, node, ast.unparse(node.func.value)
    is_method = isinstance(node.func, ast.Attribute)
    if name in SWAPS and (is_method or name not in ("sum", "mean")):
        called = ast.unparse(node.func)
        yield "swap", node.func, node.func, called.removesuffix(name) + SWAPS[name]
    for word in node.keywords:
        if word.arg == "dim" and isinstance(word.value, ast.Constant | ast.UnaryOp):
            yield "dim", word.value, word.value, "1" if ast.unparse(word.value) == "0" else "0"
    for value in node.args:
        if is_method and ast.unparse(value) == "-1":
            yield "dim", value, value, "0"


def drawn(room: str, seed: int, count: int) -> list[Mutant]:
    """``count`` mutants of a room: each kind of change is as likely as any other."""
    chance = random.Random(f"{seed} {room}")
    waiting = collections.defaultdict(list)
    for path in sorted((ROOT / "crius" / room).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for change in changes_in(text):
            waiting[change.kind].append((path, text, change))
    found: list[Mutant] = []
    while len(found) < count:
        kind = chance.choice(sorted(kind for kind in waiting if waiting[kind]))
        path, text, change = waiting[kind].pop(chance.randrange(len(waiting[kind])))
        new = planted(text, change)
        was, now = (" ".join(lines.splitlines()[change.line - 1].split()) for lines in (text, new))
        if compiles(new):
            found.append(Mutant(room, path.relative_to(ROOT).as_posix(), change, was, now))
    return found


def planted(text: str, change: Change) -> str:
    content = text.encode()
    return (content[: change.start] + change.text.encode() + content[change.stop :]).decode()


def compiles(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


class Copy:
    """A copy of the checkout, with what is not committed, in which tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs = 0
        listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        for name in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def seen_by(self, mutant: Mutant) -> tuple[str, float]:
        """As ``failure``, with the mutant planted meanwhile."""
        path = self.folder / mutant.file
        text = path.read_text(encoding="utf-8")
        try:
            self._write(path, planted(text, mutant.change))
            return self.failure(words_for(mutant))
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        self._runs += 1
        os.utime(path, (self._runs, self._runs))  # a time of its own: compiled files are found by time and size

    def failure(self, tests: Sequence[str]) -> tuple[str, float]:
        """The first of some tests that fails, empty if none does, and the CPU seconds of the tests.

        Tests that hang are ended, which counts as a failure: ``exit code -9``, or ``-24`` if they compute.
        """
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "pytest", "-p", "mutants", "-x", "-rfE", "--timeout", "200", "-m", ""]
        command += tests
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.folder), str(self.folder / "tests")])}
        with (self.folder / "tests.log").open("w+") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=limit,
            )
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
            log.seek(0)
            first = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", log.read(), re.MULTILINE)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if code == pytest.ExitCode.NO_TESTS_COLLECTED:
            raise ValueError(f"no test of {tests} runs")
        if code == 0:
            return "", seconds
        return first[1] if first else f"exit code {code}", seconds


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """As a plugin of the tests in a copy: leave out what is long, unless ``ROOMS`` names it."""
    named = tuple(word for word in config.args if "::" in word)
    items[:] = [
        item
        for item in items
        if item.nodeid.startswith(named) or not (marks_of(item) & {*LEFT_OUT} or {item.name, item.originalname} & LONG)
    ]


def marks_of(item: pytest.Item) -> set[str]:
    return {mark.name for mark in item.iter_markers()}


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def words_for(mutant: Mutant) -> list[str]:
    """Words of pytest: the tests that a room names for a file."""
    path = mutant.file.removeprefix(f"crius/{mutant.room}/")
    words = next(words for start, words in ROOMS[mutant.room].items() if path.startswith(start))
    return [word if "/" in word else f"tests/unit/{word}.py" for word in words]


def known(path: Path = FOUND) -> list[dict]:
    """The entries of the list."""
    return tomllib.loads(path.read_text(encoding="utf-8"))["mutants"] if path.exists() else []


def save(entries: list[dict], path: Path = FOUND) -> None:
    lines = ["# Faults that `python -m tests.mutants --seed N` planted, and the test that saw each"]
    for entry in entries:
        lines += ["", "[[mutants]]", *(f"{key} = {json.dumps(value)}" for key, value in entry.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def identity(entry: dict) -> tuple:
    return tuple(entry[key] for key in ("seed", "file", "was", "now"))


def record(seed: int, mutant: Mutant, seen: str, reason: str = "") -> dict:
    return {
        "seed": seed,
        "room": mutant.room,
        "file": mutant.file,
        "line": mutant.change.line,
        "kind": mutant.change.kind,
        "was": mutant.was,
        "now": mutant.now,
        "seen": seen,
        "reason": reason,
    }


def plant(copy: Copy, mutants: list[Mutant], seed: int, again: bool) -> None:
    """Plant the mutants of one room that the list does not have; ``again``: and those that were not seen."""
    entries = {identity(entry): entry for entry in known()}
    waiting = []
    for mutant in mutants:
        entry = entries.get(identity(record(seed, mutant, "")))
        if entry is None or (again and not entry["seen"]):
            waiting.append(mutant)
    if not waiting:
        return
    tests = sorted({word for mutant in waiting for word in words_for(mutant)})
    failed, seconds = copy.failure(tests)
    print(f"{waiting[0].room}: {seconds:.1f} CPU seconds without a fault", flush=True)
    if failed:
        sys.exit(f"the tests of {waiting[0].room} fail without a fault: {failed}")
    for mutant in waiting:
        seen, seconds = copy.seen_by(mutant)
        key = identity(record(seed, mutant, seen))
        entries[key] = record(seed, mutant, seen, entries.get(key, {}).get("reason", ""))
        save(list(entries.values()))
        print(f"  {seconds:5.1f} s  {mutant.file}:{mutant.change.line}  {seen or 'UNSEEN'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--count", type=int, default=5, help="faults of each room")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("--again", action="store_true", help="plant those that no test saw once more")
    asked = parser.parse_args()
    draws = {room: drawn(room, asked.seed, asked.count) for room in asked.rooms}
    if asked.list:
        for mutant in (mutant for found in draws.values() for mutant in found):
            print(f"{mutant.file}:{mutant.change.line} {mutant.change.kind}\n  - {mutant.was}\n  + {mutant.now}")
        return
    with tempfile.TemporaryDirectory(prefix="crius-mutants-") as folder:
        copy = Copy(Path(folder))
        for found in draws.values():
            plant(copy, found, asked.seed, asked.again)
    entries = [entry for entry in known() if entry["seed"] == asked.seed and entry["room"] in asked.rooms]
    print(f"{sum(bool(entry['seen']) for entry in entries)} of {len(entries)} seen")


if __name__ == "__main__":
    main()
