"""Tokenizers: text to token ids, by bytes or by a Hugging Face ``tokenizer.json``."""

import contextlib
import difflib
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crius.config.data import TokenizerConfig
from crius.errors import DataError, EnvironmentError
from crius.host import python_path
from crius.plugins import install_line
from crius.tokens.files import TOKENIZER_CONFIG, read_file, tokenizer_file
from crius.untrusted import parse_json, read_linked

TokenArray = npt.NDArray[np.integer[Any]]

EOS_NAMES = (
    "<|end_of_text|>",  # Llama 3
    "<|endoftext|>",  # GPT-2, Qwen
    "</s>",  # Llama 2, Mistral, T5
    "<|eot_id|>",
    "<eos>",  # Gemma
    "<｜end▁of▁sentence｜>",  # DeepSeek
    "[EOS]",
    "[SEP]",  # BERT
)
"""Tokens that end a document. The first one that exists is used if ``tokenizer.eos_token`` is empty."""


MAX_VOCAB_SIZE = 1 << 24
"""Most ids of a tokenizer. The largest tokenizers in use have a quarter of a million."""

BOS_NAMES = (
    "<|begin_of_text|>",  # Llama 3
    "<s>",  # Llama 2, Mistral
    "<bos>",  # Gemma
    "<｜begin▁of▁sentence｜>",  # DeepSeek
    "<|startoftext|>",
    "[BOS]",
    "[CLS]",  # BERT
)
"""Tokens that begin a document, used if neither the post-processor nor tokenizer_config.json names one."""

_TRIED: set[str] = set()
"""Hashes of files that passed the trial in this process."""

_SECONDS = 15
_MEMORY_BYTES = 5 << 28
"""Most memory of the trial: the largest tokenizers in use, of 34 MB, take half of it."""

_REGEX = re.compile(rb'"Regex":\s*("(?:[^"\\]|\\.)*")')


class MarkedText(NamedTuple):
    """The tokens of a text, with their places in the text.

    Attributes:
        ids: ``(tokens,)``, ids as from ``Tokenizer.encode_marked``.
        starts: ``(tokens,)``, index of the first character of each token.
        ends: ``(tokens,)``, index after its last character; a character of several tokens is in the range of each.
    """

    ids: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


