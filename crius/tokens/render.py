"""Renders an untrusted chat template in a separate process, with limits on time and memory.

It imports nothing of Crius and is started by ``crius.tokens.renderer``. It reads JSON, one value per line. The first
line has the arguments of ``Template`` and the limits ``cpu_seconds`` per task and ``memory_bytes``; the answer is
``{"keys"}``. The following lines are lists of tasks. A task has ``messages`` and ``tools``, ``prompt`` if the text up
to the assistant's answer is wanted, and ``others``, places of messages whose text is wanted although another role says
them.
The process writes one line per task: ``{"text", "spans"}`` or ``{"error", "turn"}``. ``spans`` has ``[message, start,
end]`` in characters of the text: the text of the assistant, or of another one, in that message, with its end of turn.
Message -1 means that the message is unknown.
"""

import datetime
import functools
import json
import os
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, ext, nodes, sandbox

MOST_CHARACTERS = 1 << 22
_HEADER = 4096
"""Longest header of a turn, in characters."""

_START = "\U0010fffe"
"""Is put before a content to see where it lies. No text has it: it is not a character."""

_NO_PROMPT = "it ignores add_generation_prompt, so the header of an answer cannot be separated from the answer"

Message = Mapping[str, Any]
Span = tuple[int, int, int]


class Refused(Exception):
    """A conversation that cannot be masked.

    Args:
        why: reason, for messages.
        turn: index of the message that cannot be masked.
    """

    def __init__(self, why: str, turn: int) -> None:
        super().__init__(why)
        self.turn = turn


