"""Tasks to metrics: a model, its rows, their scores."""

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crius.checkpoint.manifest import Hasher
from crius.errors import ConfigError, DataError
from crius.interop.context import longest_context
from crius.interop.weights import Weights
from crius.table import aligned
from crius.tokens.renderer import render_chats
from crius.tools.evaluate.encode import Encoder, TokenRow
from crius.tools.evaluate.metrics import Figure, Score, as_json, figures
from crius.tools.evaluate.record import Key, ScoreRecord
from crius.tools.evaluate.score import batches, join, saves, score
from crius.tools.evaluate.settings import EvaluateSettings
from crius.tools.evaluate.tasks import Document, Request, Task
from crius.tools.generate.source import Source, read_source

_CPU_TOKENS = 256
_GPU_TOKENS = 16384


@dataclass(frozen=True)
class Result:
    """Result of one task.

    Attributes:
        task: name of the task.
        documents: documents that were scored.
        total: documents of the task.
        metrics: metrics by name.
    """

    task: str
    documents: int
    total: int
    metrics: Mapping[str, Figure]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = {"task": self.task, "documents": self.documents, "total": self.total}
        return told | {"metrics": as_json(self.metrics)}


@dataclass(frozen=True)
class Evaluation:
    """Results of a command.

    Attributes:
        source: source of the model, for people.
        facts: what was computed and how, for JSON.
        results: results of the tasks.
        requests: texts that were scored, with those of earlier commands.
        tokens: tokens that this command read.
        seconds: seconds that the scoring took.
    """

    source: str
    facts: Mapping[str, Any]
    results: Sequence[Result]
    requests: int
    tokens: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = {"source": self.source, **self.facts, "results": [result.as_dict() for result in self.results]}
        return told | {"requests": self.requests, "tokens": self.tokens, "seconds": self.seconds}

    def lines(self) -> list[str]:
        """For people."""
        rows = [("task", "documents", "metric", "value", "95 % interval")]
        for result in self.results:
            head = (result.task, f"{result.documents:,} of {result.total:,}")
            for name, (value, low, high) in result.metrics.items():
                interval = "" if low == high == value else f"{low:.3f} to {high:.3f}"
                rows.append((*head, name, f"{value:.4f}", interval))
                head = ("", "")
        how = f"{self.facts['dtype']} on {self.facts['device']}, at most {self.facts['max_length']:,} tokens at once"
        speed = f", {self.tokens / self.seconds:,.0f} tokens/s" if self.tokens and self.seconds else ""
        done = f"({self.requests:,} texts, {self.tokens:,} tokens read in {self.seconds:.1f} s{speed})"
        return [f"{self.source}: {how}", *aligned(rows, left=(0, 1, 2, 4)), *([done] if self.requests else [])]


def as_chats(tasks: Sequence[Task], source: Source) -> list[Task]:
    """``tasks`` with each context as the text of a chat up to the answer, which begins without white space.

    Raises:
        ConfigError: a task consists of texts without a context.
        DataError: the chat template cannot be rendered.
    """
    if texts := [task.name for task in tasks if task.kind == "text"]:
        what = f"--chat does not go with {', '.join(texts)}."
        raise ConfigError(what, where="--tasks", why="a text is not an answer", fix="leave out --chat, or the text")
    said = list(dict.fromkeys(request.context for task in tasks for one in task.documents for request in one.requests))
    chats = [[{"role": "user", "content": text}] for text in said]
    texts = render_chats(source.chat_template, chats, source.special, is_dated=False)
    rendered = dict(zip(said, texts, strict=True))

    def asked(one: Request) -> Request:
        return Request(rendered[one.context], one.continuation.lstrip())

    hasher = Hasher()
    hasher.update(source.chat_template.encode())
    digest = hasher.hexdigest()
    return [
        replace(
            task,
            name=f"{task.name}, chat",
            documents=_changed(task, asked),
            digest=f"{task.digest}, template {digest}",
        )
        for task in tasks
    ]


def as_texts(tasks: Sequence[Task]) -> list[Task]:
    """``tasks`` with the white space at the end of a context in the continuation, because tokens begin with it."""

    def moved(one: Request) -> Request:
        kept = one.context.rstrip()
        return Request(kept, one.context[len(kept) :] + one.continuation)

    return [replace(task, documents=_changed(task, moved)) for task in tasks]


def _changed(task: Task, change: Callable[[Request], Request]) -> tuple[Document, ...]:
    return tuple(replace(document, requests=tuple(map(change, document.requests))) for document in task.documents)


def open_model(weights: Weights, settings: EvaluateSettings) -> tuple[Source, Encoder]:
    """The model of a run folder, a checkpoint or a Hugging Face folder, and the encoder of texts into its rows.

    Matmuls are torch's, as in transformers: another order of sums would change the log-probability of a long text by
    2e-4 nats, and results are compared.

    Raises:
        CriusError: see ``read_source``.
    """
    source = read_source(weights, settings.of_source, linear="torch")
    max_length = settings.max_length or longest_context(source.weights)
    return source, Encoder(source.tokenizer, max_length, _prefix(source), settings.chat)


def _prefix(source: Source) -> int:
    """BOS, or EOS if there is none, as in the tokenizer of transformers that an export writes."""
    for name in ("bos_token", "eos_token"):
        for found in source.tokenizer.special_ids([source.special.get(name, "")]):
            return found
    bos = None if source.special else source.tokenizer.bos_id
    return source.tokenizer.eos_id if bos is None else bos


Others = Callable[[Source, Encoder, EvaluateSettings], list[Result]]
"""Scores tasks of another package."""


