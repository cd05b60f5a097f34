"""The output layer and the loss, summed, never averaged: the step divides once, by the global count of valid tokens."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from crius.kernels.linear_cross_entropy import Chunks, linear_cross_entropy, token_losses
from crius.models.layers.linear import Linear


class Output(Linear):
    """A linear layer that can lend its weight, while it is gathered, to what computes more than logits from it."""

    def forward(self, x_BTD: Tensor, use: Callable[..., Tensor] | None = None) -> Tensor:
        """Logits ``(B, T, V)``, or what ``use`` makes of input and weight.

        Tensor parallelism calls ``use`` with this rank's rows of the weight, and with ``first_row`` and ``gather`` as
        ``linear_cross_entropy`` takes them.
        """
        return super().forward(x_BTD) if use is None else use(x_BTD, self.weight)


class Loss(nn.Module):
    """Sum of the token losses of hidden states. A module of its own, so that hooks find it.

    Attributes:
        chunks: how logits and losses are cut into chunks; None computes all logits, then all losses.
        token_losses: of all logits and labels, where there are no chunks; may be compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.chunks: Chunks | None = None
        self.token_losses: Callable[[Tensor, Tensor], Tensor] = token_losses

    def forward(self, hidden_BTD: Tensor, labels_BT: Tensor, output: nn.Module) -> Tensor:
        """A float64 scalar: in float64 the order of the sum does not show.

        Args:
            hidden_BTD: what the output layer reads; this rank's part of the sequence under tensor parallelism.
            labels_BT: of the whole sequence.
            output: the output layer; an ``Output`` where there are chunks. Of an ``nn.Identity``, which stands for one
                in another stage of a pipeline, the hidden states are returned.
        """
        if isinstance(output, nn.Identity):
            return hidden_BTD
        if self.chunks is not None:
            loss: Tensor = output(hidden_BTD, partial(linear_cross_entropy, labels_BT=labels_BT, chunks=self.chunks))
            return loss
        losses = self.token_losses(output(hidden_BTD), labels_BT)
        return losses.sum(dtype=torch.float64)


def loss_of(model: nn.Module) -> Loss:
    """The loss of a model, or of a part of it."""
    [loss] = (module for module in model.modules() if isinstance(module, Loss))
    return loss
