"""Prints sequences as text with marks around the parts that are trained on. No torch."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, TextIO

import numpy as np

from crius.data.corpus import Corpus
from crius.data.mixture import MixedSource
from crius.data.samples import SampleSource
from crius.data.source import NO_LABEL, PADDING_ID, Rows, TokenSource
from crius.redact import printable
from crius.tokens.tokenizer import Tokenizer
from crius.units import counted

OPEN = "⟦"
CLOSE = "⟧"
"""Marks around text that is trained on, if there are no colours."""

_GREEN = "\x1b[32m"
_PLAIN = "\x1b[0m"
_SHOWN = 2000  # characters of a conversation that the log shows
_OPENING = 64  # tokens from which the words of a prompt are taken
_OPENING_WORDS = 4


@dataclass(frozen=True)
class ShownDocument:
    """A document or a conversation in a sequence, or the padding after the last one.

    Attributes:
        begin, end: range of its places in the sequence, without ``end``.
        conversation: number of the conversation in the corpus, from 0; None for a document.
        is_padding: whether it is padding.
        tokens, labels: tokens and labels of its places.
        parts: its text in parts, each with True if it is trained on.
        source: name of its source in a mixture; empty: there is one corpus.
    """

    begin: int
    end: int
    conversation: int | None
    is_padding: bool
    tokens: list[int]
    labels: list[int]
    parts: list[tuple[str, bool]]
    source: str = ""

    @property
    def num_labels(self) -> int:
        """Number of tokens that are predicted."""
        return sum(label != NO_LABEL for label in self.labels)

    def text(self, *, in_colour: bool, limit: int = 0) -> str:
        """The printable text with marks around trained parts, cut to ``limit`` characters; 0: the whole text."""
        marks = (_GREEN, _PLAIN) if in_colour else (OPEN, CLOSE)
        forged = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in (OPEN, CLOSE)})  # marks in the text itself
        shown = []
        left = limit or sum(len(text) for text, _ in self.parts)
        for text, is_trained in self.parts:
            piece = printable(text[:left]).translate(forged)
            shown.append(f"{marks[0]}{piece}{marks[1]}" if is_trained and piece else piece)
            left -= min(left, len(text))
        rest = sum(len(text) for text, _ in self.parts) - (limit or 0)
        return "".join(shown) + (f" ... and {rest:,} more characters" if limit and rest > 0 else "")

    def as_dict(self) -> dict[str, Any]:
        """The same as data."""
        names = ["begin", "end", "conversation", "is_padding", "tokens", "labels"]
        if self.source:
            names.insert(0, "source")
        parts = [{"text": text, "is_trained": is_trained} for text, is_trained in self.parts]
        return {name: getattr(self, name) for name in names} | {"parts": parts}


def documents_of(rows: Rows, row: int, tokenizer: Tokenizer, conversations: Sequence[int] = ()) -> list[ShownDocument]:
    """The documents of a sequence.

    Args:
        rows: sequences.
        row: index of the sequence.
        tokenizer: tokenizer for the text.
        conversations: numbers of the conversations in the sequence, in order; empty for documents.
    """
    tokens, labels, positions = (array[row] for array in rows)
    starts = np.flatnonzero(positions == 0).tolist()
    found = []
    for number, (begin, end) in enumerate(zip(starts, [*starts[1:], len(tokens)], strict=True)):
        is_padding = bool((labels[begin:end] == NO_LABEL).all() and (tokens[begin:end] == PADDING_ID).all())
        if conversations:
            is_padding = number >= len(conversations)
        inputs = tokens[begin:end].tolist()
        outputs = labels[begin:end].tolist()
        conversation = conversations[number] if number < len(conversations) else None
        parts = [] if is_padding else _parts(inputs, outputs, tokenizer)
        found.append(ShownDocument(begin, end, conversation, is_padding, inputs, outputs, parts))
    return found


def _parts(inputs: list[int], labels: list[int], tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """The text of the first input and of each label; without a label, of the next input."""
    shown = [(inputs[0], False)]
    for following, label in zip([*inputs[1:], None], labels, strict=True):
        if label != NO_LABEL:
            shown.append((label, True))
        elif following is not None:
            shown.append((following, False))
    parts = []
    ids = list[int]()
    before = ""
    for is_trained, run in groupby(shown, key=lambda one: one[1]):
        own = [token for token, _ in run]
        ids += own
        whole = tokenizer.decode(ids, with_special=True)
        # the text of a token may depend on the tokens before it, such as the space before a word
        is_continued = whole.startswith(before)
        text = whole[len(before) :] if is_continued else tokenizer.decode(own, with_special=True)
        parts.append((text, is_trained))
        before = whole
    return parts


def read_shown(source: TokenSource, sample_ids: Sequence[int], tokenizer: Tokenizer) -> dict[int, list[ShownDocument]]:
    """The documents of each sample, by sample id."""
    found = {}
    for sample in sorted(set(sample_ids)):
        name = ""
        number = sample
        reader = source
        if isinstance(source, MixedSource):
            name, number = source.origin(sample)
            reader = source.sources[name]
        held = reader.conversations(number) if isinstance(reader, SampleSource) else ()
        documents = documents_of(reader.read([number]), 0, tokenizer, held)
        found[sample] = [replace(one, source=name) for one in documents]
    return found


def lines_of(shown: Mapping[int, Sequence[ShownDocument]], *, in_colour: bool) -> list[str]:
    """Lines of text of samples, with a line before each sample and before each document."""
    lines = []
    for sample, documents in shown.items():
        number = sum(one.num_labels for one in documents)
        places = documents[-1].end
        padding = sum(one.end - one.begin for one in documents if one.is_padding)
        what = "conversation" if any(one.conversation is not None for one in documents) else "document"
        count = sum(not one.is_padding for one in documents)
        rest = f", {padding:,} of padding" if padding else ""
        if documents[0].source:
            rest += f", of {documents[0].source}"
        lines.append(f"=== sample {sample}: {places:,} tokens, {number:,} trained on, {counted(count, what)}{rest}")
        for one in documents:
            name = "padding" if one.is_padding else "document"
            if one.conversation is not None:
                name = f"conversation {one.conversation}"
            trained = "" if one.is_padding else f", {one.num_labels:,} trained on"
            lines.append(f"--- {name}: tokens {one.begin:,} to {one.end - 1:,}{trained}")
            if one.parts:
                lines.append(one.text(in_colour=in_colour))
    return lines


def preview(source: TokenSource, tokenizer: Tokenizer) -> list[str]:
    """The first conversation of each of the first two sequences, for the log; with marks, without colours."""
    shown = read_shown(source, range(min(2, source.num_samples)), tokenizer)
    return [
        f"conversation {documents[0].conversation}, {OPEN}trained on{CLOSE}:\n"
        + documents[0].text(in_colour=False, limit=_SHOWN)
        for documents in shown.values()
    ]


class Opening(NamedTuple):
    """A prompt: its text and its ids."""

    text: str
    ids: list[int]


def openings(corpus: Corpus, number: int) -> list[Opening]:
    """The first words of sequences, or conversations up to their first answer, from places all over the held-out data.

    Without held-out data they are from the training data; a stream without it has none, because it is read once.
    """
    train = corpus.train
    parts = [*corpus.held_out.values()]
    if not parts and not train.num_shards:
        parts = [*train.sources.values()] if isinstance(train, MixedSource) else [train]
    found = {}
    for index in range(number if parts else 0):
        part = parts[index % len(parts)]
        rows = part.read([index * part.num_samples // number])
        opening = _opening(rows, corpus.tokenizer, is_chat=isinstance(part, SampleSource))
        found[opening.text] = opening
    return list(found.values())


def _opening(rows: Rows, tokenizer: Tokenizer, *, is_chat: bool) -> Opening:
    tokens, labels, positions = (array[0] for array in rows)
    if is_chat:
        ids = tokens[: np.argmax(labels != NO_LABEL) + 1].tolist()
        return Opening(tokenizer.decode(ids).strip(), ids)
    starts = np.flatnonzero(positions[:-_OPENING] == 0)
    begin = int(starts[-1]) if len(starts) else 0
    words = tokenizer.decode(tokens[begin : begin + _OPENING].tolist()).split()
    if begin == 0 and len(words) > 2:  # the first and the last word may be cut
        words = words[1:-1]
    text = " ".join(words[:_OPENING_WORDS])
    ids = tokenizer.encode(text).tolist()
    if tokenizer.bos_id is not None and (tokenizer.adds_bos or not ids):
        ids.insert(0, tokenizer.bos_id)
    return Opening(text, ids or [tokenizer.eos_id])


def coloured(text: str) -> str:
    """Text with colours in place of marks."""
    return text.replace(OPEN, _GREEN).replace(CLOSE, _PLAIN)


def takes_colour(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal, and the user did not turn colours off (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")
