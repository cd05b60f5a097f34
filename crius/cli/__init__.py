"""The ``crius`` command: verbs and the functions that they call. Slow imports, and imports of torch, are inside the
verbs."""

import gc
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from crius import __version__
from crius.cli.app import COMMAND, SOURCES, app, emit, help_text, silence_stdout
from crius.cli.verbs import HELP_FLAGS, Verbs
from crius.config.names import nearest_typo
from crius.config.other_trainers import check_verb, no_verb
from crius.data.documents import is_utf8
from crius.errors import ConfigError, CriusError
from crius.models.registry import import_models
from crius.redact import printable, redact

VERBS = {
    "train": "train",
    "tune": "tune",
    "plan": "plan",
    "verify": "verify",
    "bench": "bench",
    "checkpoint": "checkpoint",
    "chat": "chat",
    "generate": "generate",
    "evaluate": "evaluating",
    "import": "importing",
    "export": "exporting",
    "report": "report",
    "models": "models",
    "runs": "runs",
    "compare": "runs",
    "sweep": "sweep",
    "completion": "completion",
    "_complete": "completion",
    "config": "settings",
    "data": "settings",
    "doctor": "settings",
}
"""Module of each verb in this folder; importing it adds the verb to ``app``."""

IMPORT = "CRIUS_IMPORT"
"""Environment variable with modules to import, joined by commas: the modules of ``--import``, for the processes of a
run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 failed, 2 usage or config, 130 Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if unwritten := [ascii(word) for word in words if not is_utf8(word)]:
        error = ConfigError(f"{' '.join(unwritten)} is not UTF-8.", where="command line", fix="rename the file")
        print(error, file=sys.stderr)
        return error.exit_code
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")  # of letters that the encoding lacks
    SOURCES.origins.clear()
    SOURCES.notes = None
    try:
        words = _with_known_verb(import_named(words))
        add_verbs(words[0] if words else "")
        return _run(words)
    except CriusError as error:
        print(printable(redact(str(error))), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        silence_stdout()
        return 1
    except Exception:  # a mistake of Crius, or of a library below it
        print(printable(redact(traceback.format_exc())), file=sys.stderr)
        return 1


def _run(words: list[str]) -> int:
    """Run the verb that ``words`` begin with, or print its help; returns the exit code.

    Raises:
        CriusError: the words are wrong, or the verb failed.
    """
    if words[:1] == ["--version"]:
        emit(__version__)
        return 0
    verb, rest = app.find(words)
    if isinstance(verb, Verbs) or (any(word.partition("=")[0] in HELP_FLAGS for word in rest) and not verb.takes_all):
        emit(help_text(verb, rest))
        return 0
    call = verb.call(rest, SOURCES)
    if SOURCES.counted and verb.words != ("train",):
        what = f"{' and '.join(sorted(SOURCES.counted))} auto is for crius train, which counts the sequences."
        raise ConfigError(what, where="command line or file", fix="give a number")
    gc.enable()
    return call() or 0


def _with_known_verb(arguments: list[str]) -> list[str]:
    """``arguments``, with ``help`` and ``version`` as the flags that they stand for.

    Raises:
        ConfigError: the first word is not a verb.
    """
    check_verb(arguments)
    verb, *rest = arguments or [""]
    if verb in ("help", "version"):
        return [*rest, f"--{verb}"]
    if near := nearest_typo(verb, VERBS) if verb not in VERBS else "":
        raise no_verb(verb, [near, *rest])
    if verb and verb not in VERBS and not verb.startswith(("-", "_")):
        raise no_verb(verb, ["--help"])
    return arguments


def add_verbs(verb: str = "") -> None:
    """Add one verb to the app, or all verbs if there is no such verb."""
    for name in {VERBS[verb]} if verb in VERBS else dict.fromkeys(VERBS.values()):
        importlib.import_module(f"crius.cli.{name}")


def import_named(arguments: list[str]) -> list[str]:
    """``arguments`` without ``--import MODULE``, after the models of these modules and of ``CRIUS_IMPORT`` are
    registered.

    Processes that this process starts find the modules in the variable, and commands that it prints name them.

    Raises:
        ConfigError: no module is named, or it cannot be used.
    """
    named = [name for name in os.environ.get(IMPORT, "").split(",") if name]
    rest = []
    where = IMPORT if named else ""
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != "--import":
            rest.append(word)
            continue
        named.append(value if equals else next(words, ""))
        where = "--import (command line)"
        if not named[-1] or named[-1].startswith("-"):
            raise ConfigError("--import names no module.", where="command line", fix="--import mymodel for mymodel.py")
    if named:
        sys.path.insert(0, os.getcwd())  # as python -m does
        import_models(named, where)
        os.environ[IMPORT] = ",".join(dict.fromkeys(named))
    COMMAND[:] = [*rest, *(word for name in dict.fromkeys(named) for word in ("--import", name))]
    return rest


__all__ = ["SOURCES", "add_verbs", "app", "main"]
