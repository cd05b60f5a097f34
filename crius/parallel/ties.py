"""Weights that two modules share: one tensor, or where a pipeline parts the modules two that stay equal."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crius.shards import local_tensor


@contextmanager
def keeping_ties(model: nn.Module) -> Iterator[None]:
    """Parameters of ``model`` that are one tensor before are one tensor, the first of them, after.

    torch's functions over a model's parameters replace them one by one.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    yield
    for first, *others in names.values():
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))


def allocate(model: nn.Module, device: torch.device | str, *, buffers: torch.device | str | None = None) -> None:
    """Memory for the parameters and buffers of a meta-device model, in place, whatever is in it.

    Args:
        model: has its shapes.
        device: of the parameters.
        buffers: device of the buffers, where that is another.
    """
    with keeping_ties(model):
        model.to_empty(device=device)
    for name, buffer in list(model.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer.to(buffers or device))


class TiedStages:
    """The two copies of each tied weight of a pipeline: on the first stage and on the last.

    The stages are gathered and reduced apart. So the rank at the other end of the pipeline has the same shard of the
    copy as this one, and after the schedule the gradient of its own use of it. Both add the two; what follows is alike
    on both, and the copies stay equal to the last bit.

    Args:
        parts: the stages of this rank by their places.
        ranks: the stages of each rank of the pipeline.
        group: those ranks.
        device: where what is sent has to be.
    """

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        ranks: Sequence[Sequence[int]],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        ends = (0, max(map(max, ranks)))
        self._pairs = [
            [parts[end].get_parameter(name) for end, name in zip(ends, (first, last), strict=True) if end in parts]
            for last, first in getattr(next(iter(parts.values())), "ties", {}).items()
        ]
        holders = [next(rank for rank, held in enumerate(ranks) if end in held) for end in ends]
        self._peer = dist.get_global_rank(group, holders[1] if 0 in parts else holders[0])
        self._group, self._device = group, device

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Each copy's gradient becomes the sum of both. The ranks with either end call this, others may."""
        for pair in self._pairs:
            gradients = [local_tensor(parameter.grad) for parameter in pair if parameter.grad is not None]
            assert len(gradients) == len(pair), "a copy of a tied weight has no gradient"
            if len(gradients) == 2:  # this rank has both ends
                gradients[1].copy_(gradients[0].add_(gradients[1]))
            elif gradients and gradients[0].numel():
                gradients[0].add_(self._exchanged(gradients[0]))  # a + b and b + a have the same bits

    def _exchanged(self, gradient: Tensor) -> Tensor:
        """The other end's gradient for this rank's."""
        mine = gradient.to(self._device).contiguous()  # from the host, under CPU offload
        theirs = torch.empty_like(mine)
        ways = ((dist.isend, mine), (dist.irecv, theirs))
        for work in dist.batch_isend_irecv([dist.P2POp(way, sent, self._peer, self._group) for way, sent in ways]):
            work.wait()
        return theirs.to(gradient.device)
