"""``crius import``."""

import json
from typing import Annotated

from cyclopts import Parameter

from crius.cli.app import Json, app, emit


@app.command(name="import")
def import_weights(
    source: Annotated[
        str, Parameter(help="Folder of Hugging Face (config.json, safetensors), name on its hub, or GGUF file.")
    ],
    target: Annotated[str, Parameter(help="Run folder to write: its model, its tokenizer, a checkpoint of step 0.")],
    *,
    as_json: Json = False,
) -> int:
    """Import a model as a run folder, for --checkpoint.init_from. No code in it is executed.

    The weights keep their bits. If tensors do not fit the model in config.json, all of them are named, nothing is
    written and the exit code is 1.
    """
    from crius.tools.convert.importing import import_model

    done = import_model(source, target)
    emit(json.dumps(done.as_dict(), indent=2) if as_json else "\n".join(done.lines()))
    if not as_json:
        emit(f"train on it: crius train --checkpoint.init_from {done.where}")
    return 0
