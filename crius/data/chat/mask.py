"""Turns conversations into tokens, and marks the tokens that are trained on."""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crius.config.data import DataConfig
from crius.data.chat.conversations import Conversation, is_trained
from crius.errors import DataError
from crius.tokens.renderer import Rendered, Renderer
from crius.tokens.template import END_OF_TURN
from crius.tokens.tokenizer import MarkedText, Tokenizer

_VERSION = 3
"""Must change when new code gives a conversation other tokens or another mask."""

_BATCH = 64
_BATCH_CHARACTERS = 1 << 20
"""Most conversations, and about the most characters, that the renderer gets at a time."""

_MOST_KEYS = 20
"""Most unused keys that are named."""

_MARK_IT = "put {% generation %} and {% endgeneration %} around the assistant's text in chat_template.jinja"

_log = logging.getLogger("crius.data")


class ChatSample(NamedTuple):
    """A conversation as tokens.

    Attributes:
        ids: ``(tokens,)``, token ids of the whole rendered conversation.
        is_target: ``(tokens,)``, True for tokens to predict: the assistant's text and the end of its turns.
    """

    ids: npt.NDArray[np.int64]
    is_target: npt.NDArray[np.bool_]


class ChatEncoder:
    """Turns conversations into tokens and masks, by a tokenizer and its chat template.

    A token is a target if it overlaps the assistant's text, as in transformers. So a token that begins in the header of
    a turn, or ends after the turn, is also a target.

    Args:
        tokenizer: the tokenizer.
        template: jinja2 text from any source.
        special: special tokens such as ``bos_token``, by name.
        data: the section; ``train_on`` and ``train_on_end_of_turn`` choose the targets.

    Attributes:
        fingerprint: changes when the same conversation gives other ids or another mask, or the same file gives other
            conversations.
        num_with_special: number of encoded conversations in which a message contains the text of a special token.

    Raises:
        DataError: there is no template.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, special: Mapping[str, str], data: DataConfig) -> None:
        if not template.strip():
            raise DataError(
                f"tokenizer {tokenizer.name} has no chat template.",
                where="--tokenizer.path",
                why="a chat template turns a conversation into one text",
                fix="put the model's chat_template.jinja in the folder of its tokenizer.json, or use crius tune",
            )
        self._tokenizer = tokenizer
        self._template = template
        self._special = dict(special)
        self._data = data
        self._names = tokenizer.special_names()
        self._spells = re.compile("|".join(map(re.escape, sorted(filter(None, self._names), key=len, reverse=True))))
        ends = tokenizer.special_ids([*END_OF_TURN, special.get("eos_token", "")])
        self._ends = np.array(sorted({tokenizer.eos_id, *ends}))
        settings = [data.source, data.columns, data.train_on, data.train_on_end_of_turn]
        content = [_VERSION, tokenizer.fingerprint, template, sorted(self._special.items()), settings]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        self.num_with_special = 0
        self._warned: set[str] = set()

    def counted(self, conversations: Iterable[Conversation]) -> Iterator[Conversation]:
        """The conversations; after the last one, a line counts the keys that neither Crius nor the template uses."""
        unused_keys = self.key_reader()
        unused = Counter[str]()
        for chat in conversations:
            unused.update(unused_keys(chat))
            yield chat
        if unused:
            shown = ", ".join(f"{name} ({count:,})" for name, count in unused.most_common(_MOST_KEYS))
            if len(unused) > _MOST_KEYS:
                shown += f" and {len(unused) - _MOST_KEYS} more"
            _log.warning("keys used neither by Crius nor by the chat template: %s", shown)

    def key_reader(self) -> Callable[[Conversation], Iterator[str]]:
        """A function that names the keys of a conversation, and of its messages, that nothing uses."""
        with self._renderer() as renderer:
            used = {"role", "content", "weight", *renderer.keys}
        takes_all = re.search(r"for (\w+) in messages(?s:.*)\b\1( *\| *tojson|\.items)", self._template)

        def unused(chat: Conversation) -> Iterator[str]:
            yield from (f"{key!r} of rows" for key in chat.unused)
            for message in () if takes_all else chat.messages:
                yield from (f"{key!r} of messages" for key in message.keys() - used)

        return unused

    def encode(self, conversations: Iterable[Conversation]) -> Iterator[ChatSample | DataError]:
        """The tokens of each conversation, in order. A sample may have no target.

        With ``data.bad_rows skip`` the error of a conversation takes its place.

        Raises:
            DataError: the template cannot render a conversation, or the assistant's text cannot be found in its output;
                names the conversation, the turn and the template's error.
            EnvironmentError: jinja2 is missing.
        """
        with self._renderer() as renderer:
            for batch in _batches(conversations):
                rendered = []
                for chat, answer in zip(batch, renderer.render([_task(chat) for chat in batch]), strict=True):
                    try:
                        self._check(chat, answer)
                        rendered.append((chat, answer))
                    except DataError as error:
                        yield self._left_out(error)
                texts = self._tokenizer.encode_marked_texts([answer.text for _, answer in rendered])
                for (chat, answer), text in zip(rendered, texts, strict=True):
                    try:
                        sample = ChatSample(text.ids, self._mask(chat, answer, text))
                    except DataError as error:
                        yield self._left_out(error)
                        continue
                    yield sample

    def _left_out(self, error: DataError) -> DataError:
        if self._data.bad_rows == "refuse":
            raise error
        return error

    def _renderer(self) -> Renderer:
        return Renderer(self._template, self._special, self._names, is_dated=False, fix="leave out --data.format chat")

    def _check(self, chat: Conversation, answer: Rendered) -> None:
        """Refuse conversations without a mask. Count conversations that contain special tokens."""
        if answer.error and answer.turn >= 0:
            raise DataError(
                f"message {answer.turn + 1} of the conversation cannot be masked.",
                where=chat.where,
                why=f"the chat template: {answer.error}",
                fix=_MARK_IT,
            )
        if answer.error:
            raise DataError(
                "the chat template cannot render the conversation.",
                where=chat.where,
                why=answer.error,
                fix="correct the conversation, or chat_template.jinja in the folder of the tokenizer, or leave out "
                "such rows: --data.bad_rows skip",
            )
        if (half := re.search("[\ud800-\udfff]", answer.text)) is not None:
            raise DataError(
                f"the chat template makes half of a surrogate pair, {ascii(half[0])}, which is not valid text.",
                where=chat.where,
                fix="correct chat_template.jinja in the folder of the tokenizer",
            )
        if not answer.spans:
            raise DataError(
                "the chat template marks no text of the conversation as the assistant's.",
                where=chat.where,
                why="it has {% generation %} blocks, but none of them was rendered",
                fix=_MARK_IT,
            )
        self._count(chat)

    def _count(self, chat: Conversation) -> None:
        """Count messages with special tokens. Warn once about them, and once about parts that the template omits."""
        if self._names and any(self._spells.search(text) for message in chat.messages for text in _texts(message)):
            self.num_with_special += 1
            self._warn(
                chat,
                "a message contains the text of a special token, which becomes that token, as at inference. It is "
                "trained on only in the assistant's text",
            )
        if "tool_calls" not in self._template and any(message.get("tool_calls") for message in chat.messages):
            self._warn(chat, "the chat template leaves out tool_calls: such a turn is trained on without them")
        if chat.tools and "tools" not in self._template:
            self._warn(chat, "the chat template leaves out tools")

    def _warn(self, chat: Conversation, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("%s: %s. Later conversations of this kind are not shown.", chat.where, what)

    def _mask(self, chat: Conversation, answer: Rendered, text: MarkedText) -> npt.NDArray[np.bool_]:
        if not len(text.ids):
            raise DataError(
                "the chat template makes no token of the conversation.",
                where=chat.where,
                fix="correct chat_template.jinja in the folder of the tokenizer",
            )
        trained = {place for place, message in enumerate(chat.messages) if is_trained(message)}
        turns = [place for place, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if self._data.train_on == "last":
            trained &= {turns[-1]}
        mask = np.zeros(len(text.ids), dtype=np.bool_)
        for turn, start, end in answer.spans:
            if turn < 0 and not trained.issuperset(turns):
                raise DataError(
                    "the assistant's text cannot be assigned to each of its messages.",
                    where=chat.where,
                    why="the chat template does not have one {% generation %} block per message of the assistant",
                    fix="--data.train_on all, without weights and marks of messages",
                )
            if turn < 0 or turn in trained:
                if not self._mark(mask, answer.text, text, start, end) and self._data.train_on_end_of_turn:
                    self._warn(
                        chat,
                        "no known end-of-turn token follows a turn that is trained on: the model does not learn to "
                        "stop there",
                    )
        return mask

    def _mark(self, mask: npt.NDArray[np.bool_], whole: str, text: MarkedText, start: int, end: int) -> bool:
        """Mark the tokens that overlap characters ``start`` to ``end``, a turn. Returns whether it ends in a known
        token.
        """
        first = int(np.searchsorted(text.ends, start, "right"))
        after = int(np.searchsorted(text.starts, end))
        mask[first:after] = True
        last = after - 1  # the last token that is not white space: the newline after the end of a turn belongs to it
        while last >= first and not whole[text.starts[last] : text.ends[last]].strip():
            last -= 1
        if last >= first and text.ids[last] in self._ends:
            mask[last:after] = self._data.train_on_end_of_turn
            return True
        if after < len(text.ids) and text.ids[after] in self._ends:
            mask[after] = self._data.train_on_end_of_turn
            return True
        return False


def _batches(conversations: Iterable[Conversation]) -> Iterator[list[Conversation]]:
    batch: list[Conversation] = []
    characters = 0
    for chat in conversations:
        batch.append(chat)
        characters += sum(len(text) for message in chat.messages for text in _texts(message))
        if len(batch) >= _BATCH or characters >= _BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def _task(chat: Conversation) -> dict[str, Any]:
    """A task for the renderer: messages without their weight, which is only for the loss."""
    messages = [{key: value for key, value in one.items() if key != "weight"} for one in chat.messages]
    others = [place for place, one in enumerate(chat.messages) if one["role"] != "assistant" and is_trained(one)]
    return {"messages": messages, "tools": chat.tools, "others": others}


def _texts(value: Any) -> Iterator[str]:
    """All texts in a message."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from _texts(child)
    elif isinstance(value, Sequence):
        for child in value:
            yield from _texts(child)
