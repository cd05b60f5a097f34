"""Descriptions of the layers that ``crius.models.layers`` and ``crius.models.decoder`` build. Torch-free."""

from crius.models.description import Attention, FeedForward, Layer, Weight


def gqa(dim: int, num_heads: int, num_kv_heads: int, head_dim: int, *, head_norms: bool = False) -> Attention:
    """Grouped-query attention (arXiv:2305.13245) as ``crius.models.layers.attention`` has it.

    Args:
        dim: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: width of a head.
        head_norms: queries and keys are normalised, each head alone, before they are rotated.
    """
    queries, keys = num_heads * head_dim, num_kv_heads * head_dim
    norms = (Weight("q_norm.weight", (head_dim,), "norm"), Weight("k_norm.weight", (head_dim,), "norm"))
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        rotary_dim=head_dim,
        weights=(
            Weight("wq.weight", (queries, dim), "linear"),
            Weight("wk.weight", (keys, dim), "linear"),
            Weight("wv.weight", (keys, dim), "linear"),
            Weight("wo.weight", (dim, queries), "linear", to_residual=True),
            *(norms if head_norms else ()),
        ),
    )


def feed_forward(dim: int, width: int, *, gated: bool = True) -> FeedForward:
    """A dense feed-forward as ``crius.models.layers.feed_forward`` has it; without a gate there is no ``w3``."""
    gate = (Weight("w3.weight", (width, dim), "linear"),) if gated else ()
    first = Weight("w1.weight", (width, dim), "linear")
    return FeedForward(
        width=width, gated=gated, weights=(first, Weight("w2.weight", (dim, width), "linear", to_residual=True), *gate)
    )


def decoder_layer(dim: int, attention: Attention, feed_forward: FeedForward) -> Layer:
    """Attention and feed-forward, each behind a norm: the weights of ``crius.models.decoder.Block``, in its order."""
    return Layer(
        attention=attention,
        feed_forward=feed_forward,
        weights=(
            Weight("attention_norm.weight", (dim,), "norm"),
            *(weight.within("attention") for weight in attention.weights),
            Weight("ffn_norm.weight", (dim,), "norm"),
            *(weight.within("feed_forward") for weight in feed_forward.weights),
        ),
    )
