"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): torch's, and torch's arithmetic with smaller states."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from crius.optim.state import Optimizer
from crius.optim.storage import Storage, chunks
from crius.shards import local_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")

Groups = list[dict[str, Any]]


class AdamW(Optimizer, torch.optim.AdamW):
    """``torch.optim.AdamW``, to the last bit."""

    def start(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """See ``Optimizer``. It makes the same state as torch's first step."""
        device = local_tensor(parameter).device if group["fused"] else "cpu"
        moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
        self.state[parameter] = {"step": torch.zeros((), device=device), **moments}


class CompactAdamW(Optimizer):
    """AdamW whose weights or moments are stored in fewer bits than the step is computed in.

    A step converts weights and moments to float32, updates them by torch's own AdamW and converts them back, for a
    bounded number of elements at a time. Everything is elementwise on this rank's shards.

    Args:
        groups: as for ``torch.optim.AdamW``.
        storage: storage of weights and moments.
        betas: decay of the running means of gradients and of squared gradients.
        eps: number added to the denominator.
        fused: use torch's fused implementation.
        foreach: use torch's foreach implementation.
    """

    def __init__(
        self, groups: Groups, storage: Storage, *, betas: tuple[float, float], eps: float, fused: bool, foreach: bool
    ) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps, "fused": fused, "foreach": foreach})
        self._storage = storage

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def start(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """See ``Optimizer``."""
        state = self.state[parameter]
        state["step"] = torch.zeros((), device=local_tensor(parameter).device if group["fused"] else "cpu")
        self._storage.start(state, parameter, MOMENTS)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        storage = self._storage
        state = self.state[parameter]
        skip = self.found_inf
        gradient = local_tensor(parameter.grad).reshape(-1)  # type: ignore[arg-type]
        if not state:
            self.start(parameter, group)
        stored = [
            storage.weight(parameter),
            storage.moment(state, MOMENTS[0], field=1, signed=True),
            storage.moment(state, MOMENTS[1], field=2, signed=False),
        ]
        for part in chunks(gradient.numel()):
            bits = storage.bits(parameter, state["step"], part)
            values = [numbers.load(part) for numbers in stored]
            _adamw(values, gradient[part].float(), state["step"].clone(), group, skip)
            for numbers, value in zip(stored, values, strict=True):
                numbers.save(part, value, bits, skip)
        state["step"] += 1 if skip is None else 1 - skip


def _adamw(values: list[Tensor], gradient: Tensor, step: Tensor, group: dict[str, Any], skip: Tensor | None) -> None:
    """Apply torch's step to weight and moments, in place."""
    weight, mean, mean_square = values
    adamw(
        [weight],
        [gradient],
        [mean],
        [mean_square],
        [],
        [step],
        fused=group["fused"],
        foreach=group["foreach"],
        found_inf=skip,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
