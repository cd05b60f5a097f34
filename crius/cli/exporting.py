"""``crius export``."""

import json
from typing import Annotated, Literal

from cyclopts import Parameter

from crius.cli.app import Json, app, emit


@app.command
def export(
    source: Annotated[str, Parameter(help="Run folder, one checkpoint, or folder of Hugging Face.")],
    target: Annotated[str, Parameter(help="Folder to write; not there yet, or empty.")],
    *,
    dtype: Annotated[
        Literal["", "float32", "bfloat16", "float16"],
        Parameter(help="Of the weights. Empty: as they are in the checkpoint."),
    ] = "",
    step: Annotated[int, Parameter(help="Step of the checkpoint. -1: the newest whole one.")] = -1,
    format: Annotated[
        Literal["hf", "dcp"], Parameter(help="hf: a folder for transformers. dcp: torch's DCP with torchtitan's names.")
    ] = "hf",
    as_json: Json = False,
) -> int:
    """Export the weights of a run as a folder that transformers loads, of any layout, and prove it by reading it back.

    Every tensor is compared with the source bit by bit; where transformers is installed, its logits are compared too.
    Where anything differs, nothing is written and the exit code is 1.
    """
    from crius.interop.exporting import export_model, open_source

    write = export_model
    if format == "dcp":
        from crius.interop.dcp_out import export_dcp as write
    done = write(open_source(source, step), target, dtype)
    emit(json.dumps(done.as_dict(), indent=2) if as_json else "\n".join(done.lines()))
    return 0
