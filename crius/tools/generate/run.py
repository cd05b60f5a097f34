"""Prompts to answers, batch by batch, and their printing."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from random import Random

import torch
from torch import Tensor

from crius.errors import DataError
from crius.models.decode import Step, generate, sample
from crius.redact import printable
from crius.tools.generate.samples import keep_samples
from crius.tools.generate.settings import Prompt, Settings
from crius.tools.generate.source import Source
from crius.tools.generate.stream import TextStream


@dataclass
class Answer:
    """The continuation of one prompt.

    Attributes:
        prompt: prompt as given.
        text: generated text.
        tokens: its ids, with the id that ended it.
        log_probs: log-probabilities of the tokens, in nats, from the model: at temperature 1, before top_k and top_p.
        finish_reason: eos for a token that ends an answer, stop for a stop text, length for max_new_tokens.
        tokens_per_second: from the start of the prompt to the last token.
    """

    prompt: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    tokens_per_second: float = 0.0

    def add(self, token: int, log_prob: float, origin: str) -> None:
        """Add a token of the model ``origin``.

        Raises:
            DataError: the log-probability is NaN.
        """
        if math.isnan(log_prob):
            raise DataError(
                f"the log-probability of token {len(self.tokens) + 1} is nan.",
                where=origin,
                why="the model's logits are not finite",
                fix="an earlier checkpoint, or --dtype float32",
            )
        self.tokens.append(token)
        self.log_probs.append(log_prob)


def answer(
    source: Source,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    first: int = 0,
    on_text: Callable[[int, str], None] = lambda index, text: None,
) -> list[Answer]:
    """Continue ``prompts`` together.

    Args:
        source: the model and its tokenizer.
        prompts: prompts of one batch.
        settings: settings of all prompts.
        first: number of the first prompt in the command, which its random draws depend on.
        on_text: receives each text as it comes, and the index of its prompt in the batch.

    Raises:
        CriusError: a prompt cannot be encoded, memory is too small, or the logits are not finite.
    """
    ids = [source.encode(prompt, chat=settings.chat) for prompt in prompts]
    return answer_ids(source, ids, [prompt.text for prompt in prompts], settings, first=first, on_text=on_text)


def answer_ids(
    source: Source,
    ids: Sequence[list[int]],
    texts: Sequence[str],
    settings: Settings,
    *,
    first: int = 0,
    on_text: Callable[[int, str], None] = lambda index, text: None,
) -> list[Answer]:
    """As ``answer``, for prompts that are token ids; ``texts`` are what the answers call them."""
    source.check_room(len(ids), max(map(len, ids)) + settings.max_new_tokens)
    steps = generate(
        source.model,
        ids,
        picker(settings, range(first, first + len(ids))),
        max_new_tokens=settings.max_new_tokens,
        num_ids=source.tokenizer.vocab_size,
        unit=source.ranks,
    )
    return follow(source, steps, ids, texts, settings, on_text)


def follow(
    source: Source,
    steps: Iterable[Step],
    ids: Sequence[list[int]],
    texts: Sequence[str],
    settings: Settings,
    on_text: Callable[[int, str], None],
) -> list[Answer]:
    """The answers that ``steps`` make, up to the end of the last one; arguments as for ``answer_ids``."""
    answers = [Answer(text) for text in texts]
    streams = [TextStream(source.tokenizer, one, settings.stop) for one in ids]
    began = time.perf_counter()

    def end(row: int, reason: str) -> None:
        answers[row].finish_reason = reason
        on_text(row, streams[row].finish())
        answers[row].text = streams[row].text
        answers[row].tokens_per_second = len(answers[row].tokens) / (time.perf_counter() - began)

    for step in steps:
        for row, (token, log_prob) in enumerate(zip(step.ids_B.tolist(), step.log_probs_B.tolist(), strict=True)):
            if answers[row].finish_reason:
                continue
            answers[row].add(token, log_prob, source.weights.origin)
            if token in source.ends:
                end(row, "eos")
                continue
            on_text(row, streams[row].push(token))
            if streams[row].is_stopped:
                end(row, "stop")
        if all(answer.finish_reason for answer in answers):
            break
    for row in range(len(answers)):
        if not answers[row].finish_reason:
            end(row, "length")
            if streams[row].is_stopped:  # by text that was held back
                answers[row].finish_reason = "stop"
    return answers


def picker(settings: Settings, numbers: range) -> Callable[[Tensor], Tensor]:
    """A function that takes ids from logits; each prompt, with its number, has random draws of its own."""
    if settings.temperature == 0:
        return lambda logits_BV: logits_BV.argmax(-1)
    draws = [torch.Generator().manual_seed(Random(f"{settings.seed}/{number}").getrandbits(63)) for number in numbers]

    def pick(logits_BV: Tensor) -> Tensor:
        uniform_B = torch.cat([torch.rand(1, generator=draw, dtype=torch.float64) for draw in draws])
        return sample(
            logits_BV,
            uniform_B.to(logits_BV.device),
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
        )

    return pick


def answer_all(source: Source, prompts: Sequence[Prompt], settings: Settings, started: float, *, as_json: bool) -> None:
    """Answer ``prompts`` batch by batch, print the answers, and keep the first ones for the report of the run.

    Args:
        source: the model and its tokenizer.
        prompts: prompts of the command.
        settings: settings of all prompts.
        started: ``time.monotonic()`` at the start of the command.
        as_json: print a line of JSON for each prompt.

    Raises:
        CriusError: see ``answer``.
    """
    for first in range(0, len(prompts), settings.batch_size):
        batch = prompts[first : first + settings.batch_size]
        if as_json:
            answers = answer(source, batch, settings, first=first)
            for one in answers:
                write(json.dumps(asdict(one)) + "\n", is_data=True)
        else:
            answers = _print_batch(source, batch, settings, first, started, is_alone=len(prompts) == 1)
        if first == 0:
            keep_samples(source.weights, [(one.prompt, one.text, one.tokens) for one in answers], settings)


def _print_batch(
    source: Source, batch: Sequence[Prompt], settings: Settings, first: int, started: float, *, is_alone: bool
) -> list[Answer]:
    """Answer and print: a single prompt's answer as it comes, several answers one after the other."""
    is_stream = len(batch) == 1
    times: list[float] = []

    def begin(row: int) -> None:
        head = "" if is_alone else f"[{first + row + 1}] "
        write(head if settings.chat else f"{head}{batch[row].text}")

    def on_text(row: int, text: str) -> None:
        if is_stream and not times:  # the prompt is valid
            begin(row)
        times.append(time.monotonic() - started)
        if is_stream:
            write(text)

    answers = answer(source, batch, settings, first=first, on_text=on_text)
    for row, one in enumerate(answers):
        if not is_stream:
            begin(row)
            write(one.text)
        write("\n")
    reasons = ", ".join(dict.fromkeys(one.finish_reason for one in answers))
    count = sum(len(one.tokens) for one in answers)
    speed = sum(one.tokens_per_second for one in answers)
    when = f", first one {times[0]:.1f} s after the start" if first == 0 else ""
    sys.stderr.write(f"({count} tokens, ended by {reasons}, {speed:,.1f} tokens/s{when})\n")
    return answers


def write(text: str, *, is_data: bool = False) -> None:
    """Print at once; on a terminal, characters that act on it are escaped."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() and not is_data else text)
    sys.stdout.flush()
