"""Sizes of the matmuls of a decoder layer, per whole model: closed forms divide them by degrees. Torch-free."""

from dataclasses import dataclass
from functools import lru_cache

from crius.planner.workload import ModelShape

# Multi-head latent attention of DeepSeek-V2 and -V3 (arXiv:2405.04434, 2412.19437)
MLA_QUERY_RANK, MLA_KEY_RANK, MLA_ROPE_DIM, MLA_VALUE_DIM = 1536, 512, 64, 128
MLA_LITE_DIM = 2048  # V2-Lite and models as narrow do not compress the query


@dataclass(frozen=True)
class LayerSizes:
    """Widths of a layer's parts; a matmul is (features in, features out).

    Attributes:
        attention: projections before and after attention whose width tensor parallelism divides.
        dense: matmuls of a dense feed-forward.
        expert: matmuls of one routed expert.
        shared: matmuls of the shared experts.
        score_dim: width of queries over all heads: attention scores cost ``2 * tokens * context * score_dim``.
        value_dim: width of attention's output over all heads.
        key_value_dim: width of keys and values of a token, as context parallelism sends them.
        attention_parameters: weights of ``attention``.
        dense_parameters: weights of ``dense``.
        expert_parameters: weights of all routed experts of a layer.
        shared_parameters: weights of ``shared`` and the router.
        num_expert_layers: layers that have experts.
    """

    attention: tuple[tuple[int, int], ...]
    dense: tuple[tuple[int, int], ...]
    expert: tuple[tuple[int, int], ...]
    shared: tuple[tuple[int, int], ...]
    score_dim: int
    value_dim: int
    key_value_dim: int
    attention_parameters: int
    dense_parameters: int
    expert_parameters: int
    shared_parameters: int
    num_expert_layers: int


@lru_cache(maxsize=256)
def layer_sizes(shape: ModelShape) -> LayerSizes:
    """Sizes of a layer of ``shape``."""
    attention = _mla(shape) if shape.attention == "mla" else _gqa(shape)
    value_dim = MLA_VALUE_DIM if shape.attention == "mla" else shape.head_dim
    dense, expert, shared = (
        _feed_forward(shape, width) for width in (shape.ffn_dim, shape.expert_ffn_dim, shape.shared_ffn_dim)
    )
    router = shape.dim * shape.num_experts
    return LayerSizes(
        attention=attention,
        dense=dense,
        expert=expert if shape.num_experts else (),
        shared=shared,
        score_dim=shape.num_heads * shape.head_dim,
        value_dim=shape.num_heads * value_dim,
        key_value_dim=shape.num_kv_heads * (shape.head_dim + value_dim),
        attention_parameters=_weights(attention),
        dense_parameters=_weights(dense),
        expert_parameters=shape.num_experts * _weights(expert),
        shared_parameters=_weights(shared) + router,
        num_expert_layers=shape.num_layers - shape.num_dense_layers if shape.num_experts else 0,
    )


def _gqa(shape: ModelShape) -> tuple[tuple[int, int], ...]:
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return (shape.dim, query), (shape.dim, key), (shape.dim, key), (query, shape.dim)


def _mla(shape: ModelShape) -> tuple[tuple[int, int], ...]:
    query, heads = shape.num_heads * shape.head_dim, shape.num_heads
    keys = MLA_KEY_RANK, heads * (shape.head_dim - MLA_ROPE_DIM + MLA_VALUE_DIM)
    latent = shape.dim, MLA_KEY_RANK + MLA_ROPE_DIM
    output = heads * MLA_VALUE_DIM, shape.dim
    if shape.dim <= MLA_LITE_DIM:
        return (shape.dim, query), latent, keys, output
    return (shape.dim, MLA_QUERY_RANK), (MLA_QUERY_RANK, query), latent, keys, output


def _feed_forward(shape: ModelShape, width: int) -> tuple[tuple[int, int], ...]:
    if not width:
        return ()
    return ((shape.dim, width),) * (2 if shape.gated else 1) + ((width, shape.dim),)


def _weights(matmuls: tuple[tuple[int, int], ...]) -> int:
    return sum(features_in * features_out for features_in, features_out in matmuls)


def flops_per_token(shape: ModelShape, seq_len: int) -> float:
    """Model FLOPs of one token's forward and backward with causal attention (PaLM, arXiv:2204.02311, appendix B)."""
    sizes, experts = layer_sizes(shape), layer_sizes(shape).num_expert_layers
    weights = shape.num_layers * sizes.attention_parameters + (shape.num_layers - experts) * sizes.dense_parameters
    weights += experts * (sizes.shared_parameters + shape.top_k * _weights(sizes.expert))
    attention = shape.num_layers * (sizes.score_dim + sizes.value_dim) * seq_len / 2
    return 6 * (weights + shape.vocab_size * shape.dim) + 6 * attention
