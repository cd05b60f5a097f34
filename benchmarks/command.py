"""What the programs that measure share: flags of ``crius train`` on their command line, errors, and results.

No torch here.
"""

import argparse
import dataclasses
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import crius
from crius.cli import import_named
from crius.cli.app import SOURCES, facts_of
from crius.cli.settings import run_of
from crius.config import rules
from crius.config.facts import Facts
from crius.errors import CriusError
from crius.tools.bench.result import show

ROOT = Path(__file__).parent.parent


def positive(text: str) -> int:
    """A number of rounds or steps, for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


def writable(text: str) -> Path:
    """A file for results, for argparse: it is opened before anything is measured, and its text stays."""
    file = Path(text)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    return file


def parser_of(about: str | None, *, prints_json: bool = True) -> argparse.ArgumentParser:
    """A parser with ``--out``, and with ``--json`` for a program that ``publish``es its results."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    if prints_json:
        parser.add_argument("--json", action="store_true", help="print JSON with all samples")
    parser.add_argument("--out", type=writable, help="file to write the JSON to")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options of a program, and all other flags, which are those of ``crius train``. Models of ``--import`` and
    ``CRIUS_IMPORT`` are registered.
    """
    given = import_named(list(sys.argv[1:] if argv is None else argv))
    joined: list[str] = []
    for word in given:
        if joined and joined[-1] == "--vs":  # its value is flags, which argparse would take for its own
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return parser.parse_known_args(joined)


def facts_from(flags: Sequence[str], *, is_dry: bool = False) -> Facts:
    """Facts about the run that ``flags`` describe, whose rules are checked.

    Args:
        flags: those of ``crius train``.
        is_dry: whether none of its ranks is started, so that their number does not matter.

    Raises:
        ConfigError: the flags cannot be read, or break a rule.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", type=int, default=0)
    options, settings = parser.parse_known_args(flags)
    SOURCES.origins.clear()
    facts = facts_of(run_of(*settings), options.nproc, None)
    facts = dataclasses.replace(facts, is_dry=is_dry)
    rules.check(facts)
    return facts


def receipt(name: str) -> dict[str, Any]:
    """Name of the program, time, command, versions and commit; contestants report the machine and torch."""
    return {
        "verb": name,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": {"crius": crius.__version__, "python": platform.python_version()},
        "git": _commit(),
    }


def _commit() -> str | None:
    """The commit of this checkout, followed by ``+`` if files differ; None without git."""
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(describe, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def publish(options: argparse.Namespace, record: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Print ``record`` as JSON or ``lines`` for people, and write ``--out``."""
    show(options.json, record, lines)
    if options.out:
        write_result(options.out, record)


def write_result(file: Path, record: Mapping[str, Any]) -> None:
    """Write ``record`` as JSON."""
    file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def end_with(main: Callable[[], int]) -> NoReturn:
    """Leave Python with the exit code of ``main``, or with that of its error, which is printed."""
    try:
        sys.exit(main())
    except CriusError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:  # a folder or a file that cannot be written
        print(error, file=sys.stderr)
        sys.exit(1)
