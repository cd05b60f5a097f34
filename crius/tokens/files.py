"""Finds a tokenizer.json. Mistral's tekken.json is converted to one, once, in a separate process. No torch.

transformers converts it. The result is stored in the user's cache, keyed by the hash of the input. Files of
sentencepiece (``tokenizer.model``) and tiktoken (``.tiktoken``, and the ``tokenizer.model`` of Llama 3) are refused.
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

from crius.cache_lock import locked
from crius.errors import ConfigError, DataError, EnvironmentError, MissingPathError
from crius.host import python_path, user_cache
from crius.plugins import REQUIREMENTS, install_line
from crius.strict_json import load_object
from crius.untrusted import open_named, parse_json, read_below, read_linked

VERSION = 2
"""Version of the conversion. It must change when the conversion writes something else for the same file."""

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
ADDED_TOKENS = "added_tokens.json"
TEKKEN = "tekken.json"

FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    TEMPLATE,
    ADDED_TOKENS,
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Files of a tokenizer that go where it goes: into a run, out of an import, into an export."""

MOST_BYTES = 1 << 26
"""Most bytes of a file to convert or to keep with a run; the largest one in use has 34 MB."""

PACKAGES = ("transformers", "tiktoken")
"""Packages for a conversion. transformers converts; tiktoken gives the ids to compare with."""

_MOST_BESIDE = 1 << 22
_MOST_SECONDS = 900
_ORIGINAL = "tokenizer.model"
_NAMES = (TEKKEN, _ORIGINAL, "tiktoken.model")
_MODULES = {"protobuf": "google.protobuf", "mistral-common": "mistral_common"}
_RANK = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d{1,8}\r?(\n|\Z)")
_OTHERS = "a tokenizer.json, or --tokenizer.path byte"
_KEEP_IDS = ("", "LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizer", "TokenizersBackend")
"""Values of ``tokenizer_class``, without ``Fast``, of tokenizers that number pieces as sentencepiece does."""

_log = logging.getLogger("crius.data")


def tokenizer_file(path: str) -> Path:
    """The tokenizer.json for ``--tokenizer.path``, converted if the path is a tekken.json.

    Raises:
        ConfigError: it is a file of sentencepiece or tiktoken.
        DataError: there is no tokenizer, or it cannot be converted to the same ids.
        EnvironmentError: a package that the conversion needs is missing.
    """
    place = Path(path).expanduser()
    if place.is_dir() and (place / TOKENIZER).is_file():
        return place / TOKENIZER
    original = original_file(place)
    if original is not None and original.suffix == ".json":
        return _converted(original) / TOKENIZER
    if original is not None:
        raise _of_another_library(original, is_named=place.is_file())
    if place.is_file():
        return place
    kind = f"is a folder without a {TOKENIZER}" if place.is_dir() else "does not exist"
    fix = "--tokenizer.path byte, or the path of a tokenizer.json (hf download REPO tokenizer.json --local-dir DIR)"
    raise MissingPathError(f"tokenizer {path} {kind}.", where="--tokenizer.path", fix=fix)


def tokenizer_files(path: str) -> dict[str, Path]:
    """Places of the existing files of a tokenizer, by the names that they have in a folder of their own.

    Raises:
        CriusError: see ``tokenizer_file``.
    """
    file = tokenizer_file(path)
    place = Path(path).expanduser()
    folder = place if place.is_dir() else place.parent
    places = {name: folder / name for name in FILES}
    places[TOKENIZER] = file
    places[TOKENIZER_CONFIG] = file.with_name(TOKENIZER_CONFIG)  # in another folder, if it was converted
    return {name: place for name, place in places.items() if place.is_file()}


def read_tokenizer_files(path: str) -> dict[str, bytes]:
    """Contents of ``tokenizer_files``; empty for the byte tokenizer.

    Raises:
        CriusError: see ``tokenizer_file``; or a file cannot be read.
    """
    files = tokenizer_files(path) if path != "byte" else {}
    return {name: read_file(place) for name, place in files.items()}


def original_file(place: Path) -> Path | None:
    """The file of tekken, sentencepiece or tiktoken at ``place`` or in that folder; None if there is none.

    Args:
        place: file or folder.
    """
    if place.is_file():
        if place.suffix == ".json":
            return place if "tekken" in place.name and not _is_converted(place) else None
        return place if {".model", ".tiktoken"} & {*place.suffixes} else None
    files = [*(place / name for name in _NAMES), *sorted(place.glob("*.tiktoken"))]
    return next((file for file in files if file.is_file()), None)


