"""``crius export``."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

from crius.cli.app import Json, app, emit_result
from crius.errors import ConfigError


@app.verb
def export(
    source: Annotated[str, "Run folder, one checkpoint, Hugging Face folder, or its name on the hub."],
    target: Annotated[str, "Folder to write, new or empty."],
    *,
    dtype: Annotated[
        Literal["", "float32", "bfloat16", "float16"],
        "dtype of the weights. Empty: as in the checkpoint.",
    ] = "",
    step: Annotated[int, "Step of the checkpoint. -1: the newest whole one."] = -1,
    format: Annotated[
        Literal["", "hf", "peft", "dcp"],
        (
            "hf: a folder for transformers. peft: the adapters of a LoRA run alone, for PEFT. dcp: torch's DCP "
            "with torchtitan's names. hf and dcp merge adapters into their base. Empty: peft for a LoRA run, else hf."
        ),
    ] = "",
    no_tokenizer: Annotated[bool, "Write no tokenizer. Without this flag a source without one is an error."] = False,
    push_to: Annotated[str, "Name on the hub, OWNER/NAME: upload the folder there. A new repository is private."] = "",
    yes: Annotated[bool, "Upload without a question."] = False,
    as_json: Json = False,
) -> int:
    """Export the weights of a run as a folder that other libraries load, from any layout, and prove it by reading it
    back.

    Every tensor is compared with the source bit by bit; if transformers is installed, its logits are compared too. If
    anything differs, nothing is written and the exit code is 1.
    """
    from crius.interop.hub import located
    from crius.tools.convert.exporting import Export, ExportSource, export_model, open_source
    from crius.tools.convert.new_folder import check_order

    if format == "dcp" and no_tokenizer:
        what = "--no_tokenizer has no effect with --format dcp, which has no tokenizer."
        raise ConfigError(what, where="command line", fix="leave out --no_tokenizer")
    if yes and not push_to:
        raise ConfigError("--yes has no effect without --push_to.", where="command line", fix="leave out --yes")
    if push_to:
        from crius.tools.convert.pushing import check_push, push

        check_push(push_to, is_answered=yes)
    check_order("export", source, target)
    opened = replace(open_source(located(source), step), has_tokenizer=not no_tokenizer)
    write: Callable[[ExportSource, str, str], Export] = export_model
    if format == "dcp":
        from crius.tools.convert.dcp_out import export_dcp as write
    if format == "peft" or (not format and opened.weights.adapters):
        from crius.tools.convert.peft_out import export_peft as write
    done = write(opened, target, dtype)
    emit_result(done.as_dict(), done.lines(), as_json=as_json)
    if push_to:
        push(target, push_to, is_answered=yes)
    return 0
