"""What the peers have in common: the task, its batches and their turns. Sizes, weights and tokens are the driver's.

D model dim, N query heads, K key/value heads, B batch, T tokens
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.contestant import Channel, Turns

LR, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
"""AdamW with a constant learning rate; matrices and the embedding decay, norms do not."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A Llama of these sizes, its first weights and all its batches.

    Attributes:
        ffn_dim: width of the hidden layer of the feed-forward.
        norm_eps: of RMSNorm.
        rope_theta: base of the rotary frequencies.
        weights: file of the first weights, by Hugging Face's names.
        tokens: file of uint16 windows ``(steps, batch, seq_len + 1)``, in the order they are trained on.
        warmup: steps before the peer is ready.
    """

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    seq_len: int
    batch: int
    steps: int
    weights: str
    tokens: str
    warmup: int

    def windows(self) -> npt.NDArray[np.uint16]:
        """The tokens, mapped: ``(steps, batch, seq_len + 1)``."""
        shape = (self.steps, self.batch, self.seq_len + 1)
        return np.memmap(self.tokens, dtype=np.uint16, mode="r", shape=shape)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and labels of each step, int64 ``(B, T)``."""
        for window in self.windows():
            tokens = torch.from_numpy(window.astype(np.int64))
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def first_weights(self) -> dict[str, Tensor]:
        """By Hugging Face's names."""
        loaded: dict[str, Tensor] = torch.load(self.weights, weights_only=True)
        return loaded


@dataclass(frozen=True, kw_only=True)
class SftTask:
    """What Crius and TRL both do.

    Attributes:
        model: folder of Hugging Face with the first weights and the tokenizer.
        adapters: folder of PEFT with the first adapters; empty: all weights are trained.
        rows: JSONL with ``prompt`` and ``completion``, in the order of the batches.
        seq_len: tokens that each conversation is padded to, or cut at.
        batch: conversations of a step.
        steps: to train.
        warmup: steps before the contestant is ready.
        lr: constant learning rate of AdamW.
        betas: of AdamW, whose eps is 1e-8 and which decays nothing.
        max_norm: that gradients are clipped to.
        prepared: file for the tokens and labels that TRL makes.
    """

    model: str
    adapters: str
    rows: str
    seq_len: int
    batch: int
    steps: int
    warmup: int
    lr: float
    betas: tuple[float, float]
    max_norm: float
    prepared: str


def read_arguments(name: str) -> tuple[Task, bool]:
    """The task, and whether to compile, from the command line."""
    parser = argparse.ArgumentParser(name)
    parser.add_argument("task", type=Path, help="JSON with the fields of Task")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    return Task(**json.loads(arguments.task.read_text())), arguments.compile


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """torch's fused one, with the groups that all peers have."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)


def turns_of(task: Task | SftTask, **versions: str) -> Turns:
    """The turns of a peer, with the facts about it."""
    facts: dict[str, Any] = {
        "tokens_per_step": task.batch * task.seq_len,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, **versions},
    }
    return Turns(Channel(), task.warmup, facts)
