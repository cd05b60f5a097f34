"""Muon (kellerjordan.github.io/posts/muon): the update of a matrix is its momentum, made orthogonal.

Momentum stays on the shards. Only orthogonalisation needs whole matrices. Each matrix is gathered on one of the ranks
that hold it, starting with the most expensive matrices, and is iterated there once. Then each rank gets its part of the
result. ``torch.optim.Muon`` on DTensors gathers every matrix on every rank in every iteration instead.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from crius.optim.state import Optimizer
from crius.optim.storage import Storage
from crius.shards import Place, local_tensor, mesh_ranks, places

_Parts = dict[int, Place]  # holder to its part of a matrix


class Holders:
    """The ranks that together hold some matrices, and the part of a matrix that each rank has.

    Args:
        mesh: mesh of the matrices; None: this process holds them alone.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        ranks = sorted(mesh_ranks(mesh)) if mesh else [0]
        self.size = len(ranks)
        self._me = ranks.index(dist.get_rank()) if mesh else 0
        self._group = _group(mesh, ranks) if mesh else None
        self._known: dict[int, list[Place]] = {}

    def _places(self, matrix: Tensor) -> list[Place]:
        """The part that each holder has of a matrix, the same on every holder."""
        return self._known.setdefault(id(matrix), places(matrix))

    def _sources(self, matrix: Tensor, owner: int) -> _Parts:
        """Holders of the parts of the whole, each part once. The owner's own part is preferred to copies of it."""
        holders: dict[Place, int] = {}
        known = self._places(matrix)
        for holder in (owner, *range(self.size)):
            if math.prod(known[holder].shape):
                holders.setdefault(known[holder], holder)
        return {holder: place for place, holder in sorted(holders.items(), key=lambda item: item[1])}

    def collect(self, matrices: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor | None:
        """Gather whole matrices: the first holder gets the first matrix, and so on; None for holders without a matrix.

        Args:
            matrices: the same list on each holder, at most as long as the number of holders.
            parts: this rank's contribution to each matrix, as large as its part of the matrix.
        """
        if self.size == 1:
            return parts[0]
        wanted = self._sources(matrices[self._me], self._me) if self._me < len(matrices) else {}
        sends = [self._me in self._sources(matrix, owner) for owner, matrix in enumerate(matrices)]
        given = [part.reshape(-1) if is_sent else part.new_empty(0) for part, is_sent in zip(parts, sends, strict=True)]
        sizes = [math.prod(wanted[holder].shape) if holder in wanted else 0 for holder in range(self.size)]
        received = self._exchange(given, sizes)
        if not wanted:
            return None
        whole = parts[0].new_empty(matrices[self._me].shape)
        for holder, place in wanted.items():
            place.of(whole).copy_(received[holder].view(place.shape))
        return whole

    def spread(self, matrices: Sequence[Tensor], whole: Tensor | None, like: Tensor) -> list[Tensor]:
        """This rank's part of each matrix, from the whole matrices that the holders have after ``collect``.

        Args:
            matrices: as for ``collect``.
            whole: whole matrix of this holder; None: it has none.
            like: a tensor with the dtype and device of all of them.
        """
        if self.size == 1:
            assert whole is not None
            return [whole]
        given = [like.new_empty(0)]
        if whole is not None:
            given = [place.of(whole).reshape(-1) for place in self._places(matrices[self._me])]
        mine = [self._places(matrix)[self._me] for matrix in matrices]
        sizes = [math.prod(place.shape) for place in mine] + [0] * (self.size - len(mine))
        received = self._exchange(given, sizes)
        return [part.view(place.shape) for part, place in zip(received, mine, strict=False)]

    def _exchange(self, given: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Entry ``j`` of ``given`` goes to holder ``j``; entry ``i`` of the result came from holder ``i``."""
        given += [given[0].new_empty(0)] * (self.size - len(given))
        received = given[0].new_empty(sum(sizes))
        dist.all_to_all_single(received, torch.cat(given), sizes, [part.numel() for part in given], group=self._group)
        return list(received.split(sizes))


def _group(mesh: DeviceMesh, ranks: list[int]) -> dist.ProcessGroup | None:
    """The process group of all ranks of a mesh; if only one axis is longer than 1, the group of this axis."""
    long = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    if len(long) <= 1:
        return mesh.get_group(long[0] if long else 0)
    # only these ranks create it: under pipeline parallelism the other ranks do not take part
    return dist.new_group(ranks, use_local_synchronization=True)


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """The mesh of a DTensor; None for a plain tensor."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration, from Keller Jordan's post; torch.optim.Muon has the same."""

EPS = 1e-7
MOMENT = "momentum_buffer"

AdjustLr = Literal["match_rms_adamw", "original"]


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Approximately ``U V^T`` of a matrix ``U S V^T``, with singular values between 0.7 and 1.2, by Newton-Schulz.

    Args:
        matrix: two dims, in the dtype of the computation.
        steps: iterations; 5 are usual.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=EPS)  # then no singular value is above 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def lr_factor(adjust: AdjustLr, shape: torch.Size) -> float:
    """Factor on the learning rate of a matrix, from its whole shape.

    match_rms_adamw: ``0.2 sqrt(max(rows, columns))``, so that an update has the root mean square of AdamW's (Liu et al.
    2025, arXiv:2502.16982, section 2.2). original: ``sqrt(max(1, rows / columns))``, from Keller Jordan's post.
    """
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


@dataclass(frozen=True)
class _Job:
    """A matrix that is updated in this step."""

    matrix: nn.Parameter
    group: dict[str, Any]

    @property
    def cost(self) -> int:
        """Multiplications per iteration, up to a constant factor."""
        return min(self.matrix.shape) ** 2 * max(self.matrix.shape)


class Muon(Optimizer):
    """Muon for matrices with any sharding.

    Args:
        groups: as for ``torch.optim.Muon``.
        storage: storage of weights and momentum.
        momentum: decay of the running mean of gradients.
        nesterov: the update looks one step ahead.
        ns_steps: Newton-Schulz iterations.
        adjust_lr: see ``lr_factor``.
        dtype: dtype of the iterations. None: bfloat16 on CUDA, as torch.optim.Muon; float32 on a CPU, where bfloat16
            is slow.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        storage: Storage,
        *,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        adjust_lr: AdjustLr,
        dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr": adjust_lr}
        super().__init__(groups, defaults)
        self._storage = storage
        self._dtype = dtype
        self._holders: dict[DeviceMesh | None, Holders] = {}
        for group in self.param_groups:
            for matrix in group["params"]:
                mesh = mesh_of(matrix)
                if mesh not in self._holders:
                    self._holders[mesh] = Holders(mesh)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient. They must be the same on every rank that holds them."""
        for holders, jobs in self._rounds():
            matrices = [job.matrix for job in jobs]
            parts = [self._direction(job) for job in jobs]
            whole = holders.collect(matrices, parts)
            result = None if whole is None else orthogonalize(whole, jobs[0].group["ns_steps"])
            for job, part in zip(jobs, holders.spread(matrices, result, parts[0]), strict=True):
                self._apply(job, part)

    def _rounds(self) -> Iterator[tuple[Holders, list[_Job]]]:
        """Groups of matrices, one matrix per holder and of about the same cost."""
        waiting: dict[DeviceMesh | None, list[_Job]] = {mesh: [] for mesh in self._holders}
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    waiting[mesh_of(matrix)].append(_Job(matrix, group))
        for mesh, jobs in waiting.items():
            jobs.sort(key=lambda job: -job.cost)
            size = self._holders[mesh].size
            for start in range(0, len(jobs), size):
                yield self._holders[mesh], jobs[start : start + size]

    def start(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """See ``Optimizer``."""
        state = self.state[parameter]
        state["step"] = torch.zeros((), device=local_tensor(parameter).device)
        self._storage.start(state, parameter, (MOMENT,))

    def _direction(self, job: _Job) -> Tensor:
        """Add the gradient of this rank's shard to the momentum. Returns this rank's part of the matrix to iterate."""
        matrix = job.matrix
        group = job.group
        state = self.state[job.matrix]
        assert matrix.grad is not None
        gradient = local_tensor(matrix.grad)
        if not state:
            self.start(matrix, group)
        everything = slice(0, gradient.numel())
        stored = self._storage.moment(state, MOMENT, field=1, signed=True)
        mean = stored.load(everything)
        flat = gradient.reshape(-1).float()
        before = mean.clone() if self.found_inf is not None else mean
        mean.lerp_(flat, 1 - group["momentum"])
        update = flat.lerp(mean, group["momentum"]) if group["nesterov"] else mean
        mesh = mesh_of(matrix)
        device = gradient.device.type if mesh is None else mesh.device_type  # CPU offload keeps gradients on the host
        dtype = self._dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
        direction = update.to(device=device, dtype=dtype, copy=True).view(gradient.shape)
        if self.found_inf is not None:
            mean.copy_(torch.where(self.found_inf != 0, before, mean))
        stored.save(everything, mean, self._bits(job), self.found_inf)
        return direction

    def _bits(self, job: _Job) -> Tensor | None:
        everything = slice(0, local_tensor(job.matrix).numel())
        return self._storage.bits(job.matrix, self.state[job.matrix]["step"], everything)

    def _apply(self, job: _Job, direction: Tensor) -> None:
        """Apply weight decay to this rank's shard of a matrix and add its part of the orthogonal matrix."""
        matrix = job.matrix
        group = job.group
        skip = self.found_inf
        everything = slice(0, direction.numel())
        stored = self._storage.weight(matrix)
        weight = stored.load(everything)
        before = weight.clone() if skip is not None else weight
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        update = direction.reshape(-1).to(weight.device).to(weight.dtype)
        weight.add_(update, alpha=-group["lr"] * lr_factor(group["adjust_lr"], matrix.shape))
        if skip is not None:
            weight.copy_(torch.where(skip != 0, before, weight))
        stored.save(everything, weight, self._bits(job), skip)
        self.state[matrix]["step"] += 1 if skip is None else 1 - skip
