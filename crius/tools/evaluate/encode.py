"""Texts to rows of tokens, as in lm-eval (EleutherAI/lm-evaluation-harness 0.4, ``TemplateLM``). No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from crius.errors import DataError
from crius.tokens.tokenizer import Tokenizer
from crius.tools.evaluate.tasks import Kind, Request


class TokenRow(NamedTuple):
    """Tokens that the model reads at once, and the tokens to score.

    Attributes:
        tokens: input of the model.
        targets: ids to predict after the last ``len(targets)`` tokens.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Encoder:
    """Converts texts to rows.

    Attributes:
        tokenizer: tokenizer of the model.
        max_length: most tokens of a row.
        prefix: token before a text without a context.
        is_chat: whether contexts come from a chat template, in which names of special tokens are these tokens.
    """

    tokenizer: Tokenizer
    max_length: int
    prefix: int
    is_chat: bool

    def rows(self, request: Request, kind: Kind, where: str) -> list[TokenRow]:
        """The rows of a request: one, or the windows of a whole text.

        Args:
            request: texts.
            kind: kind of the task.
            where: origin of the request, for messages.

        Raises:
            DataError: no part of it can be scored, or it is longer than the model can read at once.
        """
        if kind != "text":
            return [self.row(*(self.chat_pair(request) if self.is_chat else self.pair(request)), where)]
        rows = list(self.windows(self.encode(request.continuation)))
        if not rows:
            raise DataError(f"{request.continuation[:50]!r} has no token to score.", where=where)
        return rows

    def row(self, context: list[int], targets: list[int], where: str) -> TokenRow:
        """A continuation after its context. If both together are too long, only the end of the context is read.

        Raises:
            DataError: the continuation has no token, or is longer than the model can read at once.
        """
        if not targets:
            raise DataError("a continuation has no token to score.", where=where, why="its text joins the token before")
        if len(targets) > self.max_length:
            raise DataError(
                f"a continuation has {len(targets):,} tokens, but the model reads {self.max_length:,} at once.",
                where=where,
                fix='a larger --max_length, or {"text": ...}, which is scored in windows',
            )
        return TokenRow(tuple(((context or [self.prefix]) + targets)[-self.max_length - 1 : -1]), tuple(targets))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, after a BOS if the tokenizer adds one. Names of special tokens are plain text."""
        ids = self._plain(text)
        bos = self.tokenizer.bos_id if self.tokenizer.adds_bos else None
        return ids if bos is None else [bos, *ids]

    def pair(self, request: Request) -> tuple[list[int], list[int]]:
        """Ids of context and continuation: both are encoded together and cut where the ids of the context alone end."""
        context, continuation = request
        if not context:
            targets = self._plain(continuation)
            if targets[:1] == [self.prefix]:
                return targets[:1], targets[1:]
            return [self.prefix], targets
        first = self.encode(context)
        whole = self.encode(context + continuation)
        return first, whole[len(first) :]

    def chat_pair(self, request: Request) -> tuple[list[int], list[int]]:
        """Like ``pair``, for a rendered chat and its answer: the ids that ``data.format chat`` trains on."""
        first, whole = (
            [int(token) for token in self.tokenizer.encode_marked(text)]
            for text in (request.context, request.context + request.continuation)
        )
        return first or [self.prefix], whole[len(first) :]

    def windows(self, ids: list[int]) -> Iterator[TokenRow]:
        """Rows in which each of ``ids`` is a target once: full windows, and a last one with as much context as fits."""
        size = self.max_length
        first = ids[:size]
        if first:
            yield TokenRow((self.prefix, *first[:-1]), tuple(first))
        for begin in range(size, len(ids), size):
            end = min(begin + size, len(ids))
            yield TokenRow(tuple(ids[end - size - 1 : end - 1]), tuple(ids[begin:end]))

    def _plain(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text)]
