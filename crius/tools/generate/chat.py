"""Turns of a conversation. The keys and values of earlier turns are kept, and the oldest turns leave a full context."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from crius.errors import DataError
from crius.interop.context import longest_context
from crius.models.decode import Cache, Step, cached, continued
from crius.tools.generate.run import Answer, follow, picker
from crius.tools.generate.settings import Message, Settings
from crius.tools.generate.source import Source


class Stopped(Exception):
    """Somebody stops the answer: raised by the function that receives its text."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An answer, and what it took.

    Attributes:
        text: answer, or the part of it that was given before it was stopped.
        finish_reason: see ``Answer``; stopped for an answer that was stopped.
        num_tokens: tokens of the answer.
        num_read: tokens of the conversation that were computed before the answer.
        num_kept: tokens of the conversation whose keys and values were there.
        num_left: oldest messages that did not fit into the context; the system message is not one of them.
    """

    text: str
    finish_reason: str
    num_tokens: int
    num_read: int
    num_kept: int
    num_left: int

    @property
    def lines(self) -> str:
        """What a person is told about it, each line with its end."""
        read = f"{self.num_read} tokens read, {self.num_kept} kept"
        told = f"({self.num_tokens} tokens, ended by {self.finish_reason}; {read})\n"
        if self.num_left:
            told += f"(the context is full: the oldest {self.num_left} messages were left out)\n"
        return told


class Chat:
    """A model that answers conversations. ``chatting`` makes one.

    Args:
        source: the model and its tokenizer, which has a chat template.
        cache: keeps the keys and values of the newest conversation.

    Attributes:
        name: origin of the model, for messages.
        context: most tokens of a conversation and its answer.
    """

    def __init__(self, source: Source, cache: Cache) -> None:
        self.name = source.weights.origin
        self.context = longest_context(source.weights)
        self._source = source
        self._cache = cache
        self._tokens: list[int] = []  # the first of them are in the cache

    def answer(self, messages: Sequence[Message], settings: Settings, on_text: Callable[[str], None]) -> Turn:
        """Answer the last one of ``messages``.

        Only the tokens after the beginning that this conversation shares with the one before are computed. Ctrl-C
        stops the answer, and so does ``Stopped`` from ``on_text``.

        Args:
            messages: the conversation so far; a system message is the first one.
            settings: settings that were checked.
            on_text: receives the text as it comes, and an empty text for a token that completes none.

        Raises:
            CriusError: the question does not fit into the context, its template cannot be rendered, memory is too
                small, or the logits are not finite.
        """
        num_left, ids = self._fitted(messages, settings)
        source = self._source
        room = min(settings.max_new_tokens, self.context - len(ids))
        source.check_room(1, len(ids) + room)
        self._cache.reserve(len(ids) + room)
        shared = os.path.commonprefix([self._tokens[: self._cache.length], ids[:-1]])
        self._cache.cut(len(shared))
        self._tokens = ids.copy()
        steps = continued(
            self._cache,
            torch.tensor([ids[len(shared) :]], device=source.model.tok_embeddings.weight.device),
            picker(settings, range(len(messages), len(messages) + 1)),
            max_new_tokens=room,
            num_ids=source.tokenizer.vocab_size,
        )
        given: list[str] = []

        def on_piece(_: int, text: str) -> None:
            given.append(text)
            on_text(text)

        try:
            [answer] = follow(source, self._noted(steps), [ids], [""], settings, on_piece)
        except (KeyboardInterrupt, Stopped):
            answer = Answer("", "".join(given), self._tokens[len(ids) :], finish_reason="stopped")
        return Turn(
            text=answer.text,
            finish_reason=answer.finish_reason,
            num_tokens=len(answer.tokens),
            num_read=len(ids) - len(shared),
            num_kept=len(shared),
            num_left=num_left,
        )

    def _noted(self, steps: Iterable[Step]) -> Iterator[Step]:
        for step in steps:
            self._tokens.append(int(step.ids_B))
            yield step

    def _fitted(self, messages: Sequence[Message], settings: Settings) -> tuple[int, list[int]]:
        """The number of oldest messages that leave, so that the context has room for an answer, and the ids of the
        others.

        Raises:
            DataError: the newest question and the system message alone are too long.
        """
        room = min(settings.max_new_tokens, self.context // 4)
        [ids] = self._source.encode_chats([messages])
        if len(ids) + room <= self.context:
            return 0, ids
        first = 1 if messages[0]["role"] == "system" else 0
        starts = [place for place in range(first + 1, len(messages)) if messages[place]["role"] == "user"]
        shorter = [[*messages[:first], *messages[start:]] for start in starts]
        for start, ids in zip(starts, self._source.encode_chats(shorter), strict=True):
            if len(ids) + room <= self.context:
                return start - first, ids
        raise DataError(
            f"the question has {len(ids):,} tokens with its template, and {self.name} reads {self.context:,}.",
            where="the conversation",
            why=f"{room:,} of them are for the answer",
            fix="a shorter question or system message",
        )


@contextmanager
def chatting(source: Source) -> Iterator[Chat]:
    """A chat with the model of ``source``, which is used for nothing else while the context is open."""
    with cached(source.model, 0, keeps_all=True) as cache:
        yield Chat(source, cache)
