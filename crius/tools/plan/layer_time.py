"""Seconds that a rank computes for one microbatch: its layers, and the output layer. Torch-free."""

from dataclasses import dataclass

from crius.models.description import Layer
from crius.tools.plan.matmuls import expert_matmuls, linears
from crius.tools.plan.rates import Rates
from crius.tools.plan.time_constants import TimeConstants
from crius.tools.plan.workload import Workload

HEAD_BYTES = {"eager": 48.0, "chunked": 24.0, "compiled": 20.0, "fused": 14.0}
"""Bytes a logit moves in the loss and its gradient, by ``Workload.loss``: passes over it in float32 and bfloat16."""


@dataclass(frozen=True)
class Compute:
    """Seconds by kind."""

    matmul: float
    attention: float
    elementwise: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.matmul + self.attention + self.elementwise

    def times(self, factor: float) -> "Compute":
        """Of ``factor`` times as many layers."""
        return Compute(factor * self.matmul, factor * self.attention, factor * self.elementwise)

    def plus(self, other: "Compute") -> "Compute":
        """Both."""
        return Compute(
            self.matmul + other.matmul, self.attention + other.attention, self.elementwise + other.elementwise
        )


def recomputed(workload: Workload) -> tuple[float, float]:
    """Shares of the matmuls and of attention that the backward computes again."""
    mode, every = workload.activation_checkpoint, workload.selective_layers
    if mode == "none":
        return 0.0, 0.0
    if mode == "full":
        return 1.0, 1.0
    if every is None:
        return 0.5, 0.0
    share = workload.model.num_layers // every / workload.model.num_layers
    return share, share


def forward(workload: Workload, rates: Rates, constants: TimeConstants) -> Compute:
    """One forward through a rank's mean share of the layers."""
    model, layout, attention = workload.model, workload.layout, workload.model.attention
    tp, tokens = layout.tp, workload.microbatch * workload.seq_len / layout.cp
    matmul = 0.0
    for count, layer in (model.dense, model.experts):
        if layer:
            seconds = rates.matmuls(tokens, linears(layer, tp)) + _routed(workload, layer, rates, constants, tokens)
            matmul += count / layout.pp * seconds
    spread = 1 + constants.cp_imbalance * (layout.cp - 1) / layout.cp
    width = attention.num_heads * (attention.head_dim + attention.value_dim)
    scores = tokens * workload.seq_len * width / tp  # half of them: causal
    return Compute(
        matmul=matmul,
        attention=model.num_layers / layout.pp * scores / rates.attention_flops * spread,
        elementwise=_elementwise(workload, rates, constants, tokens / tp) / rates.bytes,
    )


def _routed(workload: Workload, layer: Layer, rates: Rates, constants: TimeConstants, tokens: float) -> float:
    """Seconds of the matmuls of routed experts."""
    experts = layer.feed_forward
    if not experts.num_experts:
        return 0.0
    local = max(1.0, experts.num_experts / workload.layout.ep)
    routed = rates.matmuls(tokens * experts.top_k, expert_matmuls(layer, workload.layout.tp), local)
    return routed / (constants.expert_efficiency if workload.model.is_routed else 1.0)


def _elementwise(workload: Workload, rates: Rates, constants: TimeConstants, tokens: float) -> float:
    """Bytes that norms, rotary embedding, residuals, gates and the permutation to experts move in all layers."""
    model, numbers = workload.model, 0.0
    for count, layer in (model.dense, model.experts):
        if layer:
            attention, feed_forward = layer.attention, layer.feed_forward
            heads = attention.num_heads + attention.num_kv_heads
            width = 10 * model.dim + 3 * heads * attention.rotary_dim
            hidden = feed_forward.width + feed_forward.top_k * feed_forward.expert_width
            routed = constants.expert_traffic * rates.experts * feed_forward.top_k * model.dim * model.is_routed
            numbers += count * (rates.elementwise * (width + (5 if feed_forward.gated else 3) * hidden) + routed)
    return 2 * tokens * numbers / workload.layout.pp


def head(workload: Workload, rates: Rates) -> Compute:
    """Forward and backward of the output layer and the loss."""
    model, layout = workload.model, workload.layout
    tokens, rows = workload.microbatch * workload.seq_len / layout.cp, model.vocab_size / layout.tp
    numbers = tokens * (model.dim + rows) + model.dim * rows
    matmul = 2 * tokens * model.dim * rows / rates.wide_flops + numbers * rates.wide_traffic
    return Compute(3 * matmul, 0.0, HEAD_BYTES[workload.loss] * tokens * rows / rates.bytes)
