"""Context parallelism: the tokens of a sequence are split over ranks. Only attention needs tokens of other ranks.

There are two methods. ``all_gather``: a rank keeps its queries and gathers all keys and values. Later queries see more
keys, so the sequence is cut into ``2 * cp`` chunks, and rank ``r`` takes chunks ``r`` and ``2 * cp - 1 - r`` (zigzag).
Then all ranks do the same work (Llama 3, arXiv:2407.21783, section 3.3.2). ``ulysses``: an all-to-all exchanges tokens
for heads, so that a rank has all tokens of ``N / cp`` heads. A second all-to-all exchanges them back
(arXiv:2309.14509).

The rest of the model computes token by token and runs unchanged on ``(B, T / cp)``.

B batch, T tokens of the sequence, L = T / cp tokens of a rank, N query heads, K key/value heads, H head dim
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from crius.errors import LayoutError, PlanError
from crius.kernels.attention import Mask, causal_attention, masked_attention, masks_made
from crius.models.layers import CausalAttention, DocumentMask, replaceable
from crius.parallel.runtime import all_gather, all_to_all

Method = Literal["all_gather", "ulysses"]

_WITHOUT = "--parallelism.context_parallel_degree 1"


def _chunks(degree: int, method: Method) -> list[tuple[int, ...]]:
    """The chunks of the sequence that each rank holds, in the order of the ranks."""
    if method == "all_gather" and degree > 1:
        return [(rank, 2 * degree - 1 - rank) for rank in range(degree)]
    return [(rank,) for rank in range(degree)]


class ContextShard:
    """This rank's part of every sequence.

    Args:
        cp_mesh: ranks that share a sequence, one axis; None: a rank has the whole sequence.
        method: how attention sees the whole sequence.

    Attributes:
        degree: number of ranks that share a sequence.
        chunks: chunks of the sequence that this rank holds, ascending; two for ``all_gather``.
    """

    def __init__(self, cp_mesh: DeviceMesh | None, method: Method) -> None:
        self._mesh = cp_mesh
        self.degree = cp_mesh.size() if cp_mesh else 1
        chunks_of_ranks = _chunks(self.degree, method)
        self.chunks = chunks_of_ranks[cp_mesh.get_local_rank() if cp_mesh else 0]
        self._order = [chunk for chunks in chunks_of_ranks for chunk in chunks]

    @property
    def mesh(self) -> DeviceMesh:
        """Ranks that share a sequence, if there are several."""
        assert self._mesh is not None
        return self._mesh

    def slice(self, tensor_BT: Tensor) -> Tensor:
        """This rank's tokens of ``(B, T, ...)``: ``(B, L, ...)``. At degree 1 the tensor itself.

        Raises:
            LayoutError: the sequence does not split evenly.
        """
        if self.degree == 1:
            return tensor_BT
        parts = _split(tensor_BT, len(self._order), dim=1)
        return torch.cat([parts[chunk] for chunk in self.chunks], dim=1)

    def gather(self, tensor_BL: Tensor) -> Tensor:
        """The whole ``(B, T, ...)`` in natural order from the parts ``(B, L, ...)`` of all ranks.

        The gradient of a part is the sum of its gradients on all ranks. At degree 1 the tensor itself.
        """
        if self.degree == 1:
            return tensor_BL
        # chunk and cat, not an index: their gradients are a cat and slices, without a buffer of zeros for each part
        ranks = all_gather(tensor_BL, self.mesh).chunk(self.degree)
        parts = [part for rank in ranks for part in rank.chunk(len(self.chunks), dim=1)]
        return torch.cat([part for _, part in sorted(zip(self._order, parts, strict=True), key=_first)], dim=1)


def _first(pair: tuple[int, Tensor]) -> int:
    return pair[0]


def _split(tensor: Tensor, num_parts: int, dim: int) -> tuple[Tensor, ...]:
    if tensor.shape[dim] % num_parts:
        raise LayoutError(
            f"a sequence of {tensor.shape[dim]} tokens does not split into {num_parts} equal parts.",
            why="each context-parallel rank holds the same number of tokens",
            fix=f"use a multiple of {num_parts}",
        )
    return tensor.chunk(num_parts, dim=dim)


class _AttentionOfShard(CausalAttention):
    """Replacement of an attention that needs tokens of other ranks."""

    def __init__(self, shard: ContextShard, like: CausalAttention) -> None:
        super().__init__(like.scale, like.window, like.softcap)
        self._shard = shard
        self._has_flash = _flash_on_gpu()

    def attend(self, q_BCNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Mask | None) -> Tensor:
        """Attention of a sequence's last ``C`` queries to all its keys, ``(B, C, N, H)``; without a mask causal."""
        num_queries = q_BCNH.shape[1]
        num_keys = k_BTKH.shape[1]
        q, k, v = (x.transpose(1, 2) for x in (q_BCNH, k_BTKH, v_BTKH))
        if mask is None and num_queries == num_keys:
            y = causal_attention(q, k, v, self.scale)
        elif mask is None and self._has_flash and _fits_flash(q, v):
            # this op aligns causality to the last query; CausalBias, the public way to do so, cannot be compiled
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            y = flash(q, k, v, is_causal=True, scale=self.scale)[0]
        else:
            if mask is None:
                mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
            y = masked_attention(q, k, v, mask, self.scale, self.softcap)
        return y.transpose(1, 2)


