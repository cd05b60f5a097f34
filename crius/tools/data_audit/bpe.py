"""``crius data tokenizer``: trains a byte-level BPE on a corpus."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from crius.config.data import DataConfig, TokenizerConfig
from crius.data.chat.conversations import Conversation
from crius.data.documents import Piece
from crius.data.rows import Refusals
from crius.data.work import read_records
from crius.errors import ConfigError, DataError, EnvironmentError
from crius.plugins import REQUIREMENTS, install_line
from crius.table import aligned
from crius.tokens.files import TOKENIZER_CONFIG
from crius.tokens.tokenizer import MAX_VOCAB_SIZE, Tokenizer, build_tokenizer
from crius.tools.data_audit.rows import local_files

EOS = "<|endoftext|>"
"""Token that ends a document."""

_SMALLEST = 257  # each byte, and the end of a document
_COMPARED = 1 << 20  # characters whose tokens are counted


def train(data: DataConfig, out: Path, vocab: int) -> list[str]:
    """Train on all text of a corpus and write ``out``; the same input gives the same bytes.

    Args:
        data: the section.
        out: a folder that does not exist or is empty.
        vocab: most ids.

    Returns:
        Lines that compare the tokenizer with others.

    Raises:
        ConfigError: ``out`` or ``vocab`` cannot be used.
        DataError: a file cannot be read, there is no text, or the folder cannot be written.
        EnvironmentError: the tokenizers package is missing.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = f"{out} exists and is not an empty folder."
        raise ConfigError(what, where=str(out), fix="choose another, or remove it")
    if not _SMALLEST <= vocab <= MAX_VOCAB_SIZE:
        what = f"a vocabulary of {vocab:,} is not possible."
        why = f"256 bytes and the end of a document are {_SMALLEST} ids; {MAX_VOCAB_SIZE:,} are the most"
        raise ConfigError(what, where="--vocab", why=why, fix="--vocab 4096")
    try:
        import tokenizers  # noqa: PLC0415  optional package
    except ImportError as error:
        what = "a tokenizer is trained by the tokenizers package, which is not installed."
        raise EnvironmentError(what, fix=install_line(REQUIREMENTS["tokenizers"])) from error
    files = local_files(data, "--data.path")
    compared: list[str] = []
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(_texts(data, files, compared), trainer)
    if not compared:
        raise DataError("the files have no text.", where="--data.path", fix="give files with text")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / TOKENIZER_CONFIG).write_text(json.dumps({"eos_token": EOS}))
        (out / "tokenizer.json").write_text(model.to_str(pretty=True), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}.", where=str(out)) from error
    paths = {str(out): str(out), "byte": "byte", "Llama 3": _llama3()}
    built = {name: build_tokenizer(TokenizerConfig(path=path)) for name, path in paths.items() if path}
    return aligned([["tokenizer", "ids", "bytes per token"], *_rows(built, compared)])


def _texts(data: DataConfig, files: Sequence[Path], compared: list[str]) -> Iterator[str]:
    """Each text of the corpus; the first ones are put into ``compared``."""
    records: Iterator[Any] = Refusals(data.bad_rows).accepted(read_records(data, tuple(files)))
    texts = (text for record in records for text in _texts_of(record))
    left = _COMPARED
    for text in texts:
        if left > 0 and text:
            compared.append(text[:left])
            left -= len(text)
        yield text


def _texts_of(record: Conversation | Piece) -> list[str]:
    if isinstance(record, Piece):
        return [record.text]
    return [message["content"] for message in record.messages if message["content"]]


def _rows(tokenizers: dict[str, Tokenizer], texts: Sequence[str]) -> Iterator[list[str]]:
    num_bytes = sum(len(text.encode()) for text in texts)
    for name, tokenizer in tokenizers.items():
        count = sum(len(ids) for ids in tokenizer.encode_batch(texts))
        yield [name, f"{tokenizer.vocab_size:,}", f"{num_bytes / count:.2f}"]


def _llama3() -> str:
    """A tokenizer of Llama 3 in the hub's cache; empty if there is none."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    found = sorted(cache.glob("models--*[Ll]lama-3*/snapshots/*/tokenizer.json"))
    return str(found[0]) if found else ""
