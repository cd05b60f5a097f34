"""``crius import``."""

import json
from typing import Annotated, Literal

from cyclopts import Parameter

from crius.cli.app import Json, app, emit


@app.command(name="import")
def import_weights(
    source: Annotated[
        str,
        Parameter(
            help="Folder of Hugging Face (config.json, safetensors), PEFT adapter, name on the hub, or GGUF file."
        ),
    ],
    target: Annotated[str, Parameter(help="Run folder to write: its model, its tokenizer, a checkpoint of step 0.")],
    *,
    adapter: Annotated[
        Literal["", "merge", "keep", "leave_out"],
        Parameter(
            help="merge: the adapter is added to its base. keep: the adapter alone, as in a LoRA run. leave_out: the "
            "model beside the adapter. Empty: keep, if there is no model beside it."
        ),
    ] = "",
    allow_nonfinite: Annotated[
        bool, Parameter(negative=(), help="Weights may be NaN or infinite, here and wherever the run folder is read.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Import a model as a run folder, for --checkpoint.init_from. No code in it is executed.

    The weights keep their bits. If tensors do not fit the model in config.json, all of them are named, nothing is
    written and the exit code is 1.
    """
    from crius.tools.convert.importing import import_model

    done = import_model(source, target, adapter=adapter, allow_nonfinite=allow_nonfinite)
    emit(json.dumps(done.as_dict(), indent=2) if as_json else "\n".join(done.lines()))
    if not as_json:
        emit(f"train on it: crius train --checkpoint.init_from {done.where}")
    if done.adapters and not as_json:
        place = f"--config {done.where}/run.toml --checkpoint.load_path {done.where}/checkpoints"
        emit(f"train the adapter further: crius train {place}")
    return 0