class GatheredAttention(_AttentionOfShard):
    """Causal attention of this rank's queries over the gathered keys and values."""

    def forward(self, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, mask: Mask | None) -> Tensor:
        """``(B, L, N, H)``, tokens in this rank's order.

        Each chunk of queries meets only the keys up to its own end. Over a rank's two chunks this is half of the full
        product. A row of the mask without any key gives zeros.

        Args:
            q_BLNH: queries of this rank.
            k_BLKH: keys of this rank.
            v_BLKH: values of this rank; their head dim may differ.
            mask: bool ``(B, 1, L, T)``, queries in this rank's order, keys in natural order; no key is later than its
                query. None: plain causal attention.
        """
        assert mask is None or isinstance(mask, Tensor)  # GatheredDocumentMask makes no other kind
        keys_values = self._shard.gather(torch.cat((k_BLKH, v_BLKH), dim=-1))  # joined, for one collective
        k_BTKH, v_BTKH = keys_values.split((k_BLKH.shape[-1], v_BLKH.shape[-1]), dim=-1)
        chunks = self._shard.chunks
        queries = q_BLNH.chunk(len(chunks), dim=1)
        masks = [None] * len(chunks) if mask is None else mask.chunk(len(chunks), dim=2)
        parts = []
        for chunk, q, rows in zip(chunks, queries, masks, strict=True):
            stop = (chunk + 1) * q.shape[1]
            visible = None if rows is None else rows[..., :stop]
            parts.append(self.attend(q, k_BTKH[:, :stop], v_BTKH[:, :stop], visible))
        return torch.cat(parts, dim=1)


def _fits_flash(q: Tensor, v: Tensor) -> bool:
    """Whether the flash kernel takes this dtype and head dim without padding."""
    width = q.shape[-1]
    return q.is_cuda and q.itemsize == 2 and width == v.shape[-1] and width % 8 == 0 and width <= 256


def _flash_on_gpu() -> bool:
    """Whether this process computes on a GPU with a flash kernel (Ampere and later)."""
    if not torch.cuda.is_available() or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability() >= (8, 0)


