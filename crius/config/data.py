"""What is trained and validated on: sections of ``RunConfig``."""

import re
from dataclasses import dataclass
from typing import Literal

from crius import plugins
from crius.config.names import did_you_mean
from crius.errors import ConfigError

SET = re.compile(r"(\w[\w.-]*)=(.*)", re.DOTALL)
"""``NAME=PATH`` of ``validation.path``; a path that looks like it is written ./PATH."""

SOURCES = ("stdlib", "text", "jsonl", "parquet", "huggingface", "tokens")


def check_source(name: str, where: str) -> None:
    """Raise ConfigError where ``data.source`` is none of ours, nor of an installed package."""
    if name in SOURCES:
        return
    known = list(dict.fromkeys([*SOURCES, *plugins.installed(plugins.DATA)]))
    if name not in known:
        what = f"no data source is called {name or ascii(name)}{did_you_mean(name, known) or '.'}"
        raise ConfigError(what, where=where, fix=f"use one of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus and how it is read."""

    source: str = "stdlib"
    """What kind of data. stdlib: the source text of the running Python's standard library, nothing to download. text:
    files, one document each. jsonl: files with one JSON object a line, plain, .gz or .zst. parquet: files with one row
    each (needs ``pip install crius[chat]``, as .zst does). huggingface: a streamed dataset (needs ``pip install
    crius[huggingface]``). tokens: a folder written by ``crius data prepare``. Installed packages may add kinds of
    files: docs/plugins.md."""

    format: Literal["documents", "chat"] = "documents"
    """What a row is. documents: a text, all of which is trained on. chat: a conversation, which becomes a text by the
    chat template of the tokenizer; what the assistant says is trained on. For jsonl and parquet: docs/chat_data.md."""

    columns: tuple[str, ...] = ()
    """chat: the column (key of a row) with the messages, or those with the prompt and with the completion. Left out:
    messages, conversations, or prompt and completion (or names as clear as that), whatever the rows have."""

    train_on: Literal["all", "last"] = "all"
    """chat: which turns of the assistant are trained on. The rest of a conversation is only read."""

    train_on_end_of_turn: bool = True
    """chat: predict the token that ends a turn, such as <|im_end|>, after what is trained on. no_train_on_end_of_turn:
    the model learns nothing about when to stop."""

    path: tuple[str, ...] = ()
    """Files, folders, globs, or the name of a dataset. text, jsonl, parquet: files, globs and folders (repeat the flag
    for more); of a folder all .txt, .jsonl (also .jsonl.gz and .jsonl.zst) or .parquet files in it and its subfolders.
    huggingface: the dataset's name or folder. tokens: the folder. stdlib takes none."""

    text_field: str = "text"
    """jsonl, parquet, huggingface: the key or column that holds the document."""

    name: str = ""
    """huggingface: the configuration of the dataset, for example en of allenai/c4."""

    split: str = "train"
    """huggingface: the split to train on."""

    virtual_shards: int = 8
    """huggingface: the stream is read as this many shards with a cursor each, whatever the number of ranks. The
    data-parallel ranks must divide it."""

    add_bos: bool | None = None
    """Start each document with the tokenizer's BOS token, which is never a label. Left out: where the tokenizer itself
    puts a BOS in front of a text (its post-processor, or add_bos_token of tokenizer_config.json); a run that resumes
    keeps the rule that it began with. Without a BOS a document starts with the end-of-document token."""

    add_eos: bool = True
    """Predict the end-of-document token after the last token of each document. no_add_eos predicts nothing there."""

    packing: bool = True
    """chat: fill each sequence with whole conversations, first-fit, none of which sees another; that takes
    model.attention_mask document. no_packing gives each conversation a sequence of its own, padded to
    training.seq_len: mostly padding where conversations are short."""

    too_long: Literal["truncate", "drop"] = "truncate"
    """chat: what becomes of a conversation with more than training.seq_len tokens. truncate keeps its first ones and
    trains on what is to be predicted among them; drop leaves it out. The log has the number."""

    shuffle: bool = True
    """Visit the sequences of an indexed corpus in a random order, a new one each epoch. Streams are not shuffled."""

    cache_dir: str = ""
    """Where tokenised corpora are kept. Empty: crius/ below XDG_CACHE_HOME or ~/.cache."""

    prefetch: int = 2
    """Batches prepared ahead by a background thread. 0 prepares each one when it is asked for."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Text to token ids."""

    path: str = "byte"
    """What makes tokens of text. byte: one token a byte and one for the end of a document, 257 in all. Else a Hugging
    Face tokenizer.json, or a folder that holds one (needs ``pip install crius[huggingface]``). A file of sentencepiece,
    tiktoken or tekken, or a folder that holds one, is converted once, into the cache (needs ``pip install
    crius[tokenizers]``)."""

    eos_token: str = ""
    """Token that ends a document. Empty: the first of the usual names that the tokenizer has."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Loss on data that is never trained on."""

    interval: int = 500
    """Steps between validations; the last step always validates. 0 turns validation off."""

    num_samples: int = 128
    """Sequences that are scored, the same ones every time and under every layout. At most what is held out."""

    fraction: float = 0.02
    """Share of the corpus that is never trained on: its end, or for huggingface one document in 1 / fraction. It is
    held out also where ``interval`` is 0, so that validation has no effect on training. Unused where ``path`` is
    given. 0 trains on everything."""

    path: tuple[str, ...] = ()
    """Validate on this data, of the same kind as ``data.source``, instead of holding out a part of the training data.
    huggingface: a split of the dataset, for example validation. NAME=PATH puts it into the set NAME, which is scored
    and reported on its own (repeat the flag for more)."""

    @property
    def sets(self) -> dict[str, tuple[str, ...]]:
        """Paths of each set by its name. Without names one set, whose name is empty, also where nothing is given."""
        sets: dict[str, tuple[str, ...]] = {}
        for written in self.path:
            name, path = match.groups() if (match := SET.fullmatch(written)) else ("", written)
            sets[name] = (*sets.get(name, ()), path)
        return sets or {"": ()}