class Tokenizer(ABC):
    """Text to ids and back.

    Attributes:
        name: value of ``--tokenizer.path``.
        fingerprint: hash of everything that changes the ids of a text; part of the cache key.
        vocab_size: largest id plus one.
        eos_id: id that follows each document.
        bos_id: id that can begin a document; None if the tokenizer has none.
        adds_bos: whether encoding a text with special tokens puts ``bos_id`` before it.
    """

    name: str
    fingerprint: str
    vocab_size: int
    eos_id: int
    bos_id: int | None = None
    adds_bos: bool = False

    @abstractmethod
    def encode(self, text: str) -> TokenArray:
        """Ids of ``text``, ``(tokens,)``, without special tokens: a text cannot forge the end of a document."""

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """``encode`` of each text; faster than single calls if the tokenizer has threads of its own."""
        return [self.encode(text) for text in texts]

    def encode_marked(self, text: str) -> TokenArray:
        """Ids of a text in which names of special tokens become these tokens, as in a rendered chat template."""
        return self.encode(text)

    def encode_marked_texts(self, texts: Sequence[str]) -> list[MarkedText]:
        """``encode_marked`` of each text, with the places of its tokens.

        Raises:
            DataError: the tokenizer does not support it.
        """
        raise DataError(
            f"tokenizer {self.name} does not report the places of its tokens in a text.",
            where="--tokenizer.path",
            why="the mask of a conversation needs them",
            fix="use a tokenizer.json",
        )

    def special_ids(self, names: Iterable[str]) -> set[int]:
        """Ids of the special tokens among ``names``."""
        return set()

    def special_names(self) -> list[str]:
        """Texts of all special tokens."""
        return []

    @abstractmethod
    def decode(self, ids: Sequence[int], *, with_special: bool = False) -> str:
        """Text of ``ids``, with the names of special tokens if asked for; bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def token_bytes(self) -> npt.NDArray[np.int32]:
        """Number of UTF-8 bytes of source text that each id stands for, ``(vocab_size,)``; 0 for special tokens.

        Exact for bytes and byte-level BPE. A tokenizer that normalises text, drops spaces (WordPiece) or adds a space
        at the start (sentencepiece) differs from the source text; then the bytes of the token's own text are counted.
        """


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte: ids 0 to 255, and 256 for the end of a document."""

    def __init__(self) -> None:
        self.name = "byte"
        self.fingerprint = "byte-1"
        self.vocab_size = 257
        self.eos_id = 256

    def encode(self, text: str) -> TokenArray:
        """Bytes of ``text``, a read-only uint8 array."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_marked_texts(self, texts: Sequence[str]) -> list[MarkedText]:
        """Bytes of each text, with the character that each belongs to."""
        found = []
        for text in texts:
            starts = np.repeat(np.arange(len(text)), [len(char.encode()) for char in text])
            found.append(MarkedText(self.encode(text).astype(np.int64), starts, starts + 1))
        return found

    def decode(self, ids: Sequence[int], *, with_special: bool = False) -> str:
        """Text of ``ids`` up to 255, with ``<eos>`` for the end of a document if asked for."""
        eos = b"<eos>" if with_special else b""
        return b"".join(bytes([i]) if i < 256 else eos for i in ids).decode(errors="replace")

    def token_bytes(self) -> npt.NDArray[np.int32]:
        """1 for each byte, 0 for the end of a document, ``(257,)``."""
        counts = np.ones(self.vocab_size, dtype=np.int32)
        counts[self.eos_id] = 0
        return counts


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``, read by the tokenizers library alone, without transformers or a network.

    Args:
        path: path of the file, or of its folder.
        eos_token: token that ends a document; empty: the first of ``EOS_NAMES`` that exists.

    Raises:
        DataError: the file does not exist, is not a tokenizer, or has no token that ends a document.
        EnvironmentError: the tokenizers package is missing.
    """

    def __init__(self, path: str, eos_token: str = "") -> None:
        try:
            import tokenizers  # noqa: PLC0415  optional package
        except ImportError as error:
            raise EnvironmentError(
                f"tokenizer {path} needs the tokenizers package, which is not installed ({error}).",
                where="--tokenizer.path",
                fix=f"{install_line('tokenizers>=0.20')}, or --tokenizer.path byte",
            ) from error
        file = tokenizer_file(path)
        content = read_file(file)
        digest = hashlib.sha256(content).hexdigest()
        os.environ["RUST_BACKTRACE"] = "0"  # a panic of the library is a line, not 40
        _try_out(content, digest, path)
        try:
            self._model = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"{path} is not a tokenizer.json: {error}",
                where="--tokenizer.path",
                fix="download the file again; a Git LFS pointer or a tokenizer_config.json is not enough",
            ) from error
        # a tokenizer.json may cut each text at 512 tokens, or pad it
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True
        self.name = path
        self.vocab_size = 1 + max(self._model.get_vocab(with_added_tokens=True).values(), default=0)
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise DataError(
                f"{path} has a token with id {self.vocab_size - 1:,}; ids above {MAX_VOCAB_SIZE - 1:,} are refused.",
                where="--tokenizer.path",
                why="the model has one row for every id up to the largest",
                fix="number the tokens without gaps",
            )
        config = _read_config(file.with_name(TOKENIZER_CONFIG))
        self.eos_id = self._find_eos(eos_token, config)
        self.bos_id, self.adds_bos = self._find_bos(config)
        self.fingerprint = f"hf-1-{digest}-{self.eos_id}"

    def encode(self, text: str) -> TokenArray:
        """Ids of ``text``, int64.

        Raises:
            DataError: the tokenizer has no tokens for the text.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """Ids of each text, int64. The library spreads the texts over its threads.

        Raises:
            DataError: the tokenizer has no tokens for one of the texts.
        """
        encoded = self._encoded(self._model.encode_batch_fast, texts)
        return [np.asarray(one.ids, dtype=np.int64) for one in encoded]

    def encode_marked(self, text: str) -> TokenArray:
        """Ids of a text in which names of special tokens become these tokens, int64."""
        return self.encode_marked_texts([text])[0].ids

    def encode_marked_texts(self, texts: Sequence[str]) -> list[MarkedText]:
        """``encode_marked`` of each text, with the places of its tokens in characters.

        Raises:
            DataError: the tokenizer has no tokens for one of the texts.
        """
        self._model.encode_special_tokens = False
        try:
            encoded = self._encoded(self._model.encode_batch, texts)
        finally:
            self._model.encode_special_tokens = True
        found = []
        for one in encoded:
            offsets = np.asarray(one.offsets, dtype=np.int64).reshape(-1, 2)
            found.append(MarkedText(np.asarray(one.ids, dtype=np.int64), offsets[:, 0], offsets[:, 1]))
        return found

    def special_names(self) -> list[str]:
        """Texts of all special tokens."""
        return [added.content for added in self._model.get_added_tokens_decoder().values() if added.special]

    def special_ids(self, names: Iterable[str]) -> set[int]:
        """Ids of the special tokens among ``names``."""
        wanted = {*names}
        added: dict[int, Any] = self._model.get_added_tokens_decoder()
        return {token_id for token_id, token in added.items() if token.special and token.content in wanted}

    def decode(self, ids: Sequence[int], *, with_special: bool = False) -> str:
        """Text of ``ids``, with the names of special tokens if asked for."""
        return str(self._model.decode(list(ids), skip_special_tokens=not with_special))

    def token_bytes(self) -> npt.NDArray[np.int32]:
        """Bytes by kind of tokenizer: byte-level, sentencepiece-style or plain text, ``(vocab_size,)``."""
        spec = parse_json(self._model.to_str())
        kinds = {*_types(spec.get("pre_tokenizer")), *_types(spec.get("decoder"))}
        prefix = spec["model"].get("continuing_subword_prefix") or ""
        counts = np.zeros(self.vocab_size, dtype=np.int32)
        for token, token_id in self._model.get_vocab(with_added_tokens=False).items():
            # byte-level: each character of the token's name stands for one byte
            counts[token_id] = len(token) if "ByteLevel" in kinds else _text_bytes(token, prefix)
        for token_id, added in self._model.get_added_tokens_decoder().items():
            counts[token_id] = 0 if added.special else len(added.content.encode())
        return counts

    def _encoded(self, encode: Callable[..., list[Any]], texts: Sequence[str]) -> list[Any]:
        """What a function of the library makes of the texts.

        Raises:
            DataError: it fails on one of them, or makes too many tokens of it.
        """
        try:
            encoded = encode(list(texts), add_special_tokens=False)
        except BaseException as error:  # the library raises bare Exception, and PanicException, which is none
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            for text in texts if len(texts) > 1 else ():
                self._encoded(encode, [text])
            raise self._refused(texts[0], str(error)) from error
        for text, one in zip(texts, encoded, strict=True):
            if len(one) > _most_of(text):
                raise self._refused(text, _too_many(len(one), text))
        return encoded

    def _refused(self, text: str, reason: str) -> DataError:
        return _cannot_encode(self.name, text, reason, self._model.to_str().encode())

    def _find_bos(self, config: dict[str, Any]) -> tuple[int | None, bool]:
        """The id of BOS, and whether a text gets it: whether the post-processor puts it there.

        As in transformers 5, neither ``bos_token`` nor ``add_bos_token`` of tokenizer_config.json does.
        """
        import tokenizers  # noqa: PLC0415  optional package

        # the text is from another tokenizer, since this one may have no token for it
        text = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).encode("a")
        encoded = self._model.post_process(text, add_special_tokens=True)
        special = itertools.takewhile(bool, encoded.special_tokens_mask)
        in_front = encoded.ids[: sum(special)]
        if in_front:
            return in_front[-1], True
        # a vocabulary of text may contain such a name too: Qwen's contains [CLS]
        usual = [name for name in BOS_NAMES if name in self.special_names()]
        names = [name] if (name := spelled(config.get("bos_token"))) else usual
        for token in names:
            if (token_id := self._model.token_to_id(token)) is not None:
                return int(token_id), False
        return None, False

    def _find_eos(self, eos_token: str, config: dict[str, Any]) -> int:
        """The id of EOS: a usual special token, else another usual token, else that of tokenizer_config.json."""
        # special tokens first, since a vocabulary of text may contain such a name too: Gemma's contains HTML
        usual = [*(name for name in EOS_NAMES if name in self.special_names()), *EOS_NAMES]
        for name in [eos_token] if eos_token else [*usual, spelled(config.get("eos_token"))]:
            if (token_id := self._model.token_to_id(name)) is not None:
                return int(token_id)
        special = [added.content for added in self._model.get_added_tokens_decoder().values()]
        near = difflib.get_close_matches(eos_token, special, n=1)
        choice = near or special
        raise DataError(
            f"tokenizer {self.name} has no token {eos_token!r}."
            if eos_token
            else f"tokenizer {self.name} has none of the usual tokens that end a document: {' '.join(EOS_NAMES)}",
            where="--tokenizer.eos_token" if eos_token else "--tokenizer.path",
            fix=f"--tokenizer.eos_token '{choice[0]}'; its special tokens: {' '.join(special[:20])}"
            if choice
            else "add a special token to the tokenizer; it has none",
        )


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer of ``[tokenizer]``.

    Raises:
        DataError: the file is missing or broken, or there is no end-of-document token.
        EnvironmentError: a package is missing.
    """
    if config.path != "byte":
        return HuggingFaceTokenizer(config.path, config.eos_token)
    if config.eos_token:
        raise DataError(
            f"the byte tokenizer has no token {config.eos_token!r}: id 256 ends a document.",
            where="--tokenizer.eos_token",
            fix="leave it out, or --tokenizer.path tokenizer.json",
        )
    return ByteTokenizer()


