"""The work of tokenising documents or conversations into a token folder, in chunks that any process can encode."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from crius.config.data import DataConfig, TokenizerConfig
from crius.data.chat.conversations import Conversation, read_conversations
from crius.data.chat.mask import ChatEncoder
from crius.data.documents import Piece, read_pieces
from crius.data.rows import Refusals
from crius.errors import DataError
from crius.tokens.template import read_template, special_tokens
from crius.tokens.tokenizer import TokenArray, Tokenizer, build_tokenizer

CHUNK_CHARACTERS = 4 << 20
CHUNK_PIECES = 4096
CHUNK_CONVERSATIONS = 256


class Encoded(NamedTuple):
    """Tokens of some pieces, including end-of-document ids. ``lengths`` has the tokens of each piece, and ``ends``
    whether it ends a document.

    For samples of conversations, ``targets`` marks the tokens to predict, and ``errors`` has one for each conversation
    that is left out.
    """

    tokens: TokenArray
    lengths: npt.NDArray[np.int64]
    ends: npt.NDArray[np.bool_]
    targets: npt.NDArray[np.bool_] | None = None
    errors: tuple[DataError, ...] = ()


class SampleEncoder(Protocol):
    """Encodes conversations as samples.

    Attributes:
        fingerprint: changes when the same conversation gives another sample.
    """

    fingerprint: str

    def encode(self, conversations: Iterable[Any]) -> Iterable[tuple[TokenArray, npt.NDArray[np.bool_]] | DataError]:
        """Ids ``(n,)`` of each conversation, and a bool ``(n,)`` for the ids to predict; or why it is left out."""


Encode: TypeAlias = Callable[[list[Any]], Encoded]
"""Function that encodes a chunk: a list of pieces of documents, or of conversations."""


class Work(NamedTuple):
    """Chunks to tokenise, and the functions for it.

    Attributes:
        chunks: chunks of pieces or conversations, in order.
        encode: function that encodes a chunk in this process.
        make: function that makes ``encode`` in another process; it can be sent there.
        fingerprint: fingerprint of the ``SampleEncoder``; empty for documents.
        refusals: rows that cannot be used.
    """

    chunks: Iterable[list[Any]]
    encode: Encode
    make: Callable[[], Encode]
    fingerprint: str = ""
    refusals: Refusals = Refusals("refuse")


def encode_chunk(tokenizer: Tokenizer, chunk: list[Piece]) -> Encoded:
    """Tokens of the pieces in order, with the end-of-document id after each piece that ends a document."""
    ends = np.array([piece.ends_document for piece in chunk])
    eos = np.array([tokenizer.eos_id])
    parts: list[TokenArray] = []
    for ids, end in zip(tokenizer.encode_batch([piece.text for piece in chunk]), ends, strict=True):
        parts += (ids, eos) if end else (ids, eos[:0])
    lengths = np.array([len(part) for part in parts]).reshape(-1, 2).sum(axis=1)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    return Encoded(np.concatenate(parts, dtype=dtype, casting="unsafe"), lengths, ends)


def encode_samples(encoder: SampleEncoder, chunk: list[Any]) -> Encoded:
    """The samples of the conversations, in order."""
    errors = []
    tokens: list[TokenArray] = []
    targets: list[npt.NDArray[np.bool_]] = []
    for sample in encoder.encode(chunk):
        if isinstance(sample, DataError):
            errors.append(sample)
            continue
        tokens.append(np.asarray(sample[0]))
        targets.append(np.asarray(sample[1], dtype=np.bool_))
    lengths = np.array([len(ids) for ids in tokens], dtype=np.int64)
    assert lengths.all() and lengths.tolist() == [len(is_target) for is_target in targets], "a sample has tokens"
    ends = np.ones(len(tokens), dtype=np.bool_)
    joined = np.concatenate([np.empty(0, dtype=np.uint16), *tokens])
    return Encoded(joined, lengths, ends, np.concatenate([ends[:0], *targets]), tuple(errors))


def document_work(
    pieces: Iterable[Piece | DataError], tokenizer: Tokenizer, config: TokenizerConfig, bad_rows: str = "refuse"
) -> Work:
    """Work on documents, each followed by the end-of-document id. ``bad_rows``: see ``Refusals``."""
    refusals = Refusals(bad_rows)
    chunks = _chunks(refusals.accepted(pieces))
    return Work(chunks, partial(encode_chunk, tokenizer), partial(_document_encoder, config), refusals=refusals)


def chat_work(data: DataConfig, files: Sequence[Path], tokenizer: Tokenizer, config: TokenizerConfig) -> Work:
    """Work on the conversations of ``files``, as samples.

    Raises:
        DataError: the tokenizer has no chat template.
    """
    encoder = chat_encoder(data, config, tokenizer)
    refusals = Refusals(data.bad_rows)
    conversations = encoder.counted(refusals.accepted(read_conversations(data, files)))
    return Work(
        chunks=_batched(conversations, CHUNK_CONVERSATIONS),
        encode=partial(encode_samples, encoder),
        make=partial(_sample_encoder, data, config),
        fingerprint=encoder.fingerprint,
        refusals=refusals,
    )


def work_on(data: DataConfig, files: tuple[Path, ...], tokenizer: Tokenizer, config: TokenizerConfig) -> Work:
    """Work on the documents or conversations of ``files``, by ``data.format``."""
    if data.format == "chat":
        return chat_work(data, files, tokenizer, config)
    return document_work(read_pieces(data, files), tokenizer, config, data.bad_rows)


def read_records(data: DataConfig, files: tuple[Path, ...]) -> Iterator[Conversation | Piece | DataError]:
    """What each row of ``files`` becomes, in order, by ``data.format``, or why it cannot be used.

    Raises:
        DataError: a file cannot be read further.
    """
    return read_conversations(data, files) if data.format == "chat" else read_pieces(data, files)


def chat_encoder(data: DataConfig, config: TokenizerConfig, tokenizer: Tokenizer) -> ChatEncoder:
    """The encoder with the chat template from the tokenizer's folder.

    Raises:
        DataError: there is no template.
    """
    is_folder = config.path != "byte"
    template = read_template(config.path) if is_folder else ""
    return ChatEncoder(tokenizer, template, special_tokens(config.path) if is_folder else {}, data)


def _document_encoder(config: TokenizerConfig) -> Encode:
    return partial(encode_chunk, build_tokenizer(config))


def _sample_encoder(data: DataConfig, config: TokenizerConfig) -> Encode:
    return partial(encode_samples, chat_encoder(data, config, build_tokenizer(config)))


def _batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    found = iter(items)
    while chunk := list(itertools.islice(found, size)):
        yield chunk


def _chunks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    chunk: list[Piece] = []
    characters = 0
    for piece in pieces:
        chunk.append(piece)
        characters += len(piece.text)
        if characters >= CHUNK_CHARACTERS or len(chunk) >= CHUNK_PIECES:
            yield chunk
            chunk = []
            characters = 0
    if chunk:
        yield chunk
