"""Cross-entropy of the outputs of a linear layer, one chunk of tokens at a time: all logits never exist together.

The gradients are computed together with the losses, while the logits of a chunk exist. The backward only scales them.
So there are three matmuls, as without chunks, and nothing is computed twice (Hsu et al. 2024, arXiv:2410.10989, section
3.2). Memory holds the gradient of the weight, which the backward needs anyway, instead of all logits.

N tokens, C tokens of a chunk, D model dim, V vocabulary (under tensor parallelism, the rank's part of it)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from crius.kernels.cpu.linear import linear

IGNORE_INDEX = -100
"""Label of a position that is not scored; PyTorch's default ``ignore_index``."""

_SHORT = 4096
"""Most columns for which torch's softmax on a CPU is as precise as float32."""

PRODUCT_PARTS = 8  # parts of a product or copy whose precision is not that of its result, so that it never exists whole

Score = Callable[..., tuple[Tensor, Tensor | None]]
"""See ``score_block``."""
Gather = Callable[[Tensor], Tensor]
"""Function from ``(3, C)`` to ``(ranks, 3, C)``: gathers over the ranks that hold parts of the vocabulary."""


def token_losses(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Cross-entropy of each token in nats, float32 ``(B * T,)``; 0 where the label is ``IGNORE_INDEX``.

    Under tensor parallelism the logits stay split over the vocabulary. Only maxima and sums are communicated.
    """
    logits = logits_BTV.flatten(0, 1).to(torch.promote_types(logits_BTV.dtype, torch.float32))
    return F.cross_entropy(logits, labels_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none")


def reference(hidden_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor) -> Tensor:
    """The result of ``linear_cross_entropy``, computed with all logits at once."""
    return token_losses(F.linear(hidden_BTD, weight_VD), labels_BT).sum(dtype=torch.float64)


def score_block(
    logits_CV: Tensor, targets_C: Tensor, with_gradient: bool, gather: Gather | None = None
) -> tuple[Tensor, Tensor | None]:
    """Token losses ``(C,)`` in float32 and, if asked for, their gradient ``(C, V)`` in the dtype of the logits.

    Args:
        logits_CV: logits of this rank's part of the vocabulary. float64 logits are scored in float64. float32 and
            float64 logits are overwritten.
        targets_C: row of each label in this rank's part. For a target outside of the part, the gradient is the softmax
            alone, and without ``gather`` the loss is meaningless.
        with_gradient: whether to compute the gradient.
        gather: gathers over the ranks that hold the other parts of the vocabulary.
    """
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    is_here_C = (targets_C >= 0) & (targets_C < logits_CV.shape[1])
    # without other parts, an id outside of the vocabulary is an error, which ``logits_CV.gather`` raises
    outside_C = targets_C == IGNORE_INDEX if gather is None else ~is_here_C
    place_C1 = torch.where(outside_C, 0, targets_C)[:, None]
    peak_C = _largest(logits_CV, -torch.inf).to(wide)
    target_C = logits_CV.gather(1, place_C1).squeeze(1).to(wide) if logits_CV.shape[1] else torch.zeros_like(peak_C)
    p_CV = torch.softmax(logits_CV, -1, dtype=wide, out=logits_CV if logits_CV.dtype == wide else None)
    if p_CV.device.type == "cpu" and logits_CV.shape[1] > _SHORT:
        # torch adds up a long row in too few partial sums: rows of 49,152 columns then sum to 1 + 8e-6
        p_CV /= p_CV.sum(-1, keepdim=True)
    log_p_C = _largest(p_CV, 1.0).log_()  # the largest probability is never 0
    if gather is None:
        # the logarithm of the sum of exponentials, without the logarithm of each: large and similar logits do not lose
        # digits
        losses_C = (peak_C - target_C) - log_p_C
    else:
        target_C = torch.where(is_here_C, target_C, 0.0)
        peaks, log_ps, targets = gather(torch.stack((peak_C, log_p_C, target_C))).unbind(1)
        highest_C = peaks.amax(0)
        shares = (peaks - highest_C - log_ps).exp_()  # of each rank, in units of the largest exponential of all ranks
        sum_C = shares.sum(0)
        losses_C = (highest_C - targets.sum(0)) + sum_C.log()
        p_CV *= ((peak_C - highest_C - log_p_C).exp_() / sum_C)[:, None]
    if not with_gradient:
        return losses_C, None
    if torch.compiler.is_compiling():  # a scatter would split the kernel, which would then write float32 to memory
        columns_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
        p_CV = p_CV - ((columns_V == place_C1) & is_here_C[:, None]).to(wide)
    elif logits_CV.shape[1]:
        p_CV.scatter_add_(1, place_C1, -is_here_C.to(wide)[:, None])
    return losses_C, p_CV.to(logits_CV.dtype)


def softcapped_score(softcap: float) -> Score:
    """A ``score_block`` of logits that are ``softcap * tanh(logits / softcap)`` of the given ones."""

    def score(
        logits_CV: Tensor, targets_C: Tensor, with_gradient: bool, gather: Gather | None = None
    ) -> tuple[Tensor, Tensor | None]:
        shares_CV = torch.tanh(logits_CV / softcap)
        losses_C, gradient_CV = score_block(softcap * shares_CV, targets_C, with_gradient, gather)
        if gradient_CV is None:
            return losses_C, None
        return losses_C, torch.ops.aten.tanh_backward(gradient_CV, shares_CV)

    return score


def _largest(x_CV: Tensor, otherwise: float) -> Tensor:
    """Largest number of each row; ``otherwise`` on a rank without columns, as with more ranks than vocabulary rows."""
    return x_CV.amax(1) if x_CV.shape[1] else x_CV.new_full((len(x_CV),), otherwise)


@dataclass(frozen=True)
class Chunks:
    """Sizes of the chunks and blocks, and the function that scores a block.

    Attributes:
        tokens: most tokens whose logits exist at a time.
        block_tokens: most tokens that are scored at a time, in float32.
        score: ``score_block``, possibly compiled.
        note: gets the loss of each token of a call with gradients, ``(N,)``.
    """

    tokens: int
    block_tokens: int
    score: Score = score_block
    note: Callable[[Tensor], None] | None = None


def linear_cross_entropy(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    chunks: Chunks,
    first_row: int = 0,
    gather: Gather | None = None,
) -> Tensor:
    """Sum of the token losses in nats, a float64 scalar; a label ``IGNORE_INDEX`` gives 0 and no gradient.

    The matmuls are in the dtype of the operands, which must be the same. Losses and softmax are in float32. The
    gradient of a weight in lower precision is summed over the chunks in float32 and rounded once.

    Args:
        hidden_BTD: ``(B, T, D)``. With ``gather``, every rank has all of it and gets a summand of its gradient.
        weight_VD: rows of the weight on this rank.
        labels_BT: labels, as rows of the whole weight.
        chunks: sizes of the chunks.
        first_row: index of this rank's first row in the whole weight.
        gather: gathers over the ranks that hold the other rows; None: this rank holds all rows. Each rank calls this
            function with the same number of tokens and the same ``chunks``.
    """
    hidden = hidden_BTD.flatten(0, -2)
    labels = labels_BT.flatten()
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight_VD.requires_grad)
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight_VD, labels, chunks, first_row, gather, with_gradient)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        chunks: Chunks,
        first_row: int,
        gather: Gather | None,
        with_gradient: bool,
    ) -> Tensor:
        kept = _scored(labels_N, chunks)
        whole_shape = hidden_ND.shape
        if kept is not None:
            hidden_ND = hidden_ND[kept]
            labels_N = labels_N[kept]
        num_tokens = len(hidden_ND)
        counts_N = labels_N != IGNORE_INDEX
        size = _even(num_tokens, chunks.tokens)
        wants_hidden, wants_weight = (with_gradient and wanted for wanted in ctx.needs_input_grad[:2])
        hidden_gradient = torch.empty_like(hidden_ND) if wants_hidden else None
        weight_sum = _Product(weight_VD, is_rounded=size < num_tokens) if wants_weight else None
        losses = []
        for start in range(0, num_tokens, size):
            rows = slice(start, start + size)
            logits_CV = linear(hidden_ND[rows], weight_VD)
            chunk_losses, logits_CV = _score(logits_CV, labels_N[rows] - first_row, chunks, with_gradient, gather)
            losses += chunk_losses
            counts_C1 = counts_N[rows, None]  # logits_CV now holds the gradients of the logits
            if hidden_gradient is not None:
                torch.mul(linear(logits_CV, weight_VD.t()), counts_C1, out=hidden_gradient[rows])
            if weight_sum is not None:
                weight_sum.add(logits_CV, hidden_ND[rows] * counts_C1)
            del logits_CV  # before the next chunk's logits are allocated
        if kept is not None and hidden_gradient is not None:
            hidden_gradient = hidden_gradient.new_zeros(whole_shape).index_copy_(0, kept, hidden_gradient)
        ctx.save_for_backward(hidden_gradient, weight_sum.total if weight_sum else None)
        ctx.dtypes = hidden_ND.dtype, weight_VD.dtype
        # the loss of an ignored label is arbitrary and may not be finite, so it is replaced, not multiplied by 0
        losses_N = torch.where(counts_N, torch.cat(losses), 0.0)
        if chunks.note and with_gradient:
            whole_N = losses_N if kept is None else losses_N.new_zeros(whole_shape[0]).index_copy_(0, kept, losses_N)
            chunks.note(whole_N)
        return losses_N.sum(dtype=torch.float64)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # not in place: a pipeline that splits its backward calls this for the hidden state, then for the weight
        scaled = map(_scaled, ctx.saved_tensors, ctx.dtypes, (gradient, gradient))
        return *scaled, None, None, None, None, None


def _scored(labels_N: Tensor, chunks: Chunks) -> Tensor | None:
    """Indices of the tokens that have a label, at least one index; None: all tokens are multiplied.

    None is also returned on a GPU, whose host would wait for the number of tokens, for a compiled ``score``, which
    would be compiled again for each number, and for fake tensors, whose number is unknown.
    """
    if labels_N.device.type != "cpu" or type(labels_N) is not Tensor or chunks.score is not score_block:
        return None
    kept = (labels_N != IGNORE_INDEX).nonzero().squeeze(1)
    if len(kept) == len(labels_N):
        return None
    return kept if len(kept) else kept.new_zeros(1)


def _score(
    logits_CV: Tensor, targets_C: Tensor, chunks: Chunks, with_gradient: bool, gather: Gather | None
) -> tuple[list[Tensor], Tensor]:
    """The token losses of each block, and the logits' memory, which holds their gradients if ``with_gradient``."""
    if len(logits_CV) <= chunks.block_tokens:
        block_losses, gradient = chunks.score(logits_CV, targets_C, with_gradient, gather)
        return [block_losses], logits_CV if gradient is None else gradient
    losses = []
    for logits, targets in zip(logits_CV.split(chunks.block_tokens), targets_C.split(chunks.block_tokens), strict=True):
        block_losses, gradient = chunks.score(logits, targets, with_gradient, gather)
        losses.append(block_losses)
        if gradient is not None:
            logits.copy_(gradient)
        del gradient  # before the next block's gradient is allocated
    return losses, logits_CV


class _Product:
    """The sum over chunks of the weight's gradient, ``(V, D)``. It is in float32 if the weight's dtype is narrower.

    Args:
        weight_VD: the weight, for its shape and dtype.
        is_rounded: there are several chunks, whose products are rounded before they are added up.
    """

    def __init__(self, weight_VD: Tensor, *, is_rounded: bool) -> None:
        narrow = weight_VD.dtype
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        self._is_split = is_rounded and narrow != wide
        self._is_empty = True
        self.total = torch.empty_like(weight_VD, dtype=wide if self._is_split else narrow)

    def add(self, gradient_CV: Tensor, hidden_CD: Tensor) -> None:
        """Add the product of a chunk."""
        if not self._is_split:
            self._multiply(gradient_CV, hidden_CD)
            return
        if self._is_empty:
            self.total.zero_()
            self._is_empty = False
        size = _even(gradient_CV.shape[1], -(-gradient_CV.shape[1] // PRODUCT_PARTS))
        for some_CV, rows in zip(gradient_CV.split(size, dim=1), self.total.split(size), strict=True):
            rows += some_CV.t() @ hidden_CD

    def _multiply(self, gradient_CV: Tensor, hidden_CD: Tensor) -> None:
        if self._is_empty:
            torch.mm(gradient_CV.t(), hidden_CD, out=self.total)
            self._is_empty = False
        else:
            self.total.addmm_(gradient_CV.t(), hidden_CD)


def _even(total: int, most: int) -> int:
    """Size of the parts when ``total`` is cut into the fewest parts of at most ``most``, all equal but the last."""
    parts = max(1, -(-total // max(1, most)))
    return max(1, -(-total // parts))


def _scaled(tensor: Tensor | None, dtype: torch.dtype, factor: Tensor) -> Tensor | None:
    """``tensor`` times ``factor``, multiplied in wide precision and rounded to ``dtype`` once."""
    if tensor is None:
        return None
    wide = torch.promote_types(tensor.dtype, torch.float32)
    scaled = torch.empty_like(tensor, dtype=dtype)
    size = len(tensor) if tensor.dtype == wide else _even(len(tensor), -(-len(tensor) // PRODUCT_PARTS))
    for some, out in zip(tensor.split(size), scaled.split(size), strict=True):  # only some rows are copied to ``wide``
        torch.mul(some.to(wide), factor.to(wide), out=out)
    return scaled
