"""``crius export`` of the adapters of a LoRA run: a folder that PEFT loads, proven by reading it back. No torch."""

import contextlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from crius import __version__
from crius.checkpoint.state import read_state
from crius.errors import ConfigError, CriusError
from crius.host import free_host_bytes
from crius.hub import snapshot_of
from crius.interop.adapters import Adapters
from crius.interop.peft import PREFIX, foreign_modules
from crius.interop.safetensors_file import ADAPTER_CONFIG, read_safetensors
from crius.interop.weights import Weights, open_weights
from crius.plugins import REQUIREMENTS, install_line
from crius.tools.convert.comparison import Compare, Job, compared
from crius.tools.convert.exporting import (
    Export,
    ExportSource,
    job_of,
    parts_of,
    write_parts,
    written,
)
from crius.tools.convert.model_card import model_card
from crius.tools.convert.new_folder import new_folder
from crius.tools.convert.tokenizer_out import write_tokenizer

_STEM = "adapter_model"
_ONE_FILE = 1 << 62
"""Bytes of a file: PEFT reads one file of any size."""


def export_peft(source: ExportSource, target: str, dtype: str = "", compare: Compare = compared) -> Export:
    """Write the adapters of ``source`` as the PEFT folder ``target``.

    Args:
        source: see ``crius.tools.convert.exporting.open_source``; a LoRA run.
        target: folder; new or empty. All of it is written, or nothing.
        dtype: dtype of the adapters; empty: unchanged.
        compare: compares its logits with those of PEFT.

    Raises:
        CriusError: the source has no adapters, the target exists, Hugging Face has no such model, the source is
            damaged, or the written folder differs from it: other bits, or other logits.
    """
    weights = source.weights
    adapters = source.weights.adapters
    if adapters is None:
        raise ConfigError(
            f"{weights.origin} has no adapters.",
            where="--format peft",
            why="all its weights were trained, or it is not a LoRA run",
            fix="leave out --format",
        )
    own = replace(source, weights=replace(weights, tensors=adapters.tensors, rounds={}))
    modules = foreign_modules(weights.model["name"], adapters.linears, otherwise="--format dcp")
    names = {
        f"{name}.{part}": f"{PREFIX}{theirs}.{part}.weight"
        for name, theirs in modules.items()
        for part in ("lora_A", "lora_B")
    }
    exact, parts = (parts_of(own, names, to) for to in ("", dtype))
    is_rounded = [part.dtype for part in exact] != [part.dtype for part in parts]
    with new_folder(target) as folder:
        about = write_tokenizer(folder, weights, has_tokenizer=source.has_tokenizer)[0]
        base = base_of(adapters)
        config = adapter_config(adapters, weights, list(modules.values()), base)
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        files = write_parts(folder, exact, _STEM, most=_ONE_FILE)
        logits = _logits(folder, weights, adapters, base, compare)
        if is_rounded:  # rounding is not an error of the export; rounded tensors are read back below
            files = write_parts(folder, parts, _STEM, most=_ONE_FILE)
            logits += f", before the adapters were rounded to {dtype}"
        done = written(
            target,
            own,
            parts,
            read_safetensors(folder).tensors,
            kind=f"LoRA of rank {adapters.lora.rank} for PEFT",
            files=files,
            tokenizer=about,
            logits=logits,
        )
        told = {"written by Crius": __version__, "parameters": f"{adapters.num_parameters:,}", **source.facts}
        told |= {"base": adapters.base["path"], "hash of the base": base.digest}
        text = model_card(done.lines(), told, source.settings, files, library="peft")
        (folder / "README.md").write_text(text, encoding="utf-8")
    return done


class Base(NamedTuple):
    """The base of adapters, for PEFT.

    Attributes:
        name: name of the hub, or folder; the path of a checkpoint, if the base is neither.
        revision: commit of the hub's repository; None: the base is not from the hub.
        folder: folder that PEFT can open on this machine; empty: there is none.
        digest: hash of the base.
        line: command that exports the base as a folder, with the bits that the adapters were trained on.
    """

    name: str
    revision: str | None
    folder: str
    digest: str
    line: str


def base_of(adapters: Adapters) -> Base:
    """The base of ``adapters``. An imported checkpoint has the bits of the folder that it was imported from.

    Raises:
        CriusError: the base cannot be opened, here or by PEFT.
    """
    path = adapters.base["path"]
    weights = open_weights(path, adapter="leave_out")
    if weights.kind == "PEFT":
        raise ConfigError(
            f"the base of these adapters, {path}, is an adapter itself, which PEFT opens without adding both.",
            where="--format peft",
            fix="--format hf, which exports the sum",
        )
    folder = weights.folder if weights.kind == "Hugging Face" else None
    if weights.saved:
        state = read_state(*weights.saved)
        origin = Path(str(state.get("source_folder")))
        with contextlib.suppress(CriusError, OSError):
            if open_weights(str(origin), adapter="leave_out").digest == state.get("source_digest"):
                folder = origin
    place = str(folder.absolute()) if folder else ""
    line = f"crius export {shlex.quote(path)} DIR --format hf"
    if weights.rounds:  # the sum of a base and adapters, which an export rounds to the dtype of that base
        line += " --dtype float32"
    name = snapshot_of(place)
    if name and place.endswith(name.revision):
        return Base(name.repository, name.revision, place, weights.digest, line)
    return Base(place or path, None, place, weights.digest, line)


def adapter_config(adapters: Adapters, weights: Weights, modules: Sequence[str], base: Base) -> dict[str, Any]:
    """PEFT's settings for ``adapters`` of ``modules``, which have PEFT's names."""
    lora = adapters.lora
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "revision": base.revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": _shortened(modules, weights.facts.num_layers),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _shortened(modules: Sequence[str], num_layers: int) -> list[str]:
    """Last parts of the names if every layer has them, else the whole names."""
    counts: dict[str, int] = {}
    for module in modules:
        last = module.rpartition(".")[2]
        counts[last] = counts.get(last, 0) + 1
    return sorted(counts) if set(counts.values()) <= {num_layers} else list(modules)


def _logits(folder: Path, weights: Weights, adapters: Adapters, base: Base, compare: Compare) -> str:
    """Compare logits with those of PEFT.

    Raises:
        CheckpointError: PEFT does not load the export, or has other logits.
    """
    if not base.folder:
        why = "PEFT cannot open the base, a Crius checkpoint"
        return f"not compared: {why}. {base.line}, and name DIR in {ADAPTER_CONFIG}"
    missing = [REQUIREMENTS[name] for name in ("transformers", "peft") if find_spec(name) is None]
    if missing:
        return f"not compared: {' and '.join(missing)} not installed ({install_line(*missing)})"
    needed = 9 * weights.facts.num_parameters  # in float32, with one more copy while adapters are added
    if needed > (free := free_host_bytes()):
        return f"not compared: it takes {needed / 2**30:,.1f} GiB of memory, but {free / 2**30:,.1f} are free"
    job: Job = {
        **job_of(weights),
        "folder": str(folder),
        "base": base.folder,
        "source": adapters.where,
    }
    return compare(job)
