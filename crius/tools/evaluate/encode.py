"""Texts to rows of tokens, as lm-eval makes them (EleutherAI/lm-evaluation-harness 0.4, ``TemplateLM``). No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from crius.data.tokenizer import Tokenizer
from crius.errors import DataError
from crius.tools.evaluate.tasks import Kind, Request


class Row(NamedTuple):
    """What the model reads at once, and what is scored of it.

    Attributes:
        tokens: the model's input.
        targets: to predict after the last tokens, as many as there are targets.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Encoder:
    """How texts become rows.

    Attributes:
        tokenizer: of the model.
        max_length: tokens of a row, at most.
        prefix: the token before a text without a context.
        is_chat: contexts come out of a chat template: names of special tokens are these tokens.
    """

    tokenizer: Tokenizer
    max_length: int
    prefix: int
    is_chat: bool = False

    def rows(self, request: Request, kind: Kind, where: str) -> list[Row]:
        """The rows of a request: one, or the windows of a whole text.

        Args:
            request: texts.
            kind: of the task.
            where: the request comes from, for messages.

        Raises:
            DataError: nothing of it can be scored, or more than the model reads at once.
        """
        if kind != "text":
            return [self.row(*(self.chat_pair(request) if self.is_chat else self.pair(request)), where)]
        rows = list(self.windows(self.encode(request.continuation)))
        if not rows:
            raise DataError(f"{request.continuation[:50]!r} has no token to score.", where=where)
        return rows

    def row(self, context: list[int], targets: list[int], where: str) -> Row:
        """A continuation behind its context, of which the end is read where both are too long.

        Raises:
            DataError: the continuation has no token, or more than the model reads at once.
        """
        if not targets:
            raise DataError("a continuation has no token to score.", where=where, why="it joins the text before it")
        if len(targets) > self.max_length:
            raise DataError(
                f"a continuation has {len(targets):,} tokens, the model reads {self.max_length:,} at once.",
                where=where,
                fix='a larger --max_length, or {"text": ...}, which is scored in windows',
            )
        return Row(tuple(((context or [self.prefix]) + targets)[-self.max_length - 1 : -1]), tuple(targets))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, behind a BOS where the tokenizer puts one. Names of special tokens are plain text."""
        ids = self._plain(text)
        bos = self.tokenizer.bos_id if self.tokenizer.adds_bos else None
        return ids if bos is None else [bos, *ids]

    def pair(self, request: Request) -> tuple[list[int], list[int]]:
        """Ids of context and continuation: of both together, cut where those of the context alone end.

        White space at the end of a context counts to the continuation, since tokens begin with it.
        """
        context, continuation = request
        if not context:
            targets = self._plain(continuation)
            if targets[:1] == [self.prefix]:
                return targets[:1], targets[1:]
            return [self.prefix], targets
        kept = context.rstrip()
        first = self.encode(kept)
        whole = self.encode(context + continuation)
        return first, whole[len(first) :]

    def chat_pair(self, request: Request) -> tuple[list[int], list[int]]:
        """As ``pair``, of a rendered chat and its answer: with the ids that ``data.format chat`` trains on."""
        first, whole = (
            [int(token) for token in self.tokenizer.encode_marked(text)]
            for text in (request.context, request.context + request.continuation)
        )
        return first or [self.prefix], whole[len(first) :]

    def windows(self, ids: list[int]) -> Iterator[Row]:
        """Rows in which each of ``ids`` is a target once: full windows, the last one with as much context as fits."""
        size = self.max_length
        first = ids[:size]
        if first:
            yield Row((self.prefix, *first[:-1]), tuple(first))
        for begin in range(size, len(ids), size):
            end = min(begin + size, len(ids))
            yield Row(tuple(ids[end - size - 1 : end - 1]), tuple(ids[begin:end]))

    def _plain(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text)]
