"""Sizes of the batch: one place that fills in what ``[training]`` leaves open."""

from dataclasses import dataclass

from crius.config.training import TrainingConfig

AUTO_GLOBAL_BATCH_SIZE = 8
AUTO_LOCAL_BATCH_SIZE = 8


@dataclass(frozen=True)
class BatchSizes:
    """Sequences in a microbatch of one rank, in an optimizer step, and microbatches a step."""

    local: int
    total: int
    accumulation: int


def batch_sizes(training: TrainingConfig, data_parallel_ranks: int) -> BatchSizes:
    """Fill ``local_batch_size`` and ``global_batch_size`` where they are -1.

    Args:
        training: the section; its sizes are -1 or at least 1.
        data_parallel_ranks: ranks that read different sequences.

    Raises:
        ValueError: the sizes do not divide; the message says which and what would. ``rules`` turns it into a
            ``ConfigError`` before anything starts.
    """
    local, total = training.local_batch_size, training.global_batch_size
    if total == -1:
        # not simply local x ranks: the loss curve must not depend on the ranks, nor on a knob for memory
        unit = data_parallel_ranks * max(1, local)
        total = -(-AUTO_GLOBAL_BATCH_SIZE // unit) * unit
    if total % data_parallel_ranks:
        raise ValueError(
            f"global_batch_size {total} is no multiple of the {data_parallel_ranks} data-parallel ranks; "
            f"{_nearest_multiples(total, data_parallel_ranks)}"
        )
    share = total // data_parallel_ranks
    if local == -1:
        local = max(size for size in range(1, AUTO_LOCAL_BATCH_SIZE + 1) if share % size == 0)
    if share % local:
        unit = local * data_parallel_ranks
        raise ValueError(
            f"global_batch_size {total} is no multiple of local_batch_size {local} x {data_parallel_ranks} "
            f"data-parallel ranks = {unit}; {_nearest_multiples(total, unit)}"
        )
    return BatchSizes(local=local, total=total, accumulation=share // local)


def _nearest_multiples(value: int, unit: int) -> str:
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"nearest that work: {below} or {above}" if below else f"the least that works: {above}"
