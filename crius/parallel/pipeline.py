"""Pipeline parallelism: training and validation steps over the stages, with ``torch.distributed.pipelining``.

B batch, T tokens of this rank's part of a sequence
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from crius.config.parallelism import ParallelismConfig
from crius.config.pipeline import placement
from crius.parallel.fsdp import fsdp_modules
from crius.parallel.stages import TORCH_SCHEDULES, order_of
from crius.shards import counters, local_tensor, zero


class _Stage(PipelineStage):
    """A stage that does not send to its own rank, which Gloo cannot do.

    In torch 2.11, the first step of a schedule tests the connection to each neighbouring stage. In a V schedule a
    neighbouring stage may be on the same rank.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]


class TiedStages:
    """The two copies of each tied weight of a pipeline, on the first and on the last stage.

    Each stage gathers and reduces its own copy. So the rank at the other end of the pipeline has the same shard of its
    copy as this rank. After the schedule, each rank has the gradient of its own use of the weight. Both ranks add the
    two gradients. Everything after that is the same on both, so the copies stay equal to the last bit.

    Args:
        parts: stages of this rank by their index.
        ranks: stages of each rank of the pipeline.
        group: process group of the pipeline.
        device: device of communicated tensors.
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
        holders = [next(rank for rank, stages in enumerate(ranks) if end in stages) for end in ends]
        self._peer = dist.get_global_rank(group, holders[1] if 0 in parts else holders[0])
        self._group = group
        self._device = device

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Set each copy's gradient to the sum of both. Ranks with the first or last stage must call it, others may."""
        for pair in self._pairs:
            if not any(parameter.requires_grad for parameter in pair):  # frozen
                continue
            gradients = [local_tensor(parameter.grad) for parameter in pair if parameter.grad is not None]
            assert len(gradients) == len(pair), "a copy of a tied weight has no gradient"
            if len(gradients) == 2:  # this rank has both ends
                gradients[1].copy_(gradients[0].add_(gradients[1]))
            elif gradients and gradients[0].numel():
                gradients[0].add_(self._exchanged(gradients[0]))  # a + b and b + a have the same bits

    def _exchanged(self, gradient: Tensor) -> Tensor:
        """Send this rank's gradient to the other end, and receive the gradient from there."""
        mine = gradient.to(self._device).contiguous()  # from the host, under CPU offload
        theirs = torch.empty_like(mine)
        ways = ((dist.isend, mine), (dist.irecv, theirs))
        for work in dist.batch_isend_irecv([dist.P2POp(way, sent, self._peer, self._group) for way, sent in ways]):
            work.wait()
        return theirs.to(gradient.device)


