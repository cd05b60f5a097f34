"""Gradients, norms and losses whose bits do not depend on the number of data-parallel ranks.

The global batch is cut into V virtual shards, a number that does not depend on the ranks. Each is one microbatch. Their
gradients are the leaves of a binary tree over v = 0 ... V - 1, and neighbours are added first. Rank b of n takes
v = k * n + b as its microbatch k, so in each microbatch the n ranks hold an aligned block of leaves. FSDP's ranks sum
the lowest levels of the tree, replicas the levels above, and each rank adds consecutive blocks as a binary counter
carries. The sum of two numbers does not depend on the rank that adds them, and the same pairs are added on 1, 2, 4, ...
V ranks.

Norms and losses are summed in a way that does not depend on any order.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.nn import functional as F

from crius.config.layout import Layout
from crius.parallel.gradients import Gradients
from crius.parallel.mesh import Mesh
from crius.parallel.runtime import World
from crius.shards import is_first_holder
from crius.units import counted

CHUNK = {"cpu": 1 << 16}
"""Numbers hashed at a time. On a CPU their places and products then fit its cache (2.7 GB/s per core, else 0.3)."""

_CHUNK = 1 << 24  # on a GPU: few kernel launches, 0.4 GiB of temporary memory

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP = -0x61C8864680B583EB  # the odd increment of splitmix64, as a signed number


def hash_bits(values: Tensor) -> Tensor:
    """A hash of the bits of ``values`` in their order, int64 ``(2,)``. The host does not wait for a GPU.

    The first number is the sum of the bits of each value, so that any change of a single value shows. The second number
    multiplies each value by a factor of its place, in wrapping 64 bits. The hash does not protect against someone who
    constructs two tensors with the same hash.
    """
    flat = values.reshape(-1)
    bits = flat.view(_INTS[flat.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=values.device)
    chunk = CHUNK.get(values.device.type, _CHUNK)
    places = torch.arange(min(chunk, bits.numel()), device=values.device) * 2 + 1
    for index, part in enumerate(bits.split(chunk) if bits.numel() else ()):
        wide = part.to(torch.int64)
        weighted = (wide * places[: wide.numel()]).sum()
        sums[0] += wide.sum()
        sums[1] += weighted * (2 * index + 1) * _STEP
    return sums


class PlainReduceScatter(ReduceScatter):
    """FSDP's default reduce-scatter, which FSDP does not export."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer for FSDP."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Write this rank's part of the sum of all ranks' ``input_tensor`` to ``output_tensor``."""
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch before 2.13
        work: dist.Work | None = scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work


class HashedReduceScatter(ReduceScatter):
    """Wraps a reduce-scatter. While it is on, it hashes this rank's own gradient before it is summed.

    It belongs to one FSDP unit. FSDP allocates two buffers in each backward pass: one for the gradient of this rank and
    one for the result. The gradient is complete when the second buffer is allocated. On an axis with one rank FSDP also
    allocates both, but does not call the reduce-scatter.

    Args:
        inner: reduce-scatter that sums.
    """

    def __init__(self, inner: ReduceScatter) -> None:
        self._inner = inner
        self._brought: Tensor | None = None
        self.is_on = False
        self.hashes: list[Tensor] = []
        """Results of ``hash_bits``, one per backward pass while it is on."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer for FSDP."""
        buffer = self._inner.allocate(size, dtype=dtype, device=device)
        if self.is_on:
            if self._brought is None:
                self._brought = buffer
            else:
                self.hashes.append(hash_bits(self._brought))
                self._brought = None
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        """Call ``inner``."""
        return self._inner(*args, **kwargs)


SUMMED = 1 << 22
"""Numbers that are squared in float64 at a time."""

BITS = 20
"""Bits of one slice of a squared number. 2**33 slices add up exactly in the 53 bits of float64."""

SLICES = 3