def _is_converted(file: Path) -> bool:
    """Whether a JSON file begins like a tokenizer.json."""
    try:
        with open_named(file) as opened:
            return b'"added_tokens"' in opened.read(4096)
    except OSError:
        return False


def refused(file: Path, why: str, fix: str = _OTHERS) -> DataError:
    """The error for a file that cannot be converted or kept."""
    return DataError(f"tokenizer {file} cannot be used.", where="--tokenizer.path", why=why, fix=fix)


def missing(packages: tuple[str, ...], file: Path) -> EnvironmentError | None:
    """The error for a file whose conversion lacks packages; None if all are installed."""
    lacking = _lacking(packages)
    if not lacking:
        return None
    return EnvironmentError(
        f"tokenizer {file} must be converted to a {TOKENIZER}, once, which needs {' and '.join(lacking)}.",
        where="--tokenizer.path",
        fix=f"{install_line(*(REQUIREMENTS[package] for package in lacking))}, or {_OTHERS}",
    )


def _lacking(packages: tuple[str, ...]) -> list[str]:
    return [package for package in packages if not _is_installed(_MODULES.get(package, package))]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing, or is not a package
        return False


def _of_another_library(file: Path, *, is_named: bool) -> ConfigError:
    """The error for a file of sentencepiece or tiktoken, with a command that makes or gets a tokenizer.json.

    Args:
        file: the file.
        is_named: whether the user gave its path, not that of its folder.
    """
    folder = shlex.quote(str(file.parent))
    download = f"hf download REPO {TOKENIZER} --local-dir {folder}, where REPO is the name of this model on the hub"
    if _is_tiktoken(file):
        kind = "a tiktoken file"
        why = "it says neither how a text is split nor which special tokens there are, and so cannot be converted"
        fix = download
    else:
        kind = "a sentencepiece model"
        why = (
            "transformers converts it, with sentencepiece and protobuf; where the model has a tokenizer.json, take that"
        )
        fix = _conversion(file, is_named=is_named) or download
    if (file.parent / TOKENIZER).is_file():
        fix = f"--tokenizer.path {folder}, which has a {TOKENIZER}"
    what = f"tokenizer {file} is {kind}, and Crius reads {TOKENIZER}."
    return ConfigError(what, where="--tokenizer.path", why=why, fix=fix)


def _is_tiktoken(file: Path) -> bool:
    """Whether a file is of tiktoken or of sentencepiece, by its content: Llama 2 and Llama 3 give both one name.

    Raises:
        DataError: it is neither, or cannot be read.
    """
    try:
        with open_named(file) as opened:
            content = opened.read(4096)
    except OSError as error:
        raise _unreadable(file, error) from error
    is_tiktoken = _RANK.match(content) is not None
    if is_tiktoken or content[:1] == b"\n":  # the first field of a sentencepiece model: its pieces
        return is_tiktoken
    is_pointer = content.startswith(b"version https://git-lfs")
    why = "it is a Git LFS pointer" if is_pointer else "it is neither a sentencepiece model nor a tiktoken file"
    raise refused(file, why, f"download the file itself, or {_OTHERS}")


