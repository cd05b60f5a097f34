"""Balance of the tokens of a step over the experts, from the counts of all ranks. It does not wait for the device."""

import logging
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from crius.errors import EffectError
from crius.models.description import ModelDescription
from crius.models.moe import LOSS_UNIT

log = logging.getLogger("crius.metrics")

IDLE_STEPS = 10
"""Number of consecutive steps without a token after which a warning calls an expert dead."""


class ExpertLoads:
    """Measures of the loads of each step, over all layers with experts.

    Args:
        model: model with experts.
        take_totals: function that returns the counts of all ranks in the last step, once: int64, flat, in the order
            of the model's counters. It returns None if there was no update since.
        device: device of the counts.
        advice: end of the warning about dead experts; empty: no warning. Only one rank warns.

    Attributes:
        counts: tokens of the last step by layer and expert, over all ranks, int64 ``(layers, E)``.
    """

    def __init__(
        self,
        model: ModelDescription,
        take_totals: Callable[[], Tensor | None],
        device: torch.device,
        *,
        advice: str = "",
    ) -> None:
        self._take_totals = take_totals
        self._top_k = model.top_k
        self._experts = model.num_experts
        self._advice = advice
        self._layers = [buffer.name.split(".")[1] for buffer in model.buffers if buffer.name.endswith(".load")]
        self._idle = torch.zeros(len(self._layers), self._experts, dtype=torch.int64, device=device)
        self.counts = torch.zeros_like(self._idle)
        self._lost = torch.zeros((), dtype=torch.int64, device=device)
        self._was_idle = self._idle
        self._number_of = torch.arange(1, self._idle.numel() + 1, device=device).square().view_as(self._idle)
        self._warned: set[tuple[int, int]] = set()
        self._set = 0.0

    def numbers(self, tokens: int) -> dict[str, Tensor]:
        """Figures of a step of ``tokens`` over all ranks, float64 scalars on the device. Empty if it made no update."""
        totals = self._take_totals()
        if totals is None:
            return {}
        table = totals.view(len(self._layers), -1)
        self.counts = counts = table[:, :-1]
        self._lost += (counts.sum(1) - tokens * self._top_k).abs().sum()
        self._was_idle = self._idle
        self._idle = torch.where(counts > 0, 0, self._idle + 1)
        share = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
        entropy = -torch.special.xlogy(share, share).sum(1) / math.log(max(2, self._experts))
        return {
            "load_max_over_mean": share.amax() * self._experts,
            "load_entropy": entropy.amin() if self._experts > 1 else torch.ones_like(entropy[0]),
            "dead_experts": (counts == 0).sum().double(),
            "aux_loss": table[:, -1].sum().double() * LOSS_UNIT,
            "idle": ((self._idle >= IDLE_STEPS) * self._number_of).sum().double(),  # another number for another set
            "lost": self._lost.double(),
        }

    def taken(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The figures of a record, from ``numbers`` on the host. Warns about dead experts.

        Raises:
            EffectError: the experts counted more or fewer tokens than the step has.
        """
        record = dict(numbers)
        if lost := record.pop("lost", 0.0):
            raise EffectError(
                f"the experts' counts differ from the tokens of a step times top_k by {lost:,.0f} in all.",
                why="a token was lost or counted twice on its way to its experts",
                fix="report it with run.toml; the run can resume from its checkpoint on another layout",
            )
        idle = record.pop("idle", 0.0)
        if self._advice and idle and idle != self._set:
            self._warn(idle)
        self._set = idle
        return record

    def _warn(self, idle: float) -> None:
        """Name the dead experts that no warning has named yet. ``idle`` identifies the step of the numbers."""
        both = (self._was_idle >= IDLE_STEPS, self._idle >= IDLE_STEPS)
        is_dead = next((table for table in both if (table * self._number_of).sum().item() == idle), both[1])
        dead = [(layer, expert) for layer, expert in is_dead.nonzero().tolist()]
        if new := [place for place in dead if place not in self._warned]:
            self._warned |= {*new}
            names = ", ".join(f"layers.{self._layers[layer]} expert {expert}" for layer, expert in new[:4])
            log.warning(
                "experts: %d of %d had no token in the last %d steps, new among them: %s%s; %s",
                len(dead),
                self._idle.numel(),
                IDLE_STEPS,
                names,
                ", ..." if len(new) > 4 else "",
                self._advice,
            )
