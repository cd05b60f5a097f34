"""The moment of a step at which a rank holds most. Torch-free.

Candidates: the loss and its backward, when all activations are there; the last and the first block, with what they
recompute; the gradients of the first block and of the embedding, while FSDP sums them; the update.
"""

from dataclasses import dataclass
from typing import NamedTuple

from crius.planner.holdings import Held
from crius.planner.logits import LossBytes
from crius.planner.memory_constants import TRAITS
from crius.planner.workload import Workload

_ID_BYTES = 3 * 8  # of a token: its id, label and position


class Moment(NamedTuple):
    """Bytes at one moment, by what they are for; ``weights`` and ``state`` are there all the time."""

    name: str
    gradients: float
    activations: float = 0.0
    loss: float = 0.0
    copies: float = 0.0
    in_flight: float = 0.0
    working: float = 0.0
    weights: float = 0.0
    state: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self[1:])


@dataclass(frozen=True)
class Activations:
    """Bytes of the activations of one microbatch on a rank.

    Attributes:
        kept: what its blocks keep.
        recomputed: what one of them needs beyond that in its backward.
        hidden: one hidden state.
    """

    kept: float
    recomputed: float
    hidden: float


class _Copies(NamedTuple):
    """Bytes of gathered weights, and of gradients on their way to the other ranks.

    Attributes:
        at_loss: gathered at the loss.
        at_last: at the backward of the last block, while the gradient of the output layer is summed.
        at_first: at that of the first block.
        at_end: at that of the embedding.
        block: a gathered block.
        waiting: the gradient of the output layer where it waits for the embedding's.
        block_sum: of a block's gradient, as it is summed over ranks.
        end_gradient: of the embedding, as its backward makes it.
        end_sum: the same, as it is summed.
    """

    at_loss: float = 0.0
    at_last: float = 0.0
    at_first: float = 0.0
    at_end: float = 0.0
    block: float = 0.0
    waiting: float = 0.0
    block_sum: float = 0.0
    end_gradient: float = 0.0
    end_sum: float = 0.0


def peak(workload: Workload, held: Held, loss: LossBytes, activations: Activations) -> Moment:
    """The moment at which a rank holds most."""
    layers, layout, count = held.layers, workload.layout, workload.num_microbatches
    own = 0.0 if workload.cpu_offload else held.own
    gradients, is_there, is_summed = _gradients(workload, held, own)
    copies = _copies(workload, held, is_summed=is_summed)
    stored, in_flight = workload.weight_bytes, layers.in_flight
    hidden = activations.hidden
    # between pipeline stages the output is kept; the input is a buffer
    kept = activations.kept + hidden * (layers.has_embedding - layers.has_head) * (layout.pp > 1)
    others = kept * (in_flight - 1) + loss.kept * (in_flight - 1) * (workload.schedule == "gpipe")
    buffers = _ID_BYTES * workload.microbatch * workload.seq_len / layout.cp * count
    if layout.pp > 1:
        buffers += layers.neighbours * hidden * (count if TRAITS[workload.framework].receives_all else 1)
    before = gradients if is_there else 0.0
    block = activations.recomputed + hidden + copies.waiting
    ends = copies.end_gradient + copies.end_sum
    unmade = held.block + held.end * layers.has_embedding  # of what gradients there are not yet
    almost = gradients if is_there else gradients * max(0.0, 1 - unmade / held.whole)
    moments = [
        Moment("backward, last block", before, kept, 0.0, copies.at_last, others, block),
        Moment(
            "backward, first block",
            *(almost, kept / layers.layers, 0.0, copies.at_first + copies.block_sum, others, block),
        ),
        Moment(
            "backward, gradients of the first block",
            *(gradients, 0.0, 0.0, copies.at_first + 2 * copies.block_sum + copies.block, others),
            2 * hidden + copies.waiting,
        ),
        Moment("update", gradients, working=2 * own * stored * (workload.optimizer == "foreach")),
    ]
    if layers.has_head:
        made = copies.waiting or ends  # the gradient of the output layer, summed over ranks now or later
        more = max(0.0, made - loss.output)
        moments += [
            Moment("at the loss", before, kept, loss.kept + loss.work, copies.at_loss, others, hidden),
            Moment("backward, output layer", before, kept, loss.output, copies.at_loss + more, others),
        ]
    if layers.has_embedding:
        unsummed = gradients if is_there else max(0.0, gradients - held.end * stored / layout.fsdp)
        if workload.model.tied_embeddings:  # both gradients of the weight and their sum
            ends = max(ends, 3 * copies.waiting)
        moments.append(
            Moment(
                "backward, embedding",
                *(unsummed, 0.0, 0.0, copies.at_end + ends + copies.block_sum, others, 2 * hidden),
            )
        )
    found = max(moments, key=lambda moment: moment.total)
    weights, state = _constant(workload, held)
    return found._replace(weights=weights, state=state, working=found.working + buffers)