class HeadsAttention(_AttentionOfShard):
    """Causal attention of all tokens over this rank's share of the heads."""

    def forward(self, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, mask: Mask | None) -> Tensor:
        """``(B, L, N, H)``, tokens in natural order on every rank.

        If there are fewer key/value heads than ranks, each is repeated ``cp / K`` times, so that every rank has the
        head that its query heads need. Their gradients are summed.

        Args:
            q_BLNH: queries of this rank; ``cp`` divides ``N``.
            k_BLKH: keys of this rank; ``cp`` divides ``K`` or is a multiple of it.
            v_BLKH: values of this rank; their head dim may differ.
            mask: bool ``(B, 1, T, T)``, or None for plain causal attention.

        Raises:
            LayoutError: the heads do not split evenly.
        """
        degree = self._shard.degree
        num_heads = q_BLNH.shape[2]
        num_kv_heads = k_BLKH.shape[2]
        if num_heads % degree or (num_kv_heads % degree and degree % num_kv_heads):
            raise LayoutError(
                f"{num_heads} query and {num_kv_heads} key/value heads do not split over {degree} ranks.",
                why="ulysses gives each context-parallel rank all tokens of some heads",
                fix="--parallelism.context_parallel_method all_gather",
            )
        if num_kv_heads < degree:
            k_BLKH, v_BLKH = (x.repeat_interleave(degree // num_kv_heads, dim=2) for x in (k_BLKH, v_BLKH))
        q_BTNH, k_BTKH, v_BTKH = self._tokens_for_heads((q_BLNH, k_BLKH, v_BLKH))
        return self._heads_for_tokens(self.attend(q_BTNH, k_BTKH, v_BTKH, mask))

    def _tokens_for_heads(self, xs_BLNH: tuple[Tensor, ...]) -> list[Tensor]:
        """Each ``(B, L, N, H)`` as ``(B, T, N / cp, H)``; one collective for all."""
        degree = self._shard.degree
        by_rank = [x.unflatten(2, (degree, -1)).flatten(3) for x in xs_BLNH]
        widths = [x.shape[-1] for x in by_rank]
        exchanged = all_to_all(torch.cat(by_rank, dim=-1).movedim(2, 0), self._shard.mesh)
        parts = exchanged.movedim(0, 1).flatten(1, 2).split(widths, dim=-1)
        return [part.unflatten(-1, (-1, x.shape[-1])) for part, x in zip(parts, xs_BLNH, strict=True)]

    def _heads_for_tokens(self, y_BTNH: Tensor) -> Tensor:
        """``(B, T, N / cp, H)`` as ``(B, L, N, H)``."""
        exchanged = all_to_all(y_BTNH.unflatten(1, (self._shard.degree, -1)).movedim(1, 0), self._shard.mesh)
        return exchanged.movedim(0, 2).flatten(2, 3)


class _MaskOfShard(DocumentMask):
    """Replacement of a mask that needs tokens of other ranks."""

    def __init__(self, shard: ContextShard, like: DocumentMask) -> None:
        super().__init__()
        self._shard = shard


class GatheredDocumentMask(_MaskOfShard):
    """The mask of this rank's queries and the keys of the whole sequence."""

    def forward(self, positions_BL: Tensor, ends_BM: Tensor | None = None, window: int = 0) -> Tensor:
        """Bool ``(B, 1, L, T)``: queries in this rank's order, keys in natural order."""
        masks_made["sdpa"] += 1
        documents_BT = (self._shard.gather(positions_BL) == 0).cumsum(dim=-1)
        tokens_T = torch.arange(documents_BT.shape[1], device=positions_BL.device)
        same = self._shard.slice(documents_BT)[:, :, None] == documents_BT[:, None, :]
        own = self._shard.slice(tokens_T[None])[:, :, None]
        seen = own >= tokens_T
        if window:
            seen = seen & (own < tokens_T + window)
        return (same & seen)[:, None]


class WholeDocumentMask(_MaskOfShard):
    """The mask of the whole sequence, the same on all ranks that share it."""

    def forward(self, positions_BL: Tensor, ends_BM: Tensor | None = None, window: int = 0) -> Mask:
        """Bool ``(B, 1, T, T)``, queries before keys."""
        return super().forward(self._shard.gather(positions_BL), None, window)


def apply_context_parallel(model: nn.Module, cp_mesh: DeviceMesh, method: Method) -> list[str]:
    """Replace attention and document mask of ``model`` by modules that see the whole sequence. Returns log lines.

    Call this after tensor parallelism and before activation checkpointing. The model is then called with this rank's
    tokens and with their positions in the whole sequence (``ContextShard.slice`` of both). Without positions it would
    count from the first token of this rank.

    Args:
        model: the whole model, or one pipeline stage of it.
        cp_mesh: ranks that share a sequence, one axis.
        method: how attention sees the whole sequence.

    Raises:
        PlanError: a layer has no ``CausalAttention``, or a subclass of it, or of ``DocumentMask``.
    """
    shard = ContextShard(cp_mesh, method)
    attention = GatheredAttention if method == "all_gather" else HeadsAttention
    document_mask = GatheredDocumentMask if method == "all_gather" else WholeDocumentMask
    num_attentions = _replace(model, CausalAttention, attention, shard)
    num_masks = _replace(model, DocumentMask, document_mask, shard)
    layers = getattr(model, "layers", None)
    num_layers = 1 if layers is None else len(layers)  # a pipeline stage may have none
    if num_attentions < num_layers:
        raise PlanError(
            f"context parallelism found {num_attentions} CausalAttention in {num_layers} layers of "
            f"{type(model).__name__}.",
            why="it replaces modules of type crius.models.layers.CausalAttention",
            fix=f"use that class in the model's attention, or {_WITHOUT}",
        )
    how = {
        "all_gather": f"keys and values gathered, zigzag: 2 of {2 * shard.degree} chunks of the sequence per rank",
        "ulysses": f"all-to-all, 1/{shard.degree} of the heads per rank during attention",
    }[method]
    masked = ", document mask" if num_masks else ""
    return [f"context parallel: {shard.degree} ranks, {num_attentions} attention{masked}, {method} ({how})"]


def _replace(
    model: nn.Module, kind: type[nn.Module], replacement: Callable[[ContextShard, Any], nn.Module], shard: ContextShard
) -> int:
    """Replace each module whose type is ``kind``. Returns their number."""
    names = replaceable(model, kind, _WITHOUT)
    for name in names:
        model.set_submodule(name, replacement(shard, model.get_submodule(name)))
    return len(names)
