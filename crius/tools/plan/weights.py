"""How many weights a rank holds, to the number: FSDP gives the fullest rank whole rows of every weight. Torch-free."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from crius.config.low_precision import parts
from crius.models.description import Layer, ModelDescription, Weight

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
        head: after them: the norm and, unless it is tied on the same stage, the output layer.
    """

    dense: Part
    experts: Part
    embedding: Part
    head: Part


def model_parameters(model: ModelDescription) -> int:
    """All trained numbers, a tied weight once; the published number where that is known to be another."""
    return model.published_parameters or model.num_parameters


@lru_cache(maxsize=4096)
def weights(model: ModelDescription, tp: int, ep: int, shards: int, *, is_tied: bool) -> Weights:
    """The units of ``model``, each weight split over ``tp`` ranks and then by rows over ``shards``.

    Args:
        model: its description.
        tp: tensor-parallel ranks, which split as the plan's rows say.
        ep: ranks that share the experts of a layer, which lie within ``tp * shards``.
        shards: ranks that store a part of each weight.
        is_tied: the output layer has no weight of its own, nor a copy of the embedding's.
    """
    dim = model.dim
    norm = _Tensor(dim, 1, dim, is_matrix=False)
    embedding = _Tensor(-(-model.vocab_size // tp), dim, model.vocab_size * dim)
    dense, experts = (
        _part(_tensors(model, layer, tp), shards) if layer else Part() for _, layer in (model.dense, model.experts)
    )
    routed = model.experts[1]
    if routed:
        width = max(ep, tp)  # ranks that share one copy of the experts
        experts = _with_experts(experts, routed, width, tp * shards)
    return Weights(
        dense=dense,
        experts=experts,
        embedding=_part([embedding], shards),
        head=_part([norm] if is_tied else [norm, embedding], shards),
    )


class _Tensor(NamedTuple):
    """One weight on a tensor-parallel rank, ``(rows, columns)``, and how many numbers the whole has."""

    rows: int
    columns: int
    total: int
    is_matrix: bool = True


def _tensors(model: ModelDescription, layer: Layer, tp: int) -> list[_Tensor]:
    """The weights of a layer but its routed experts."""
    return [_tensor(model, weight, tp) for weight in layer.weights if weight.shape[0] and not weight.is_routed]


def _tensor(model: ModelDescription, weight: Weight, tp: int) -> _Tensor:
    if len(weight.shape) == 1:
        return _Tensor(weight.shape[0], 1, weight.numel, is_matrix=False)
    rows, columns = weight.shape
    style = model.plan.style_of(f"layers.0.{weight.name.removesuffix('.weight')}")
    over_rows, over_columns = parts(style, model.num_kv_heads, tp)
    if style == "colwise_heads" and model.num_kv_heads < tp:
        over_rows = 1  # each rank holds all of them, and computes one
    return _Tensor(-(-rows // over_rows), -(-columns // over_columns), weight.numel)


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


def _with_experts(common: Part, layer: Layer, most: int, ranks: int) -> Part:
    routed = [weight for weight in layer.weights if weight.is_routed]
    numbers = sum(weight.numel for weight in routed)
    own = numbers / ranks
    return Part(
        whole=common.whole + numbers / most,
        own=common.own + own,
        own_matrices=common.own_matrices + own,
        own_small=common.own_small,
        own_blocks=common.own_blocks + own,
        matrix_small=common.matrix_small,
        matrix_blocks=common.matrix_blocks + own,
        tensors=common.tensors + len(routed),
    )
