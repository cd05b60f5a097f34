"""Sizes of the batch: one place that fills in what ``[training]`` leaves open."""

from dataclasses import dataclass

from crius.config.training import TrainingConfig

AUTO_GLOBAL_BATCH_SIZE = 8
AUTO_LOCAL_BATCH_SIZE = 8
AUTO_MICROBATCHES_A_UNIT = 4
"""Under pipeline parallelism; at 4 microbatches a stage the bubble of 1F1B is below a fifth."""


@dataclass(frozen=True)
class BatchSizes:
    """Sequences in a microbatch of one rank, in an optimizer step, and microbatches a step."""

    local: int
    total: int
    accumulation: int


def batch_sizes(training: TrainingConfig, data_parallel_ranks: int, microbatch_unit: int = 1) -> BatchSizes:
    """Fill ``local_batch_size`` and ``global_batch_size`` where they are -1.

    Args:
        training: the section; its sizes are -1 or at least 1.
        data_parallel_ranks: ranks that read different sequences.
        microbatch_unit: the microbatches a step are to be a multiple of this (``config.pipeline.microbatch_unit``).

    Raises:
        ValueError: the sizes do not divide; the message says which and what would. ``rules`` turns it into a
            ``ConfigError`` before anything starts.
    """
    local, total = training.local_batch_size, training.global_batch_size
    if training.reproducible and training.virtual_shards >= 1 and training.virtual_shards % data_parallel_ranks == 0:
        return _virtual_batch_sizes(training, data_parallel_ranks)
    if total == -1:
        # not simply local x ranks: the loss curve must not depend on the ranks, nor on a knob for memory
        unit = data_parallel_ranks * max(1, local) * microbatch_unit
        total = -(-AUTO_GLOBAL_BATCH_SIZE // unit) * unit
    if total % data_parallel_ranks:
        raise ValueError(
            f"global_batch_size {total} is no multiple of the {data_parallel_ranks} data-parallel ranks; "
            f"{_nearest_multiples(total, data_parallel_ranks)}"
        )
    share = total // data_parallel_ranks
    if local == -1:
        local = _local_batch_size(share, microbatch_unit)
    if share % local:
        unit = local * data_parallel_ranks
        raise ValueError(
            f"global_batch_size {total} is no multiple of local_batch_size {local} x {data_parallel_ranks} "
            f"data-parallel ranks = {unit}; {_nearest_multiples(total, unit)}"
        )
    return BatchSizes(local=local, total=total, accumulation=share // local)


def _virtual_batch_sizes(training: TrainingConfig, data_parallel_ranks: int) -> BatchSizes:
    """A microbatch is a virtual shard."""
    local, total, shards = training.local_batch_size, training.global_batch_size, training.virtual_shards
    if total == -1:
        total = shards * (local if local != -1 else -(-AUTO_GLOBAL_BATCH_SIZE // shards))
    if total % shards:
        nearest = _nearest_multiples(total, shards)
        raise ValueError(f"global_batch_size {total} is no multiple of the {shards} virtual shards; {nearest}")
    return BatchSizes(local=total // shards, total=total, accumulation=shards // data_parallel_ranks)


def _local_batch_size(share: int, microbatch_unit: int) -> int:
    """The largest that leaves enough microbatches for the pipeline to be busy; without one, just the largest."""
    sizes = [size for size in range(1, AUTO_LOCAL_BATCH_SIZE + 1) if share % size == 0]
    if microbatch_unit == 1:
        return max(sizes)
    sizes = [size for size in sizes if share // size % microbatch_unit == 0] or [1]
    busy = [size for size in sizes if share // size >= AUTO_MICROBATCHES_A_UNIT * microbatch_unit]
    return max(busy, default=min(sizes))


def _nearest_multiples(value: int, unit: int) -> str:
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"nearest that work: {below} or {above}" if below else f"the least that works: {above}"
