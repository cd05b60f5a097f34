"""What ``[kernels] linear_cross_entropy`` comes to. No torch, so that the planner can ask."""

from dataclasses import dataclass
from typing import Literal

from crius.config.dtype import ITEMSIZE
from crius.config.parallelism import ParallelismConfig
from crius.config.run import RunConfig

CHUNK_BYTES = {"cpu": 8 * 2**20, "cuda": 2**30}
"""Logits of a chunk. Each chunk but the first reads and writes the weight's gradient once more: with the 4,186 tokens
of 128,256 bfloat16 logits on a GPU that is a tenth of the time of its matmuls, whatever the model dim."""
LEAST_TOKENS = 256
"""Of a chunk: the matmuls of fewer are slow."""
BLOCK_BYTES = {"cpu": 8 * 2**20, "cuda": 128 * 2**20}
"""Float32 logits that are scored at a time: what caches hold, or what gives each multiprocessor several rows."""


@dataclass(frozen=True)
class LossChunks:
    """How the loss is cut.

    Attributes:
        tokens: whose logits exist at a time; None: of all of a microbatch.
        block_tokens: of those, tokens that are scored in float32 at a time.
        reason: why, in a few words.
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
    """How a run cuts its loss.

    Args:
        config: the run; its rules have been checked, its ``training.mixed_precision_param`` is decided.
        vocab_size: of the model.
        device_type: what it runs on.
        num_ranks: tensor-parallel ranks that the vocabulary is split over.
        in_low_precision: the output layer is.
    """
    asked, parallelism = config.kernels.linear_cross_entropy, config.parallelism
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
    if config.compile.enable and config.compile.loss:  # which writes no float32
        block = tokens
    return LossChunks(tokens, block, asked if asked == "auto" else "as asked")


def _is_gpipe(parallelism: ParallelismConfig) -> bool:
    return not parallelism.pipeline_parallel_schedule_csv and parallelism.pipeline_parallel_schedule == "gpipe"
