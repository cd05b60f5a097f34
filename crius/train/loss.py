"""How a run computes its loss: all logits first, or a chunk of tokens at a time."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from crius.config.loss_chunks import loss_chunks
from crius.config.run import RunConfig
from crius.data.batch import IGNORE_INDEX
from crius.kernels.linear_cross_entropy import Chunks
from crius.models.description import ModelDescription
from crius.models.layers.output import loss_of
from crius.parallel.compile import compile_loss


@dataclass(frozen=True)
class LossChoice:
    """What ``[kernels] linear_cross_entropy`` comes to.

    Attributes:
        chunks: None where all logits are computed first.
        reason: why, in a few words.
    """

    chunks: Chunks | None
    reason: str

    def line(self, num_tokens: int, vocabulary: int, itemsize: int) -> str:
        """What to log of a microbatch of ``num_tokens`` with logits of ``itemsize`` bytes over a ``vocabulary``."""
        name = "linear_cross_entropy"
        logits = num_tokens * vocabulary
        if self.chunks is None:
            return f"{name}: off ({self.reason}): {_mib(logits * itemsize)} of logits a microbatch"
        tokens = min(num_tokens, self.chunks.tokens)
        eager = logits * 3 * 4  # in its backward: log-softmax, the gradient of that, the gradient of the logits
        here = tokens * vocabulary * itemsize + min(tokens, self.chunks.block_tokens) * vocabulary * 4
        return (
            f"{name}: chunked ({self.reason}): at most {tokens:,} of {num_tokens:,} tokens at a time, "
            f"{_mib(here)} of logits instead of {_mib(eager)}"
        )


def choose_loss(
    config: RunConfig,
    facts: ModelDescription,
    device_type: str,
    *,
    num_ranks: int = 1,
    in_low_precision: bool = False,
) -> LossChoice:
    """What ``[kernels] linear_cross_entropy`` comes to.

    Args:
        config: the run; its rules have been checked.
        facts: sizes of the model.
        device_type: ``cpu`` or ``cuda``.
        num_ranks: tensor-parallel ranks that the vocabulary is split over.
        in_low_precision: the output layer is.
    """
    device: Literal["cpu", "cuda"] = "cuda" if device_type == "cuda" else "cpu"
    found = loss_chunks(config, facts.vocab_size, device, num_ranks=num_ranks, in_low_precision=in_low_precision)
    return LossChoice(None if found.tokens is None else Chunks(found.tokens, found.block_tokens), found.reason)


def set_up_loss(part: nn.Module, choice: LossChoice, config: RunConfig) -> None:
    """Have a part of the model compute its loss as chosen; where asked for, compiled."""
    loss = loss_of(part)
    loss.chunks = choice.chunks
    if config.compile.enable and config.compile.loss:
        loss.token_losses = compile_loss(loss.token_losses, config.compile)
        loss.chunks = choice.chunks and replace(choice.chunks, score=compile_loss(choice.chunks.score, config.compile))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def count_valid(labels_BT: Tensor) -> Tensor:
    """Number of labels that count, a float64 scalar (exact up to 2**53)."""
    return (labels_BT != IGNORE_INDEX).sum().to(torch.float64)
