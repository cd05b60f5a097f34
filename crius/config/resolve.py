"""Values for ``auto`` and -1: ``Resolved``, and the rules of dtype, attention, chunks of the loss and batch sizes.

``crius.train.inputs.resolve`` asks these rules, the model, the tokenizer and the checkpoint: docs/decisions/035.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from crius.config.parallelism import ParallelismConfig
from crius.config.run import RunConfig
from crius.config.training import TrainingConfig
from crius.host import ATTENTION_BLOCK, BFLOAT16_FLAGS, bfloat16_instructions, is_wide_amd_cpu

ITEMSIZE = {"float32": 4, "bfloat16": 2}
"""Bytes per number."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A run whose open settings were decided, once and before anything is built.

    Attributes:
        asked: the run as it was asked for.
        config: the run that is trained.
        reasons: reason of each decision, by the dotted field of the setting.
        model: its ``crius.models.description.ModelDescription``; None if there is no such model.
    """

    asked: RunConfig
    config: RunConfig
    reasons: Mapping[str, str]
    model: Any


def auto_dtype(*, on_gpu: bool) -> tuple[Literal["float32", "bfloat16"], str]:
    """The dtype and its reason: docs/training.md has the measurement.

    Args:
        on_gpu: whether the run computes on a GPU; otherwise on the CPU of this host.
    """
    if on_gpu:
        return "bfloat16", "a GPU"
    instructions = bfloat16_instructions()
    if instructions:
        return "bfloat16", f"a CPU with {instructions}"
    return "float32", f"a CPU without {' or '.join(BFLOAT16_FLAGS)}"


def with_dtype(config: RunConfig, *, on_gpu: bool) -> RunConfig:
    """``config`` with ``training.mixed_precision_param`` decided: for a GPU, or for the CPU of this host."""
    if config.training.mixed_precision_param != "auto":
        return config
    return replace(config, training=replace(config.training, mixed_precision_param=auto_dtype(on_gpu=on_gpu)[0]))


def has_mask(config: RunConfig, model: Any) -> bool:
    """Whether attention takes a mask, of documents, of windows or since only kernels with masks bound the scores.

    ``model`` is as in ``varlen_obstacle``.
    """
    return config.model.attention_mask == "document" or (model is not None and any(model.windows)) or caps_scores(model)


def caps_scores(model: Any) -> bool:
    """Whether attention bounds its scores; ``model`` as in ``varlen_obstacle``."""
    return model is not None and model.attention.softcap > 0


def varlen_obstacle(config: RunConfig, model: Any) -> str:
    """Why a run on a GPU cannot use varlen attention, which takes the ends of documents; empty if it can.

    Args:
        config: the run.
        model: its ``crius.models.description.ModelDescription``; None if there is no such model.
    """
    if config.parallelism.context_parallel_degree > 1:
        return "context parallelism makes masks of its own"
    if config.training.mixed_precision_param == "float32":
        return "it needs 16-bit numbers"
    widths = {(a.head_dim, a.value_dim) for a in (layer.attention for _, layer in (model.layers if model else ()))}
    odd = [pair for pair in sorted(widths) if pair[0] != pair[1] or pair[0] % 8 or pair[0] > MOST_HEAD_DIM]
    if odd:
        return f"its head dims are multiples of 8 up to {MOST_HEAD_DIM}, the model's are {odd[0][0]} and {odd[0][1]}"
    return ""


MOST_HEAD_DIM = 256
"""The largest head dim that FlashAttention takes."""

MOST_TOKENS = 512
"""Tokens of the longest sequences for which ``auto`` keeps the probabilities: half of ``seq_len`` numbers for each
token and head."""


def obstacle(config: RunConfig, model: Any) -> tuple[str, str]:
    """Why a run on a CPU cannot use the blocked kernel, and what to change; both empty if it can.

    Args:
        config: the run.
        model: as in ``varlen_obstacle``.
    """
    training = config.training
    if config.model.attention_mask == "document":
        return "it takes no mask", "--kernels.attention auto, or --model.attention_mask causal"
    if model and (any(model.windows) or model.attention.scale is not None or caps_scores(model)):
        return "it takes no windows, no other scale and no softcap", "--kernels.attention auto"
    if config.parallelism.context_parallel_degree > 1:
        return "context parallelism splits sequences among ranks", "--kernels.attention auto"
    dtype = training.mixed_precision_param
    if (auto_dtype(on_gpu=False)[0] if dtype == "auto" else dtype) != "float32":
        return "it needs float32", "--training.mixed_precision_param float32, or --kernels.attention auto"
    if training.seq_len % ATTENTION_BLOCK:
        longer = training.seq_len + -training.seq_len % ATTENTION_BLOCK
        why = f"training.seq_len {training.seq_len} is not a multiple of {ATTENTION_BLOCK}"
        return why, f"--training.seq_len {longer}, or --kernels.attention auto"
    return "", ""


def keeps_probabilities(config: RunConfig, model: Any) -> bool:
    """Whether a run on a CPU uses the blocked kernel. It does if the kernel was asked for, or under ``auto`` if it was
    measured to be faster and takes little memory. Recomputation does not matter here, because it must not change a bit
    of a run.

    Args:
        config: the run.
        model: as in ``varlen_obstacle``.
    """
    if config.kernels.attention != "auto":
        return config.kernels.attention == "blocked"
    is_short = config.training.seq_len <= MOST_TOKENS
    return is_short and is_wide_amd_cpu() and obstacle(config, model) == ("", "")


def compares_bits(config: RunConfig) -> list[str]:
    """The settings of a run that promise equal bits of repeated sums. On a GPU they need deterministic kernels."""
    checks = {
        "training.reproducible": config.training.reproducible,
        "sdc.recompute_interval": config.sdc.recompute_interval,
    }
    return [name for name, is_on in checks.items() if is_on]


CHUNK_BYTES = {"cpu": 8 * 2**20, "cuda": 2**30}
"""Bytes of the logits of a chunk. Each chunk except the first reads and writes the weight's gradient once more. With
the 4,185 tokens of 128,256 bfloat16 logits on a GPU this takes a tenth of the time of the chunk's matmuls, for any
model dim."""
LEAST_TOKENS = 256
"""Fewest tokens of a chunk: matmuls of fewer tokens are slow."""
BLOCK_BYTES = {"cpu": 8 * 2**20, "cuda": 128 * 2**20}
"""Bytes of float32 logits that are scored at a time: they fit into caches, or give each multiprocessor several rows."""


@dataclass(frozen=True)
class LossChunks:
    """Chunks that the loss is computed in.

    Attributes:
        tokens: number of tokens whose logits exist at a time; None: all tokens of a microbatch.
        block_tokens: number of these tokens that are scored in float32 at a time.
        reason: reason, in a few words.
    """

    tokens: int | None
    block_tokens: int
    reason: str


def loss_chunks(
    config: RunConfig,
    vocab_size: int,
    device_type: Literal["cpu", "cuda"],
    *,
    num_ranks: int = 1,
    in_low_precision: bool = False,
) -> LossChunks:
    """Chunks that a run computes its loss in.

    Args:
        config: the run, whose rules were checked and whose ``training.mixed_precision_param`` is decided.
        vocab_size: vocabulary of the model.
        device_type: type of the device that the run uses.
        num_ranks: tensor-parallel ranks that the vocabulary is split over.
        in_low_precision: whether the output layer runs in low precision.
    """
    asked = config.kernels.linear_cross_entropy
    parallelism = config.parallelism
    if asked == "off":
        return LossChunks(None, 0, "as asked")
    if in_low_precision:
        return LossChunks(None, 0, "auto: the output layer is in low precision")
    if asked == "auto" and parallelism.pipeline_parallel_degree > 1 and _is_gpipe(parallelism):
        return LossChunks(None, 0, "auto: gpipe would keep a gradient of the output layer for each microbatch")
    vocabulary = -(-vocab_size // num_ranks)
    tokens = config.kernels.loss_chunk_tokens
    if tokens == -1:
        itemsize = ITEMSIZE.get(config.training.mixed_precision_param, 2)  # auto: as on a GPU
        tokens = max(LEAST_TOKENS, CHUNK_BYTES[device_type] // (vocabulary * itemsize))
    block = min(tokens, max(1, BLOCK_BYTES[device_type] // (4 * vocabulary)))
    if config.compile.enable and config.compile.loss:  # a compiled loss writes no float32
        block = tokens
    return LossChunks(tokens, block, asked if asked == "auto" else "as asked")


def _is_gpipe(parallelism: ParallelismConfig) -> bool:
    return not parallelism.pipeline_parallel_schedule_csv and parallelism.pipeline_parallel_schedule == "gpipe"


USABLE = 0.9
"""Share of a device's memory that plans may use. The rest is for memory that the plan does not see, and for its
error."""


def leaves_open(config: RunConfig, *, on_gpu: bool) -> bool:
    """Whether the memory of the ranks decides about recomputation, or on a GPU about the microbatch."""
    return config.activation_checkpoint.mode == "auto" or (on_gpu and config.training.local_batch_size == -1)


AUTO_GLOBAL_BATCH_SIZE = 8
AUTO_LOCAL_BATCH_SIZE = 8
AUTO_MICROBATCHES_A_UNIT = 4
"""Microbatches per unit under pipeline parallelism: with 4 per stage the bubble of 1F1B is below a fifth."""


@dataclass(frozen=True)
class BatchSizes:
    """Sequences per microbatch of one rank, sequences per optimizer step, and microbatches per step."""

    local: int
    total: int
    accumulation: int


def batch_sizes(training: TrainingConfig, data_parallel_ranks: int, microbatch_unit: int = 1) -> BatchSizes:
    """Fill ``local_batch_size`` and ``global_batch_size`` if they are -1.

    Args:
        training: the section; its sizes are -1 or at least 1.
        data_parallel_ranks: ranks that read different sequences.
        microbatch_unit: unit of the microbatches per step, which become a multiple of it if possible
            (``config.pipeline.microbatch_unit``).

    Raises:
        ValueError: the sizes do not divide; the message names them and sizes that do. ``rules`` turns it into a
            ``ConfigError`` before anything starts.
    """
    local = training.local_batch_size
    total = training.global_batch_size
    if training.reproducible and training.virtual_shards >= 1 and training.virtual_shards % data_parallel_ranks == 0:
        return _virtual_batch_sizes(training, data_parallel_ranks)
    if total == -1:
        # not local x ranks: the loss curve must depend neither on the ranks nor on a setting about memory
        unit = batch_unit(training, data_parallel_ranks, microbatch_unit)
        total = -(-AUTO_GLOBAL_BATCH_SIZE // unit) * unit
    if total % data_parallel_ranks:
        raise ValueError(
            f"global_batch_size {total} is not a multiple of the {data_parallel_ranks} data-parallel ranks; "
            f"{_nearest_multiples(total, data_parallel_ranks)}"
        )
    share = total // data_parallel_ranks
    if local == -1:
        local = _local_batch_size(share, microbatch_unit)
    if share % local:
        unit = local * data_parallel_ranks
        raise ValueError(
            f"global_batch_size {total} is not a multiple of local_batch_size {local} x {data_parallel_ranks} "
            f"data-parallel ranks = {unit}; {_nearest_multiples(total, unit)}"
        )
    return BatchSizes(local=local, total=total, accumulation=share // local)


def batch_unit(training: TrainingConfig, data_parallel_ranks: int, microbatch_unit: int = 1) -> int:
    """Sequences of which a ``global_batch_size`` that is not given is a multiple; see ``batch_sizes``."""
    microbatches = max(1, training.virtual_shards) if training.reproducible else data_parallel_ranks * microbatch_unit
    return microbatches * max(1, training.local_batch_size)


def _virtual_batch_sizes(training: TrainingConfig, data_parallel_ranks: int) -> BatchSizes:
    """A microbatch is a virtual shard."""
    local = training.local_batch_size
    total = training.global_batch_size
    shards = training.virtual_shards
    if total == -1:
        total = shards * (local if local != -1 else -(-AUTO_GLOBAL_BATCH_SIZE // shards))
    if total % shards:
        nearest = _nearest_multiples(total, shards)
        raise ValueError(f"global_batch_size {total} is not a multiple of the {shards} virtual shards; {nearest}")
    return BatchSizes(local=total // shards, total=total, accumulation=shards // data_parallel_ranks)


def open_microbatches(training: TrainingConfig, data_parallel_ranks: int, microbatch_unit: int = 1) -> list[int]:
    """Sizes of a microbatch to choose from, in descending order from the one that ``batch_sizes`` fills in. All of them
    give the same global batch, in a number of microbatches that suits the pipeline as well.
    """
    sizes = batch_sizes(training, data_parallel_ranks, microbatch_unit)
    if training.local_batch_size != -1 or training.reproducible:
        return [sizes.local]
    share = sizes.local * sizes.accumulation
    unit = microbatch_unit if sizes.accumulation % microbatch_unit == 0 else 1
    return [size for size in range(sizes.local, 0, -1) if share % size == 0 and share // size % unit == 0]


def _local_batch_size(share: int, microbatch_unit: int) -> int:
    """The largest size that leaves enough microbatches for the pipeline; without a pipeline the largest size."""
    sizes = [size for size in range(1, AUTO_LOCAL_BATCH_SIZE + 1) if share % size == 0]
    if microbatch_unit == 1:
        return max(sizes)
    sizes = [size for size in sizes if share // size % microbatch_unit == 0] or [1]
    busy = [size for size in sizes if share // size >= AUTO_MICROBATCHES_A_UNIT * microbatch_unit]
    return max(busy, default=min(sizes))


def _nearest_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    above = -(-value // unit) * unit
    return f"nearest that work: {below} or {above}" if below else f"the least that works: {above}"
