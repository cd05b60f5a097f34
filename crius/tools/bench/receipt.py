"""What the result of a benchmark says beside its numbers, so that it can be repeated."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import crius
from crius.errors import ConfigError, EnvironmentError

_ROOT = Path(crius.__file__).parent.parent


def receipt(verb: str) -> dict[str, Any]:
    """Verb, time, command and versions; the machine and torch are the contestants' to tell."""
    return {
        "verb": verb,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": {"crius": crius.__version__, "python": platform.python_version()},
        "git": git_commit(),
    }


def git_commit() -> str | None:
    """The commit of the checkout that Crius runs from, with ``+`` behind it where files differ; None without one."""
    if not (_ROOT / ".git").exists():
        return None
    git = ["git", "-C", str(_ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def check_result_file(file: Path) -> None:
    """Before anything is measured, whether ``write_result`` can write; what is there stays.

    Raises:
        ConfigError: it cannot.
    """
    is_new = not file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(
            f"the result cannot be written to {file}: {error.strerror}.",
            where="--out",
            fix="name a file in a folder that you may write: --out FILE",
        ) from None
    if is_new:
        file.unlink()


def write_result(file: Path, result: Mapping[str, Any]) -> None:
    """Write ``result`` as JSON, with the folders above it.

    Raises:
        EnvironmentError: it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise EnvironmentError(
            f"the result cannot be written to {file}: {error.strerror}.",
            where="--out",
            fix="name a file in a folder that you may write: --out FILE",
        ) from None
