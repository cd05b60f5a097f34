"""Tokenises a local corpus once, into a token folder that is created whole or not at all."""

import contextlib
import hashlib
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from crius.config.data import DataConfig, TokenizerConfig
from crius.data.checked import BLOCK_BYTES, BlockHasher
from crius.data.documents import describe, find_files
from crius.data.meta import CHAT_VERSION, DTYPES, FORMAT_VERSION, META, TokenMeta
from crius.data.rows import BAD_ROWS, Refusals
from crius.data.tokens import DOCUMENTS, HASHES, TARGETS, TOKEN_BYTES, TOKENS
from crius.data.work import Encode, Encoded, Work, work_on
from crius.errors import ConfigError, DataError
from crius.new_folder import new_folder
from crius.tokens.tokenizer import Tokenizer, build_tokenizer

Worker: TypeAlias = "Connection[Any, Any]"
"""One end of the pipe between a worker and its parent. Chunks go to the worker, ``Encoded`` or an error comes back."""

_log = logging.getLogger("crius.data")


def prepare(data: DataConfig, tokenizer: TokenizerConfig, out: Path, num_workers: int = 1) -> TokenMeta:
    """Tokenise ``data`` into the new folder ``out``.

    Args:
        data: the section; ``source`` is stdlib, text, jsonl, csv or parquet.
        tokenizer: section with the tokenizer.
        out: a folder that does not exist or is empty.
        num_workers: number of processes; the written bytes do not depend on it.

    Raises:
        DataError: the corpus, the tokenizer or ``out`` cannot be used. No files are left behind.
    """
    if data.source in ("huggingface", "tokens"):
        why = "a streamed dataset is read directly" if data.source == "huggingface" else "it is tokens already"
        raise DataError(
            f"source {data.source} cannot be prepared.",
            where="--data.source",
            why=why,
            fix="--data.source stdlib, text, jsonl, csv or parquet",
        )
    if data.format == "chat" and data.source not in ("jsonl", "csv", "parquet"):
        raise DataError(
            f"source {data.source} has no conversations.",
            where="--data.source",
            fix="--data.source jsonl, csv or parquet, or --data.format documents",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out} exists and is not an empty folder.",
            where="OUT",
            fix="choose another OUT; --data.path names what is read",
        )
    files = find_files(data)
    built = build_tokenizer(tokenizer)
    work = work_on(data, files, built, tokenizer)
    return write(out, work, built, source=describe(data, files), num_workers=num_workers)


def write(out: Path, work: Work, tokenizer: Tokenizer, *, source: str, num_workers: int = 1) -> TokenMeta:
    """Do ``work`` into a folder that becomes ``out``, which is absent or empty.

    Raises:
        DataError: there is nothing to write, or the folder cannot be written. No files are left behind.
    """
    start = time.monotonic()
    try:
        with new_folder(out) as temporary:
            chunks = _encode_all(work, temporary, num_workers)
            with contextlib.closing(chunks) as encoded:
                kept = _without_bad_rows(encoded, work.refusals, temporary)
                meta = _write(temporary, kept, tokenizer, source, work.fingerprint)
    except OSError as error:
        raise DataError(
            f"token folder {out} cannot be written: {error.strerror or error}.", where=str(error.filename or out)
        ) from error
    seconds = time.monotonic() - start
    _log.info("tokenised %s: %s tokens in %.1f s", source, f"{meta.num_tokens:,}", seconds)
    return meta


def _without_bad_rows(encoded: Iterable[Encoded], refusals: Refusals, folder: Path) -> Iterator[Encoded]:
    """The chunks with tokens. After the last one, the rows that were left out are listed in ``folder``."""
    for chunk in encoded:
        for error in chunk.errors:
            refusals.refuse(error)
        if len(chunk.ends):
            yield chunk
    if bad_rows := refusals.text():
        (folder / BAD_ROWS).write_text(bad_rows, encoding="utf-8", errors="backslashreplace")