def spelled(token: Any) -> str:
    """Name of a special token in tokenizer_config.json; empty if it has none."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else ""


def _try_out(content: bytes, digest: str, path: str) -> None:
    """Try a tokenizer.json, once, in a process with limits: see ``crius.tokens.trial``.

    Raises:
        DataError: the library crashes, or takes too much, on loading it or on a text.
    """
    if digest in _TRIED:
        return
    flaw = f"it takes more than {_SECONDS} s"
    text = ""
    script = str(Path(__file__).with_name("trial.py"))
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [sys.executable, "-P", script, str(_SECONDS), str(_MEMORY_BYTES)],
            input=content,
            capture_output=True,
            timeout=6 * _SECONDS,
            env={**os.environ, "PYTHONPATH": python_path(), "TOKENIZERS_PARALLELISM": "false"},
        )
        for answer in map(json.loads, done.stdout.splitlines()):
            text = answer.get("text", text)
            for unit in ("characters", "tokens"):
                if answer.get(unit, 0) > _most_of(text):
                    raise _cannot_encode(path, text, _too_many(answer[unit], text, unit), content)
            if "end" in answer:
                _TRIED.add(digest)
                return
        if done.returncode == -signal.SIGABRT:
            flaw = f"it takes more than {_MEMORY_BYTES / 2**30} GiB"
        elif done.returncode != -signal.SIGXCPU:
            flaw = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
    raise _cannot_encode(path, text, flaw, content)


def _most_of(text: str) -> int:
    """Most tokens of a text: far more than a tokenizer makes of any."""
    return 1024 + 64 * len(text)


def _too_many(number: int, text: str, unit: str = "tokens") -> str:
    return f"it makes {number:,} {unit} of {len(text):,} characters"


def _cannot_encode(name: str, text: str, reason: str, content: bytes) -> DataError:
    """The error for a text that the tokenizer.json ``content`` fails on; empty: it fails before the first one."""
    why = f"the text begins {ascii(text[:60])}" if text else "it fails before it has a text"
    if patterns := b", ".join(_REGEX.findall(content)):
        why += f"; regular expressions of the tokenizer: {ascii(patterns)[2:-1][:300]}"
    return DataError(
        f"tokenizer {name} cannot encode a text: {reason}.",
        where="--tokenizer.path",
        why=why,
        fix="use another tokenizer; one whose vocabulary lacks its unk_token cannot encode every text",
    )


def _read_config(file: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; empty if it is missing.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        config = parse_json(read_linked(file.parent, file.name))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file} cannot be read: {error}.",
            where="--tokenizer.path",
            why="it says whether a document starts with a BOS token",
            fix="download the file again, or remove it",
        ) from error
    return config if isinstance(config, dict) else {}


def _types(node: Any) -> Iterator[str]:
    """Every ``type`` below a node of tokenizer.json."""
    if isinstance(node, dict):
        if isinstance(node.get("type"), str):
            yield node["type"]
        for child in node.values():
            yield from _types(child)
    elif isinstance(node, list):
        for child in node:
            yield from _types(child)


def _text_bytes(token: str, continuing_prefix: str) -> int:
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
        return 1
    return len(token.removeprefix(continuing_prefix).replace("▁", " ").encode())
