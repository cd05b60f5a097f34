"""Tokenise a local corpus once, into a token folder that appears whole or not at all."""

import contextlib
import fcntl
import glob
import hashlib
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import time
import uuid
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from crius.config.data import DataConfig, TokenizerConfig
from crius.data.checked import BLOCK_BYTES, BlockHasher
from crius.data.documents import Piece, describe, find_files, read_pieces
from crius.data.source import TokenArray
from crius.data.tokenizer import Tokenizer, build_tokenizer
from crius.data.tokens import DOCUMENTS, DTYPES, FORMAT_VERSION, HASHES, META, TOKEN_BYTES, TOKENS, TokenMeta
from crius.errors import DataError

CHUNK_CHARACTERS = 4 << 20
CHUNK_PIECES = 4096

Worker: TypeAlias = "Connection[Any, Any]"
"""This side of the pipe to a worker, or a worker's to its parent: chunks go down, ``Encoded`` or an error come up."""

_log = logging.getLogger("crius.data")


class Encoded(NamedTuple):
    """Tokens of some pieces, end-of-document ids included, and how many each piece has and whether it ends one."""

    tokens: TokenArray
    lengths: npt.NDArray[np.int64]
    ends: npt.NDArray[np.bool_]


def prepare(data: DataConfig, tokenizer: TokenizerConfig, out: Path, num_workers: int = 1) -> TokenMeta:
    """Tokenise ``data`` into the new folder ``out``.

    Args:
        data: ``source`` is stdlib, text, jsonl or parquet.
        tokenizer: the tokenizer.
        out: a folder that does not exist or is empty.
        num_workers: processes; the bytes that are written do not depend on it.

    Raises:
        DataError: the corpus, the tokenizer or ``out`` is not usable. Nothing is left behind.
    """
    if data.source in ("huggingface", "tokens"):
        why = "a streamed dataset is read where it is" if data.source == "huggingface" else "it is tokens already"
        raise DataError(
            f"source {data.source} cannot be prepared.",
            where="--data.source",
            why=why,
            fix="--data.source stdlib, text, jsonl or parquet",
        )
    if data.format == "chat":
        raise DataError(
            "conversations cannot be prepared.",
            where="--data.format",
            why="a folder of tokens does not say which of them are trained on",
            fix="leave out --data.format chat",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and is not an empty folder.", where=str(out), fix="choose another, or remove it")
    files = find_files(data)
    return write_folder(
        out,
        read_pieces(data, files),
        build_tokenizer(tokenizer),
        tokenizer_config=tokenizer,
        source=describe(data, files),
        num_workers=num_workers,
    )


def write_folder(
    out: Path,
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    *,
    tokenizer_config: TokenizerConfig,
    source: str,
    num_workers: int = 1,
) -> TokenMeta:
    """Tokenise ``pieces`` in order into ``<out>.tmp-<uuid>`` and rename that to ``out``, which is absent or empty.

    What writers of ``out`` that were killed left behind is removed.

    Raises:
        DataError: there is no document, or the folder cannot be written. Nothing is left behind.
    """
    start = time.monotonic()
    try:
        with _temporary_folder(out) as temporary:
            chunks = _encode_all(_chunks(pieces), tokenizer, tokenizer_config, temporary, num_workers)
            with contextlib.closing(chunks) as encoded:
                meta = _write(temporary, encoded, tokenizer, source)
            _sync(temporary)
            temporary.rename(out)
            _sync(out.parent)
    except OSError as error:
        raise DataError(
            f"token folder {out} cannot be written: {error.strerror or error}.", where=str(error.filename or out)
        ) from error
    seconds = time.monotonic() - start
    _log.info("tokenised %s: %s tokens in %.1f s", source, f"{meta.num_tokens:,}", seconds)
    return meta


@contextlib.contextmanager
def _temporary_folder(out: Path) -> Iterator[Path]:
    """A new folder beside ``out``, removed at the end unless it was renamed.

    It is locked while it is open. The kernel frees the lock of a process that dies, which tells what a killed one left
    from what another process writes now.
    """
    collect(out.parent, glob.escape(out.name))
    temporary = out.with_name(f"{out.name}.tmp-{uuid.uuid4().hex}")
    try:
        with contextlib.ExitStack() as stack:
            while not temporary.exists():  # another process may collect it before it is locked
                temporary.mkdir(parents=True)
                with contextlib.suppress(FileNotFoundError):
                    stack.enter_context(_locked(temporary))
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def collect(folder: Path, name: str = "*") -> None:
    """Remove what killed writers of token folders in ``folder`` left, whose names fit the pattern ``name``."""
    for left in folder.glob(f"{name}.tmp-*"):
        with contextlib.suppress(OSError), _locked(left, fcntl.LOCK_NB):
            shutil.rmtree(left)


@contextlib.contextmanager
def _locked(folder: Path, flag: int = 0) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | flag)
        yield
    finally:
        os.close(handle)


