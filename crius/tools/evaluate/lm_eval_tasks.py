"""Tasks of lm-eval (github.com/EleutherAI/lm-evaluation-harness), an optional package, scored by the model here."""

import importlib.util
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from crius.errors import ConfigError, CriusError, DataError, EnvironmentError
from crius.plugins import REQUIREMENTS, install_line
from crius.tools.evaluate.encode import Encoder, TokenRow
from crius.tools.evaluate.metrics import Figure, Score, Z
from crius.tools.evaluate.run import Others, Result, score_groups
from crius.tools.evaluate.score import saves
from crius.tools.evaluate.settings import EvaluateSettings
from crius.tools.evaluate.tasks import LM_EVAL
from crius.tools.generate.run import answer
from crius.tools.generate.settings import Prompt
from crius.tools.generate.settings import Settings as Generation
from crius.tools.generate.source import Source

_MAX_NEW_TOKENS = 256  # lm-eval's default
_BATCH = 8


def scorer(names: Sequence[str]) -> Others:
    """The scorer of the tasks ``names``: tasks that lm-eval knows, or YAML files of one's own.

    Raises:
        ConfigError: lm-eval has no such task.
        EnvironmentError: lm-eval is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise EnvironmentError(
            f"tasks that begin with {LM_EVAL} need the lm-eval package, which is not installed.",
            where="--tasks",
            fix=install_line(REQUIREMENTS["lm_eval"]),
        )
    from lm_eval.tasks import TaskManager  # noqa: PLC0415  optional package

    files = [Path(name) for name in names if Path(name).is_file()]
    manager = TaskManager(include_path=[str(folder) for folder in {file.parent.absolute() for file in files}] or None)
    wanted = [Path(name).stem if Path(name) in files else name for name in names]
    if unknown := [name for name in wanted if name not in manager.all_tasks]:
        raise ConfigError(
            f"lm-eval has no task {', '.join(unknown)}.",
            where="--tasks",
            why="a YAML file has the name of its task" if files else "",
            fix="lm-eval ls tasks lists its tasks; a file of your own is given as lm_eval:FILE.yaml",
        )
    return partial(_score, wanted, manager)


def _score(
    wanted: Sequence[str], manager: Any, source: Source, encoder: Encoder, settings: EvaluateSettings
) -> list[Result]:
    """Results of tasks.

    Raises:
        DataError: a task cannot be scored, for example because its data is missing.
    """
    import lm_eval  # noqa: PLC0415  optional package

    try:
        found = lm_eval.simple_evaluate(
            model=_model(source, encoder, settings),
            tasks=list(wanted),
            limit=settings.limit or None,
            task_manager=manager,
            bootstrap_iters=1000,
            log_samples=False,
        )
    except CriusError:
        raise
    except Exception as error:  # errors of the package, of datasets, of the hub
        is_offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")
        is_data = isinstance(error, OSError) or type(error).__module__.startswith(("datasets", "huggingface_hub"))
        raise DataError(
            f"lm-eval failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            where=f"--tasks {LM_EVAL}{wanted[0]}",
            why="HF_HUB_OFFLINE is set, and the data of most tasks comes from the hub"
            if is_data and is_offline
            else "",
            fix="the data of the task must be in the cache of datasets, or reachable" if is_data else "",
        ) from error
    samples = found["n-samples"]
    tasks = [
        Result(f"{LM_EVAL}{name}", samples[name]["effective"], samples[name]["original"], _figures(metrics))
        for name, metrics in found["results"].items()
        if name in samples
    ]
    for name, metrics in found.get("groups", {}).items():
        parts = [samples[part] for part in found.get("group_subtasks", {}).get(name, ()) if part in samples]
        scored, total = (sum(part[count] for part in parts) for count in ("effective", "original"))
        if figures := _figures(metrics):
            tasks.append(Result(f"{LM_EVAL}{name}", scored, total, figures))
    return tasks


def _figures(metrics: Mapping[str, Any]) -> dict[str, Figure]:
    """The metrics of a task by name, with intervals from its standard errors."""
    figures = {}
    for key, value in metrics.items():
        name, _, kind = key.partition(",")
        if name.endswith("_stderr") or not kind or not isinstance(value, float | int):
            continue
        error = metrics.get(f"{name}_stderr,{kind}")
        half = Z * error if isinstance(error, float) and math.isfinite(error) else 0.0
        figures[name if kind == "none" else f"{name} ({kind})"] = Figure(value, value - half, value + half)
    return figures


def _model(source: Source, encoder: Encoder, settings: EvaluateSettings) -> Any:
    """The model with lm-eval's interface."""
    from lm_eval.api.model import TemplateLM  # noqa: PLC0415  optional package

    class Model(TemplateLM):
        eot_token_id = encoder.tokenizer.eos_id
        prefix_token_id = encoder.prefix
        max_length = encoder.max_length
        tokenizer_name = source.weights.origin

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            if add_special_tokens is False:
                return [int(token) for token in encoder.tokenizer.encode(string)]
            return encoder.encode(string)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            where = "a request of lm-eval"
            rows = [encoder.row(context, targets, where) for _, context, targets in requests]
            numbers = iter(range(len(rows)))  # choices of a context; other texts stand alone
            contexts = [request[0][0] or number for number, request in enumerate(requests)]
            groups = [[rows[next(numbers)] for _ in same] for _, same in itertools.groupby(contexts)]
            apart = [part for group in groups for part in ([group] if saves(group) else [[row] for row in group])]
            return [(score.log_prob, score.is_greedy) for score in _scores(apart)]

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            windows = [list(encoder.windows(encoder.encode(request.args[0]))) for request in requests]
            scores = iter(_scores([[row] for rows in windows for row in rows]))
            return [math.fsum(next(scores).log_prob for _ in rows) for rows in windows]

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            return _answers(source, encoder, [request.args for request in requests])

    def _scores(groups: Sequence[Sequence[TokenRow]]) -> list[Score]:
        found: dict[int, Sequence[Score]] = {}
        score_groups(source, groups, settings.batch_tokens, found.__setitem__)
        return [score for number in range(len(groups)) for score in found[number]]

    return Model()


def _answers(source: Source, encoder: Encoder, prompts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """The model's text after each prompt; prompts with equal settings and similar length are answered together."""
    order = sorted(
        range(len(prompts)), key=lambda number: (repr(sorted(prompts[number][1].items())), prompts[number][0])
    )
    texts = [""] * len(prompts)
    while order:
        asked = prompts[order[0]][1]
        batch = [number for number in order[:_BATCH] if prompts[number][1] == asked]
        order = order[len(batch) :]
        until = asked.get("until") or ()
        samples = bool(asked.get("do_sample", False))
        generation = Generation(
            max_new_tokens=int(asked.get("max_gen_toks", _MAX_NEW_TOKENS)),
            temperature=float(asked.get("temperature", 1.0)) if samples else 0.0,
            top_k=int(asked.get("top_k", 0)),
            top_p=float(asked.get("top_p", 1.0)),
            stop=(until,) if isinstance(until, str) else tuple(until),
        )
        room = max(1, encoder.max_length - generation.max_new_tokens)
        answers = answer(
            source,
            [Prompt(_end_of(prompts[number][0], encoder, room), ()) for number in batch],
            generation,
            first=batch[0],
        )
        for number, one in zip(batch, answers, strict=True):
            texts[number] = one.text
    return texts


def _end_of(text: str, encoder: Encoder, tokens: int) -> str:
    """The end of a text that is too long, cut as lm-eval does."""
    ids = encoder.encode(text)
    return text if len(ids) <= tokens else encoder.tokenizer.decode(ids[-tokens:])
