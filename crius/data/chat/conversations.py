"""Reads conversations from files with rows. All formats become one form."""

import difflib
import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crius.config.data import ROLES, DataConfig
from crius.data.rows import checked_text, json_kind, read_rows, value_of
from crius.errors import DataError
from crius.untrusted import parse_json

SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Names of roles in ShareGPT and elsewhere."""

LISTS = ("messages", "conversations")
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
)
"""Names of columns that are found automatically: a list of messages first, then pairs of question and answer."""

_BESIDE = ("input", "context", "history", "system_prompt")
"""Columns that, in addition to a pair, would belong to the question."""

_USED = ("system", "tools")
_OF_ROWS = ("messages", "prompt", "completion", *_USED)
"""Columns that are used in addition, and the meanings that a column can have."""

_MARKS = {"weight": True, "train": True, "loss": True, "masked": False}
"""Keys that say whether the loss is on a message, with the value of a message that is trained on."""

_FLAG = "--data.columns"
_DEEPEST = 100


@dataclass(frozen=True)
class Conversation:
    """The messages of a conversation in order. At least one is by the assistant.

    Attributes:
        messages: objects with ``role`` and ``content``, maybe ``tool_calls`` and others, as a chat template takes them.
            ``weight`` 0 excludes an assistant's message from the loss, 1 includes that of another role.
        tools: JSON schemas of the tools that the assistant may call; None if there are none.
        where: file and line or row, for messages.
        unused: keys of the row that Crius does not use.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None
    where: str
    unused: tuple[str, ...] = ()

    @property
    def answers(self) -> list[str]:
        """Texts of the assistant's messages without tool_calls."""
        own = (message for message in self.messages if message["role"] == "assistant")
        return [message["content"] or "" for message in own if not message.get("tool_calls")]


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether the loss is on a message of a ``Conversation``."""
    return bool(message.get("weight", message["role"] == "assistant"))


def read_conversations(data: DataConfig, files: Sequence[Path]) -> Iterator[Conversation | DataError]:
    """Read the conversations of ``files``, in order, in bounded memory.

    A row without a conversation is given as a DataError that names file and row.

    Args:
        data: the section; ``source`` is jsonl, csv or parquet, and ``columns`` names the columns of a conversation.
        files: result of ``find_files``.

    Raises:
        DataError: a file cannot be read or is empty.
        EnvironmentError: a package is missing.
    """
    for file in files:
        is_empty = True
        for conversation in _of_file(data, file):
            is_empty = False
            yield conversation
        if is_empty:
            raise DataError(
                f"{file} has no conversation.", where=str(file), why="it has no row", fix="leave it out, or give others"
            )


def _of_file(data: DataConfig, file: Path) -> Iterator[Conversation | DataError]:
    not_read: list[str] = []

    def choose(names: list[str]) -> list[str]:
        known = [name.partition(".")[0] for name in (*data.named_columns, *data.meanings)]
        known += (*LISTS, *itertools.chain(*PAIRS), *_BESIDE, *_USED)
        not_read.extend(name for name in names if name not in known)
        chosen = [name for name in names if name in known]
        return chosen if {*chosen} - {*_USED} else columns_of(data.named_columns, names, str(file))

    def convert(row: object, where: str) -> Conversation:
        if data.source == "parquet":  # a column has the keys of all rows: keys that a row lacks are null in it
            row = {key: _without_nulls(value) for key, value in row.items()} if isinstance(row, dict) else row
        return conversation_of(row, data, where, not_read)

    yield from read_rows(data.source, file, choose, convert)


def conversation_of(row: object, data: DataConfig, where: str, not_read: Sequence[str] = ()) -> Conversation:
    """The conversation of a row.

    Args:
        row: a JSON value.
        data: the section with the columns.
        where: file and line or row, for messages.
        not_read: further columns, which are not used.

    Raises:
        DataError: the row has no conversation.
    """
    if not isinstance(row, dict):
        raise DataError(
            f"the row is {json_kind(row)}, not an object with a conversation.",
            where=where,
            fix="write each row as an object; jq -c '{messages: .}' FILE does so with lists of messages",
        )
    check_is_row(row, where)
    meanings = data.meanings
    row = _translated(row, meanings, where)
    if "messages" in meanings.values():
        asked: Sequence[str] = ("messages",)
    elif {"prompt", "completion"} <= {*meanings.values()}:
        asked = ("prompt", "completion")
    else:
        asked = data.named_columns
    inner = [f"{name}.{key}" for name, value in row.items() if isinstance(value, dict) for key in value]
    columns = columns_of(asked, [*row, *inner], where)
    for name in columns:
        try:
            value = value_of(row, name)
        except KeyError:
            raise DataError(f"the row has no value {name}.", where=where, fix=f"{_FLAG} NAME of a value") from None
        if len(columns) == 1 and isinstance(value, str | bytes):
            value = _parsed(value)
        if isinstance(value, list):
            value = [_translated_message(one, meanings) if isinstance(one, dict) else one for one in value]
        row[name] = value
    used = (*columns, *_USED, *(name.partition(".")[0] for name in columns))
    if not meanings and tuple(columns) in PAIRS:
        _check_beside(row, columns, where)
        used = (*used, *_BESIDE)
    unused = (*not_read, *(name for name in row if name not in used))
    return _conversation(row, columns, where, unused)


def check_is_row(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError if ``row`` is a file with all rows under its keys, one or several."""
    firsts = [value[0] for value in row.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if not firsts or len(firsts) < len(row):
        return
    if all(any({*keys} <= {*first} for keys in (*zip(LISTS), *PAIRS, ("text",))) for first in firsts):
        name, value = next(iter(row.items()))
        code = f"import json; print(json.dumps(json.load(open({where.rpartition(':')[0]!r}))[{name!r}]))"
        raise DataError(
            f"the file is one object, whose {name!r} has {len(value):,} rows.",
            where=where,
            fix=f"python -c {shlex.quote(code)} > rows.json, and --data.path rows.json",
        )


def _translated(row: dict[str, Any], meanings: Mapping[str, str], where: str) -> dict[str, Any]:
    """The row with the columns of ``meanings`` under their meanings. Texts of one meaning become paragraphs."""
    found: dict[str, Any] = {}
    for name, meaning in meanings.items():
        if meaning not in _OF_ROWS:
            continue
        try:
            value = value_of(row, name)
        except KeyError:
            continue
        if meaning in found:
            texts = [checked_text(text or "", f"the value of {name!r}", where) for text in (found[meaning], value)]
            value = "\n\n".join(filter(None, texts))
        found[meaning] = value
    tops = {name.partition(".")[0] for name, meaning in meanings.items() if meaning in found}
    return {name: value for name, value in row.items() if name not in tops} | found


def columns_of(asked: Sequence[str], names: Sequence[str], where: str) -> list[str]:
    """The column with the messages, or the columns with prompt and completion.

    Args:
        asked: ``data.columns``; empty: find the columns.
        names: existing columns.
        where: file or row, for messages.

    Raises:
        DataError: no column fits, or several do.
    """
    listed = ", ".join(map(str, names)) or "none"
    if asked:
        for name in asked:
            if name not in names and name.partition(".")[0] not in names:
                near = difflib.get_close_matches(name, list(map(str, names)), n=1)
                fix = f"{_FLAG} {shlex.quote(near[0])}" if near else f"{_FLAG} NAME, with the column of the messages"
                raise DataError(f"there is no column {name!r}; the columns are: {listed}.", where=where, fix=fix)
        return list(asked)
    for name in LISTS:
        if name in names:
            return [name]
    pairs = [pair for pair in PAIRS if {*pair} <= {*names}]
    if len(pairs) == 1:
        return list(pairs[0])
    if "chosen" in names and "rejected" in names:
        wanted = [name for name in ("prompt", "chosen") if name in names]
        raise DataError(
            "these rows are preference pairs: chosen and rejected answers.",
            where=where,
            why="Crius trains on conversations, which the chosen answers can be",
            fix=" ".join(f"{_FLAG} {name}" for name in wanted),
        )
    leaves = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    likely = [*pairs, leaves, ("PROMPT", "COMPLETION")]
    first, second = next(pair for pair in likely if len(pair) == 2)
    raise DataError(
        f"the columns of the conversation are not clear; the columns are: {listed}.",
        where=where,
        why=f"{' or '.join(' and '.join(pair) for pair in pairs)} may be meant"
        if pairs
        else f"Crius looked for {', '.join(LISTS)}, and for {', '.join('+'.join(pair) for pair in PAIRS)}",
        fix=f"{_FLAG} MESSAGES, or {_FLAG} {shlex.quote(first)} {_FLAG} {shlex.quote(second)}",
    )


def _parsed(text: str | bytes) -> Any:
    """The JSON value of a text, or the text itself if it has none."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def _translated_message(message: Mapping[str, Any], meanings: Mapping[str, str]) -> dict[str, Any]:
    """The message with its keys and its role by their meanings."""
    names = {name: meaning for name, meaning in meanings.items() if meaning in ("role", "content")}
    found = {names.get(name, name): value for name, value in message.items()}
    for name in ("role", "from"):
        if isinstance(found.get(name), str):
            found[name] = meanings.get(found[name], found[name])
    return found


def _conversation(row: Mapping[str, Any], columns: Sequence[str], where: str, unused: Sequence[str]) -> Conversation:
    if len(columns) == 1:
        messages = _messages(row[columns[0]], columns[0], where)
    else:
        messages = _pair(row, columns, where)
    if (system := row.get("system")) and messages[0]["role"] != "system" and "system" not in columns:
        messages.insert(0, {"role": "system", "content": checked_text(system, "the value of 'system'", where)})
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(
            "the conversation has no message of the assistant.",
            where=where,
            why=f"its roles are {', '.join(dict.fromkeys(message['role'] for message in messages))}; it has nothing "
            "to train on",
            fix="remove the row",
        )
    return Conversation(tuple(messages), _tools(row.get("tools"), where), where, tuple(unused))


def _check_beside(row: Mapping[str, Any], columns: Sequence[str], where: str) -> None:
    for name in _BESIDE:
        if not row.get(name):
            continue
        beside = f",{name}=prompt"
        does = "joins them as paragraphs"
        if isinstance(row[name], list):
            beside = ""
            does = f"leaves out {name!r}"
        raise DataError(
            f"the row has {columns[0]!r} and {name!r}.",
            where=where,
            why="there is no rule that joins the two to one message",
            fix=f"{_FLAG} {columns[0]}=prompt{beside},{columns[1]}=completion {does}",
        )


def _pair(row: Mapping[str, Any], columns: Sequence[str], where: str) -> list[dict[str, Any]]:
    """Messages of a prompt and its completion, each a text or a list of messages. The prompt is excluded
    from the loss.
    """
    found = []
    for name, role in zip(columns, ("user", "assistant"), strict=True):
        value = row[name]
        if isinstance(value, list):
            messages = _messages(value, name, where)
            if role == "user":
                messages = [one | {"weight": 0} if one["role"] == "assistant" else one for one in messages]
            found += messages
        else:
            found.append({"role": role, "content": checked_text(value, f"the value of {name!r}", where)})
    return found


def _messages(value: Any, column: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise DataError(
            f"the value of {column!r} is {json_kind(value)}, not a list of messages.",
            where=where,
            why="text can be the JSON of such a list",
            fix=f"{_FLAG} NAME, with the column of the messages, or the columns of prompt and completion",
        )
    if not value:
        raise DataError(f"the list of messages {column!r} is empty.", where=where, fix="remove the row")
    named = (one.get("role", one.get("from")) for one in value if isinstance(one, dict))
    roles = [str(role) for role in named if role is not None]
    return [_message(message, f"message {number}", where, roles) for number, message in enumerate(value, start=1)]


def _message(value: Any, what: str, where: str, roles: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        what = f"{what} is {json_kind(value)}, not an object with role and content."
        raise DataError(what, where=where, fix='write each message as {"role": "user", "content": "Hi"}')
    message = {key: child for key, child in value.items() if child is not None or key == "content"}
    if "role" not in message and "from" in message:  # ShareGPT
        message = {"role": message.pop("from"), "content": message.pop("value", None)} | message
    message["role"] = _role(message, what, where, roles)
    message["content"] = _content(message, what, where)
    if message.get("weight", 1) not in (0, 1):
        raise DataError(
            f"{what} has the weight {message['weight']!r}; it must be 0 or 1.",
            where=where,
            why="a message is trained on, or it is not",
            fix="write 0 or 1",
        )
    _take_marks(message, what, where)
    if not isinstance(message.get("tool_calls", []), list):
        raise DataError(f"the tool_calls of {what} are {json_kind(message['tool_calls'])}, not a list.", where=where)
    _check_texts(message, what, where)
    return message


def _role(message: Mapping[str, Any], what: str, where: str, roles: Sequence[str]) -> str:
    role = message.get("role")
    known = _known(str(role))
    if isinstance(role, str) and known in ROLES:
        return known
    fix = f"{_FLAG} {shlex.quote(_meant(roles))}"
    if role is None:
        texts = [key for key, text in message.items() if isinstance(text, str)] or ["KEY"]
        fix = f"{_FLAG} {texts[0]}=role,{texts[-1]}=content" if len(texts) > 1 else f"{_FLAG} KEY=role"
    raise DataError(
        f"{what} has no role." if role is None else f"{what} has the unknown role {role!r}.",
        where=where,
        why=f"roles are {', '.join(ROLES)}; also known are {', '.join(SHAREGPT)}",
        fix=fix,
    )


def _known(role: str) -> str:
    return SHAREGPT.get(role.lower(), role.lower())


def _meant(roles: Sequence[str]) -> str:
    """Values of ``data.columns`` for the unknown roles of a conversation: the first one asks, the next one answers."""
    missing = [role for role in ("user", "assistant") if role not in map(_known, roles)]
    meanings = []
    for role in dict.fromkeys(roles):
        if _known(role) not in ROLES:
            near = difflib.get_close_matches(role.lower(), [*ROLES, *SHAREGPT], n=1)
            meaning = _known(near[0]) if near else (missing or ["user"])[0]
            missing = [one for one in missing if one != meaning]
            meanings.append(f"{role}={meaning}")
    return ",".join(meanings)


def _take_marks(message: dict[str, Any], what: str, where: str) -> None:
    """Leave ``weight`` where the loss is not as the role says: 0 of the assistant, 1 of another role."""
    said = {key: message.pop(key) for key in _MARKS if message.get(key) in (0, 1)}
    votes = {value == _MARKS[key] for key, value in said.items()}
    if len(votes) > 1:
        raise DataError(
            f"{what} says that it is trained on, and that it is not: {json.dumps(said, default=int)}.",
            where=where,
            fix="keep one of these keys, or make them agree",
        )
    if message["role"] == "assistant" and votes == {False}:
        message["weight"] = 0
    if message["role"] != "assistant" and said.get("train"):
        message["weight"] = 1


def _content(message: Mapping[str, Any], what: str, where: str) -> str | None:
    """The text of a message. Parts that are text are joined, as templates with support for parts join them."""
    content = message.get("content")
    if content is None:
        if message.get("tool_calls"):
            return None
        raise DataError(
            f"{what} has no content.",
            where=where,
            why="only a message with tool_calls may lack it",
            fix="write its text, or remove the row",
        )
    if not isinstance(content, list):
        return checked_text(content, f"the content of {what}", where)
    texts: list[str] = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else json_kind(part)
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str) or kind != "text":
            raise DataError(
                f"the content of {what} has a part that is not text: {kind}.",
                where=where,
                why="Crius trains on text",
                fix="remove the row, or the part",
            )
        texts.append(text)
    return checked_text("".join(texts), f"the content of {what}", where)


def _tools(value: Any, where: str) -> tuple[Mapping[str, Any], ...] | None:
    """Tools of a conversation: a list of objects, or the same as JSON text."""
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else None
        except ValueError as error:
            raise DataError(f"the value of 'tools' is text that is not JSON: {error}.", where=where) from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"the value of 'tools' is {json_kind(value)}, not a list of objects.", where=where)
    _check_texts(value, "'tools'", where)
    return tuple(value)


def _check_texts(value: Any, what: str, where: str, depth: int = 0) -> None:
    """Refuse text with a lone surrogate, which tokenizers cannot read, values that are nested too deeply, and values
    that JSON lacks, since templates are rendered in another process.
    """
    if isinstance(value, str):
        checked_text(value, f"a text in {what}", where)
    elif isinstance(value, dict | list):
        if depth == _DEEPEST:
            raise DataError(f"{what} is nested more than {_DEEPEST} levels deep.", where=where, fix="remove the row")
        named = value.items() if isinstance(value, dict) else (("", child) for child in value)
        for key, child in named:
            _check_texts(key, what, where, depth + 1)
            _check_texts(child, f"{key!r} of {what}" if key and depth == 0 else what, where, depth + 1)
    elif value is not None and not isinstance(value, bool | int | float):
        raise DataError(
            f"{what} is of type {type(value).__name__}, which a chat template cannot take.",
            where=where,
            fix="write it as text, or leave out the key",
        )


def _without_nulls(value: Any, kept: str = "content") -> Any:
    """A value of a parquet file without keys that are null. A message keeps a null content."""
    if isinstance(value, dict):
        return {key: _without_nulls(child, "") for key, child in value.items() if child is not None or key == kept}
    if isinstance(value, list):
        return [_without_nulls(child, kept) for child in value]
    return value
