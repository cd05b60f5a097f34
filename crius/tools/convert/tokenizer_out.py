"""The tokenizer of an export: files that transformers' ``AutoTokenizer`` loads, with the ids that Crius trained on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crius.config.data import TokenizerConfig
from crius.data.tokenizer import build_tokenizer
from crius.data.tokenizer_files import TOKENIZER, TOKENIZER_CONFIG, tokenizer_file
from crius.errors import ConfigError
from crius.interop.foreign import read_inside
from crius.interop.kept import CONFIG, GENERATION
from crius.interop.safetensors_file import json_object
from crius.interop.weights import Weights
from crius.tools.convert.importing import TOKENIZER_FILES, copy_file

_END = "<|endoftext|>"
_LARGEST = 1 << 22


def byte_tokenizer() -> dict[str, Any]:
    """A tokenizer.json with the ids of ``ByteTokenizer``: pairs of bytes without any merge.

    Its alphabet is GPT-2's, in which each byte is a printable character.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = dict(zip(plain, plain, strict=True)) | {byte: 256 + place for place, byte in enumerate(others)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [{"id": 256, "content": _END, "special": True, **flags}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {chr(letters[byte]): byte for byte in range(256)}, "merges": []},
    }


def write_tokenizer(folder: Path, weights: Weights, context: int) -> tuple[str, dict[str, Any]]:
    """Write the files of the tokenizer into ``folder``.

    Args:
        folder: folder of the export.
        weights: weights, which name the tokenizer.
        context: tokens of the longest context.

    Returns:
        Description of the tokenizer for people; generation_config.json.

    Raises:
        CriusError: a file of it is damaged, or it has more ids than the model has rows.
    """
    if not weights.tokenizer:
        return "none: the source has none", {}
    if weights.tokenizer != "byte" and not Path(weights.tokenizer).expanduser().exists():
        return f"none: {weights.tokenizer} is not there", {}
    origin = _copy(folder, weights.tokenizer)
    built = build_tokenizer(TokenizerConfig(path=weights.tokenizer, eos_token=weights.eos_token))
    if built.vocab_size > weights.model["vocab_size"]:
        what = f"tokenizer {weights.tokenizer} has {built.vocab_size:,} ids, the model {weights.model['vocab_size']:,}"
        raise ConfigError(f"{what} rows.", where="tokenizer.path", fix="export with the tokenizer of this model")
    spec = json_object((folder / TOKENIZER).read_bytes(), TOKENIZER)
    config = origin.get(TOKENIZER_CONFIG) or {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": _spelled(spec, built.eos_id),
        **({"bos_token": _spelled(spec, built.bos_id)} if built.bos_id is not None else {}),
    }
    config.setdefault("model_max_length", context)
    config.pop("auto_map", None)  # a stranger's code, which nobody should load
    _dump(folder / TOKENIZER_CONFIG, config)
    named = config.get("eos_token")
    end = _ids(spec).get(named.get("content") if isinstance(named, dict) else named)
    ends = list(dict.fromkeys(number for number in (end, built.eos_id) if number is not None))
    generation = origin.get(GENERATION) or {
        "bos_token_id": built.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
    }
    _dump(folder / GENERATION, generation)
    template = "with a chat template" if weights.chat_template else "no chat template"
    return f"{weights.tokenizer}: {built.vocab_size:,} ids, {template}", generation


def _copy(folder: Path, path: str) -> dict[str, dict[str, Any]]:
    """Copy unchanged files; returns the contents of the JSON files that are written again."""
    if path == "byte":
        _dump(folder / TOKENIZER, byte_tokenizer())
        return {}
    place = Path(path).expanduser()
    beside = place if place.is_dir() else place.parent
    file = tokenizer_file(path)  # in another folder, if it was converted
    anew = {}
    for name in TOKENIZER_FILES:
        source = file.parent if name == TOKENIZER_CONFIG else beside
        if name in (GENERATION, TOKENIZER_CONFIG) and (source / name).exists():
            anew[name] = json_object(read_inside(source, name, _LARGEST), f"{source}/{name}")
        elif (source / name).exists() and name not in (TOKENIZER, CONFIG):  # the export writes config.json again
            copy_file(source, name, folder / name)
    copy_file(file.parent, file.name, folder / TOKENIZER)
    return anew


def _ids(spec: Mapping[str, Any]) -> dict[Any, int]:
    """Ids of the tokens of a tokenizer.json that was already built."""
    model = spec["model"].get("vocab", {})
    vocab = model if isinstance(model, dict) else {row[0]: number for number, row in enumerate(model)}
    return vocab | {added["content"]: added["id"] for added in spec.get("added_tokens") or ()}


def _spelled(spec: Mapping[str, Any], number: int) -> str:
    return next(token for token, at in _ids(spec).items() if at == number)


def _dump(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
