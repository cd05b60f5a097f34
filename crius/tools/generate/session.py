"""A conversation in the terminal, or with lines from a pipe."""

import contextlib
import importlib
import io
import json
import os
import sys
from dataclasses import replace

from crius.errors import ConfigError, CriusError, DataError
from crius.redact import printable, redact
from crius.tools.generate.chat import Chat
from crius.tools.generate.run import write
from crius.tools.generate.settings import Message, Settings

_HELP = """/reset        forget the conversation; the system message stays
/system TEXT  give the model a system message; without TEXT it has none
/temp NUMBER  temperature; 0 takes the most probable token
/save FILE    write the conversation as a line of JSON, as training data and --prompt_file have it
/help         show these commands
/quit         end, as Ctrl-D does; Ctrl-C stops an answer"""


class Session:
    """The state of a conversation.

    Args:
        chat: the model.
        settings: settings that were checked.
    """

    def __init__(self, chat: Chat, settings: Settings) -> None:
        self._chat = chat
        self._settings = settings
        self._system: list[Message] = []
        self._messages: list[Message] = []
        self.has_ended = False
        self._commands = {
            "/reset": self._reset,
            "/system": self._set_system,
            "/temp": self._set_temperature,
            "/save": self._save,
            "/help": lambda _: _say(_HELP),
            "/quit": self._quit,
        }

    def take(self, line: str) -> bool:
        """Run a command, or answer a question. Returns whether the answer was stopped.

        Raises:
            CriusError: the command is wrong, or the question cannot be answered; the conversation is as before.
        """
        if not line.startswith("/"):
            return self._ask(line)
        name, _, rest = line.partition(" ")
        if name not in self._commands:
            fix = f"{', '.join(self._commands)}; a question may begin with a space"
            raise ConfigError(f"there is no command {name}.", where="the conversation", fix=fix)
        self._commands[name](rest.strip())
        return False

    def _ask(self, question: str) -> bool:
        asked = [*self._messages, {"role": "user", "content": question.strip()}]
        turn = self._chat.answer([*self._system, *asked], self._settings, write)
        write("\n")
        sys.stderr.write(turn.lines)
        is_stopped = turn.finish_reason == "stopped"
        if turn.text or not is_stopped:
            self._messages = [*asked[turn.num_left :], {"role": "assistant", "content": turn.text}]
        return is_stopped

    def _reset(self, _: str) -> None:
        self._messages = []

    def _set_system(self, text: str) -> None:
        self._system = [{"role": "system", "content": text}] if text else []

    def _set_temperature(self, text: str) -> None:
        try:
            changed = replace(self._settings, temperature=float(text))
        except ValueError:
            raise ConfigError(f"{text or 'nothing'} is not a number.", where="/temp", fix="/temp 0.7") from None
        changed.check()
        self._settings = changed

    def _save(self, name: str) -> None:
        try:
            new = os.open(os.path.expanduser(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            with os.fdopen(new, "w", encoding="utf-8") as file:
                file.write(json.dumps({"messages": [*self._system, *self._messages]}) + "\n")
        except OSError as error:
            what = f"{name or 'a file without a name'} cannot be written: {error.strerror}."
            raise DataError(what, where="/save", fix="/save another_name.jsonl") from None

    def _quit(self, _: str) -> None:
        self.has_ended = True


def talk(chat: Chat, settings: Settings) -> int:
    """Answer lines of standard input until they end. Returns the exit code: 1 if a line from a pipe failed.

    Ctrl-C stops an answer, and what was said of it stays.

    Raises:
        KeyboardInterrupt: a second Ctrl-C came, at the prompt.
    """
    if sys.stdin is None:  # closed by the shell
        return 0
    session = Session(chat, settings)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if is_terminal:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # input() then has a history
        _say(f"{chat.name}, {chat.context:,} tokens of context. /help lists the commands, Ctrl-D ends.")
    code = 0
    was_stopped = False
    while not session.has_ended:
        try:
            line = input("> " if is_terminal else "")
            was_stopped = False
            if line.strip():
                was_stopped = session.take(line)
        except EOFError:
            break
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            if was_stopped:
                raise
            was_stopped = True
        except CriusError as error:
            _say(f"error: {' '.join(str(error).split())}")
            code = 1
            was_stopped = False
        if was_stopped and is_terminal:
            _say("(Ctrl-C again ends)")
    return 0 if is_terminal else code


def _say(text: str) -> None:
    sys.stderr.write(printable(redact(text)) + "\n")