def _write(folder: Path, encoded: Iterable[Encoded], tokenizer: Tokenizer, source: str) -> TokenMeta:
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    hashes = {name: hashlib.sha256() for name in (TOKENS, DOCUMENTS, TOKEN_BYTES)}
    blocks = {name: BlockHasher(BLOCK_BYTES) for name in hashes}
    num_tokens, num_documents, largest, at_start = 0, 0, 0, True

    def put(file: IO[bytes], name: str, array: npt.NDArray[Any]) -> None:
        content = array.tobytes()
        hashes[name].update(content)
        blocks[name].update(content)
        file.write(content)

    with (folder / TOKENS).open("wb") as tokens, (folder / DOCUMENTS).open("wb") as documents:
        for chunk in encoded:
            put(tokens, TOKENS, chunk.tokens.astype(DTYPES[dtype]))
            begins = np.concatenate(([at_start], chunk.ends[:-1]))
            starts = (num_tokens + np.cumsum(chunk.lengths) - chunk.lengths)[begins]
            put(documents, DOCUMENTS, starts.astype("<i8"))
            at_start = bool(chunk.ends[-1])
            largest = max(largest, int(chunk.tokens.max(initial=0)))
            num_tokens, num_documents = num_tokens + len(chunk.tokens), num_documents + len(starts)
    if not num_documents:
        raise DataError(f"the corpus is empty: no document with text in {source}.", where="--data.path")
    with (folder / TOKEN_BYTES).open("wb") as token_bytes:
        put(token_bytes, TOKEN_BYTES, tokenizer.token_bytes().astype("<i4"))
    table = np.concatenate([block.hashes() for block in blocks.values()]).tobytes()
    (folder / HASHES).write_bytes(table)
    meta = TokenMeta(
        version=FORMAT_VERSION,
        dtype=dtype,
        num_tokens=num_tokens,
        num_documents=num_documents,
        max_token_id=largest,
        tokenizer_name=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        source=source,
        sha256={name: value.hexdigest() for name, value in hashes.items()},
        block_bytes=BLOCK_BYTES,
        hashes_xxh3=xxhash.xxh3_128_hexdigest(table),
    )
    (folder / META).write_text(meta.to_json())
    for name in (*hashes, HASHES, META):
        _sync(folder / name)
    return meta


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _chunks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    chunk: list[Piece] = []
    characters = 0
    for piece in pieces:
        chunk.append(piece)
        characters += len(piece.text)
        if characters >= CHUNK_CHARACTERS or len(chunk) >= CHUNK_PIECES:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def encode_chunk(tokenizer: Tokenizer, chunk: list[Piece]) -> Encoded:
    """Tokens of the pieces one after the other, with the end-of-document id after each that ends a document."""
    ends = np.array([piece.ends_document for piece in chunk])
    eos = np.array([tokenizer.eos_id])
    parts: list[TokenArray] = []
    for ids, end in zip(tokenizer.encode_batch([piece.text for piece in chunk]), ends, strict=True):
        parts += (ids, eos) if end else (ids, eos[:0])
    lengths = np.array([len(part) for part in parts]).reshape(-1, 2).sum(axis=1)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    return Encoded(np.concatenate(parts, dtype=dtype, casting="unsafe"), lengths, ends)


def _encode_all(
    chunks: Iterable[list[Piece]], tokenizer: Tokenizer, config: TokenizerConfig, temporary: Path, num_workers: int
) -> Generator[Encoded, None, None]:
    """Each chunk encoded, in order; at most two chunks a worker are in memory."""
    if num_workers <= 1:
        yield from (encode_chunk(tokenizer, chunk) for chunk in chunks)
        return
    waiting: deque[Worker] = deque()
    with _workers(config, temporary, num_workers) as workers:
        for chunk, worker in zip(chunks, itertools.cycle(workers), strict=False):
            with _alive(num_workers):
                worker.send(chunk)
            waiting.append(worker)
            if len(waiting) >= 2 * num_workers:
                yield _receive(waiting.popleft(), num_workers)
        while waiting:
            yield _receive(waiting.popleft(), num_workers)


@contextlib.contextmanager
def _workers(config: TokenizerConfig, temporary: Path, number: int) -> Iterator[list[Worker]]:
    """Processes that encode chunks, each with a pipe of its own: it can be killed at any time and nobody waits for it.

    A queue that is shared would be left locked, or with half a result in it.
    """
    # not fork: the parent may have threads (torch, a tokenizer), and a forked child can then wait for ever
    context = multiprocessing.get_context("forkserver")
    ends: list[Worker] = []
    with contextlib.ExitStack() as stack:  # at the end of the work too it kills: nobody needs what they are at
        for _ in range(number):
            here, there = context.Pipe()
            ends.append(stack.enter_context(here))
            process = context.Process(target=_work, args=(there, config, temporary), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            there.close()
        yield ends


def _receive(worker: Worker, num_workers: int) -> Encoded:
    with _alive(num_workers):
        result = worker.recv()
    if isinstance(result, Exception):
        raise result
    assert isinstance(result, Encoded)
    return result


@contextlib.contextmanager
def _alive(num_workers: int) -> Iterator[None]:
    """A pipe that breaks means that its worker is gone."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise DataError(
            f"one of {num_workers} tokeniser processes ended before its work did.",
            why="most often it was killed because the memory was full",
            fix=f"use {max(1, num_workers // 2)} workers",
        ) from error


def _work(parent: Worker, config: TokenizerConfig, temporary: Path) -> None:
    """Encode what comes until the parent kills this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core is enough threads
    chunks: SimpleQueue[list[Piece]] = SimpleQueue()
    Thread(target=_take, args=(parent, chunks, temporary), daemon=True).start()
    try:
        tokenizer = build_tokenizer(config)
        while True:
            parent.send(encode_chunk(tokenizer, chunks.get()))
    except Exception as error:
        parent.send(error)


def _take(parent: Worker, chunks: "SimpleQueue[list[Piece]]", temporary: Path) -> None:
    """Take chunks until the parent is gone. A killed one can neither end its workers nor remove what it wrote."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            chunks.put(parent.recv())
    shutil.rmtree(temporary, ignore_errors=True)
    os._exit(1)
