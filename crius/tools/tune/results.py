"""What ``crius tune`` leaves in its run folder: adapters with their base, and the merged model. No torch."""

import json
import os
import shutil
from pathlib import Path

from crius.interop.safetensors_file import ADAPTER_CONFIG
from crius.tools.convert.comparison import comparing
from crius.tools.convert.exporting import export_model, open_source
from crius.tools.convert.new_folder import new_folder
from crius.tools.convert.peft_out import Base, base_of, export_peft
from crius.untrusted import parse_json, read_named

ADAPTERS = "adapters"
BASE = "base"
MERGED = "merged"
_OF_A_MODEL = (".json", ".safetensors", ".jinja", ".txt", ".model")
"""Ends of the names of the files of a base that are linked: no code."""


def leave(run: Path) -> list[str]:
    """Export the newest checkpoint of a run into its folder.

    Args:
        run: folder of a run that has ended. What an earlier call left there, perhaps in part, is written anew.

    Returns:
        Lines that say what is there and how it is opened.

    Raises:
        CriusError: see ``export_model`` and ``export_peft``.
    """
    source = open_source(str(run), -1)
    for name in (MERGED, ADAPTERS):
        shutil.rmtree(run / name, ignore_errors=True)
    with comparing() as compare:
        done = export_model(source, str(run / MERGED), compare=compare)
        if source.weights.adapters:
            export_peft(source, str(run / ADAPTERS), compare=compare)
    lines = [f"{run / MERGED}: {done.kind}, {done.num_bytes / 2**20:,.1f} MiB, opens in transformers"]
    if source.weights.adapters:
        beside = _keep_base(run, base_of(source.weights.adapters))
        lines.append(f"{run / ADAPTERS}: adapters{beside}, open in PEFT:")
        opened = f"from peft import AutoPeftModelForCausalLM as A; A.from_pretrained('{ADAPTERS}')"
        lines.append(f'  (cd {run} && python -c "{opened}")')
    return lines


def _keep_base(run: Path, base: Base) -> str:
    """Put the base beside the adapters, unless it has a name on the hub; returns where it is, in words."""
    if base.revision:
        return f" of {base.name}"
    place = run / BASE
    if not place.exists():
        if base.folder:
            with new_folder(str(place)) as folder:
                for file in sorted(Path(base.folder).iterdir()):
                    if file.is_file() and file.name.endswith(_OF_A_MODEL):
                        _link(file.resolve(), folder / file.name)
        else:
            export_model(open_source(base.name, -1), str(place))
    settings = run / ADAPTERS / ADAPTER_CONFIG
    named = parse_json(read_named(settings)) | {"base_model_name_or_path": BASE}
    settings.write_text(json.dumps(named, indent=2) + "\n")
    return f" of the model in {place}"


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:  # another disk
        shutil.copy2(file, to)