def tree_sum(parts: Tensor) -> Tensor:
    """The sum over the first dim: neighbours are added, then their sums. The result's bits depend on this order.

    Args:
        parts: ``(n, ...)``, n at least 1. If n is not a power of two, an odd last part is carried to the next level.
    """
    while len(parts) > 1:
        pairs = parts[0:-1:2] + parts[1::2]
        parts = torch.cat((pairs, parts[-1:])) if len(parts) % 2 else pairs
    return parts[0]


class TreeReduceScatter(PlainReduceScatter):
    """Reduce-scatter for ``FSDPModule.set_custom_reduce_scatter``: ranks exchange parts, and each rank adds its own.

    Args:
        innermost: number of ranks that share a sequence, neighbours on the axis. Their parts are added first.
    """

    def __init__(self, innermost: int = 1) -> None:
        self._innermost = innermost

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's part of the sum to ``output_tensor``; ``input_tensor`` is n times as long, for n ranks."""
        assert op == dist.ReduceOp.SUM and not async_op
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = received.view(-1, self._innermost, output_tensor.numel())
        output_tensor.copy_(tree_sum(tree_sum(parts.transpose(0, 1))))


def tree_all_reduce(values: Tensor, group: dist.ProcessGroup) -> None:
    """Sum the flat ``values`` in place over the ranks of ``group`` by ``tree_sum``, with the traffic of a ring."""
    size = group.size()
    numel = values.numel()
    padded = F.pad(values, (0, -numel % size))
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    mine = tree_sum(received.view(size, -1)).clone()
    dist.all_gather(list(received.view(size, -1).unbind()), mine, group=group)
    values.copy_(received[:numel])


class TreeAccumulation:
    """Adds the sharded gradient of an FSDP unit over replicas, then over microbatches, up the tree.

    FSDP calls it with each microbatch's gradient, flat, on the stream of its all-reduces. The gradient of the last
    microbatch becomes the total. The ``.grad`` of earlier microbatches must be discarded. It holds one more gradient
    for each doubling of the microbatches, in the dtype that gradients are reduced in.

    Args:
        replicas: ranks that hold the same shards; None: there are no other such ranks.
    """

    def __init__(self, replicas: dist.ProcessGroup | None) -> None:
        self._replicas = replicas
        self._waiting: list[Tensor] = []
        self._count = 0
        self.is_last = True
        """Whether this microbatch is the last of the step."""

    def __call__(self, gradient: Tensor) -> None:
        """Add ``gradient``, flat and already summed over FSDP's ranks; it is changed in place."""
        if self._replicas is not None:
            tree_all_reduce(gradient, self._replicas)
        self._count += 1
        total = gradient
        carries = self._count
        while carries % 2 == 0:
            total = self._waiting.pop().add_(total)
            carries //= 2
        if not self.is_last:
            self._waiting.append(total.clone() if total is gradient else total)
            return
        assert not self._waiting, f"{self._count} microbatches are not a power of two"
        self._count = 0
        if total is not gradient:
            gradient.copy_(total)


def install_trees(model: nn.Module, mesh: Mesh) -> list[TreeAccumulation]:
    """Make FSDP sum the gradients of ``model``, which is sharded over ``mesh.shards``, as trees."""
    replicas = mesh.fsdp.get_group("dp_replicate") if mesh.layout.dp_replicate > 1 else None
    scatter = TreeReduceScatter(mesh.layout.cp)
    trees = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            trees.append(TreeAccumulation(replicas))
            module.set_custom_reduce_scatter(scatter)
            module.set_all_reduce_hook(trees[-1])
    return trees


