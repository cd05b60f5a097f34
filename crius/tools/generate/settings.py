"""Settings and prompts of a command, checked before torch is imported."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from crius.config.arguments import Option
from crius.errors import ConfigError, DataError, MissingPathError
from crius.untrusted import parse_json, text_named

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen, and where they are computed."""

    max_new_tokens: int = 100
    """Most tokens of an answer."""

    temperature: float = 0.0
    """Number that divides the logits; 0 takes the most probable token."""

    top_k: int = 0
    """Draw from this many of the most probable tokens. 0: from all."""

    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities sum to this. 1: from all."""

    stop: Annotated[tuple[str, ...], Option(takes_hyphen=True)] = ()
    """Text that ends an answer and is not part of it; repeat it for several."""

    seed: int = 0
    """Seed of the random draws. Each prompt has draws of its own, independent of the others in its batch."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of weights and computation. auto: bfloat16 on a GPU, else float32."""


@dataclass(frozen=True, kw_only=True)
class ChatSettings(Sampling):
    """How questions of a conversation are answered."""

    max_new_tokens: int = 1024
    """Most tokens of an answer, which also ends where the model's context ends."""


@dataclass(frozen=True, kw_only=True)
class Settings(Sampling):
    """How text is generated."""

    batch_size: int = 8
    """Prompts that are continued together."""

    chat: bool = False
    """Treat a prompt as a user's message: put it into the tokenizer's chat template."""

    ranks: Annotated[int, Option(name="parallelism.tensor_parallel_degree")] = 1
    """Processes of this host that share each layer."""

    def check(self) -> None:
        """Compare all settings with their ranges.

        Raises:
            ConfigError: lists all settings that are out of range.
        """
        wrong = [
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "a number of at least 1"),
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 for the most probable, or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 for all tokens, or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "a number above 0, 1 for all tokens"),
            ("seed", self.seed, 0 <= self.seed < 2**63, "a number from 0 below 2**63"),
            ("batch_size", self.batch_size, self.batch_size >= 1, "a number of at least 1"),
            ("stop", "''", all(self.stop), "a text that is not empty"),
            ("parallelism.tensor_parallel_degree", self.ranks, self.ranks >= 1, "a number of at least 1"),
        ]
        refuse_out_of_range(wrong)


def refuse_out_of_range(settings: Iterable[tuple[str, object, bool, str]]) -> None:
    """Report all settings that are out of their ranges together.

    Args:
        settings: name, value, whether the value is in range, and the range in words.

    Raises:
        ConfigError: lists all settings that are out of range.
    """
    problems = [
        ConfigError(f"--{name} {value} is out of range.", where="command line", fix=f"give {right}")
        for name, value, is_right, right in settings
        if not is_right
    ]
    if problems:
        raise ConfigError.together(problems)


@dataclass(frozen=True)
class Prompt:
    """Input to continue: a text, or for a chat the messages so far, which need a chat template if they were given."""

    text: str
    messages: tuple[Message, ...]
    is_conversation: bool = False


def read_prompts(texts: Sequence[str], file: str, *, chat: bool) -> list[Prompt]:
    """The prompts of a command line.

    Args:
        texts: one prompt each.
        file: a ``.jsonl`` file has one prompt per line, another file is one prompt; ``-`` is standard input; empty:
            none.
        chat: prompts go through a chat template; without one, a line of messages is refused.

    Raises:
        ConfigError: there is no prompt.
        DataError: the file cannot be read.
    """
    prompts = [_prompt(text) for text in texts]
    if file == "-":
        prompts.append(_prompt(sys.stdin.read().removesuffix("\n")))
    elif file:
        try:
            content = text_named(file)
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            kind = MissingPathError if isinstance(error, OSError) else DataError
            what = f"{file} cannot be read: {why}."
            raise kind(what, where="--prompt_file", fix="give a text file in UTF-8 that exists") from None
        whole = [_prompt(content.removesuffix("\n"))]
        prompts += _lines(content, file, chat=chat) if file.endswith(".jsonl") else whole
    if not prompts:
        raise ConfigError(
            "there is no prompt.", where="command line", fix="--prompt TEXT, --prompt_file FILE, or --prompt_file -"
        )
    return prompts


def _prompt(text: str) -> Prompt:
    return Prompt(text, ({"role": "user", "content": text},))


def _lines(content: str, file: str, *, chat: bool) -> Iterator[Prompt]:
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompt = _of_json(parse_json(line))
        except ValueError as error:
            raise DataError(
                f"line {number} of {file} is not a prompt: {str(error)[:200]}.",
                where="--prompt_file",
                fix='"TEXT", {"prompt": "TEXT"}, or {"messages": [{"role": "user", "content": "TEXT"}]}',
            ) from None
        if prompt.is_conversation and not chat:
            raise ConfigError(
                f"line {number} of {file} is a conversation.",
                where="--prompt_file",
                why="without a chat template only its last message would be read",
                fix="--chat",
            )
        yield prompt


def _of_json(value: Any) -> Prompt:
    text = value.get("prompt") if isinstance(value, dict) else value
    if isinstance(text, str):
        return _prompt(text)
    messages = value.get("messages") if isinstance(value, dict) else None
    if not (isinstance(messages, list) and messages and all(is_message(message) for message in messages)):
        raise ValueError("it has neither a prompt nor messages with role and content")
    return Prompt(messages[-1]["content"], tuple(messages), is_conversation=True)


def is_message(value: Any) -> bool:
    """Whether a value of JSON is a message: an object with two texts, ``role`` and ``content``."""
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