class Template:
    """A compiled template.

    Args:
        task: object with ``template``, ``tokens`` such as ``bos_token`` by name, ``special``, the texts of all special
            tokens of the tokenizer, and ``date``, today's date in ISO format; null for the clock's date.

    Attributes:
        keys: names that the template's code can read from a message.

    Raises:
        Exception: any error of the template.
    """

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.source = str(task["template"])
        self.tokens = task["tokens"]
        self.special = list(task["special"])
        today = datetime.datetime.fromisoformat(task["date"]) if task["date"] else None
        environment, self._marks = _environment(today)
        tree = environment.parse(self.source)
        self.keys = _keys(tree)
        self._template = environment.from_string(tree)
        self.has_generation = self._marks.has_generation

    @functools.cached_property
    def opening(self) -> str:
        """The text that a generation prompt adds to a conversation, even if the template always adds it; or empty."""
        question = [{"role": "user", "content": "x"}]
        try:
            bare = self.text(question, None)
            asked = self.text(question, None, prompt=True)
            _, extents, _ = self._marked(question, None, prompt=True)
        except Exception:  # the template needs another conversation
            return ""
        added = asked[len(bare) :] if asked.startswith(bare) else ""
        return added or (asked[extents[0][1] :] if 0 in extents else "")

    def text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool = False, separator: str = ""
    ) -> str:
        """The text of ``messages``. ``prompt`` adds the start of an answer, ``separator`` adds marks.

        Content that is null is left out, as in transformers. If the template then fails, it gets null, and if it fails
        again, an empty text.
        """
        nulls = [place for place, message in enumerate(messages) if message.get("content", "") is None]

        def changed(content: dict[str, Any]) -> list[Message]:
            given = list(messages)
            for place in nulls:
                given[place] = {key: value for key, value in messages[place].items() if key != "content"} | content
            return given

        for given in (changed({}), messages, changed({"content": ""})) if nulls else (messages,):
            try:
                return self._render(given, tools, prompt, separator)
            except Exception as error:
                failure = error
        raise failure

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool, separator: str) -> str:
        parts = []
        length = 0
        given = {"messages": list(messages), "add_generation_prompt": prompt, **({"tools": tools} if tools else {})}
        self._marks.begin(separator, given["messages"])
        for part in self._template.generate(**self.tokens, **given):
            parts.append(part)
            length += len(part)
            if length > MOST_CHARACTERS:
                raise ValueError(f"it makes more than {MOST_CHARACTERS:,} characters")
        return "".join(parts)

    def _marked(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool = False
    ) -> tuple[str, dict[int, tuple[int, int]], list[tuple[int, int]] | None]:
        """The text, the place of each message that a loop of the template renders, and its generation blocks.

        If the template changes the text that it made, the blocks are None and no message is found.
        """
        text = self.text(messages, tools, prompt=prompt)
        known = self.source + text + json.dumps([list(messages), tools], ensure_ascii=False)
        separator = next(char for char in map(chr, range(0x100000, 0x10FFFE)) if char not in known)
        marked = self.text(messages, tools, prompt=prompt, separator=separator)
        parts = re.split(f"{separator}(.)([0-9]*),?([0-9]*){separator}", marked)
        if "".join(parts[::4]) != text:
            return text, {}, None
        found, blocks = _read_marks(parts)
        lies = {index: (start, end) for index, start, end in found}
        return text, lies if len(lies) == len(found) else {}, blocks

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, others: Sequence[int]
    ) -> tuple[str, list[Span]]:
        """The text of a conversation, and the spans of the assistant's text in it, and of the messages ``others``.

        Raises:
            Refused: the spans cannot be found.
        """
        text, extents, blocks = self._marked(messages, tools)
        spans = []
        for place in others:  # from where the content begins to the end of the turn
            begin, end = extents.get(place, (0, -1))
            changed = [*messages]
            changed[place] = {**messages[place], "content": f"{_START}{messages[place].get('content') or ''}"}
            shifted = self.text(changed, tools)
            start = shifted.find(_START, begin, end + 1)
            if start < 0 or not text.startswith(shifted[:start]):
                raise Refused("the start of its text cannot be found: no loop renders it as it is", place)
            spans.append((place, start, end))
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if self.has_generation:
            if blocks is None:
                raise Refused("it changes the text of its {% generation %} blocks after it made them", turns[0])
            for place, message in enumerate(messages):
                begin, after = extents.get(place, (0, 0))
                if message["role"] != "assistant" and any(start < after and begin < end for start, end in blocks):
                    why = f"a {{% generation %}} block is around the text of the {message['role']}"
                    raise Refused(why, place)
            return text, spans + self._of_blocks(blocks, turns, extents)
        return text, spans + [self._turn(text, messages, tools, turn, extents.get(turn)) for turn in turns]

    def _of_blocks(
        self, blocks: list[tuple[int, int]], turns: list[int], extents: dict[int, tuple[int, int]]
    ) -> list[Span]:
        spans = []
        for place, (start, end) in enumerate(blocks):
            inside = [turn for turn in turns if _is_inside(start, end, extents.get(turn))]
            by_order = turns[place] if len(blocks) == len(turns) else -1
            spans.append((inside[0] if inside else by_order, start, end))
        return spans

    def _turn(
        self,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        turn: int,
        extent: tuple[int, int] | None,
    ) -> Span:
        if extent is None:
            return self._by_prefixes(text, messages, tools, turn)
        start, end = extent
        if self.opening and text.startswith(self.opening, start, end):
            return turn, start + len(self.opening), end
        try:
            before = self.text(messages[:turn], tools, prompt=True) if turn else ""
        except Exception:  # the template needs another conversation
            before = ""
        if turn and text.startswith(before) and start <= len(before) <= end:
            if start == len(before) and not self.opening and self._has_header(text[start:end], messages[turn]):
                raise Refused(_NO_PROMPT, turn)
            return turn, len(before), end
        if self.opening and text.count(self.opening, start, end) == 1:
            return turn, text.index(self.opening, start) + len(self.opening), end
        # the text before differs from that in the whole: the header is the common start of a prompt and this turn
        turn_text = text[start:end]
        shared = os.path.commonprefix([self.opening, turn_text])
        ends = (turn_text[:size] for size in range(min(len(before), len(turn_text), _HEADER), 0, -1))
        for header in (*(shared[:size] for size in range(len(shared), 0, -1)), *filter(before.endswith, ends)):
            rest = self.opening[len(header) :] if self.opening.startswith(header) else ""
            if re.search(r"\w", re.sub(r"<[^>]*>", "", rest)):
                continue  # the prompt's header continues with another word, so the turn has another header
            if re.search(r"\w", header) and header.endswith(("\n", *self.special)):
                return turn, start + len(header), end
        raise Refused("the start of the answer cannot be found: its header is not that of a generation prompt", turn)

    def _has_header(self, text: str, message: Message) -> bool:
        """Whether the text of a turn has words before the assistant's text."""
        for name in self.special:
            text = text.replace(name, "")
        content = message.get("content")
        if (
            isinstance(content, str) and content.strip() in text
        ):  # the last occurrence: a header may contain a short content too
            text = text[: text.rindex(content.strip())]
        return re.search(r"\w", text) is not None

    def _by_prefixes(self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None, turn: int) -> Span:
        """The span of a turn that no loop renders. The text up to it and the text with it must start the whole text."""
        if not self.opening:
            raise Refused("it renders nothing for the message, or ignores add_generation_prompt", turn)
        before = self.text(messages[:turn], tools, prompt=True) if turn else self.opening
        after = self.text(messages[: turn + 1], tools).removesuffix(self.opening)  # some templates always add a prompt
        if text.startswith(before) and text.startswith(after) and len(before) < len(after):
            return turn, len(before), len(after)
        raise Refused("the text up to the message does not begin the whole text, or the message is left out", turn)


