"""What the last norm, the logits and the loss of a microbatch take. Torch-free."""

from dataclasses import dataclass

from crius.tools.plan.memory_constants import MemoryConstants
from crius.tools.plan.workload import Workload

_PRODUCT_PARTS = 8  # of what a chunk adds to the output layer's gradient (crius/kernels/linear_cross_entropy.py)


@dataclass(frozen=True)
class LossBytes:
    """Bytes of the last norm, the logits and the loss of a microbatch.

    Attributes:
        kept: between the loss and its backward.
        work: beside them while it is computed or back-propagated.
        output: all there is while the gradient of the output layer is made.
    """

    kept: float = 0.0
    work: float = 0.0
    output: float = 0.0


def loss_bytes(workload: Workload, tokens: float, constants: MemoryConstants) -> LossBytes:
    """Of ``tokens`` tokens on one rank that has the output layer."""
    model, itemsize = workload.model, workload.param_bytes
    vocabulary = model.vocab_size / workload.layout.tp
    embedding = vocabulary * model.dim
    hidden = model.dim * tokens * itemsize
    part = hidden / workload.layout.tp if workload.sequence_parallel else hidden
    wide = (1 + 4 / itemsize * (itemsize < 4)) * (workload.pointwise in ("operators", "norms"))  # of the norm's input
    normed = hidden + part * (1 + wide)
    if workload.loss_tokens is not None:
        # stays: the gradients of the hidden state and of the weight, which several chunks sum in float32
        has_chunks = tokens > workload.loss_tokens
        kept = normed + embedding * (4 if has_chunks else itemsize)
        chunk = min(tokens, workload.loss_tokens)  # they are cut alike, so that one may be smaller, but no larger
        wide = 8 * (itemsize < 4)  # logits and probabilities in float32, which else lie over the logits
        work = vocabulary * chunk * itemsize
        work += max(vocabulary * min(workload.score_tokens, chunk) * wide, model.dim * chunk * itemsize)
        work += embedding * itemsize / _PRODUCT_PARTS * (has_chunks and itemsize < 4)
        rounded = embedding * 4 / _PRODUCT_PARTS * (not has_chunks and itemsize < 4)
        return LossBytes(kept, work, kept + embedding * itemsize + rounded)
    logits = vocabulary * tokens
    if workload.loss == "eager":  # stays: log-probabilities in float32, which the backward takes
        nbytes = _eager_logit_bytes(workload) * logits
        kept = min(nbytes / 2, 4 * logits)
        return LossBytes(normed + kept, nbytes - kept, embedding * itemsize)
    nbytes = (
        logits
        * {
            "compiled": constants.compiled_logit_bytes,
            "chunked": constants.chunked_logit_bytes,
            "fused": constants.fused_logit_bytes,
        }[workload.loss]
    )
    stays = (normed + nbytes) * (workload.loss == "fused")
    return LossBytes(normed + nbytes / 2, nbytes / 2, stays + embedding * itemsize)


def _eager_logit_bytes(workload: Workload) -> float:
    """Of one logit of this rank's part of the vocabulary."""
    trainer, tp = workload.trainer, workload.layout.tp
    if tp == 1:
        return trainer.eager_logit_bytes
    return (trainer.eager_logit_bytes + trainer.split_logit_bytes) * (tp if trainer.gathers_logits else 1)
