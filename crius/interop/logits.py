"""Logits and token ids of an exported folder, in transformers and here: ``python -m crius.interop.logits``.

A process of its own, for the memory that it takes. It reads a job from stdin and prints what it found, as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from crius.checkpoint.load import load_tensors
from crius.config.data import TokenizerConfig
from crius.data.tokenizer import build_tokenizer
from crius.interop.safetensors_file import read_safetensors
from crius.interop.weights import described, hugging_face_tensors
from crius.models.registry import build, import_models

NUM_TOKENS = 48
TEXTS = (
    "The capital of France is Paris.",
    "  def f(x):\n\treturn x ** 2  # 1234567\r\n\r\n",
    "Grüße, naïve café — 東京 🙂🇫🇷 e\u0301 \u200b",
)


def compare(folder: Path, model: dict[str, Any], tokenizer: str, tolerance: float) -> dict[str, Any]:
    """How far the logits of transformers are from ours, and texts of which its tokenizer makes other ids.

    Args:
        folder: of the export.
        model: settings of ``[model]`` of the source.
        tokenizer: of the source.
        tolerance: share of the largest logit beyond which it is measured, too, what rounding does to this model.

    Returns:
        Facts by name; ``version`` alone where transformers has no such architecture.
    """
    if json.loads((folder / "config.json").read_bytes())["model_type"] not in transformers.CONFIG_MAPPING:
        return {"version": transformers.__version__}
    tokens = (torch.arange(NUM_TOKENS) * 7919 % model["vocab_size"])[None]
    with torch.inference_mode():
        ours = _ours(folder, model, tokens, torch.float32)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        difference = float((ours - loaded.eval()(tokens).logits).abs().max())
        del loaded
        largest, rounding = float(ours.abs().max()), 0.0
        if difference > tolerance * largest:
            rounding = float((ours - _ours(folder, model, tokens, torch.float64)).abs().max())
    return {
        "difference": difference,
        "largest": largest,
        "rounding": rounding,
        "tokens": NUM_TOKENS,
        "version": transformers.__version__,
        "texts": _differing(folder, tokenizer) if (folder / "tokenizer.json").exists() else [],
    }


def _ours(folder: Path, model: dict[str, Any], tokens: Tensor, dtype: torch.dtype) -> Tensor:
    decoder = build(described(model)).to(dtype).eval()
    sources = hugging_face_tensors(read_safetensors(folder), model, str(folder))
    load_tensors(sources, dict(decoder.named_parameters()))
    logits: Tensor = decoder(tokens)
    return logits


def _differing(folder: Path, tokenizer: str) -> list[str]:
    own, theirs = build_tokenizer(TokenizerConfig(path=tokenizer)), transformers.AutoTokenizer.from_pretrained(folder)
    return [text for text in TEXTS if own.encode(text).tolist() != theirs(text, add_special_tokens=False).input_ids]


if __name__ == "__main__":
    import_models(sys.argv[1:], "command line")
    sys.stdout.write(json.dumps(compare(**{**(job := json.load(sys.stdin)), "folder": Path(job["folder"])})) + "\n")
