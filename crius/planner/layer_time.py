"""Seconds that a rank computes for one microbatch: its layers, and the output layer. Torch-free."""

from dataclasses import dataclass

from crius.planner.matmuls import MLA_ROPE_DIM, layer_sizes
from crius.planner.rates import Rates
from crius.planner.time_constants import TimeConstants
from crius.planner.workload import Workload

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
    model, layout, sizes = workload.model, workload.layout, layer_sizes(workload.model)
    tp, tokens = layout.tp, workload.microbatch * workload.seq_len / layout.cp
    layers, with_experts = model.num_layers / layout.pp, sizes.num_expert_layers / layout.pp
    matmul = layers * rates.matmuls(tokens, divided(sizes.attention, tp))
    matmul += (layers - with_experts) * rates.matmuls(tokens, divided(sizes.dense, tp))
    if with_experts:
        local = max(1.0, model.num_experts / layout.ep)
        routed = rates.matmuls(tokens * model.top_k, divided(sizes.expert, tp), local)
        shared = rates.matmuls(tokens, divided(sizes.shared, tp))
        grouped = constants.expert_efficiency if model.is_routed else 1.0
        matmul += with_experts * (routed / grouped + shared)
    spread = 1 + constants.cp_imbalance * (layout.cp - 1) / layout.cp
    scores = tokens * workload.seq_len * (sizes.score_dim + sizes.value_dim) / tp  # half of them: causal
    return Compute(
        matmul=matmul,
        attention=layers * scores / rates.attention_flops * spread,
        elementwise=_elementwise(workload, rates, constants, tokens / tp) / rates.bytes,
    )


def _elementwise(workload: Workload, rates: Rates, constants: TimeConstants, tokens: float) -> float:
    """Bytes that norms, rotary embedding, residuals, gates and the permutation to experts move in all layers."""
    model, pp = workload.model, workload.layout.pp
    with_experts = layer_sizes(model).num_expert_layers
    rotated = MLA_ROPE_DIM if model.attention == "mla" else model.head_dim
    width = 10 * model.dim + 3 * (model.num_heads + model.num_kv_heads) * rotated
    gate = 5 if model.gated else 3
    numbers = (model.num_layers - with_experts) * rates.elementwise * (width + gate * model.ffn_dim)
    if with_experts:
        hidden = model.top_k * model.expert_ffn_dim + model.shared_ffn_dim
        routed = constants.expert_traffic * rates.experts * model.top_k * model.dim * model.is_routed
        numbers += with_experts * (rates.elementwise * (width + gate * hidden) + routed)
    return 2 * tokens * numbers / pp


def head(workload: Workload, rates: Rates) -> Compute:
    """Forward and backward of the output layer and the loss."""
    model, layout = workload.model, workload.layout
    tokens, rows = workload.microbatch * workload.seq_len / layout.cp, model.vocab_size / layout.tp
    numbers = tokens * (model.dim + rows) + model.dim * rows
    matmul = 2 * tokens * model.dim * rows / rates.wide_flops + numbers * rates.wide_traffic
    return Compute(3 * matmul, 0.0, HEAD_BYTES[workload.loss] * tokens * rows / rates.bytes)


def divided(matmuls: tuple[tuple[int, int], ...], tp: int) -> list[tuple[float, float]]:
    """Each matmul as one rank of tensor parallelism has it: the last splits its input, the others their output."""
    if tp == 1 or not matmuls:
        return list(matmuls)
    *wide, (features_in, features_out) = matmuls
    return [(a, b / tp) for a, b in wide] + [(features_in / tp, features_out)]
