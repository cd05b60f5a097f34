"""The table of docs/which_model_fits.md: python docs/fits.py prints it, from plans of ``crius plan``."""

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from crius.__main__ import main

MODELS = (
    "qwen3/0.6b",
    "llama3/1b",
    "qwen3/1.7b",
    "smollm3/3b",
    "qwen3/4b",
    "mistral/7b",
    "llama3/8b",
    "gemma3/12b",
    "phi3/14b",
    "mistral/24b",
    "gemma3/27b",
    "qwen3/32b",
    "llama3/70b",
)
WAYS = {
    "all weights": (),
    "all weights, 8-bit states": ("--optimizer.state_dtype", "8bit"),
    "LoRA": ("--lora.rank", "16"),
    "LoRA on int8": ("--lora.rank", "16", "--lora.base", "int8"),
    "LoRA on nf4": ("--lora.rank", "16", "--lora.base", "nf4"),
}
"""Ways to tune a model, with their flags; all have the flags of ``SHAPE``."""
SHAPE = ("--seq_len", "2048", "--local_batch_size", "1", "--global_batch_size", "16")
SHAPE += ("--activation_checkpoint.mode", "full")
CARDS = {24: "rtx-4090", 40: "a100-40g", 80: "h100", 141: "h200", 180: "b200"}
"""Cards by the GB of their names."""


def planned(model: str, way: str, gpu: str) -> dict[str, Any]:
    """What ``crius plan --json`` says of one GPU.

    Args:
        model: ``FAMILY/FLAVOR``.
        way: a key of ``WAYS``.
        gpu: value of ``--gpu``.
    """
    family, flavor = model.split("/")
    printed = io.StringIO()
    words = ["plan", "--model", family, "--flavor", flavor, "--gpus", "1", "--gpu", gpu, *SHAPE, *WAYS[way], "--json"]
    with contextlib.redirect_stdout(printed):
        main(words)
    plan: dict[str, Any] = json.loads(printed.getvalue())
    return plan


def cell(model: str, way: str, gpu: str, usable: dict[int, float]) -> str:
    """GiB at the peak, and the smallest card that has them."""
    plan = planned(model, way, gpu)
    nbytes = (plan["recommended"] or plan["smallest"])["memory_bytes"]
    fitting = [f"{size} GB" for size, most in usable.items() if nbytes <= most]
    return f"{nbytes / 2**30:,.1f}: {fitting[0] if fitting else 'several'}"


def table(models: tuple[str, ...] = MODELS) -> list[str]:
    """Rows of a Markdown table: GiB and card of each model and way."""
    usable = {size: planned("llama3/1b", "LoRA", gpu)["usable_bytes"] for size, gpu in CARDS.items()}
    with tempfile.TemporaryDirectory() as folder:
        huge = Path(folder, "huge.toml")
        huge.write_text('like = "h100-80g"\nmemory_bytes = 4e12\n')
        rows = [[model, *(cell(model, way, str(huge), usable) for way in WAYS)] for model in models]
    head = ["model", *WAYS]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    print("\n".join(table()))
