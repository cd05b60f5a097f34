"""Text from ids as they come: only whole characters, and no part of a text that ends the answer."""

from collections.abc import Sequence

from crius.tokens.tokenizer import Tokenizer

_CONTEXT = 5
"""Ids before the newest id that are decoded with it: some tokenizers write a space that depends on them."""

_LONGEST = 4
"""Most bytes of a character in UTF-8; each byte may be an id."""


class TextStream:
    """The text that continues a prompt.

    Args:
        tokenizer: tokenizer of the ids.
        prompt: ids before the text.
        stops: texts that end it.

    Attributes:
        text: text so far, without text that is held back.
        is_stopped: whether one of ``stops`` came; it and the text after it are not in ``text``.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._ids = self._end_of(prompt[-_CONTEXT - _LONGEST :])
        self._told = len(self._ids)
        self._held = ""
        self.text = ""
        self.is_stopped = False

    def push(self, token_id: int) -> str:
        """New text after one more id; empty while a character, or a possible stop text, is incomplete."""
        self._ids.append(token_id)
        new = self._new()
        if new.endswith("\ufffd"):  # may be the first bytes of a character
            return ""
        self._ids = self._end_of(self._ids)
        self._told = len(self._ids)
        return self._give(new)

    def finish(self) -> str:
        """The text that was held back, when no more ids come."""
        given = "" if self.is_stopped else self._give(self._new())
        rest = "" if self.is_stopped else self._held
        self._held = ""
        self.text += rest
        return given + rest

    def _end_of(self, ids: Sequence[int]) -> list[int]:
        """The last ids, from the beginning of a character on: decoders treat a run of bytes as a whole."""
        longest = max(0, len(ids) - _CONTEXT)
        starts = range(longest, max(-1, longest - _LONGEST), -1)
        whole = (start for start in starts if not self._tokenizer.decode(ids[start:]).startswith("\ufffd"))
        return list(ids[next(whole, longest) :])

    def _new(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._told])
        return self._tokenizer.decode(self._ids)[len(before) :]

    def _give(self, new: str) -> str:
        self._held += new
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            given = self._held[: min(places)]
            self._held = ""
        else:
            keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
            given = self._held[: len(self._held) - keep]
            self._held = self._held[len(self._held) - keep :]
        self.text += given
        return given


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
