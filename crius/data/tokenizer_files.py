"""Finds a tokenizer.json. Files of other libraries are converted to one, once, in a separate process. No torch.

transformers converts sentencepiece (``tokenizer.model``), tiktoken (``.tiktoken``, and the ``tokenizer.model`` of
Llama 3) and Mistral's tekken. The result is stored in the user's cache, keyed by the hash of the input.
"""

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crius.data.lock import locked
from crius.errors import DataError, EnvironmentError
from crius.host import python_path, user_cache
from crius.plugins import REQUIREMENTS, install_line

VERSION = 1
"""Version of the conversion. It must change when the conversion writes something else for the same file."""

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
ADDED_TOKENS = "added_tokens.json"
SOURCE = {"sentencepiece": "tokenizer.model", "tiktoken": "tokenizer.model", "tekken": "tekken.json"}
"""Name under which a conversion reads the file, by kind."""

MOST_BYTES = 1 << 26
"""Most bytes of a file to convert; the largest one in use, Mistral's tekken, has 19 MB."""

_MOST_BESIDE = 1 << 22
_MOST_SECONDS = 900
_NAMES = ("tekken.json", "tokenizer.model", "tiktoken.model")
PACKAGES = {
    "sentencepiece": ("transformers", "sentencepiece", "protobuf"),
    "tiktoken": ("transformers", "tiktoken"),
    "tekken": ("transformers", "tiktoken"),
}
"""Packages for a conversion, by kind. transformers converts; the file's own library gives the ids to compare with."""

_MODULES = {"protobuf": "google.protobuf", "mistral-common": "mistral_common"}
_RANK = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d{1,8}\r?(\n|\Z)")
_OTHERS = "a tokenizer.json, or --tokenizer.path byte"

_log = logging.getLogger("crius.data")


def tokenizer_file(path: str) -> Path:
    """The tokenizer.json for ``--tokenizer.path``, converted if the path is another kind of file.

    Raises:
        DataError: there is no tokenizer, or it cannot be converted to the same ids.
        EnvironmentError: a package that the conversion needs is missing.
    """
    place = Path(path).expanduser()
    if place.is_dir() and (place / TOKENIZER).is_file():
        return place / TOKENIZER
    if (original := original_file(place)) is not None:
        return _converted(original) / TOKENIZER
    if place.is_file():
        return place
    kind = f"is a folder without a {TOKENIZER}" if place.is_dir() else "does not exist"
    fix = "--tokenizer.path byte, or the path of a tokenizer.json (hf download REPO tokenizer.json --local-dir DIR)"
    raise DataError(f"tokenizer {path} {kind}.", where="--tokenizer.path", fix=fix)


def original_file(place: Path) -> Path | None:
    """The file of sentencepiece, tiktoken or tekken at ``place`` or in that folder; None if there is none.

    Args:
        place: file or folder.

    Raises:
        DataError: the folder has several such files.
    """
    if place.is_file():
        if place.suffix == ".json":
            return place if "tekken" in place.name and not _is_converted(place) else None
        return place if {".model", ".tiktoken"} & {*place.suffixes} else None
    if not place.is_dir():
        return None
    named = [place / name for name in _NAMES if (place / name).is_file()]
    found = named[:1] or sorted(file for file in place.glob("*.tiktoken") if file.is_file())
    if len(found) > 1:
        what = f"tokenizer {place} is a folder with {len(found)} .tiktoken files."
        raise DataError(what, where="--tokenizer.path", fix=f"name one of them: --tokenizer.path {found[0]}")
    return found[0] if found else None


def _is_converted(file: Path) -> bool:
    """Whether a JSON file begins like a tokenizer.json."""
    try:
        with file.open("rb") as opened:
            return b'"added_tokens"' in opened.read(4096)
    except OSError:
        return False


def refused(file: Path, why: str, fix: str = _OTHERS) -> DataError:
    """The error for a file that cannot be converted."""
    return DataError(f"tokenizer {file} cannot be converted.", where="--tokenizer.path", why=why, fix=fix)


def missing(packages: tuple[str, ...], file: Path) -> EnvironmentError | None:
    """The error for a file whose conversion lacks packages; None if all are installed."""
    lacking = [package for package in packages if not _is_installed(_MODULES.get(package, package))]
    if not lacking:
        return None
    return EnvironmentError(
        f"tokenizer {file} must be converted to a {TOKENIZER}, once, which needs {' and '.join(lacking)}.",
        where="--tokenizer.path",
        fix=f"{install_line(*(REQUIREMENTS[package] for package in lacking))}, or {_OTHERS}",
    )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing, or is not a package
        return False