def _conversion(file: Path, *, is_named: bool) -> str:
    """Shell commands that convert a sentencepiece model with transformers; empty if its ids might change.

    ``LlamaTokenizer``, and any class with ``legacy`` false, gives other ids than sentencepiece to a text that begins
    with a space.
    """
    try:
        config = load_object(read_linked(file.parent, TOKENIZER_CONFIG))
    except (OSError, ValueError):
        config = {}
    if str(config.get("tokenizer_class") or "").removesuffix("Fast") not in _KEEP_IDS:
        return ""
    folder = shlex.quote(str(file.parent))
    target = shlex.quote(f"tokenizer-{Path(os.path.abspath(file.parent)).name}")
    commands = []
    if lacking := _lacking(("transformers", "sentencepiece", "protobuf")):
        commands.append(install_line(*(REQUIREMENTS[package] for package in lacking)))
    source = folder
    if file.name != _ORIGINAL:  # the name that transformers looks for
        source = target
        commands.append(f"mkdir -p {target} && cp -- {shlex.quote(str(file))} {target}/{_ORIGINAL}")
    options = "legacy=True" if config.get("add_bos_token") is False else "legacy=True, add_bos_token=True"
    code = (
        "import sys; from transformers import PreTrainedTokenizerFast as Tokenizer; "
        f"Tokenizer.from_pretrained(sys.argv[1], {options}).save_pretrained(sys.argv[2])"
    )
    commands.append(f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {source} {target}")
    then = f"then --tokenizer.path {target}"
    if not is_named and (file.parent / "config.json").is_file():  # a model, which is used by its folder
        commands.append(f"cp -- {target}/{TOKENIZER} {folder}")
        then = "then run the same command again"
    return f"{' && '.join(commands)}\n         {then}"


def _converted(file: Path) -> Path:
    """The folder in the cache with the converted ``file``."""
    content = read_file(file)
    names = (name for name in (TOKENIZER_CONFIG, ADDED_TOKENS) if (file.parent / name).is_file())
    beside = {name: read_file(file.parent / name, _MOST_BESIDE) for name in names}
    parts = [VERSION, _hash(content), {name: _hash(data) for name, data in sorted(beside.items())}]
    entry = user_cache() / "tokenizers" / _hash(json.dumps(parts).encode())[:32]
    if _is_whole(entry):
        return entry
    if lacking := missing(PACKAGES, file):
        raise lacking
    try:
        with locked(entry, "converts a tokenizer to"):
            if not _is_whole(entry):
                _convert(file, {TEKKEN: content, **beside}, entry)
    except OSError as error:
        raise DataError(
            f"the conversion of tokenizer {file} cannot be written: {error.strerror or error}.",
            where=f"cache folder {entry.parent}",
            fix="free some space, or XDG_CACHE_HOME=DIR, with a folder that can be written",
        ) from error
    return entry


def read_file(file: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file in a tokenizer's folder.

    Raises:
        DataError: see ``crius.untrusted.read_linked``.
    """
    try:
        return read_linked(file.parent, file.name, most)
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> DataError:
    return refused(file, f"it cannot be read: {error.strerror or error}", f"put a readable file there, or {_OTHERS}")


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _is_whole(entry: Path) -> bool:
    """Whether the conversion exists, as it was written."""
    try:
        digests = parse_json(read_below(entry, "conversion.json"))["digests"]
        return all(
            _hash(read_below(entry, name, MOST_BYTES)) == digests[name] for name in (TOKENIZER, TOKENIZER_CONFIG)
        )
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _convert(file: Path, files: Mapping[str, bytes], entry: Path) -> None:
    """Write the folder ``entry`` atomically. The caller must hold its lock."""
    partial = entry.with_suffix(".partial")
    for old in (partial, entry):  # left by a killed process, or damaged
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(old)
    try:
        partial.mkdir(parents=True)
        for name, data in files.items():
            (partial / name).write_bytes(data)
        facts = _in_a_process(file, partial)
        for name in {*files} - {TOKENIZER_CONFIG}:
            (partial / name).unlink()
        digests = {name: _hash(read_below(partial, name, MOST_BYTES)) for name in (TOKENIZER, TOKENIZER_CONFIG)}
        (partial / "conversion.json").write_text(json.dumps({**facts, "digests": digests}, indent=2) + "\n")
        partial.rename(entry)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    told = "tokenizer: %s (%s, %s ids) was converted by %s to %s; %s texts have the same ids as in %s"
    size, texts = (f"{facts[name]:,}" for name in ("ids", "texts"))
    # a warning, so that it shows where no log is set up, as in crius import
    _log.warning(told, file, facts["kind"], size, facts["converter"], entry, texts, facts["library"])


def _in_a_process(file: Path, folder: Path) -> dict[str, Any]:
    """Run the conversion with limits in a separate process: the file may be untrusted, and its imports are large."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    quiet = {"TIKTOKEN_CACHE_DIR": "", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-m", "crius.tokens.conversion"],
            input=json.dumps({"file": str(file), "folder": str(folder)}),
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
        found: dict[str, Any] = parse_json(lines[-1])
        if problem := found.get("problem"):
            kinds = {"EnvironmentError": EnvironmentError}
            raise kinds.get(problem.pop("class"), DataError)(problem.pop("what"), **problem)
        return found
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
    if done.returncode < 0:
        last = f"{signal.Signals(-done.returncode).name} ended it, as happens with too much memory or time"
    raise refused(file, f"the conversion failed: {last}", f"download {shlex.quote(file.name)} again, or {_OTHERS}")
