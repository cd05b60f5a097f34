"""Warmup-stable-decay, by torchtitan's definition."""

import logging
import math

from crius.config.training import LRSchedulerConfig

log = logging.getLogger("crius.optim")


class WarmupStableDecay:
    """Factor of the peak learning rate at each step.

    Linear warmup over ``w`` steps, then 1, then a decay over ``d`` steps. ``d`` is ``decay_ratio`` of the run, or
    everything after the warmup. The decay's first step is still at 1 and its end lies one step after the run, so that
    no step trains at ``min_lr_factor`` 0: 10 steps with ``w`` 2 give 1/2, 1, 1, 7/8, 6/8, ..., 1/8.

    Args:
        config: the section.
        steps: steps of the run, at least 1.
    """

    def __init__(self, config: LRSchedulerConfig, steps: int) -> None:
        self._config = config
        self._warmup = min(config.warmup_steps, steps)
        if config.warmup_steps > steps:
            log.info("lr_scheduler: warmup_steps %d clamped to the %d steps of the run", config.warmup_steps, steps)
        left = steps - self._warmup
        ratio = config.decay_ratio
        self._decay = left if ratio is None else min(left, round(steps * ratio))
        if ratio is not None and round(steps * ratio) > left:
            log.info("lr_scheduler: decay of %d steps clamped to the %d after warmup", round(steps * ratio), left)
        self._decay_start = steps - self._decay  # the first step of the decay, which is still at the peak

    def factor(self, step: int) -> float:
        """Factor at ``step``, counted from 0."""
        if step < self._warmup:
            return (step + 1) / self._warmup
        if step <= self._decay_start:
            return 1.0
        progress = (step - self._decay_start) / self._decay
        shape = {
            "linear": 1 - progress,
            "sqrt": 1 - math.sqrt(progress),
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        }[self._config.decay_type]
        return self._config.min_lr_factor + (1 - self._config.min_lr_factor) * shape