def describe_trees(layout: Layout, num_microbatches: int) -> str:
    """The collectives of a step of ``num_microbatches`` with trees, and their memory, for the log."""
    counts = [f"{num_microbatches} all-to-all instead of a reduce-scatter"] if layout.fsdp > 1 else []
    if layout.dp_replicate > 1:
        counts.append(f"{num_microbatches} all-to-all and all-gather over replicas")
    levels = num_microbatches.bit_length() - 1
    kept = f"{counted(levels, 'more sharded gradient')} {'is' if levels == 1 else 'are'} kept"
    return f"{' + '.join(counts) or 'no collective'} per unit and step, {kept if levels else 'no more memory'}"


class ReproducibleGradients(Gradients):
    """Gradients whose norm has the same bits for every sharding, and losses summed by virtual shard.

    Args:
        parameters: all trained parameters of this rank.
        mesh: mesh that they are laid out on.
        world: all ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: Mesh, world: World) -> None:
        super().__init__(parameters, world.size, world.device)
        self._world = world
        self._layout = mesh.layout
        # FSDP and the meshes of its parameters do not know the replicas here
        is_replica = mesh.layout.dp_replicate > 1 and mesh.fsdp.get_local_rank("dp_replicate") > 0
        counted = [not is_replica and is_first_holder(parameter) for parameter in self._parameters]
        self._is_counted = torch.tensor(counted, dtype=torch.float64, device=world.device)[:, None]

    def _squared(self, tensors: Sequence[Tensor]) -> Tensor:
        """See ``Gradients``. Rank 0's share is the whole; a non-finite value is also in the share of its holder."""
        largest = torch.stack(
            [t.abs().amax().double() if t.numel() else t.new_zeros((), dtype=torch.float64) for t in tensors]
        )
        largest = largest.to(self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        scales = slice_scales(largest)
        mine = torch.stack(
            [
                sliced_squares(tensor, scale.to(tensor.device)).to(self._device)
                for tensor, scale in zip(tensors, scales, strict=True)
            ]
        )
        slices = self._world.sum(mine * self._is_counted)
        whole = (slices[:, 2] + slices[:, 1]) + slices[:, 0]
        return whole if self._world.rank == 0 else mine.sum(dim=1) * 0.0

    def totals(self, losses: Tensor, squared_norms: Tensor, world: World, layout: Layout) -> Tensor:
        """See ``Gradients``."""
        by_rank = world.gather(losses).view(layout.batch, layout.cp * layout.tp, -1)
        by_shard = by_rank.permute(2, 0, 1).reshape(-1, layout.cp * layout.tp)  # (V, ranks of one sequence)
        return torch.stack((by_shard.sum(dim=1).sum() / layout.tp, world.sum(squared_norms.sum())))


def slice_scales(largest: Tensor) -> Tensor:
    """Numbers that cut squares into slices, ``(n, SLICES)``, for values of at most ``largest``, float64 ``(n,)``.

    Adding and subtracting 1.5 * 2**(52 + e) rounds a float64 to a multiple of 2**e (Demmel and Nguyen 2013, "Fast
    reproducible floating-point summation"). The first slice has the upper BITS bits of the largest square, the next
    slice the BITS bits below. A slice of every number is a multiple of the same power of two, so the sum of the slices
    is exact in any order.
    """
    exponent = torch.frexp(largest).exponent.to(torch.int64).clamp(-149, 129)  # largest < 2**exponent
    steps = torch.arange(1, SLICES + 1, device=largest.device)
    binary = (2 * exponent)[:, None] - BITS * steps + 52
    return (((binary + 1023) << 52) | (1 << 51)).view(torch.float64)


def sliced_squares(values: Tensor, scale: Tensor) -> Tensor:
    """Cut the squares of ``values`` into slices by ``scale``, and sum each slice: float64 ``(SLICES,)``."""
    sums = torch.zeros(SLICES, dtype=torch.float64, device=values.device)
    for part in values.reshape(-1).split(SUMMED) if values.numel() else ():
        rest = part.double().square_()
        for index in range(SLICES):
            upper = (rest + scale[index]) - scale[index]
            rest -= upper
            sums[index] += upper.sum()
    return sums
