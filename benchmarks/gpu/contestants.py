"""What the peers of Crius have in common: its weights, its tokens, its settings, and the answers to the driver.

B batch, T tokens
"""

import argparse
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.contestant import Channel, Turns
from benchmarks.parts import first_model, run_facts
from crius.cli.settings import run_of
from crius.config.run import RunConfig
from crius.tools.bench.machine import wait_for
from crius.train.inputs import run_batch_sizes
from crius.units import GIB


def options_of(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, RunConfig]:
    """The peer's own options, and the run that the flags of Crius behind ``--`` describe."""
    own = list(itertools.takewhile(lambda part: part != "--", argv))
    parser.add_argument("--warmup", type=int, default=3, help="steps before the contestant is ready")
    return parser.parse_args(own), run_of(*argv[len(own) + 1 :])


def start_weights(config: RunConfig, device: torch.device) -> dict[str, Tensor]:
    """The weights that Crius starts ``config`` with, by name."""
    return dict(first_model(config, device).named_parameters())


def copy_weights(weights: Mapping[str, Tensor], targets: dict[str, Any]) -> None:
    """Copy each weight into the target of its name, which may be sharded over a mesh of one.

    Raises:
        RuntimeError: a target got no weight.
    """
    with torch.no_grad():
        for name, weight in weights.items():
            target = targets.pop(name)
            local = target.to_local() if hasattr(target, "to_local") else target
            local.copy_(weight)
    if targets:
        raise RuntimeError(f"no weights for {', '.join(targets)}")


def turns_of(config: RunConfig, device: torch.device, driver: "PeakChannel", warmup: int) -> Turns:
    """The turns of a peer that trains ``config`` on ``device``."""
    tokens = run_batch_sizes(config, 1).total * config.training.seq_len
    return Turns(driver, warmup, run_facts(config, device, 1, tokens), lambda: wait_for(device))


class PeakChannel:
    """A ``Channel`` that adds the peak memory of the GPU, and numbers of the peer, to its answers.

    Attributes:
        peak_gib: largest peak so far; whoever resets torch's statistics calls ``see_peak`` before.
        words: added to each answer.
    """

    def __init__(self, device: torch.device) -> None:
        self._channel = Channel()  # from here on stdout is for answers
        self._device = device
        self.peak_gib = 0.0
        self.words: dict[str, Any] = {}

    def see_peak(self) -> None:
        """Note the peak since torch's statistics were reset."""
        if self._device.type == "cuda":
            self.peak_gib = max(self.peak_gib, torch.cuda.max_memory_allocated(self._device) / GIB)

    def answer(self, words: Mapping[str, Any]) -> None:
        """See ``Driver``."""
        self.see_peak()
        self._channel.answer({**words, "peak_gib": self.peak_gib, **self.words})

    def order(self) -> int:
        """See ``Driver``."""
        return self._channel.order()
