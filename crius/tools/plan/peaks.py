"""The moment of a step at which a rank has most in memory. Torch-free.

Candidates: the loss and the backward of the output layer, when all activations exist; the backwards of the first and of
the last layers, with all that they recompute, gather and sum; the backward of the embedding; the update. Between these
moments everything grows or shrinks by equal parts, layer by layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from crius.tools.plan.holdings import Held
from crius.tools.plan.workload import Workload

_ID_BYTES = 3 * 8  # per token: its id, label and position


class Moment(NamedTuple):
    """Bytes at one moment, by purpose; ``weights`` and ``state`` exist all the time."""

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
        """Sum of all bytes."""
        return sum(self[1:])


@dataclass(frozen=True)
class LossBytes:
    """Bytes of the last norm, the logits and the loss of a microbatch.

    Attributes:
        kept: bytes between the loss and its backward.
        work: further bytes while it is computed or back-propagated.
        output: all bytes while the gradient of the output layer is computed.
    """

    kept: float = 0.0
    work: float = 0.0
    output: float = 0.0


class BlockKind(NamedTuple):
    """Layers of one kind on a rank, and the bytes of one of them for a microbatch.

    Attributes:
        spans: begin and end of their runs in the model.
        kept: bytes that a layer keeps for its backward.
        saved: bytes that a recomputed layer does not keep.
        recomputed: further bytes that the backward of a recomputed layer needs; if ``saved`` is 0, of every layer.
        backward: bytes that the backward needs in any case.
    """

    spans: tuple[tuple[int, int], ...] = ()
    kept: float = 0.0
    saved: float = 0.0
    recomputed: float = 0.0
    backward: float = 0.0

    @property
    def number(self) -> int:
        """Number of the layers."""
        return sum(end - begin for begin, end in self.spans)

    def multiples(self, count: int, every: int) -> int:
        """Number of layers among the first ``count`` whose number in the model (from 1) is a multiple of ``every``."""
        found = 0
        for begin, end in self.spans:
            end = min(end, begin + count)
            count -= end - begin
            found += end // every - begin // every
        return found


@dataclass(frozen=True)
class Activations:
    """Bytes of the activations of one microbatch on a rank.

    Attributes:
        kinds: its layers, the dense ones first.
        every: every how many layers one is recomputed, if not all are treated alike.
        sent: bytes that it keeps in addition to its layers, less the bytes of its input, which is a buffer.
        hidden: bytes of one hidden state.
    """

    kinds: tuple[BlockKind, BlockKind]
    every: int
    sent: float
    hidden: float

    @property
    def all(self) -> float:
        """Bytes that all layers keep."""
        return self.first(sum(kind.number for kind in self.kinds))

    def first(self, count: int) -> float:
        """Bytes that the first ``count`` layers keep."""
        dense = min(count, self.kinds[0].number)
        found = self.sent
        for kind, number in zip(self.kinds, (dense, count - dense), strict=True):
            found += number * kind.kept - kind.saved * (kind.multiples(number, self.every) if kind.saved else 0)
        return max(0.0, found)

    def backward(self, index: int) -> float:
        """Bytes that the backward of layer ``index`` needs beyond the kept ones."""
        dense = self.kinds[0].number
        kind, number = (self.kinds[0], index) if index < dense else (self.kinds[1], index - dense)
        is_again = not kind.saved or kind.multiples(number + 1, self.every) > kind.multiples(number, self.every)
        return kind.backward + kind.recomputed * is_again


class _Pass(NamedTuple):
    """A backward through the rank's layers.

    Attributes:
        is_there: whether gradients of earlier microbatches exist before it.
        is_summed: whether FSDP sums gradients over ranks, layer by layer.
        stays: whether all weights stay gathered.
        others: other microbatches whose activations exist.
    """

    is_there: bool
    is_summed: bool
    stays: bool
    others: float = 0.0


def peak(
    workload: Workload, held: Held, loss: LossBytes, activations: Activations, *, is_cached: bool = False
) -> Moment:
    """The moment of the peak memory of a rank.

    Args:
        workload: computed work.
        held: weights of the rank.
        loss: bytes of the loss.
        activations: activations of a microbatch.
        is_cached: whether freed memory stays with an allocator, which cannot join it for the largest copy, made last.
    """
    rank = workload.part(Rank)(workload, held, activations)
    layers = held.layers
    count = workload.num_microbatches
    other = activations.all + loss.kept * (workload.schedule == "gpipe")
    moments = [rank.update()]
    for one in _passes(workload, held):
        found = [*rank.layers(one)]
        if layers.has_head:
            found += rank.output(one, loss)
        if layers.has_embedding:
            found.append(rank.embedding(one, is_cached=is_cached))
        moments.append(max(found, key=lambda moment: moment.total)._replace(in_flight=other * one.others))
    most = max(moments, key=lambda moment: moment.total)
    buffers = _ID_BYTES * workload.tokens * count + layers.neighbours * activations.hidden * workload.received
    weights, state = _constant(workload, held)
    return most._replace(weights=weights, state=state, working=most.working + buffers)


def _passes(workload: Workload, held: Held) -> Iterator[_Pass]:
    """The backwards that may need most: the last microbatch's, and the first one's and the others' if they differ."""
    count = workload.num_microbatches
    others = held.layers.in_flight - 1
    if workload.zero_stage < 3:
        yield _Pass(is_there=True, is_summed=False, stays=True, others=others)
    elif workload.layout.pp > 1:  # weights stay, and gradients are summed after the last
        yield _Pass(is_there=count > held.layers.in_flight, is_summed=False, stays=True, others=others)
        if count <= held.layers.in_flight and count > 1:
            yield _Pass(is_there=True, is_summed=False, stays=True, others=max(0.0, others - 1))
    else:
        yield _Pass(is_there=count > 1, is_summed=True, stays=False)
        is_kept = workload.reshard == "never"
        is_deferred = workload.gradient_sync == "deferred"
        for is_there in range(min(count - 1, 2)) if is_kept or is_deferred else ():
            yield _Pass(is_there=bool(is_there), is_summed=not is_deferred, stays=is_kept)


