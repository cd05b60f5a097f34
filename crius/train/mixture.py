"""Reports of a mixture: loss, share and epochs of each of its sources."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from crius.config.layout import Layout
from crius.data.loader import IGNORE_INDEX, Batch, BatchLoader
from crius.data.mixed import MixedSource
from crius.models.layers import loss_of
from crius.parallel.runtime import World
from crius.shards import local_tensor


class MixtureReport:
    """What the sources of a mixture give, and what the model makes of them.

    Args:
        source: the mixture.
        loader: its loader.
        parts: this rank's stages of the model, whose losses of tokens are noted.
        world: all ranks.
        layout: the degrees, so that tokens that several ranks have count once.
    """

    def __init__(
        self, source: MixedSource, loader: BatchLoader, parts: Sequence[nn.Module], world: World, layout: Layout
    ) -> None:
        self._plan = source.plan
        self._loader = loader
        self._world = world
        self._layout = layout
        self._noted: list[Tensor] = []
        for part in parts:
            if not isinstance(part.output, nn.Identity):
                loss = loss_of(part)
                loss.note = self._noted.append
                loss.chunks = loss.chunks and replace(loss.chunks, note=loss.note)

    def begin(self) -> None:
        """Call before the forward pass of a step."""
        self._noted.clear()

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Mean loss of the tokens of each source in the step, float64 scalars, the same on all ranks; -1 without any.

        One small sum over all ranks.

        Args:
            batch: the batch of the step, as the model got it.
        """
        number = len(self._plan.names)
        device = batch.labels_BT.device
        counts = (batch.labels_BT != IGNORE_INDEX).sum(1).double() / (self._layout.tp * self._layout.pp)
        losses = torch.zeros_like(counts)
        if self._noted:  # in the order of the rows
            tokens = torch.cat([local_tensor(noted) for noted in self._noted])
            losses = tokens.view(len(batch), -1).sum(1, dtype=torch.float64) / self._layout.tp
        assert self._loader.mixed is not None
        chosen = [self._loader.mixed.sources.get(sample, 0) for sample in batch.sample_ids]
        sums = torch.zeros(2, number, dtype=torch.float64, device=device)
        sums.index_add_(1, torch.tensor(chosen, device=device), torch.stack((losses, counts)))
        total, tokens = self._world.sum(sums)
        means = torch.where(tokens > 0, total / tokens.clamp(min=1), -1.0)
        return {f"loss/{name}": mean for name, mean in zip(self._plan.names, means.unbind(), strict=True)}

    def shares(self) -> dict[str, float]:
        """Share of each source in all sequences so far, and its epochs, after the newest batch."""
        assert self._loader.mixed is not None
        place = self._loader.mixed.place
        found: dict[str, float] = {}
        for name, total, size in zip(self._plan.names, place.totals, self._plan.sizes, strict=True):
            found[f"share/{name}"] = total / sum(place.totals)
            found[f"epochs/{name}"] = total / size
        return found
