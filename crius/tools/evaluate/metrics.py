"""Metrics of a task from the scores of its documents, with 95 % intervals. No torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from crius.tools.evaluate.tasks import Document, Task

Z = 1.959964
"""Standard deviations on both sides of a normal distribution's mean that contain 95 %."""


class Score(NamedTuple):
    """A scored text.

    Attributes:
        log_prob: sum over its tokens, in nats.
        is_greedy: whether every token is the most probable one.
        tokens: number of its tokens.
    """

    log_prob: float
    is_greedy: bool
    tokens: int


class Figure(NamedTuple):
    """A value and its 95 % interval; both ends equal the value if the interval is unknown."""

    value: float
    low: float
    high: float


Scored = Sequence[tuple[Document, Sequence[Score]]]


def figures(task: Task, scores: Sequence[Sequence[Score]]) -> dict[str, Figure]:
    """Metrics by name.

    accuracy: the most probable choice is the right one. accuracy_norm: the same by log-probability per character of the
    choice. greedy: the model alone would write the continuation. bits_per_byte: bits per byte of the right text, over
    all documents.

    Args:
        task: its documents.
        scores: scores of each document's requests.
    """
    rows = list(zip(task.documents, scores, strict=True))
    bits = _ratio([(-given[document.gold].log_prob / math.log(2), _bytes(document)) for document, given in rows])
    if task.kind == "text":
        return {"bits_per_byte": bits}
    if task.kind == "continuation":
        return {"greedy": _share([given[0].is_greedy for _, given in rows]), "bits_per_byte": bits}
    return {
        "accuracy": _share([_choice(document, given, lambda text: 1) == document.gold for document, given in rows]),
        "accuracy_norm": _share([_choice(document, given, _length) == document.gold for document, given in rows]),
        "bits_per_byte": bits,
    }


def as_json(found: Mapping[str, Figure]) -> dict[str, dict[str, float]]:
    """Metrics for JSON."""
    return {name: figure._asdict() for name, figure in found.items()}


def _length(text: str) -> int:
    """Characters of a choice without its leading space."""
    return max(1, len(text.lstrip()))


def _bytes(document: Document) -> int:
    return len(document.requests[document.gold].continuation.encode())


def _choice(document: Document, scores: Sequence[Score], length: Callable[[str], int]) -> int:
    """The most probable choice; the first of equal choices."""
    values = [
        score.log_prob / length(request.continuation) for request, score in zip(document.requests, scores, strict=True)
    ]
    return values.index(max(values))


def _share(hits: Sequence[bool]) -> Figure:
    """A share with the interval of Wilson (1927), which is valid for few documents and for shares near 0 and 1."""
    count = len(hits)
    share = sum(hits) / len(hits)
    middle = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return Figure(share, max(0.0, middle - half), min(1.0, middle + half))


def _ratio(rows: Sequence[tuple[float, int]]) -> Figure:
    """Ratio of two sums over documents, with an interval by the delta method if there are at least two documents."""
    above = math.fsum(row[0] for row in rows)
    below = sum(row[1] for row in rows)
    count = len(rows)
    value = above / below
    if count < 2:
        return Figure(value, value, value)
    spread = math.fsum((one - value * size) ** 2 for one, size in rows) * count / (count - 1)
    half = Z * math.sqrt(spread) / below
    return Figure(value, max(0.0, value - half), value + half)
