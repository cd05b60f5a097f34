"""A model with buffers: each layer counts its tokens, and after each update shifts what it sees by the counts."""

from dataclasses import dataclass, fields, replace

import torch
from torch.nn import functional as F

from crius.models import registry
from crius.models.decoder import Block
from crius.models.description import Buffer
from crius.models.llama3 import Llama3Config

SHIFT = 1e-3


@dataclass(frozen=True, kw_only=True)
class CountingConfig(Llama3Config):
    """Layers with the buffers of ``CountingBlock``."""

    def layer(self, index):
        buffers = (Buffer("shift", (2,), value=0.5), Buffer("seen", (2,), "int64", persistent=False))
        return replace(super().layer(index), buffers=buffers)


class CountingBlock(Block):
    """Moves the first two features by ``shift``; counts tokens, and those of which the last feature is positive."""

    def __init__(self, config, index):
        super().__init__(config, index)
        self.register_buffer("shift", torch.zeros(2))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64), persistent=False)

    def forward(self, x_BTD, rope, mask):
        tokens = x_BTD.shape[0] * x_BTD.shape[1]
        seen = torch.stack((torch.tensor(tokens, device=x_BTD.device), (x_BTD[..., -1] > 0).sum()))
        moved = x_BTD + F.pad(self.shift, (0, x_BTD.shape[-1] - 2)).to(x_BTD.dtype)
        return super().forward(moved, rope, mask), seen

    def after_update(self):
        self.shift += SHIFT * self.seen


def use_counting_blocks(patch, block=CountingBlock, kind=CountingConfig):
    """Have ``llama3/debug`` be a model with counting blocks, in this process and in those that it forks."""
    spec = registry.SPECS["llama3"]
    debug = spec.flavors["debug"]
    config = kind(**{one.name: getattr(debug, one.name) for one in fields(debug)})
    patch.setitem(registry.SPECS, "llama3", replace(spec, flavors={**spec.flavors, "debug": config}, block=block))
