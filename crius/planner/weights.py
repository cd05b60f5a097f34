"""How many weights a rank holds, to the number: FSDP gives the fullest rank whole rows of every weight. Torch-free."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from crius.planner.matmuls import MLA_VALUE_DIM, LayerSizes, layer_sizes
from crius.planner.workload import ModelShape

MIN_QUANTIZED = 4096
"""Weights with fewer numbers keep float32 moments (``crius/optim/storage.py``)."""

BLOCK = 256
"""Numbers that share a scale in 8-bit moments."""


@dataclass(frozen=True)
class Part:
    """Weights of one unit of FSDP, in numbers.

    Attributes:
        whole: what a rank computes with, after tensor and expert parallelism.
        own: what the fullest rank stores of it.
        own_matrices: of ``own``, those of matrices; ``matrix_small`` and ``matrix_blocks`` so of the next two.
        own_small: of ``own``, those of weights that keep float32 moments beside 8-bit ones.
        own_blocks: the others, each weight rounded up to whole blocks.
        tensors: how many weights these are.
    """

    whole: float = 0
    own: float = 0
    own_matrices: float = 0
    own_small: float = 0
    own_blocks: float = 0
    matrix_small: float = 0
    matrix_blocks: float = 0
    tensors: int = 0


@dataclass(frozen=True)
class Weights:
    """The units of a model as one rank holds them.

    Attributes:
        dense: a layer with a dense feed-forward.
        experts: a layer with experts.
        embedding: before the layers.
        head: after them: the norm and, unless it is tied, the output layer.
    """

    dense: Part
    experts: Part
    embedding: Part
    head: Part


def model_parameters(shape: ModelShape) -> int:
    """All trained numbers, a tied weight once; the published number where ``shape`` has it."""
    return shape.num_parameters_known or _counted(shape)


def _counted(shape: ModelShape) -> int:
    one = weights(shape, 1, 1, 1)
    with_experts = layer_sizes(shape).num_expert_layers
    layers = (shape.num_layers - with_experts) * one.dense.whole + with_experts * one.experts.whole
    return round(one.embedding.whole + layers + one.head.whole)


@lru_cache(maxsize=4096)
def weights(shape: ModelShape, tp: int, ep: int, shards: int) -> Weights:
    """The units of ``shape``, each weight split over ``tp`` ranks and then by rows over ``shards``.

    Args:
        shape: of the model.
        tp: tensor-parallel ranks, as ``crius/models/llama3/plan.py`` splits.
        ep: ranks that share the experts of a layer, which lie within ``tp * shards``.
        shards: ranks that store a part of each weight.
    """
    sizes, dim = layer_sizes(shape), shape.dim
    norm = _Tensor(dim, 1, dim, is_matrix=False)
    rows, vocabulary = -(-shape.vocab_size // tp), shape.vocab_size * dim
    embedding = _Tensor(rows, dim, vocabulary)
    attention = _attention(shape, sizes, tp)
    router = _Tensor(shape.num_experts, dim, shape.num_experts * dim)
    common = _part([norm, *attention, norm, *_feed_forward(sizes.shared, tp), router], shards)
    width = max(ep, tp)  # ranks that share one copy of the experts
    return Weights(
        dense=_part([norm, *attention, norm, *_feed_forward(sizes.dense, tp)], shards),
        experts=_with_experts(common, sizes.expert_parameters, width, tp * shards) if shape.num_experts else Part(),
        embedding=_part([embedding], shards),
        head=_part([norm] if shape.tied_embeddings else [norm, embedding], shards),
    )


class _Tensor(NamedTuple):
    """One weight on a tensor-parallel rank, ``(rows, columns)``, and how many numbers the whole has."""

    rows: int
    columns: int
    total: int
    is_matrix: bool = True


def _attention(shape: ModelShape, sizes: LayerSizes, tp: int) -> list[_Tensor]:
    *inputs, output = sizes.attention
    found = []
    for source, out in inputs:
        heads = shape.num_heads if out >= shape.num_heads * shape.head_dim else shape.num_kv_heads
        if shape.attention == "mla" and out < shape.num_heads * MLA_VALUE_DIM:
            parts = 1  # a latent, which every rank has whole
        else:
            parts = tp if tp <= heads else 1  # fewer key/value heads than ranks: each rank has all of their weights
        found.append(_Tensor(-(-out // parts), source, out * source))
    return [*found, _Tensor(output[1], -(-output[0] // tp), output[0] * output[1])]


def _feed_forward(matmuls: tuple[tuple[int, int], ...], tp: int) -> list[_Tensor]:
    if not matmuls:
        return []
    *inputs, output = matmuls
    found = [_Tensor(-(-out // tp), source, out * source) for source, out in inputs]
    return [*found, _Tensor(output[1], -(-output[0] // tp), output[0] * output[1])]


def _part(tensors: Iterable[_Tensor], shards: int) -> Part:
    tensors = [tensor for tensor in tensors if tensor.rows]
    own = [-(-tensor.rows // shards) * tensor.columns for tensor in tensors]
    pairs = list(zip(tensors, own, strict=True))
    matrices = [(tensor, size) for tensor, size in pairs if tensor.is_matrix]
    return Part(
        whole=sum(tensor.rows * tensor.columns for tensor in tensors),
        own=sum(own),
        own_matrices=sum(size for _, size in matrices),
        own_small=_small(pairs),
        own_blocks=_blocks(pairs),
        matrix_small=_small(matrices),
        matrix_blocks=_blocks(matrices),
        tensors=len(tensors),
    )


def _small(pairs: Iterable[tuple[_Tensor, int]]) -> int:
    return sum(size for tensor, size in pairs if tensor.total < MIN_QUANTIZED)


def _blocks(pairs: Iterable[tuple[_Tensor, int]]) -> int:
    return sum(-(-size // BLOCK) * BLOCK for tensor, size in pairs if tensor.total >= MIN_QUANTIZED)


def _with_experts(common: Part, numbers: int, most: int, ranks: int) -> Part:
    own = numbers / ranks
    return Part(
        whole=common.whole + numbers / most,
        own=common.own + own,
        own_matrices=common.own_matrices + own,
        own_small=common.own_small,
        own_blocks=common.own_blocks + own,
        matrix_small=common.matrix_small,
        matrix_blocks=common.matrix_blocks + own,
        tensors=common.tensors + 3,
    )
