"""Renders conversations by the tokenizer's own chat template, in a separate process."""

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from crius.errors import DataError, EnvironmentError
from crius.plugins import REQUIREMENTS, install_line
from crius.untrusted import parse_json

_SCRIPT = Path(__file__).with_name("render.py")
_LIMITS = {"cpu_seconds": 4, "memory_bytes": 1 << 29}
"""CPU time per conversation, and memory of the process."""

_SECONDS = 60
"""Longest wait for one conversation: far above its limit of CPU time, since the machine may be busy."""

_DATE = "2024-07-26"
"""Date in training conversations, whose tokens must not change from day to day: the date in Llama 3's templates."""

Message = Mapping[str, Any]


class Rendered(NamedTuple):
    """A conversation as text.

    Attributes:
        text: rendered text.
        spans: ``(message, start, end)`` of the assistant's text in characters of the text; message -1: unknown.
        error: why there is no text, or no spans; empty if there is no error.
        turn: index of the message that caused the error; -1: none of them.
    """

    text: str
    spans: tuple[tuple[int, int, int], ...]
    error: str = ""
    turn: int = -1


class Renderer:
    """A process that renders one template for any number of conversations; a context manager.

    Args:
        template: jinja2 text from any source.
        tokens: special tokens such as ``bos_token``, by name.
        special: texts of all special tokens of the tokenizer.
        is_dated: ``strftime_now`` in the template returns today's date; else always the same date.
        fix: remedy for error messages.

    Attributes:
        keys: names that the template's code can read from a message.

    Raises:
        EnvironmentError: jinja2 is missing.
    """

    def __init__(
        self, template: str, tokens: Mapping[str, str], special: Sequence[str] = (), *, is_dated: bool, fix: str
    ) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise EnvironmentError(
                "chat templates need the jinja2 package, which is not installed.",
                fix=f"{install_line(REQUIREMENTS['jinja2'])}, or {fix}",
            )
        self._rest = b""
        self._flaw = ""
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={key: value for key, value in os.environ.items() if key in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")},
        )
        date = None if is_dated else _DATE
        task = {"template": template, "tokens": dict(tokens), "special": list(special), "date": date, **_LIMITS}
        try:
            self._write(task)
            answer = self._read()
            self._flaw = str(answer.get("error", ""))
            self.keys = frozenset(answer.get("keys", ()))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()

    def render(self, tasks: Sequence[Mapping[str, Any]]) -> Iterator[Rendered]:
        """Render each task, in order: ``messages``, ``tools``, and ``prompt`` for the text up to an answer.

        After an error that ended the process, all further tasks return the same error.
        """
        if not self._flaw:
            self._write([dict(task) for task in tasks])
        for _ in tasks:
            answer: dict[str, Any] = {"error": self._flaw} if self._flaw else self._read()
            spans = tuple((int(span[0]), int(span[1]), int(span[2])) for span in answer.get("spans", []))
            yield Rendered(
                str(answer.get("text", "")), spans, str(answer.get("error", "")), int(answer.get("turn", -1))
            )

    def _write(self, value: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # _read reports it
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        """The next line of the process. Without one, the process has ended, and ``_flaw`` has the reason."""
        line = self._line(self._process.stdout)
        try:
            answer = parse_json(line) if line else {"error": self._flaw}
        except ValueError:
            answer = {"error": "the renderer process did not write JSON"}
        return answer if isinstance(answer, dict) else {"error": "the renderer process did not write a JSON object"}

    def _line(self, pipe: IO[bytes] | None) -> bytes:
        assert pipe is not None
        parts = [self._rest]
        while b"\n" not in parts[-1]:
            if not select.select([pipe], [], [], _SECONDS)[0]:
                self._flaw = f"it takes more than {_SECONDS} s"
                self._process.kill()
                return b""
            if not (block := os.read(pipe.fileno(), 1 << 16)):
                self._flaw = f"it takes more than {_LIMITS['cpu_seconds']} s, or crashes"
                return b""
            parts.append(block)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line


def render_chats(
    template: str, chats: Sequence[Sequence[Message]], tokens: Mapping[str, str], *, is_dated: bool
) -> list[str]:
    """The texts of chats up to the assistant's answer.

    Args:
        template: jinja2 text from any source.
        chats: messages of each chat so far.
        tokens: special tokens such as ``bos_token``, by name.
        is_dated: see ``Renderer``.

    Raises:
        DataError: the template cannot be rendered, or takes too much time or memory, or makes too much text.
        EnvironmentError: jinja2 is missing.
    """
    with Renderer(template, tokens, is_dated=is_dated, fix="generate without --chat") as renderer:
        answers = list(renderer.render([{"messages": list(messages), "prompt": True} for messages in chats]))
    if error := next((answer.error for answer in answers if answer.error), ""):
        raise DataError(
            "the chat template cannot be rendered.",
            where="the tokenizer",
            why=error,
            fix="correct chat_template.jinja in the folder of the tokenizer, or generate without --chat",
        )
    return [answer.text for answer in answers]
