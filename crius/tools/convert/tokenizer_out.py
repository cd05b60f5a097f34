"""The tokenizer of an export: files that transformers' ``AutoTokenizer`` loads, with the ids that Crius trained on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crius.config.data import TokenizerConfig
from crius.errors import ConfigError, DataError
from crius.interop.context import longest_context
from crius.interop.foreign import read_inside
from crius.interop.kept import BOS_ID, CONFIG, EOS_ID, GENERATION, encoded
from crius.interop.safetensors_file import json_object
from crius.interop.weights import Weights
from crius.tokens.files import TOKENIZER, TOKENIZER_CONFIG, tokenizer_files
from crius.tokens.tokenizer import build_tokenizer
from crius.tools.convert.importing import copy_file
from crius.untrusted import read_below

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


def write_tokenizer(folder: Path, weights: Weights, *, has_tokenizer: bool = True) -> tuple[str, dict[str, Any]]:
    """Write the tokenizer and ``generation_config.json`` into ``folder``.

    The latter is that of the source; if it had none, it has the ids in the source's ``config.json``, else those of the
    tokenizer.

    Args:
        folder: folder of the export.
        weights: weights, which name the tokenizer.
        has_tokenizer: False: the tokenizer is left out.

    Returns:
        Description of the tokenizer for people; its BOS and EOS by their keys in ``config.json``.

    Raises:
        CriusError: there is no tokenizer, a file of it is damaged, or it has more ids than the model has rows.
    """
    about = "none, as asked"
    ids: dict[str, Any] = {}
    if has_tokenizer:
        _check(weights)
        about, ids = _write(folder, weights)
    config = weights.said.get(CONFIG, {})
    own = {key: config[key] for key in (BOS_ID, EOS_ID, "pad_token_id") if config.get(key) is not None}
    if content := weights.said.get(GENERATION) or (own if EOS_ID in own else ids):
        (folder / GENERATION).write_bytes(encoded(content))
    return about, ids


def _check(weights: Weights) -> None:
    path = weights.tokenizer
    if path == "byte" or (path and Path(path).expanduser().exists()):
        return
    raise DataError(
        f"the tokenizer {path} of {weights.origin} is not there." if path else f"{weights.origin} has no tokenizer.",
        where="crius export",
        why="without its tokenizer the exported model reads no text",
        fix="put its tokenizer.json there; or --no_tokenizer, which exports the weights alone",
    )


def _write(folder: Path, weights: Weights) -> tuple[str, dict[str, Any]]:
    config = _copy(folder, weights.tokenizer)
    built = build_tokenizer(TokenizerConfig(path=weights.tokenizer, eos_token=weights.eos_token))
    if built.vocab_size > weights.model["vocab_size"]:
        what = f"tokenizer {weights.tokenizer} has {built.vocab_size:,} ids, the model {weights.model['vocab_size']:,}"
        raise ConfigError(f"{what} rows.", where="tokenizer.path", fix="export with the tokenizer of this model")
    spec = json_object(read_below(folder, TOKENIZER), TOKENIZER)
    config = config or {
        "clean_up_tokenization_spaces": False,
        "eos_token": _spelled(spec, built.eos_id),
        **({"bos_token": _spelled(spec, built.bos_id)} if built.bos_id is not None else {}),
        "model_max_length": longest_context(weights),
    }
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")  # AutoTokenizer would guess one by the model
    config.pop("auto_map", None)  # a stranger's code, which nobody should load
    _dump(folder / TOKENIZER_CONFIG, config)
    named = config.get("eos_token")
    end = _ids(spec).get(named.get("content") if isinstance(named, dict) else named)
    ends = list(dict.fromkeys(number for number in (end, built.eos_id) if number is not None))
    ids: dict[str, Any] = {} if built.bos_id is None else {BOS_ID: built.bos_id}
    ids[EOS_ID] = ends[0] if len(ends) == 1 else ends
    template = "with a chat template" if weights.chat_template else "no chat template"
    return f"{weights.tokenizer}: {built.vocab_size:,} ids, {template}", ids


def _copy(folder: Path, path: str) -> dict[str, Any]:
    """Copy unchanged files; returns the content of tokenizer_config.json, which is written again."""
    if path == "byte":
        _dump(folder / TOKENIZER, byte_tokenizer())
        return {}
    config = {}
    for name, place in tokenizer_files(path).items():
        if name == TOKENIZER_CONFIG:
            config = json_object(read_inside(place.parent, place.name, _LARGEST), str(place))
        else:
            copy_file(place.parent, place.name, folder / name)
    return config


def _ids(spec: Mapping[str, Any]) -> dict[Any, int]:
    """Ids of the tokens of a tokenizer.json that was already built."""
    model = spec["model"].get("vocab", {})
    vocab = model if isinstance(model, dict) else {row[0]: number for number, row in enumerate(model)}
    return vocab | {added["content"]: added["id"] for added in spec.get("added_tokens") or ()}


def _spelled(spec: Mapping[str, Any], number: int) -> str:
    return next(token for token, at in _ids(spec).items() if at == number)


def _dump(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