def _constant(workload: Workload, held: Held) -> tuple[float, float]:
    """Bytes of the weights and of the optimizer's state, which are there all the time."""
    stored, param = workload.weight_bytes, workload.param_bytes
    own, state = (0.0, 0.0) if workload.cpu_offload else (held.own, held.state)
    if workload.zero_stage == 3:
        return own * stored, state
    return held.whole * param, state + own * stored * (stored > param)  # and weights to update, beside narrower ones


def _gradients(workload: Workload, held: Held, own: float) -> tuple[float, bool, bool]:
    """Bytes of gradients between microbatches; whether they are there before the one of the peak is back-propagated;
    whether they are summed over ranks in it.
    """
    count = workload.num_microbatches
    if workload.zero_stage < 3:
        return (held.own if workload.zero_stage == 2 else held.whole) * workload.reduce_bytes, True, True
    is_there = count > held.layers.in_flight
    if count > 1 and (workload.gradient_sync == "deferred" or workload.layout.pp > 1):
        return held.whole * workload.reduce_bytes, is_there, False  # whole, and not offloaded, until the last
    return own * workload.weight_bytes, is_there, True


def _copies(workload: Workload, held: Held, *, is_summed: bool) -> _Copies:
    layout, layers = workload.layout, held.layers
    stored, param, reduce = workload.weight_bytes, workload.param_bytes, workload.reduce_bytes
    is_tied = workload.model.tied_embeddings and layers.has_embedding and layers.has_head
    if workload.zero_stage < 3:
        return _Copies(waiting=held.end * param * is_tied, end_gradient=held.end * param)
    if layout.num_ranks == 1 and param == stored <= reduce and not workload.cpu_offload:
        return _Copies(waiting=held.end * stored * is_tied, end_gradient=held.end * stored)
    stays = TRAITS[workload.framework].ends_stay
    ends = max(1, layers.has_embedding + (layers.has_head and not is_tied)) if stays else 1
    end, block, whole = ends * held.end * param, held.block * param, held.whole * param
    part = whole / int(workload.reshard) if workload.reshard.isdecimal() else 0.0
    # FSDP frees a block when the next is gathered, which is after a chunked loss
    late = block * (workload.loss_tokens is not None and layout.fsdp > 1)
    output_sum = held.end * reduce * is_summed * (layers.has_head and not is_tied and not stays)
    gathered = (end + part + late, part + end * stays + 2 * block + output_sum, end * stays + 2 * block, end)
    if layout.pp > 1 or (workload.reshard == "never" and workload.num_microbatches > 1):
        gathered = (whole, whole + output_sum, whole, whole)
    elif workload.reshard == "never":  # freed on the way back
        gathered = (whole, whole + output_sum, *gathered[2:])
    return _Copies(
        *gathered,
        block=block,
        waiting=held.end * param * (is_tied or (stays and layers.has_head)),
        block_sum=held.block * reduce * is_summed,
        end_gradient=end,
        end_sum=ends * held.end * reduce * is_summed,
    )