def _converted(file: Path) -> Path:
    """The folder in the cache with the converted ``file``."""
    content = _read(file, MOST_BYTES)
    kind = _kind_of(file, content)
    names = (name for name in (TOKENIZER_CONFIG, ADDED_TOKENS) if (file.parent / name).is_file())
    beside = {name: _read(file.parent / name, _MOST_BESIDE) for name in names}
    parts = [VERSION, kind, _hash(content), {name: _hash(data) for name, data in sorted(beside.items())}]
    entry = user_cache() / "tokenizers" / _hash(json.dumps(parts).encode())[:32]
    if _is_whole(entry):
        return entry
    if lacking := missing(PACKAGES[kind], file):
        raise lacking
    try:
        with locked(entry, "converts a tokenizer to"):
            if not _is_whole(entry):
                _convert(file, kind, {f"source/{SOURCE[kind]}": content, **beside}, entry)
    except OSError as error:
        raise DataError(
            f"the conversion of tokenizer {file} cannot be written: {error.strerror or error}.",
            where=f"cache folder {entry.parent}",
            fix="free some space, or XDG_CACHE_HOME=DIR, with a folder that can be written",
        ) from error
    return entry


def _read(file: Path, most: int) -> bytes:
    try:
        with file.open("rb") as opened:
            content = opened.read(most + 1)
    except OSError as error:
        raise refused(file, f"it cannot be read: {error.strerror or error}", "make it readable") from error
    if len(content) > most:
        raise refused(file, f"it has more than {most:,} bytes, and no tokenizer does")
    return content


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _kind_of(file: Path, content: bytes) -> str:
    """sentencepiece, tiktoken or tekken, by content: ``tokenizer.model`` of Llama 2 and of Llama 3 differ in kind."""
    if file.suffix == ".json":
        return "tekken"
    if _RANK.match(content):
        return "tiktoken"
    if content[:1] == b"\n":  # the first field of a sentencepiece model: its pieces
        return "sentencepiece"
    is_pointer = content.startswith(b"version https://git-lfs")
    why = "it is a Git LFS pointer" if is_pointer else "it is neither a sentencepiece model nor a tiktoken file"
    raise refused(file, why, f"download the file itself, or {_OTHERS}")


def _is_whole(entry: Path) -> bool:
    """Whether the conversion exists, as it was written."""
    try:
        digests = json.loads((entry / "conversion.json").read_bytes())["digests"]
        return all(_hash((entry / name).read_bytes()) == digests[name] for name in (TOKENIZER, TOKENIZER_CONFIG))
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _convert(file: Path, kind: str, files: Mapping[str, bytes], entry: Path) -> None:
    """Write the folder ``entry`` atomically. The caller must hold its lock."""
    partial = entry.with_suffix(".partial")
    for old in (partial, entry):  # left by a killed process, or damaged
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(old)
    try:
        for name, data in files.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).write_bytes(data)
        facts = _in_a_process(file, kind, partial)
        for name in {*files} - {TOKENIZER_CONFIG}:
            (partial / name).unlink()
        (partial / "source").rmdir()
        digests = {name: _hash((partial / name).read_bytes()) for name in (TOKENIZER, TOKENIZER_CONFIG)}
        (partial / "conversion.json").write_text(json.dumps({**facts, "digests": digests}, indent=2) + "\n")
        partial.rename(entry)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    told = "tokenizer: %s (%s, %s ids) was converted by %s to %s; %s texts have the same ids as in %s"
    size, texts = (f"{facts[name]:,}" for name in ("ids", "texts"))
    # a warning, so that it shows where no log is set up, as in crius import
    _log.warning(told, file, facts["kind"], size, facts["converter"], entry, texts, facts["library"])


def _in_a_process(file: Path, kind: str, folder: Path) -> dict[str, Any]:
    """Run the conversion with limits in a separate process: the file may be untrusted, and its imports are large."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    quiet = {"TIKTOKEN_CACHE_DIR": "", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-m", "crius.data.tokenizer_conversion"],
            input=json.dumps({"file": str(file), "kind": kind, "folder": str(folder)}),
            text=True,
            errors="replace",
            capture_output=True,
            timeout=_MOST_SECONDS,
            env={**os.environ, **offline, **quiet, "PYTHONPATH": python_path()},
        )
    except subprocess.TimeoutExpired:
        raise refused(file, f"the conversion took more than {_MOST_SECONDS} s") from None
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        if problem := found.get("problem"):
            kinds = {"EnvironmentError": EnvironmentError}
            raise kinds.get(problem.pop("class"), DataError)(problem.pop("what"), **problem)
        return found
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
    if done.returncode < 0:
        last = f"{signal.Signals(-done.returncode).name} ended it, as happens with too much memory or time"
    raise refused(file, f"the conversion failed: {last}", f"download {shlex.quote(file.name)} again, or {_OTHERS}")