def _write(folder: Path, encoded: Iterable[Encoded], tokenizer: Tokenizer, source: str, fingerprint: str) -> TokenMeta:
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    names = (TOKENS, DOCUMENTS, TOKEN_BYTES, *([TARGETS] if fingerprint else []))
    hashes = {name: hashlib.sha256() for name in names}
    blocks = {name: BlockHasher(BLOCK_BYTES) for name in hashes}
    num_tokens = 0
    num_documents = 0
    largest = 0
    at_start = True

    def put(file: IO[bytes], name: str, array: npt.NDArray[Any]) -> None:
        content = array.tobytes()
        hashes[name].update(content)
        blocks[name].update(content)
        file.write(content)

    with contextlib.ExitStack() as stack:
        tokens, documents = (stack.enter_context((folder / name).open("wb")) for name in (TOKENS, DOCUMENTS))
        targets = stack.enter_context((folder / TARGETS).open("wb")) if fingerprint else None
        for chunk in encoded:
            put(tokens, TOKENS, chunk.tokens.astype(DTYPES[dtype]))
            if targets and chunk.targets is not None:
                put(targets, TARGETS, chunk.targets.astype(np.uint8))
            begins = np.concatenate(([at_start], chunk.ends[:-1]))
            starts = (num_tokens + np.cumsum(chunk.lengths) - chunk.lengths)[begins]
            put(documents, DOCUMENTS, starts.astype("<i8"))
            at_start = bool(chunk.ends[-1])
            largest = max(largest, int(chunk.tokens.max(initial=0)))
            num_tokens = num_tokens + len(chunk.tokens)
            num_documents = num_documents + len(starts)
    if not num_documents:
        what = "conversation" if fingerprint else "document with text"
        raise DataError(f"the corpus is empty: no {what} in {source}.", where="--data.path", fix="give files with text")
    with (folder / TOKEN_BYTES).open("wb") as token_bytes:
        put(token_bytes, TOKEN_BYTES, tokenizer.token_bytes().astype("<i4"))
    table = np.concatenate([block.hashes() for block in blocks.values()]).tobytes()
    (folder / HASHES).write_bytes(table)
    meta = TokenMeta(
        version=CHAT_VERSION if fingerprint else FORMAT_VERSION,
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
        encoder=fingerprint,
    )
    (folder / META).write_text(meta.to_json())
    return meta


def _encode_all(work: Work, temporary: Path, num_workers: int) -> Generator[Encoded, None, None]:
    """Encode each chunk, in order. At most two chunks per worker are in memory."""
    if num_workers <= 1:
        yield from map(work.encode, work.chunks)
        return
    waiting: deque[Worker] = deque()
    with _workers(work.make, temporary, num_workers) as workers:
        for chunk, worker in zip(work.chunks, itertools.cycle(workers), strict=False):
            with _alive(num_workers):
                worker.send(chunk)
            waiting.append(worker)
            if len(waiting) >= 2 * num_workers:
                yield _receive(waiting.popleft(), num_workers)
        while waiting:
            yield _receive(waiting.popleft(), num_workers)


@contextlib.contextmanager
def _workers(make: Callable[[], Encode], temporary: Path, number: int) -> Iterator[list[Worker]]:
    """Processes that encode chunks. Each has its own pipe, so any process can be killed without another one waiting.

    A shared queue could stay locked, or contain half a result.
    """
    # not fork: the parent may have threads (torch, a tokenizer), and a forked child could then wait forever; not
    # forkserver: after a kill a folder with its socket stays
    context = multiprocessing.get_context("spawn")
    ends: list[Worker] = []
    with contextlib.ExitStack() as stack:  # workers are also killed at the end, since no result is missing then
        for _ in range(number):
            here, there = context.Pipe()
            ends.append(stack.enter_context(here))
            process = context.Process(target=_work, args=(there, make, temporary), daemon=True)
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
    """Turn a broken pipe into an error: its worker has ended."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise DataError(
            f"one of {num_workers} tokeniser processes ended before its work did.",
            why="most often it was killed because the memory was full",
            fix=f"--num_workers {max(1, num_workers // 2)}",
        ) from error


def _work(parent: Worker, make: Callable[[], Encode], temporary: Path) -> None:
    """Encode received chunks until the parent kills this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core is enough
    chunks: SimpleQueue[list[Any]] = SimpleQueue()
    Thread(target=_take, args=(parent, chunks, temporary), daemon=True).start()
    try:
        encode = make()
        while True:
            parent.send(encode(chunks.get()))
    except Exception as error:
        parent.send(error)


def _take(parent: Worker, chunks: "SimpleQueue[list[Any]]", temporary: Path) -> None:
    """Receive chunks until the parent is gone. A killed parent cannot end its workers or remove its files."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            chunks.put(parent.recv())
    shutil.rmtree(temporary, ignore_errors=True)
    os._exit(1)