class Pipeline:
    """This rank's stages of a model, and the steps over all stages. All ranks of a pipeline pass the same batch.

    Stages are given the shapes of the tensors between them. Otherwise torch would run each stage on uninitialised
    numbers to learn the shapes, and experts would count them. Each microbatch has its own receive buffers.

    Args:
        parts: stages of this rank, laid out and materialised. Their forward is ``part(x, positions_BT=...,
            labels_BT=..., ends_BM=...)``, where x is token ids ``(B, T)`` on the first stage and the hidden state
            ``(B, T / tp, D)`` elsewhere. The last stage returns the sum of the token losses, a float64 scalar.
        indices: indices of these stages in the pipeline, ascending.
        parallelism: degree and schedule.
        num_microbatches: microbatches per training step; must suit the schedule
            (``config.pipeline.microbatches_allowed``).
        mesh: ranks of this pipeline, one axis.
        device: device of the tensors.
        dim: width of the hidden state.
        dtype: dtype of the hidden state.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        indices: Sequence[int],
        parallelism: ParallelismConfig,
        num_microbatches: int,
        mesh: DeviceMesh,
        device: torch.device,
        dim: int,
        dtype: torch.dtype,
    ) -> None:
        self._parts = dict(zip(indices, parts, strict=True))
        self._counters = counters(parts)
        self._parallelism = parallelism
        self._num_microbatches = num_microbatches
        self._group = mesh.get_group()
        self._device = device
        self._ranks = placement(parallelism)
        self._num_stages = sum(map(len, self._ranks))
        self._tied = TiedStages(self._parts, self._ranks, self._group, device)
        self._schedule: _PipelineSchedule | None = None
        self._batch_shape = torch.Size()
        self._valid_tokens = torch.ones((), dtype=torch.float64, device=device)
        self._dim = dim
        self._dtype = dtype

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self._num_stages - 1 in self._parts

    def forward_backward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        labels_BT: Tensor,
        valid_tokens: Tensor,
        ends_BM: Tensor | None = None,
    ) -> Tensor:
        """Compute the gradients of a batch, summed over its microbatches into the parts, and synchronise them once.

        The gradient of a tied weight is the same on both stages that have it.

        Args:
            tokens_BT: token ids. Rows are divided over the microbatches in order, evenly.
            positions_BT: position of each token.
            labels_BT: label of each token.
            valid_tokens: global number of tokens with a label in the step, which divides the loss; a float64 scalar.
            ends_BM: ends of the documents of each row, if attention uses them.

        Returns:
            The loss sum of each microbatch divided by ``valid_tokens``, float64 ``(num_microbatches,)``; zeros on ranks
            without the last stage.
        """
        if self._schedule is None or tokens_BT.shape != self._batch_shape:  # buffers have one shape
            self._schedule = self._build(tokens_BT)
            self._batch_shape = tokens_BT.shape
        self._valid_tokens = valid_tokens
        zero(self._counters)
        losses: list[Tensor] = []
        inputs = (tokens_BT,) if 0 in self._parts else ()
        batch: dict[str, Any] = {"positions_BT": positions_BT, "labels_BT": labels_BT}
        batch |= {} if ends_BM is None else {"ends_BM": ends_BM}
        self._schedule.step(*inputs, target=labels_BT, losses=losses, return_outputs=False, **batch)
        self._tied.sum_gradients()
        if not self.has_last_stage:
            return torch.zeros(self._num_microbatches, dtype=torch.float64, device=self._device)
        with torch.no_grad():  # else their graph would live as long as the losses
            return torch.stack(losses)

    @torch.no_grad()
    def evaluate(
        self, tokens_BT: Tensor, positions_BT: Tensor, labels_BT: Tensor, ends_BM: Tensor | None = None
    ) -> Tensor:
        """The loss sum of a batch, a float64 scalar; 0 on ranks without the last stage.

        This does not use ``schedule.eval``, which fails on schedules with neighbouring stages on one rank. Its stages
        also infer all shapes again, with a backward, at each change between training and validation.

        Args:
            tokens_BT: token ids. Any number of rows, the same on each rank. The number of microbatches is the greatest
                common divisor of the number of rows and the microbatches of training.
            positions_BT: position of each token.
            labels_BT: label of each token.
            ends_BM: ends of the documents of each row, if attention uses them.
        """
        count = math.gcd(len(tokens_BT), self._num_microbatches)
        batch = [tensor.chunk(count) for tensor in (tokens_BT, positions_BT, labels_BT)]
        ends = [None] * count if ends_BM is None else ends_BM.chunk(count)
        me = dist.get_rank(self._group)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        inputs = {(0, number): tokens for number, tokens in enumerate(batch[0])}
        for actions in forward_steps(tuple(map(tuple, self._ranks)), count):
            exchanges = []
            for rank, action in enumerate(actions):
                if action is None:
                    continue
                stage, number = action
                following = (stage + 1, number)
                if rank == me:
                    output = self._parts[stage](inputs.pop(action), batch[1][number], batch[2][number], ends[number])
                    if stage + 1 == self._num_stages:
                        total += output
                    elif stage + 1 in self._parts:
                        inputs[following] = output
                    else:
                        peer = next(other for other, stages in enumerate(self._ranks) if stage + 1 in stages)
                        exchanges.append(self._exchange(dist.isend, output.contiguous(), peer))
                elif stage + 1 in self._parts:
                    inputs[following] = self._hidden(batch[0][number], self._device)
                    exchanges.append(self._exchange(dist.irecv, inputs[following], rank))
            for work in dist.batch_isend_irecv(exchanges) if exchanges else ():
                work.wait()
        for part in self._parts.values():
            for module in fsdp_modules(part):
                module.reshard()
        return total

    def _build(self, tokens_BT: Tensor) -> _PipelineSchedule:
        """A schedule with new stages for batches of this shape."""
        tokens = tokens_BT.chunk(self._num_microbatches)[0].to("meta")
        hidden = self._hidden(tokens, torch.device("meta")).requires_grad_()
        loss = torch.empty((), dtype=torch.float64, device="meta", requires_grad=True)
        last = self._num_stages - 1
        stages = [
            _Stage(
                part,
                index,
                self._num_stages,
                self._device,
                input_args=hidden if index else tokens,
                output_args=loss if index == last else hidden,
                group=self._group,
            )
            for index, part in self._parts.items()
        ]
        options = {"n_microbatches": self._num_microbatches, "loss_fn": self._scaled_loss, "scale_grads": False}
        if self._parallelism.pipeline_parallel_schedule_csv:
            schedule = _PipelineScheduleRuntime(stages, **options)
            order = order_of(self._parallelism, self._num_microbatches)
            cells = [[_Action.from_str(f"{a.stage}{a.kind}{a.microbatch}") for a in row] for row in order]
            schedule._prepare_schedule_with_comms(dict(enumerate(cells)))
            return schedule
        kind = get_schedule_class(TORCH_SCHEDULES[self._parallelism.pipeline_parallel_schedule])
        return kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, **options)

    def _scaled_loss(self, loss_sum: Tensor, labels_BT: Tensor) -> Tensor:
        """Loss function for the schedule: scales the output of the last stage, which has used the labels already."""
        return loss_sum / self._valid_tokens

    def _hidden(self, tokens_BT: Tensor, device: torch.device) -> Tensor:
        """Buffer for the hidden state of a microbatch between stages, ``(B, T / tp, D)``."""
        num_tokens = tokens_BT.shape[1] // self._parallelism.tensor_parallel_degree
        return torch.empty(tokens_BT.shape[0], num_tokens, self._dim, dtype=self._dtype, device=device)

    def _exchange(self, way: Callable[..., Any], tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(way, tensor, dist.get_global_rank(self._group, peer), self._group)


@functools.lru_cache(maxsize=8)
def forward_steps(ranks: tuple[tuple[int, ...], ...], num_microbatches: int) -> list[list[tuple[int, int] | None]]:
    """The forward pass in lockstep: for each step, the ``(stage, microbatch)`` that each rank computes, or None.

    After each step the results are exchanged, with all sends and receives of a rank together, so that no order of them
    can deadlock. A rank takes the latest stage that is ready.

    Args:
        ranks: stages of each rank.
        num_microbatches: microbatches, each of which passes all stages.
    """
    num_stages = sum(map(len, ranks))
    ready = {(0, number) for number in range(num_microbatches)}
    steps = []
    while ready:
        actions: list[tuple[int, int] | None] = []
        for stages in ranks:
            own = [action for action in ready if action[0] in stages]
            actions.append(min(own, key=lambda action: (-action[0], action[1])) if own else None)
        for action in filter(None, actions):
            ready.remove(action)
            if action[0] + 1 < num_stages:
                ready.add((action[0] + 1, action[1]))
        steps.append(actions)
    return steps
