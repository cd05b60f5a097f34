"""Training and validation data: sections of ``RunConfig``."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, get_args

from crius import plugins
from crius.config.names import did_you_mean
from crius.errors import ConfigError
from crius.untrusted import parse_json

SET = re.compile(r"(\w[\w.-]*)=(.*)", re.DOTALL)
"""``NAME=PATH`` of ``validation.path``; a path that looks like it is written ./PATH."""

SOURCES = ("stdlib", "text", "jsonl", "csv", "parquet", "huggingface", "tokens")

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Known roles. A chat template may support only some of them."""

MEANINGS = ("messages", "prompt", "completion", "tools", "role", "content", *ROLES)
"""Meanings that ``data.columns`` gives to names of the files."""


def check_source(name: str, where: str) -> None:
    """Raise ConfigError if ``data.source`` is neither one of Crius's sources nor one of an installed package."""
    if name in SOURCES:
        return
    known = list(dict.fromkeys([*SOURCES, *plugins.installed(plugins.DATA)]))
    if name not in known:
        what = f"no data source is called {name or ascii(name)}{did_you_mean(name, known) or '.'}"
        raise ConfigError(what, where=where, fix=f"use one of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus, and how it is read."""

    source: str = "stdlib"
    """Kind of data. stdlib: the source text of the running Python's standard library; nothing is downloaded. text:
    files, each file is one document. jsonl: files with one JSON object per line, or with one array of objects. csv: CSV
    and TSV files whose first row names the columns. jsonl and csv may be .gz or .zst. parquet: files with one document
    per row (needs ``pip install crius[chat]``, as .zst does). huggingface: a streamed dataset (needs ``pip install
    crius[huggingface]``). tokens: a folder written by ``crius data prepare``. Installed packages may add sources:
    docs/plugins.md. Left out: the source that data.path looks like."""

    format: Literal["documents", "chat"] = "documents"
    """Meaning of a row. documents: a row is a text, and the model is trained on all of it. chat: a row is a
    conversation. The tokenizer's chat template turns it into a text, and the model is trained on what the assistant
    says. Only for jsonl, csv and parquet: docs/chat_data.md. Left out: what the first rows look like."""

    columns: tuple[str, ...] = ()
    """chat: the column (key of a row) that holds the messages, or the two columns that hold the prompt and the
    completion. Left out: messages, conversations, or prompt and completion (or names as clear as these), whichever the
    rows have. NAME=MEANING translates a name of the files: a column to messages, prompt, completion, system or tools, a
    key of messages to role or content, a role to user, assistant or another role. Repeat the flag for more, or join
    them by commas. Dots lead into objects: data.turns=messages."""

    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Rows that cannot be used, such as a broken line, a null text or a conversation without an answer. refuse: the
    first one is an error. skip: they are left out and counted, and bad_rows.txt in the folder data of the run lists
    them. More than 1 % of the rows, and more than one row, is an error all the same."""

    train_on: Literal["all", "last"] = "all"
    """chat: which turns of the assistant the model is trained on. It reads the rest of the conversation without being
    trained on it."""

    train_on_end_of_turn: bool = True
    """chat: train the model to predict the token that ends a turn, such as <|im_end|>. With no_train_on_end_of_turn the
    model does not learn when to stop."""

    path: tuple[str, ...] = ()
    """Files, folders, globs, or the name of a dataset. text, jsonl, csv, parquet: files, globs and folders (repeat the
    flag for more). A folder stands for all .txt, .jsonl and .ndjson (.json if it has neither), .csv and .tsv (these
    also .gz and .zst), or .parquet files in it and in its subfolders. huggingface: the dataset's name or folder.
    tokens: the folder. stdlib takes no path."""

    mix: tuple[str, ...] = ()
    """Several sources in exact shares, in place of path: tables [[data.mix]] of a TOML file, with name, source, path,
    format, field, columns, on_end (repeat, stop or share) and one of weight, tokens and epochs. A weight is a share of
    the sequences, or a whole number of a ratio. On a command line a table is a JSON object: docs/mixtures.md."""

    stage: tuple[str, ...] = ()
    """Other weights of data.mix from a step on: tables [[data.stage]] with from, the first step, and weights by name of
    the sources that are read then. The stage from 1 replaces the weights of the entries."""

    alpha: float | None = None
    """Weights of data.mix from the sizes of its sources: in proportion to size to this power. 1: by size; 0: equal
    shares; between them small sources are read more often than large ones. Left out: the entries have weights."""

    text_field: str = "text"
    """jsonl, csv, parquet, huggingface: the key or column that holds the document. Dots lead into objects."""

    name: str = ""
    """huggingface: the configuration of the dataset, for example en of allenai/c4."""

    split: str = "train"
    """huggingface: the split to train on."""

    virtual_shards: int = 8
    """huggingface: number of shards that the stream is read as, each with a cursor of its own. It does not depend on
    the number of ranks, but the number of data-parallel ranks must divide it."""

    add_bos: bool | None = None
    """Start each document with the tokenizer's BOS token, which is never a label. Left out: on if the tokenizer itself
    puts a BOS in front of a text (by its post-processor, or by add_bos_token of tokenizer_config.json); a resumed run
    keeps the choice of its first start. Without a BOS a document starts with the end-of-document token."""

    add_eos: bool = True
    """Train the model to predict the end-of-document token after the last token of each document. With no_add_eos the
    last token has no label."""

    packing: bool = True
    """chat: fill each sequence with whole conversations (first-fit). They do not see each other, which needs
    model.attention_mask document. no_packing gives each conversation a sequence of its own, padded to training.seq_len:
    if conversations are short, most of it is padding."""

    too_long: Literal["truncate", "drop"] = "truncate"
    """chat: how to treat a conversation with more than training.seq_len tokens. truncate: keep its first seq_len tokens
    and train on the assistant's tokens among them. drop: leave the conversation out. The log says how many there
    are."""

    shuffle: bool = True
    """Read the sequences of an indexed corpus in random order, with a new order in each epoch. Streams are not
    shuffled."""

    cache_dir: str = ""
    """Folder of tokenised corpora. Empty: crius/ in XDG_CACHE_HOME, or in ~/.cache."""

    prefetch: int = 2
    """Batches that a background thread prepares ahead. 0: each batch is prepared when the step asks for it."""

    @property
    def named_columns(self) -> tuple[str, ...]:
        """The entries of ``columns`` that are names of columns."""
        return tuple(entry for entry in self.columns if "=" not in entry)

    @property
    def meanings(self) -> dict[str, str]:
        """The names that ``columns`` translates, and their meanings."""
        pairs = [part.rpartition("=") for entry in self.columns if "=" in entry for part in entry.split(",")]
        return {name: meaning for name, _, meaning in pairs}


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Text to token ids."""

    path: str = "byte"
    """The tokenizer. byte: one token per byte and one for the end of a document, 257 in all. Otherwise a Hugging Face
    tokenizer.json, or a folder with such a file (needs ``pip install crius[huggingface]``). Mistral's tekken.json is
    converted once, into the cache (needs ``pip install crius[tekken]``). Files of sentencepiece and tiktoken are
    refused, with the way to a tokenizer.json."""

    eos_token: str = ""
    """Token that ends a document. Empty: the first of the usual names that the tokenizer knows."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Loss on data that is never trained on."""

    interval: int = 500
    """Steps between validations; the last step always validates. 0 turns validation off."""

    num_samples: int = 128
    """Sequences that are scored, the same ones at every validation and under every layout. At most all held-out
    sequences are scored."""

    fraction: float = 0.02
    """Share of the corpus that is never trained on: its end, or for huggingface one document in 1 / fraction. It is
    held out even if ``interval`` is 0, so that validation does not change training. No effect if ``path`` is given. 0:
    train on everything."""

    path: tuple[str, ...] = ()
    """Validate on this data instead of holding out a part of the training data. Its kind is that of ``data.source``.
    huggingface: a split of the dataset, for example validation. NAME=PATH puts the data into the validation set NAME,
    which is scored and reported separately (repeat the flag for more)."""

    @property
    def sets(self) -> dict[str, tuple[str, ...]]:
        """Paths of each set by its name. Without names there is one set, whose name is empty, also without a path."""
        sets: dict[str, tuple[str, ...]] = {}
        for written in self.path:
            name, path = match.groups() if (match := SET.fullmatch(written)) else ("", written)
            sets[name] = (*sets.get(name, ()), path)
        return sets or {"": ()}


TABLES = ("data.mix", "data.stage")
"""Settings that are arrays of tables in TOML, and JSON objects on a command line."""

ONE_CORPUS = ("data.source", "data.format", "data.path", "data.text_field", "data.columns")
"""Settings of a single corpus, in place of which a mixture has entries."""

DENOMINATOR = 10**6
"""Shares are exact where integers up to this sum give them; else they are rounded to a millionth."""

OnEnd = Literal["repeat", "stop", "share"]

_CHOICES = {"on_end": get_args(OnEnd), "format": ("documents", "chat")}

KINDS = ("weight", "tokens", "epochs")
"""Keys that give a source its share."""


@dataclass(frozen=True, kw_only=True)
class MixEntry:
    """A source of a mixture.

    Attributes:
        name: name in reports.
        source, path, format, field, columns: as the settings of ``[data]``; field is ``data.text_field``.
        weight: share of the sequences, or a whole number that stands for a ratio.
        tokens: tokens that it should give to the run; the share follows.
        epochs: how often it should be read; the share follows.
        on_end: after its sequences were read once, or for its epochs: repeat them, stop the run, or share its weight
            among the others in proportion.
    """

    name: str = ""
    source: str = ""
    path: tuple[str, ...] = ()
    format: str = ""
    field: str = ""
    columns: tuple[str, ...] = ()
    weight: float | None = None
    tokens: float | None = None
    epochs: float | None = None
    on_end: OnEnd = "repeat"

    def corpus(self, data: DataConfig) -> DataConfig:
        """The section of this source alone."""
        return replace(
            data,
            mix=(),
            stage=(),
            source=self.source,
            path=self.path,
            format="chat" if self.format == "chat" else "documents",
            text_field=self.field or data.text_field,
            columns=self.columns,
        )


_FLAG = re.compile(r"--data\.(?:text_)?(source|format|path|field|columns)( [^\s(]*[^\s(),;])?")


def as_keys(text: str) -> str:
    """``text`` with keys of a table of ``data.mix`` in place of flags of ``ONE_CORPUS``."""
    text = _FLAG.sub(lambda match: f'{match[1]} = "{match[2][1:]}"' if match[2] else match[1], text)
    return re.sub(r"columns = (\S+) columns = (\S+)", r"columns = [\1, \2]", text)


def table_text(table: Mapping[str, Any]) -> str:
    """A table of TOML as the text that stands for it."""
    return json.dumps(table, ensure_ascii=False, default=str)


def tables_of(texts: Sequence[str]) -> list[Any]:
    """The tables that ``texts`` stand for; a text that is not JSON stays."""
    found: list[Any] = []
    for text in texts:
        try:
            found.append(parse_json(text))
        except ValueError:
            found.append(text)
    return found


def read_entry(text: str) -> MixEntry:
    """An entry of ``data.mix``.

    Raises:
        ValueError: it is not one; the message is the end of a sentence about it.
    """
    table = _object(text, MixEntry.__dataclass_fields__)
    for name, value in table.items():
        if name in KINDS:
            _check_number(name, value)
            continue
        texts = value if name in ("path", "columns") and isinstance(value, list) else [value]
        if not all(isinstance(one, str) for one in texts):
            raise ValueError(f"has {name} = {json.dumps(value)}, which is not text")
        if value not in _CHOICES.get(name, [value]):
            raise ValueError(f"has {name} = {value}, which is not one of {', '.join(_CHOICES[name])}")
        if name in ("path", "columns"):
            table[name] = tuple(texts)
    return MixEntry(**table)


def read_stage(text: str) -> tuple[int, dict[str, float]]:
    """The first step of an entry of ``data.stage``, and the weight of each source that is read then.

    Raises:
        ValueError: as ``read_entry``.
    """
    table = _object(text, ("from", "weights"))
    first = table.get("from")
    weights = table.get("weights")
    if type(first) is not int or first < 1:
        raise ValueError(f"has from = {json.dumps(first)}, which is not the number of a step")
    if not isinstance(weights, dict) or not weights:
        raise ValueError("has no weights")
    for name, value in weights.items():
        _check_number(f"weights.{name}", value)
    return first, weights


def _object(text: str, known: Iterable[str]) -> dict[str, Any]:
    (table,) = tables_of([text])
    if not isinstance(table, dict):
        raise ValueError("is not a table")
    if unknown := [name for name in table if name not in known]:
        raise ValueError(f"has the unknown key {unknown[0]}; the keys are {', '.join(known)}")
    return table


def _check_number(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value < 1e18:
        raise ValueError(f"has {name} = {json.dumps(value)}, which is not a positive number below 1e18")


def exact(number: float) -> Fraction:
    """The fraction that a number of TOML was written as: 0.1 is 1/10."""
    return Fraction(str(number))


def sums_up(weights: Iterable[float]) -> bool:
    """Whether the numbers are shares that sum to 1, or whole numbers."""
    numbers = [exact(weight) for weight in weights]
    return sum(numbers) == 1 or all(number.denominator == 1 for number in numbers)


def integers(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Integers in the ratio of ``shares``, without a common divisor. If their sum is above ``DENOMINATOR``, each is
    rounded to a share of about that sum; a positive share gets at least 1.
    """
    common = math.lcm(*(share.denominator for share in shares))
    numbers = [int(share * common) for share in shares]
    divisor = math.gcd(*numbers)
    total = sum(numbers)
    if total // divisor > DENOMINATOR:
        return tuple(number and max(1, number * DENOMINATOR // total) for number in numbers)
    return tuple(number // divisor for number in numbers)
