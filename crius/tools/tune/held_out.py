"""Conversations that are never trained on: their questions answered by a model, and how probable their answers are."""

import gc
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from crius.data.samples import SampleSource
from crius.data.source import NO_LABEL
from crius.redact import printable
from crius.tokens.tokenizer import Tokenizer
from crius.tools.generate.run import answer_ids
from crius.tools.generate.settings import Settings
from crius.tools.generate.source import Source

QUESTIONS = 3
MOST_SCORED = 64
"""Conversations that are asked, and most that are scored."""
_WIDTH = 110
PASSES = {True: 3.2, False: 2.4}
"""Seconds of training over those of a forward pass, of all weights and of adapters: a backward takes two, or one."""
ANSWER = Settings(max_new_tokens=64, batch_size=QUESTIONS)


class HeldConversation(NamedTuple):
    """A conversation as the model reads it.

    Attributes:
        ids: its tokens, cut to the sequence length.
        targets: whether each token is to be predicted.
    """

    ids: list[int]
    targets: list[bool]

    @property
    def question(self) -> list[int]:
        """Tokens before the first answer."""
        return self.ids[: self.targets.index(True)]

    @property
    def answer(self) -> list[int]:
        """Tokens of the first answer."""
        begin = len(self.question)
        rest = self.targets[begin:]
        return self.ids[begin : begin + (rest.index(False) if False in rest else len(rest))]


@dataclass(frozen=True)
class Told:
    """What a model makes of held-out conversations.

    Attributes:
        answers: its answer to each of the first questions.
        losses: nats per token of the right answers of each conversation.
    """

    answers: list[str]
    losses: list[float]


def conversations_of(source: SampleSource) -> list[HeldConversation]:
    """The first held-out conversations with something to predict."""
    file = source.file
    ends = [*file.documents[1:].tolist(), file.meta.num_tokens]
    found = []
    for number in range(source.first, source.last):
        begin = int(file.documents[number])
        end = min(ends[number], begin + source.seq_len)
        ids = file.tokens[begin:end].tolist()
        targets = [bool(one) for one in file.targets[begin:end]]
        targets[0] = False  # the first token is never a label
        if any(targets):
            found.append(HeldConversation(ids, targets))
    return found[:MOST_SCORED]


def tell(model: Source, conversations: Sequence[HeldConversation]) -> Told:
    """Answer the first questions greedily, and score the answers of all.

    Raises:
        CriusError: memory is too small, or the logits are not finite.
    """
    asked = [one.question for one in conversations[:QUESTIONS]]
    texts = [model.tokenizer.decode(ids) for ids in asked]
    answers = answer_ids(model, asked, texts, ANSWER) if asked else []
    return Told([one.text.strip() for one in answers], [_loss(model, one) for one in conversations])


@torch.no_grad()
def _loss(model: Source, conversation: HeldConversation) -> float:
    """Mean nats of the tokens to predict."""
    device = model.model.tok_embeddings.weight.device
    ids = conversation.ids
    labels = [one if is_target else NO_LABEL for one, is_target in zip(ids, conversation.targets, strict=True)][1:]
    total = model.model(torch.tensor([ids[:-1]], device=device), labels_BT=torch.tensor([labels], device=device))
    return float(total) / sum(conversation.targets)


def change(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Mean of the paired differences, after minus before, and its standard error."""
    differences = [late - early for early, late in zip(before, after, strict=True)]
    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    return statistics.fmean(differences), spread / math.sqrt(len(differences))


def compared(
    tokenizer: Tokenizer, conversations: Sequence[HeldConversation], before: Mapping[str, Any], after: Told
) -> list[str]:
    """Lines that show answers before and after, and whether the right answers became more probable."""
    lines = []
    answers = before.get("answers") or ["(some ids were new to it)"] * QUESTIONS
    for conversation, early, late in zip(conversations, answers, after.answers, strict=False):
        lines.append(f"question  {_short(tokenizer.decode(conversation.question), is_end=True)}")
        for name, text in (("before", early), ("after", late), ("data", tokenizer.decode(conversation.answer))):
            lines.append(f"{name:<8}  {_short(text)}")
        lines.append("")
    if not before.get("losses"):
        mean = sum(after.losses) / len(after.losses)
        return [*lines, f"{len(after.losses)} held-out conversations: {mean:.3f} nats per token of their answers"]
    mean, error = change(before["losses"], after.losses)
    first = sum(before["losses"]) / len(before["losses"])
    spread = f" +- {error:.3f}, paired" if len(after.losses) > 1 else ""
    lines.append(
        f"{len(after.losses)} held-out conversations: {first:.3f} -> {first + mean:.3f} nats per token of their "
        f"answers ({mean:+.3f}{spread})"
    )
    return lines


def _short(text: str, *, is_end: bool = False) -> str:
    """One line of a text; of a long one its beginning, or its end."""
    line = " ".join(printable(text).split())
    if len(line) <= _WIDTH:
        return line
    return f"...{line[3 - _WIDTH :]}" if is_end else f"{line[: _WIDTH - 3]}..."


def seconds_per_token(model: Source, seq_len: int, *, is_whole: bool) -> float:
    """Seconds of training per token: a measured forward pass, times ``PASSES``.

    Args:
        model: the model, as it generates.
        seq_len: tokens of a sequence.
        is_whole: whether all weights are trained.
    """
    device = model.model.tok_embeddings.weight.device
    ids = torch.zeros(1, seq_len, dtype=torch.long, device=device)
    for _ in range(2):  # the first one allocates
        began = time.perf_counter()
        with torch.no_grad():
            float(model.model(ids, labels_BT=ids))  # waits for the device
        seconds = time.perf_counter() - began
    return seconds / seq_len * PASSES[is_whole]


def give_back_memory() -> None:
    """Give a GPU's memory that no tensor uses back to it, for the process that trains."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
