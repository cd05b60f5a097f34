"""What follows an update of the weights: the model's own ``after_update``."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from crius.buffers import named_buffers
from crius.models.buffer import Buffer
from crius.parallel.runtime import World
from crius.shards import local_tensor


class AfterUpdate:
    """Sums the counters of the step over all ranks, then calls ``after_update()`` of each module that has one.

    Ranks that hold a layer count each their part of its tokens, in int64, so that every rank has the same sums to the
    last bit whatever the layout. They take one collective for all layers, and none where nothing is counted.

    Args:
        parts: this rank's stages of the model, materialised.
        buffers: of the whole model.
        world: all ranks.
    """

    def __init__(self, parts: Sequence[nn.Module], buffers: Sequence[Buffer], world: World) -> None:
        self._world = world
        # not hasattr of the module: what wraps one may have the attributes of it
        modules = (module for part in parts for module in part.modules() if hasattr(type(module), "after_update"))
        self._modules = list(modules)
        counted = [buffer for buffer in buffers if not buffer.persistent]
        *starts, self._total = accumulate((buffer.numel for buffer in counted), initial=0)
        start_of = {buffer.name: start for buffer, start in zip(counted, starts, strict=True)}
        held = named_buffers(parts, persistent=False)
        self._counters = [local_tensor(counter).view(-1) for _, counter in held]
        places = [range(start_of[name], start_of[name] + counter.numel()) for name, counter in held]
        self._places = torch.tensor([place for of_one in places for place in of_one], device=world.device)

    @torch.no_grad()
    def __call__(self) -> None:
        """Call once after each update, on every rank."""
        if self._total:
            totals = torch.zeros(self._total, dtype=torch.int64, device=self._world.device)
            if self._counters:  # a stage of a pipeline may have none
                totals[self._places] = torch.cat(self._counters)
            self._world.sum(totals)
            if self._counters:
                own = totals[self._places].split([counter.numel() for counter in self._counters])
                torch._foreach_copy_(self._counters, list(own))
        for module in self._modules:
            module.after_update()  # type: ignore[operator]
