"""The longest context of a model. Weights do not depend on it, so it is not a setting of the model. No torch."""

from pathlib import Path

from crius.data.tokenizer_files import TOKENIZER_CONFIG
from crius.interop.foreign import read_inside
from crius.interop.kept import CONFIG
from crius.interop.safetensors_file import json_object
from crius.interop.weights import Weights

UNKNOWN = 2048
"""Tokens of the longest context, if it is not known."""

_LARGEST = 1 << 28


def longest_context(weights: Weights) -> int:
    """The longest known context, in tokens.

    It is the longest of three numbers: the sequence length of the run, the context in a ``config.json`` in the folder
    of weights or tokenizer, and, if the run began with pretrained weights, ``model_max_length`` of their tokenizer. If
    none is known, it is ``model_max_length`` of the tokenizer, else ``UNKNOWN``. A model with stretched rotary
    frequencies has at least the context that they were stretched to.

    Raises:
        CheckpointError: a file in the tokenizer's folder is damaged.
    """
    settings = weights.saved.manifest.config if weights.saved else {}
    known = max(_number(settings.get("training.seq_len")), _named(weights, CONFIG, "max_position_embeddings"))
    told = _named(weights, TOKENIZER_CONFIG, "model_max_length")
    known = max(known, told) if settings.get("checkpoint.init_from") else known or told or UNKNOWN
    scaling = weights.facts.config.rope_scaling
    if scaling and known <= scaling.original_context:
        return int(scaling.factor * scaling.original_context)
    return known


def _named(weights: Weights, file: str, key: str) -> int:
    """A number in a file in the folder of the weights or the tokenizer; 0: there is none."""
    place = Path(weights.tokenizer).expanduser() if weights.tokenizer not in ("", "byte") else None
    folder = weights.folder or (place if place is None or place.is_dir() else place.parent)
    if folder is None or not (folder / file).exists():
        return 0
    return _number(json_object(read_inside(folder, file, _LARGEST), f"{folder}/{file}").get(key))


def _number(value: object) -> int:
    return value if type(value) is int and 0 < value < 1 << 40 else 0