def waits_for_loss(workload: Workload) -> bool:
    """Whether the last layer is gathered before the backward of the output layer begins: with a chunked loss."""
    layout = workload.layout
    is_gathered = layout.fsdp > 1 or (workload.model.num_experts > 0 and layout.efsdp > 1)
    return is_gathered and layout.pp == 1 and workload.reshard != "never" and workload.loss_tokens is not None


def waiting_for_loss(workload: Workload, held: Held) -> float:
    """Numbers of the last layer that are gathered when the backward of the output layer begins."""
    return _gathered_ahead(workload, held) if waits_for_loss(workload) else 0.0


def _gathered_ahead(workload: Workload, held: Held) -> float:
    """Numbers of the last layer that FSDP gathers ahead; with two groups on separate meshes, those of the experts."""
    layout = workload.layout
    last = held.layer(held.layers.layers - 1)
    if last.routed and max(layout.tp, layout.ep) > 1 and not workload.splits_experts:
        return last.routed * (layout.efsdp > 1)
    return last.whole * (layout.fsdp > 1)


def parts_between(workload: Workload, held: Held, count: int) -> float:
    """Bytes of the embedding and the first ``count`` layers, with an integer ``reshard_after_forward_mode``: forward
    and backward leave parts of them.
    """
    if not workload.reshard.isdecimal():
        return 0.0
    whole = held.first(count)[0] + held.units.embedding.whole * held.layers.has_embedding
    return whole * workload.param_bytes / int(workload.reshard)


def _constant(workload: Workload, held: Held) -> tuple[float, float]:
    """Bytes of the weights and of the optimizer's state, which exist all the time."""
    stored = workload.weight_bytes
    param = workload.param_bytes
    own, state = (0.0, 0.0) if workload.cpu_offload else (held.own, held.state)
    if workload.zero_stage == 3:
        return own * stored + held.buffers, state
    # and the weights to update, in addition to narrower ones
    return held.whole * param + held.buffers, state + own * stored * (stored > param)


