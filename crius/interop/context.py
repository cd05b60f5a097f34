"""The longest context of a model. Weights do not depend on it, so it is not a setting of the model. No torch."""

from crius.interop.foreign import read_inside
from crius.interop.kept import CONFIG, CONTEXT, Origin
from crius.interop.safetensors_file import json_object
from crius.interop.weights import Weights
from crius.tokens.files import TOKENIZER_CONFIG
from crius.tokens.template import folder_of

UNKNOWN = 2048
"""Tokens of the longest context, if it is not known."""

_LARGEST = 1 << 28


def longest_context(weights: Weights) -> int:
    """The longest known context, in tokens.

    It is the context that the source of the weights names, or the sequence length of the run if that is longer. If the
    source names none, it is the longer of the sequence length and of ``model_max_length`` of the tokenizer that came
    with pretrained weights. If none is known, it is ``model_max_length`` of any tokenizer, else ``UNKNOWN``; a model
    with stretched rotary frequencies then has at least the context that they were stretched to.

    Raises:
        CheckpointError: a file in the tokenizer's folder is damaged.
    """
    settings = weights.saved.manifest.config if weights.saved else {}
    trained = _number(settings.get("training.seq_len"))
    if said := _number(weights.said.get(CONFIG, {}).get(CONTEXT)):
        return max(said, trained)
    told = _of_tokenizer(weights.tokenizer)
    known = max(trained, told) if settings.get("checkpoint.init_from") else trained or told or UNKNOWN
    scaling = weights.facts.config.rope_scaling
    if scaling and known <= scaling.original_context:
        return int(scaling.factor * scaling.original_context)
    return known


def handed_on(weights: Weights) -> Origin:
    """What belongs to weights, for a run that starts from them or an import of them: with the context that the run of
    the weights gave them, unless their source names none.
    """
    said = weights.said
    config = said.get(CONFIG, {CONTEXT: 0})
    if weights.saved and "training.seq_len" in weights.saved.manifest.config and CONTEXT in config:
        said = {**said, CONFIG: {**config, CONTEXT: longest_context(weights)}}
    return Origin(weights.tokenizer, said)


def _of_tokenizer(path: str) -> int:
    """``model_max_length`` in the folder of a tokenizer; 0: there is none."""
    if path in ("", "byte"):
        return 0
    folder = folder_of(path)
    if not (folder / TOKENIZER_CONFIG).exists():
        return 0
    content = read_inside(folder, TOKENIZER_CONFIG, _LARGEST)
    return _number(json_object(content, f"{folder}/{TOKENIZER_CONFIG}").get("model_max_length"))


def _number(value: object) -> int:
    return value if type(value) is int and 0 < value < 1 << 40 else 0