def evaluate(
    weights: Weights,
    tasks: Sequence[Task],
    settings: EvaluateSettings,
    others: Others = lambda source, encoder, settings: [],
) -> Evaluation:
    """Score ``tasks``, then others.

    Args:
        weights: weights of the model.
        tasks: tasks that were read.
        settings: settings that were checked.
        others: scores the tasks of another package.

    Raises:
        CriusError: the model or the record cannot be used, or a text cannot be scored.
    """
    source, encoder = open_model(weights, settings)
    tasks = as_chats(tasks, source) if settings.chat else as_texts(tasks)
    weight = source.model.tok_embeddings.weight
    facts = {
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": weight.device.type,
        "max_length": encoder.max_length,
    }
    rows: dict[Key, list[TokenRow]] = {}
    for task in tasks:
        for document in task.documents:
            for number, request in enumerate(document.requests):
                where = f"{task.name}, document {document.number}"
                rows[Key(task.name, document.number, number)] = encoder.rows(request, task.kind, where)
    theirs = others(source, encoder, settings)  # first, because Crius's own scores are recorded
    words = {"tokenizer": source.tokenizer.fingerprint, "prefix": encoder.prefix, "bos": source.tokenizer.adds_bos}
    header = facts | words | ({"digest": source.weights.digest} if settings.out else {})
    with ScoreRecord(settings.out, header, {task.name: task.digest for task in tasks}) as record:
        began = time.perf_counter()
        scores, tokens = _score(source, rows, record, settings.batch_tokens)
        seconds = time.perf_counter() - began
    results = [
        Result(
            task.name,
            len(task.documents),
            task.total,
            figures(
                task,
                [
                    [scores[Key(task.name, document.number, number)] for number in range(len(document.requests))]
                    for document in task.documents
                ],
            ),
        )
        for task in tasks
    ]
    return Evaluation(source.weights.origin, facts, [*results, *theirs], len(rows), tokens, seconds)


def score_groups(
    source: Source,
    groups: Sequence[Sequence[TokenRow]],
    batch_tokens: int,
    done: Callable[[int, Sequence[Score]], None],
    is_known: Callable[[int], bool] = lambda number: False,
) -> int:
    """Score groups of rows in batches; returns the number of tokens that were read.

    Args:
        source: the model.
        groups: rows that may share their beginning, in any order.
        batch_tokens: tokens of a batch; 0: a number that suits the device.
        done: receives the number of a group and the scores of its rows.
        is_known: whether a group, given by number, is known. A batch of known groups is left out. Other batches keep
            their known groups, because the sums of a batch depend on its shape.
    """
    on_gpu = source.model.tok_embeddings.weight.is_cuda
    tokens = 0
    for numbers in batches(groups, batch_tokens or (_GPU_TOKENS if on_gpu else _CPU_TOKENS)):
        if all(map(is_known, numbers)):
            continue
        for number, scores in zip(numbers, score(source.model, [groups[n] for n in numbers]), strict=True):
            done(number, scores)
        tokens += sum(len(join(groups[number]).tokens) for number in numbers)
    return tokens


def _score(
    source: Source, rows: Mapping[Key, Sequence[TokenRow]], record: ScoreRecord, batch_tokens: int
) -> tuple[dict[Key, Score], int]:
    """Scores of all requests, and the tokens read for requests that were not in the record."""
    scores = {key: record.scores[key] for key in rows if key in record.scores}
    known = set(scores)
    groups = list(_grouped(rows))
    parts: dict[Key, list[Score]] = {}
    progress = _Progress(len(rows), len(scores))

    def done(number: int, found: Sequence[Score]) -> None:
        whole = []
        for (key, _), one in zip(groups[number], found, strict=True):
            if not math.isfinite(one.log_prob):
                raise DataError(
                    f"the log-probability is {one.log_prob}.",
                    where=f"{key.task}, document {key.document}",
                    why="the model's logits are not finite",
                    fix="evaluate an earlier checkpoint, or --dtype float32",
                )
            mine = parts.setdefault(key, [])
            mine.append(one)
            if len(mine) == len(rows[key]) and key not in known:
                log_prob, is_greedy, tokens = zip(*mine, strict=True)
                scores[key] = Score(sum(log_prob), all(is_greedy), sum(tokens))
                whole.append((key, scores[key]))
        record.add(whole)
        progress.show(len(scores))

    tokens = score_groups(
        source,
        [[row for _, row in group] for group in groups],
        batch_tokens,
        done,
        is_known=lambda number: all(key in known for key, _ in groups[number]),
    )
    progress.end()
    return scores, tokens


def _grouped(rows: Mapping[Key, Sequence[TokenRow]]) -> Iterator[list[tuple[Key, TokenRow]]]:
    """The choices of a document together if that saves work, each window of a text by itself."""
    for _, keys in itertools.groupby(rows, key=lambda key: (key.task, key.document)):
        parts = [(key, row) for key in keys for row in rows[key]]
        if len({key for key, _ in parts}) > 1 and saves([row for _, row in parts]):
            yield parts
        else:
            yield from ([part] for part in parts)


class _Progress:
    """A line on a terminal with the progress and the remaining time."""

    def __init__(self, total: int, already: int) -> None:
        self._total = total
        self._already = already
        self._began = time.monotonic()
        self._is_shown = sys.stderr.isatty()

    def show(self, done: int) -> None:
        if self._is_shown and done > self._already:
            rest = (time.monotonic() - self._began) / (done - self._already) * (self._total - done)
            sys.stderr.write(f"\r\x1b[K{done:,} of {self._total:,} texts, about {rest:,.0f} s left")
            sys.stderr.flush()

    def end(self) -> None:
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