class Rank:
    """The moments of one pipeline rank."""

    def __init__(self, workload: Workload, held: Held, activations: Activations) -> None:
        self._work = workload
        self._held = held
        self._activations = activations
        self._param = workload.param_bytes
        self._reduce = workload.reduce_bytes
        self._stored = workload.weight_bytes
        layers = held.layers
        layout = workload.layout
        is_sharded = workload.zero_stage == 3
        self._is_plain = (
            layout.num_ranks == 1 and self._param == self._stored <= self._reduce and not workload.cpu_offload
        )
        self._is_copied = is_sharded and not self._is_plain  # FSDP gathers weights and sums gradients
        self._is_whole = workload.num_microbatches > 1 and (workload.gradient_sync == "deferred" or layout.pp > 1)
        self._is_one_end = workload.is_tied  # embedding and output layer are one unit: it stays until the end
        self._end = held.end * self._param
        self._ends = self._end  # of the whole unit
        self._waiting = self._end * self._is_one_end
        self._last = [held.units.embedding] if layers.has_embedding else []  # their gradients come last

    def layers(self, one: _Pass) -> Iterator[Moment]:
        """Moments when the backward of a layer begins and ends, and when its gradient is to be summed over ranks."""
        held = self._held
        kept = self._activations
        hidden = self._activations.hidden
        count = held.layers.layers
        dense = held.layers.dense
        for index in sorted({0, 1, dense - 1, dense, dense + 1, count - 2, count - 1} & set(range(count))):
            copies = self._gathered(one, index) + self._sum(one, index + 1)
            gradients = self._gradients(one, index)
            made = held.layer(index).whole * self._made(one)
            begin = kept.first(index + 1)
            end = kept.first(index)
            name = f"backward, layer {index + 1} of {count}"
            yield Moment(name, gradients, begin, 0.0, copies, 0.0, kept.backward(index) + hidden + self._waiting)
            yield Moment(name, gradients, end, 0.0, copies + made, 0.0, 2 * hidden + self._waiting)
            if one.is_summed and self._is_copied:
                layer = held.layer(index)
                copies = self._gathered(one, index) - layer.whole * self._param + self._sum(one, index)
                if not self._is_whole:
                    copies += max(made, layer.own * self._stored * (not self._work.cpu_offload))
                yield Moment(name, gradients, end, 0.0, copies, 0.0, hidden + self._waiting)

    def output(self, one: _Pass, loss: LossBytes) -> Iterator[Moment]:
        """Moments of the loss and of the backward of the output layer."""
        held = self._held
        work = self._work
        kept = self._activations.all
        before = self._before(one)
        gathered = late = 0.0
        last = _gathered_ahead(work, held) * self._param
        if self._is_copied and (one.stays or work.reshard == "never"):
            gathered = held.whole * self._param
            # the source of the last gather is freed at the next gather
            gathered += last * (self._is_one_end and work.layout.pp == 1 and not one.is_there)
        elif self._is_copied:
            gathered = self._ends + parts_between(work, held, held.layers.layers)
            late = last  # gathered when the backward of the output layer begins
        made = self._waiting or self._end + self._sum(one, held.layers.layers)  # its gradient, and the sum of it
        copies = gathered + late + max(0.0, made - loss.output)
        yield Moment("at the loss", before, kept, loss.kept + loss.work, gathered, 0.0, self._activations.hidden)
        yield Moment("backward, output layer", before, kept, max(loss.kept, loss.output), copies)

    def embedding(self, one: _Pass, *, is_cached: bool) -> Moment:
        """Moment of the backward of the embedding, and of the sum of its gradient over ranks."""
        ends = self._ends
        summed = ends * self._reduce / self._param * (one.is_summed and self._is_copied)
        freed = self._sum(one, 0) + self._gathered(one, -1)  # freed before its own gradient is summed
        # a tied weight has both gradients and their sum
        made = max(ends, 3 * self._waiting) if self._work.is_tied else ends
        shard = ends / self._param * self._stored / self._work.layout.fsdp
        left = ends if not summed or self._is_whole or self._work.cpu_offload else max(ends, shard)
        copies = max(made + freed, left + summed + freed * (is_cached and self._is_one_end))
        return Moment(
            "backward, embedding", self._gradients(one, -1), 0.0, 0.0, copies, 0.0, 2 * self._activations.hidden
        )

    def update(self) -> Moment:
        """Moment of the optimizer's step, after FSDP has summed all gradients over ranks."""
        work = self._work
        held = self._held
        own = 0.0 if work.cpu_offload else held.own
        gradients = (
            own * self._stored
            if work.zero_stage == 3
            else self._before(_Pass(is_there=True, is_summed=False, stays=True))
        )
        return Moment("update", gradients, working=2 * own * self._stored * (work.optimizer == "foreach"))

    def _made(self, one: _Pass) -> float:
        """Bytes of a weight's new gradient."""
        if self._work.zero_stage < 3:
            return 0.0
        if one.is_there and (self._is_plain or (self._is_whole and self._param == self._reduce)):
            return 0.0  # it is added to the existing gradient
        if self._is_whole and not (one.is_there or one.is_summed):
            return max(self._param, self._reduce)  # and the dtype in which it is kept
        return self._param

    def _before(self, one: _Pass) -> float:
        """Bytes of gradients of earlier microbatches."""
        held = self._held
        work = self._work
        if work.zero_stage < 3:
            return (held.own if work.zero_stage == 2 else held.whole) * self._reduce
        if not one.is_there:
            return 0.0
        if self._is_whole:
            return held.whole * self._reduce
        return 0.0 if work.cpu_offload else held.own * self._stored

    def _gradients(self, one: _Pass, index: int) -> float:
        """Bytes of gradients in the backward of layer ``index`` (-1: the embedding), without its own and its sums."""
        held = self._held
        before = self._before(one)
        if self._work.zero_stage < 3:
            return before
        whole, own = held.first(index + 1)
        for unit in self._last:
            whole += unit.whole
            own += unit.own
        made = held.whole - whole
        stored = (held.own - own) * (not self._work.cpu_offload)
        if not self._is_whole:
            # the input of the replicas' sum stays until the end of the backward, unless it is the gradient itself
            is_other = one.is_there or self._stored != self._reduce
            summed = stored * self._reduce * (is_other and self._is_copied and self._work.layout.dp_replicate > 1)
            return (before or stored * self._stored) + summed
        if not one.is_summed:
            return before or made * self._reduce
        return before - made * self._reduce + stored * self._stored

    def _sum(self, one: _Pass, index: int) -> float:
        """Bytes of the gradient of layer ``index`` on its way to other ranks; after the last: the output layer's."""
        held = self._held
        if not (one.is_summed and self._is_copied):
            return 0.0
        if index < held.layers.layers:
            return held.layer(index).whole * self._reduce
        return held.end * self._reduce * (held.layers.has_head and not self._is_one_end)

    def _gathered(self, one: _Pass, index: int) -> float:
        """Bytes of weights that are whole in the backward of layer ``index`` (-1: the embedding)."""
        held = self._held
        work = self._work
        if not self._is_copied:
            return 0.0
        if one.stays:
            return held.whole * self._param
        ends = self._ends * held.layers.has_embedding
        if work.reshard == "never":
            return held.first(index + 1)[0] * self._param + ends
        if index < 0:
            return ends
        found = held.layer(index).whole * self._param + ends * self._is_one_end
        if work.layout.fsdp > 1:  # and the next layer
            found += held.layer(index - 1).whole * self._param if index else ends * (not self._is_one_end)
        return found + parts_between(work, held, index)
