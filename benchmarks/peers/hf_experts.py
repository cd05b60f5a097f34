"""transformers' Qwen3 with experts in a plain loop: the way to compute experts is the second argument."""

import argparse
import json
import os
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRANSFORMERS_VERBOSITY="error")

import torch
import transformers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from benchmarks.peers.task import MAX_NORM, Task, adamw, turns_of


def main() -> None:
    """Train until the driver says that it is over."""
    parser = argparse.ArgumentParser("hf_experts")
    parser.add_argument("task", type=Path, help="JSON with the fields of Task; its weights are a folder")
    parser.add_argument("experts", help="experts_implementation of transformers")
    arguments = parser.parse_args()
    task = Task(**json.loads(arguments.task.read_text()))
    model = AutoModelForCausalLM.from_pretrained(
        task.weights, dtype=torch.float32, attn_implementation="sdpa", experts_implementation=arguments.experts
    )
    model.train()
    model.config.use_cache = False
    optimizer = adamw(model)
    turns = turns_of(task, transformers=transformers.__version__)
    for tokens, labels in task.batches():
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not turns.after_step(loss.detach()):
            return


if __name__ == "__main__":
    main()
