"""``crius import``."""

import shlex
from typing import Annotated, Any, Literal

from crius.cli.app import Json, app, emit, emit_result
from crius.errors import ConfigError


@app.verb(name="import")
def import_weights(
    source: Annotated[
        str,
        "Folder of Hugging Face (config.json, safetensors), PEFT adapter, name on the hub, or GGUF file.",
    ],
    target: Annotated[str, "Run folder to write: its model, its tokenizer, a checkpoint of step 0."] = "",
    *,
    explain: Annotated[
        bool,
        (
            "Print first what each file and each key of config.json becomes, and every reason against an import, "
            "but do not read the numbers. Without TARGET nothing is written, and SOURCE may be a config.json."
        ),
    ] = False,
    adapter: Annotated[
        Literal["", "merge", "keep", "leave_out"],
        (
            "merge: the adapter is added to its base. keep: the adapter alone, as in a LoRA run. leave_out: the "
            "model beside the adapter. Empty: keep, if there is no model beside it."
        ),
    ] = "",
    allow_nonfinite: Annotated[
        bool, "Weights may be NaN or infinite, here and wherever the run folder is read."
    ] = False,
    as_json: Json = False,
) -> int:
    """Import a model as a run folder, for --checkpoint.init_from. No code in it is executed.

    The weights keep their bits. If tensors do not fit the model in config.json, all of them are named, nothing is
    written and the exit code is 1. What --explain finds has exit code 2.
    """
    from crius.tools.convert.importing import import_model

    told: dict[str, Any] = {}
    if explain:
        told = _explained(source, adapter, is_printed=not as_json or not target, as_json=as_json)
    if explain and not target:
        return 0
    if not target:
        fix = f"crius import {shlex.quote(source)} DIR, or --explain"
        raise ConfigError("no run folder to write is given.", where="command line", fix=fix)
    done = import_model(source, target, adapter=adapter, allow_nonfinite=allow_nonfinite)
    emit_result({**done.as_dict(), **told}, done.lines(), as_json=as_json)
    if not as_json:
        emit(f"train on it: crius train --checkpoint.init_from {done.where}")
    if done.adapters and not as_json:
        place = f"--config {done.where}/run.toml --checkpoint.load_path {done.where}/checkpoints"
        emit(f"train the adapter further: crius train {place}")
    return 0


def _explained(source: str, adapter: str, *, is_printed: bool, as_json: bool) -> dict[str, Any]:
    """What an import makes of a source. It is printed in any case if that is a refusal.

    Raises:
        ConfigError: the source is refused, with every reason.
    """
    from crius.tools.convert.explaining import explain

    explanation = explain(source, adapter)
    told = explanation.as_dict()
    if is_printed or explanation.refusals:
        emit_result(told, explanation.lines(), as_json=as_json)
    explanation.check()
    return told
