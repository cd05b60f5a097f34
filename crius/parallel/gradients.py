"""The global gradient norm and clipping. Under every layout they need one small sum over all ranks."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from crius.config.layout import Layout
from crius.kernels.cpu.pointwise import squared_norms
from crius.parallel.runtime import World
from crius.shards import local_tensor, num_shards


class Gradients:
    """The gradients of a model's parameters, as this rank holds them.

    Args:
        parameters: all trained parameters of this rank.
        num_holders: ranks that hold a part of each parameter: all ranks of the run, or of one pipeline stage.
        device: device of the sums over ranks.
        twice: tied parameters that two stages have a copy of, so that twice as many ranks hold a part.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        num_holders: int,
        device: torch.device,
        twice: Collection[nn.Parameter] = (),
    ) -> None:
        self._parameters = list(parameters)
        self._local_peak: Tensor | None = None
        self._device = device
        copies = set(twice)
        # a parameter held by several ranks counts once: each rank contributes its share
        shares = [num_shards(p) / num_holders / (2 if p in copies else 1) for p in self._parameters]
        self._share = torch.tensor(shares, dtype=torch.float64, device=device)

    def squared_norms(self) -> Tensor:
        """This rank's share of the squared L2 norm of each parameter's gradient, float64 ``(num parameters,)``.

        The sum over parameters and all ranks is the squared global norm, with replicas counted once. It is float64, so
        that the order of the sums, which depends on the layout, has no visible effect.
        """
        # frozen or unused parameters have no gradient
        return self._squared(
            [local_tensor(p.grad) if p.grad is not None else torch.zeros(0, device=p.device) for p in self._parameters]
        )

    def watch(self, model: nn.Module) -> None:
        """Record the gradient that this rank's own backward passes bring to the embeddings of ``model``.

        The gradients of parameters are already summed over ranks when they can be read, so they do not show which rank
        a non-finite value came from. Such a value spreads to everything computed from it, and so down to the
        embeddings.
        """
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(self._watch_output)

    def _watch_output(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._note_peak)

    def _note_peak(self, gradient: Tensor) -> None:
        peak = torch.linalg.vector_norm(local_tensor(gradient), ord=torch.inf)
        self._local_peak = peak if self._local_peak is None else torch.maximum(self._local_peak, peak)

    def take_local_peak(self) -> Tensor | None:
        """The largest absolute gradient that ``watch`` recorded since the last call, a scalar; None without one."""
        peak = self._local_peak
        self._local_peak = None
        return peak

    def squared_weight_norms(self) -> Tensor:
        """As ``squared_norms``, for the parameters themselves."""
        return self._squared([local_tensor(parameter) for parameter in self._parameters])

    def _squared(self, tensors: Sequence[Tensor]) -> Tensor:
        return squared_norms(tensors).to(self._device) * self._share

    def totals(self, losses: Tensor, squared_norms: Tensor, world: World, layout: Layout) -> Tensor:
        """Loss and squared gradient norm of a step, float64 ``(2,)``, the same on all ranks.

        Args:
            losses: this rank's share of the loss by microbatch. All ranks of a tensor-parallel group have the same
                loss.
            squared_norms: result of ``squared_norms`` on this rank.
            world: all ranks.
            layout: the degrees.
        """
        return world.sum(torch.stack((losses.sum() / layout.tp, squared_norms.sum())))

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Scale all gradients by ``min(1, max_norm / norm)``, without waiting for the device.

        Args:
            norm: global L2 norm, a float64 scalar on the device.
            max_norm: largest norm that is not scaled; 0: nothing is scaled.
        """
        if max_norm > 0:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            grads = [local_tensor(p.grad) for p in self._parameters if p.grad is not None]
            torch._foreach_mul_(grads, factor.to(dtype=torch.float32, device=grads[0].device))
