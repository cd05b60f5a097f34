"""Local corpora are tokenised once per machine, into a cache of token folders that is keyed by content."""

import contextlib
import hashlib
import json
import logging
import shlex
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crius.cache_lock import locked
from crius.config.data import DataConfig, TokenizerConfig
from crius.data.checked import SETTLED_NS
from crius.data.documents import describe, find_files, kind_of, reading
from crius.data.meta import CHAT_VERSION, FORMAT_VERSION
from crius.data.prepare import write
from crius.data.tokens import TokenFile
from crius.data.work import chat_encoder, work_on
from crius.errors import DataError
from crius.host import user_cache
from crius.new_folder import collect
from crius.tokens.tokenizer import Tokenizer
from crius.untrusted import open_named, parse_json, read_named

_log = logging.getLogger("crius.data")


def open_cached(
    data: DataConfig, config: TokenizerConfig, tokenizer: Tokenizer, *, flag: str = "--data.path"
) -> TokenFile:
    """Open the token folder of a local corpus in the cache. It is written first if it is missing.

    Any number of processes may call this at once: one tokenises, the others wait for it. If it fails, each of them
    tries and fails with the same error.

    Args:
        data: the section; ``source`` is stdlib, text, jsonl, csv or parquet.
        config: section that ``tokenizer`` was built from.
        tokenizer: the tokenizer.
        flag: flag that ``data.path`` came from, for messages.

    Raises:
        DataError: the corpus is bad, or the cache folder cannot be written.
    """
    root = cache_folder(data)
    files = find_files(data, flag)
    before = [_signature(file) for file in files]
    digests = _digests(files, before, root / "index")
    version = kind_of(data.source).version  # empty for our own kinds
    content: list[Any] = [FORMAT_VERSION, data.source, "" if data.source in ("stdlib", "text") else data.text_field]
    if data.format == "chat":
        content = [CHAT_VERSION, data.source, chat_encoder(data, config, tokenizer).fingerprint]
    if version:
        content.append(version)
    if data.bad_rows == "skip":
        content.append("skip")
    content += [tokenizer.fingerprint, *digests]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
    folder = root / "tokens" / key
    if (found := _open(folder)) is not None:
        return found
    with _locked(root, folder):
        if (found := _open(folder)) is not None:
            return found
        _remove(folder)
        collect(folder.parent)  # of any corpus: a killed run may never be started again
        write(folder, work_on(data, files, tokenizer, config), tokenizer, source=describe(data, files))
        for file, signature in zip(files, before, strict=True):
            if _signature(file) != signature:
                _remove(folder)
                raise DataError(f"{file} changed while it was read.", where=str(file), fix="start again")
    return TokenFile(folder, _mend(folder))


def cache_folder(data: DataConfig) -> Path:
    """``data.cache_dir``, else ``crius`` below ``XDG_CACHE_HOME``, else ~/.cache/crius."""
    if data.cache_dir:
        return Path(data.cache_dir).expanduser()
    return user_cache()


def _open(folder: Path) -> TokenFile | None:
    """Open the cache entry; None if it is missing or damaged."""
    if not folder.exists():
        return None
    try:
        return TokenFile(folder, _mend(folder))
    except DataError as error:
        _log.warning("cache: %s It is tokenised again.", error.what)
        return None


def _mend(folder: Path) -> str:
    return f"rm -r {shlex.quote(str(folder))}: the next start tokenises the corpus again"


def _remove(folder: Path) -> None:
    """Remove an entry. The caller must hold the lock."""
    if folder.exists():
        shutil.rmtree(folder)


@contextlib.contextmanager
def _locked(root: Path, folder: Path) -> Iterator[None]:
    """Hold the lock of an entry."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder, "tokenises"))
        except OSError as error:
            raise DataError(
                f"cache folder {root} cannot be written: {error.strerror or error}.",
                where="--data.cache_dir",
                why="tokenised corpora are cached there",
                fix="--data.cache_dir DIR, a folder that can be written",
            ) from error
        yield


def _signature(file: Path) -> list[int]:
    with reading(file):
        status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _digests(files: tuple[Path, ...], signatures: list[list[int]], index_folder: Path) -> list[str]:
    """sha256 of each file. Files that did not change are not read again: an index stores their hashes."""
    names = [str(file.resolve()) for file in files]
    index_file = index_folder / (hashlib.sha256("\0".join(names).encode()).hexdigest()[:32] + ".json")
    known = _read_index(index_file)
    digests = []
    index = {}
    for name, file, signature in zip(names, files, signatures, strict=True):
        entry = known.get(name)
        hashed = time.time_ns()
        digest = entry[1] if entry is not None and entry[0] == signature else _hash(file)
        digests.append(digest)
        if (entry is not None and entry[0] == signature) or max(signature[1:3]) + SETTLED_NS < hashed:
            index[name] = (signature, digest)
    if index != known:
        _write_index(index_file, index)
    return digests


def _hash(file: Path) -> str:
    with reading(file), open_named(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _read_index(file: Path) -> dict[str, tuple[list[int], str]]:
    try:
        return {
            name: (list(signature), str(digest)) for name, (signature, digest) in parse_json(read_named(file)).items()
        }
    except (OSError, ValueError, TypeError, AttributeError):  # the index is missing or damaged: hash again
        return {}


def _write_index(file: Path, index: dict[str, tuple[list[int], str]]) -> None:
    temporary = file.with_name(f"{file.name}.tmp-{uuid.uuid4().hex}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(index))
        temporary.replace(file)
    except OSError as error:  # the index only saves time
        _log.debug("cache: %s was not written: %s", file, error)
