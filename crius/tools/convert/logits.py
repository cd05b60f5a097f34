"""Logits and token ids of an export, in transformers or PEFT, and here: ``python -m crius.tools.convert.logits``.

It runs in a process of its own because of its memory. It reads a job from each line of stdin, and prints its results as
a line of JSON.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from crius.checkpoint.load import load_tensors
from crius.checkpoint.pieces import TensorSource
from crius.config.data import TokenizerConfig
from crius.host import free_host_bytes
from crius.interop.safetensors_file import read_safetensors
from crius.interop.weights import described, hugging_face_tensors, open_weights
from crius.models.registry import build, import_models
from crius.tokens.tokenizer import build_tokenizer
from crius.untrusted import parse_json, read_below

NUM_TOKENS = 48
TEXTS = (
    "The capital of France is Paris.",
    "  def f(x):\n\treturn x ** 2  # 1234567\r\n\r\n",
    "Grüße, naïve café — 東京 🙂🇫🇷 e\u0301 \u200b",
)


def compare(
    folder: Path,
    model: dict[str, Any],
    tokenizer: str,
    eos_token: str,
    tolerance: float,
    base: str = "",
    source: str = "",
) -> dict[str, Any]:
    """Distance of the logits of transformers from Crius's, and texts that its tokenizer gives other ids.

    Args:
        folder: folder of the export.
        model: settings of ``[model]`` of the source.
        tokenizer: tokenizer of the source.
        eos_token: EOS token of the source, if its tokenizer does not name it.
        tolerance: share of the largest logit; a larger distance is compared with the effect of rounding on this model.
        base: Hugging Face folder of the base, if the export has adapters; empty: the export is a whole model.
        source: source of the adapters.

    Returns:
        Facts by name; only ``version`` if transformers has no such architecture.
    """
    version = f"transformers {transformers.__version__}"
    config = parse_json(read_below(base or folder, "config.json"))
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        return {"version": version}
    tokens = (torch.arange(NUM_TOKENS) * 7919 % model["vocab_size"])[None]
    with torch.inference_mode():
        sources = _sources(folder, model, source)
        ours = _ours(sources, model, tokens, torch.float32)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(base or folder, dtype=torch.float32)
        if base:
            loaded, version = _adapted(loaded, folder)
        difference = float((ours - loaded.eval()(tokens).logits).abs().max())
        del loaded
        largest = float(ours.abs().max())
        rounding = 0.0
        if difference > tolerance * largest and free_host_bytes() > 10 * described(model).num_parameters:
            rounding = float((ours - _ours(sources, model, tokens, torch.float64)).abs().max())
    return {
        "difference": difference,
        "largest": largest,
        "rounding": rounding,
        "tokens": NUM_TOKENS,
        "version": version,
        "texts": _differing(folder, TokenizerConfig(path=tokenizer, eos_token=eos_token))
        if (folder / "tokenizer.json").exists()
        else [],
    }


def _sources(folder: Path, model: dict[str, Any], source: str) -> Mapping[str, TensorSource]:
    """Tensors of the source; for adapters the base with the adapters applied, as in a run that starts from them."""
    return (
        open_weights(source).tensors if source else hugging_face_tensors(read_safetensors(folder), model, str(folder))
    )


def _adapted(model: Any, folder: Path) -> tuple[Any, str]:
    import peft  # noqa: PLC0415  optional package

    return peft.PeftModel.from_pretrained(model, folder), f"peft {peft.__version__}"


def _ours(sources: Mapping[str, TensorSource], model: dict[str, Any], tokens: Tensor, dtype: torch.dtype) -> Tensor:
    decoder = build(described(model)).to(dtype).eval()
    load_tensors(sources, dict(decoder.named_parameters()))
    logits: Tensor = decoder(tokens)
    return logits


def _differing(folder: Path, tokenizer: TokenizerConfig) -> list[str]:
    if not (folder / "tokenizer.json").exists():
        return []
    own = build_tokenizer(tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    return [text for text in TEXTS if own.encode(text).tolist() != theirs(text, add_special_tokens=False).input_ids]


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.path.insert(0, os.getcwd())  # as the command line does for --import
        import_models(sys.argv[1:], "command line")
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # other libraries print too
    for line in sys.stdin:
        job = parse_json(line)
        job["folder"] = Path(job["folder"])
        results.write(json.dumps(compare(**job)) + "\n")