def _keys(tree: nodes.Template) -> list[str]:
    """Attributes, items and arguments in the code of a template. Its text, and values that it compares, are no keys."""
    places: tuple[type[nodes.Node], ...] = (nodes.Getitem, nodes.Call, nodes.Filter, nodes.Keyword, nodes.Compare)
    if any(isinstance(item.arg, nodes.Name) for item in tree.find_all(nodes.Getitem)):
        places += (nodes.Assign, nodes.List, nodes.Tuple)  # what such a name can stand for
    found = [node.attr for node in tree.find_all(nodes.Getattr)]
    for node in tree.find_all(places):
        values = (child.value for child in node.iter_child_nodes() if isinstance(child, nodes.Const))
        found += [str(value).partition(".")[0] for value in values]  # a filter takes the path of an attribute
    return found


def _is_inside(start: int, end: int, extent: tuple[int, int] | None) -> bool:
    return extent is not None and extent[0] <= start <= end <= extent[1]


def _read_marks(parts: Sequence[str]) -> tuple[list[Span], list[tuple[int, int]]]:
    """Messages and generation blocks of a text that is split at its marks into text, kind, loop, message, text, ..."""
    found: list[Span] = []
    blocks: list[tuple[int, int]] = []
    place = len(parts[0])
    begun = []
    stack: list[tuple[str, int, int]] = []  # nested loops: a message is rendered by the outermost loop
    for kind, loop, index, following in zip(parts[1::4], parts[2::4], parts[3::4], parts[4::4], strict=True):
        if kind == "[":
            begun.append(place)
        elif kind == "]":
            blocks.append((begun.pop(), place))
        else:
            while any(loop == other for other, _, _ in stack):  # a continue or a break skips the mark of the end
                _, message, start = stack.pop()
                if not stack and place > start:
                    found.append((message, start, place))
            if kind == "<":
                stack.append((loop, int(index), place))
        place += len(following)
    return found, sorted(blocks)


class Marks(ext.Extension):
    """Marks the places where a loop renders a message, and ``{% generation %}`` blocks, which have the assistant's
    text.
    """

    tags = {"generation"}

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.has_generation = False
        self.begin("", [])

    def begin(self, separator: str, messages: Sequence[Message]) -> None:
        """Use ``separator`` for marks; empty: no marks."""
        self._separator = separator
        self._index = {id(message): place for place, message in enumerate(messages)}

    def parse(self, parser: Any) -> nodes.Node:
        """Parse a generation block. Variables that are set in it are not visible outside, as in transformers."""
        self.has_generation = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_block"), [], [], body).set_lineno(line)

    def mark(self, kind: str, loop: int, name: str) -> nodes.Node:
        """A node that marks the message in a loop's variable."""
        arguments = [nodes.Const(kind), nodes.Const(loop), nodes.Name(name, "load")]
        return nodes.Output([self.call_method("_message", arguments)])

    def _block(self, caller: Any) -> str:
        begin, end = (f"{self._separator}{kind}{self._separator}" if self._separator else "" for kind in "[]")
        return f"{begin}{caller()}{end}"

    def _message(self, kind: str, loop: int, value: Any) -> str:
        index = self._index.get(id(value)) if self._separator else None
        return "" if index is None else f"{self._separator}{kind}{loop},{index}{self._separator}"


class Environment(sandbox.ImmutableSandboxedEnvironment):
    """Environment of templates: the functions of transformers, and a mark around each turn of each loop."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        marks: Any = self.extensions[Marks.identifier]
        for number, loop in enumerate(tree.find_all(nodes.For)):
            if isinstance(loop.target, nodes.Name):
                begin, end = (marks.mark(kind, number, loop.target.name) for kind in "<>")
                loop.body = [begin, *loop.body, end]
        return tree


def _environment(today: datetime.datetime | None) -> tuple[Environment, Any]:
    """The environment of templates, and the object that puts marks into their text."""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Marks, ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: (today or datetime.datetime.now()).strftime(form)
    return environment, environment.extensions[Marks.identifier]


def _limit(seconds: int) -> None:
    """Limit the CPU time of the next task; the kernel ends the process if it takes more."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds, most))


def _answer(template: Template, task: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if task.get("prompt"):
            return {"text": template.text(task["messages"], task.get("tools"), prompt=True)}
        text, spans = template.conversation(task["messages"], task.get("tools"), task.get("others", ()))
        return {"text": text, "spans": spans}
    except Exception as error:  # an untrusted template may raise anything
        return _error(error)


def _error(error: Exception) -> dict[str, Any]:
    if isinstance(error, MemoryError):
        return {"error": "it takes too much memory"}
    if isinstance(error, Refused):
        return {"error": str(error), "turn": error.turn}
    return {"error": f"{type(error).__name__}: {error}"[:500]}


def _write(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Render the tasks from standard input until it ends."""
    task = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (task["memory_bytes"], task["memory_bytes"]))
    _limit(task["cpu_seconds"])
    try:
        template = Template(task)
    except Exception as error:  # see _answer
        _write(_error(error))
        return
    _write({"keys": template.keys})
    for line in sys.stdin:
        for wanted in json.loads(line):
            _limit(task["cpu_seconds"])
            _write(_answer(template, wanted))


if __name__ == "__main__":
    main()
