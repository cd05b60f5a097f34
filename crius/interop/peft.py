"""Folders of PEFT (github.com/huggingface/peft): LoRA adapters, by Crius's names. No torch."""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from crius.checkpoint.pieces import TensorSource
from crius.config.lora import LoraConfig, target_names
from crius.errors import ConfigError
from crius.interop.safetensors_file import ADAPTER_FILE, read_safetensors
from crius.models.description import ModelDescription
from crius.models.registry import foreign_names

PREFIX = "base_model.model."
"""Start of the names of all tensors; the name in Hugging Face's model follows."""

_DEFAULT = 8  # of rank and alpha
_NUMBERS = {"r": (int,), "lora_alpha": (int, float)}
_PATTERNS = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "use_rslora": (True, False),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),  # others change the base
}
_WITHOUT_EFFECT = set(  # on trained adapters; which layers have some is read from the tensors
    "auto_mapping base_model_name_or_path revision peft_version inference_mode target_modules exclude_modules "
    "layers_to_transform layers_pattern lora_dropout megatron_core loftq_config eva_config corda_config "
    "qalora_group_size".split()
)


def differences(content: dict[str, Any]) -> Iterator[str]:
    """Settings in an adapter_config.json that Crius does not support."""
    for key, value in ({"peft_type": None} | content).items():
        if key in _NUMBERS:
            is_fine = type(value) in _NUMBERS[key] and 0 < value < math.inf
        elif key in _PATTERNS and isinstance(value, dict):
            is_fine = all(one == content.get(_PATTERNS[key], _DEFAULT) for one in value.values())
        elif key in _SUPPORTED:
            is_fine = value in _SUPPORTED[key]
        else:
            is_fine = key in _WITHOUT_EFFECT or not value or value == "none"
        if not is_fine:
            yield f"{key} {ascii(value)[:100]} is not supported"


def foreign_modules(model: str, linears: Iterable[str], **told: str) -> dict[str, str]:
    """Hugging Face's names of linear layers, by Crius's names.

    Args:
        model: name of the model.
        linears: Crius's names of the layers.
        told: ``otherwise`` and ``where``, as ``foreign_names`` takes them.

    Raises:
        ConfigError: some have no name there, or share a layer there.
    """
    _, names = foreign_names(model, [f"{name}.weight" for name in linears], **told)
    theirs = list(names.values())
    if joined := sorted({name for name in theirs if theirs.count(name) > 1}):
        otherwise = told.get("otherwise", "")
        raise ConfigError(
            f"{joined[0].removesuffix('.weight')} of {model} in transformers is several layers here.",
            where=told.get("where", "model.name"),
            why="one adapter of it would be several here",
            fix=otherwise or "merge the adapters first: merge_and_unload() in PEFT",
        )
    return {name.removesuffix(".weight"): theirs.removesuffix(".weight") for name, theirs in names.items()}


def read_peft(
    folder: Path, content: Mapping[str, Any], model: ModelDescription, modules: Mapping[str, str]
) -> tuple[LoraConfig, dict[str, TensorSource]]:
    """The settings of adapters as the section ``[lora]``, and their tensors by our names; an unknown name is kept.

    Args:
        folder: folder of PEFT.
        content: its adapter_config.json.
        model: description of its base.
        modules: Hugging Face's names of the layers that may be adapted, by ours.

    Raises:
        CheckpointError: tensors are missing, damaged or of an unknown dtype.
    """
    ours = {
        f"{PREFIX}{module}.{part}.weight": f"{name}.{part}"
        for name, module in modules.items()
        for part in ("lora_A", "lora_B")
    }
    foreign = read_safetensors(folder / ADAPTER_FILE).all_tensors(str(folder))
    tensors = {ours.get(key, key): tensor for key, tensor in foreign.items()}
    adapted = {name.rpartition(".lora_")[0] for name in tensors}
    names = tuple(name for name, module in modules.items() if name in adapted or _is_listed(module, content))
    rank, alpha = (content.get(key, _DEFAULT) for key in _NUMBERS)
    within = dict.fromkeys(name.split(".", 2)[2] for name in names)
    for targets in ((), tuple(within), names):  # the shortest
        lora = LoraConfig(rank=rank, alpha=alpha, rslora=bool(content.get("use_rslora")), targets=targets)
        if target_names(lora, model) == names:
            break
    return lora, tensors


def _is_listed(module: str, content: Mapping[str, Any]) -> bool:
    """Whether ``target_modules`` is a list that names a module, in all layers."""
    names = content.get("target_modules")
    is_narrowed = any(content.get(key) not in (None, []) for key in ("layers_to_transform", "exclude_modules"))
    return isinstance(names, list) and not is_narrowed and any(f".{module}".endswith(f".{name}") for name in names)
