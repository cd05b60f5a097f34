"""Reached speeds of a processor and its memory, and seconds of the layers of a model. Torch-free.

``benchmarks/fit_planner.py`` writes the constants.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from crius.models.description import Layer
from crius.tools.plan.hardware import Hardware
from crius.tools.plan.workload import Workload


@dataclass(frozen=True)
class TimeConstants:
    """Efficiencies, overlaps and overheads; shares of a peak unless a unit is named.

    Attributes:
        matmul_ampere: share of the peak that large matmuls of a training step reach on A100.
        matmul_hopper: the same on H100 and H200.
        matmul_blackwell: the same on B200 and GB200.
        matmul_blackwell_ultra: the same on B300 and GB300, against the same peaks.
        matmul_cdna3: the same on MI300X.
        power_exponent: exponent by which efficiency falls with the share of the power limit.
        power_exponent_blackwell: the same on Blackwell, which even its full power limit slows.
        matmul_traffic: number of times that a matmul's operands cross the memory, as a cost in addition to its FLOPs.
        attention_ampere: share of the peak that causal attention reaches on A100.
        attention_hopper: the same on H100 and H200 with TransformerEngine's kernels.
        attention_blackwell: the same on Blackwell.
        flash2_flops: FLOP/s of FlashAttention-2 on GPUs newer than it, whose matmul units it does not use.
        memory: share of the bandwidth that elementwise operations reach.
        elementwise_eager: number of times that a layer's activations cross the memory in eager PyTorch.
        elementwise_compiled: the same, compiled.
        float8_tensorwise: share of float8's peak relative to bfloat16's efficiency, with one scale per tensor.
        float8_rowwise: the same with one scale per row.
        mxfp8: factor on these with a scale per 32 numbers.
        nvfp4: share of the 4-bit peak.
        cast_traffic: number of times that a matmul's operands cross the memory to be quantized.
        link: share of ``link_bandwidth`` that collectives reach.
        nic: share of ``nic_bandwidth`` that collectives reach.
        hop_seconds: latency of a collective for each node it visits, seconds.
        overlap_cost: share of hidden communication that slows the compute that hides it.
        tp_exposed: share of tensor parallelism's communication that is not hidden.
        tp_async: factor on it with async tensor parallelism.
        cp_imbalance: share by which attention slows as context parallelism grows.
        cp_exposed: share of context parallelism's communication that is not hidden.
        ep_exposed: share of expert parallelism's all-to-alls that is not hidden.
        dp_exposed: share of the gradient reduction that overlaps in theory but is not hidden.
        expert_efficiency: factor on the efficiency of matmuls of experts.
        expert_traffic: number of times that routed tokens cross the memory to be permuted.
        expert_seconds: time that a layer of experts waits for its routing to reach the host and back, both passes,
            seconds.
        expert_torch: factor on the permutation and the routing to experts, above fused kernels.
        graph_launch: share of launch times that is left when graphs or compiled code are launched.
        op_seconds: time to launch one operation, seconds.
        step_seconds: fixed cost of a step, seconds.
        bias: logarithm of the factor by which compute is slower than the other constants predict. It is torchtitan's,
            whose blocks are like Crius's.
    """

    matmul_ampere: float = 0.866
    matmul_hopper: float = 0.746
    matmul_blackwell: float = 0.516
    matmul_blackwell_ultra: float = 0.687
    matmul_cdna3: float = 0.342
    power_exponent: float = 0.466
    power_exponent_blackwell: float = 0.859
    matmul_traffic: float = 0.933
    attention_ampere: float = 0.532
    attention_hopper: float = 0.459
    attention_blackwell: float = 0.412
    flash2_flops: float = 279000000000000.0
    memory: float = 0.833
    elementwise_eager: float = 1.77
    elementwise_compiled: float = 0.468
    float8_tensorwise: float = 1.0
    float8_rowwise: float = 0.559
    mxfp8: float = 0.939
    nvfp4: float = 0.547
    cast_traffic: float = 0.445
    link: float = 0.719
    nic: float = 0.95
    hop_seconds: float = 4.14e-06
    overlap_cost: float = 0.128
    tp_exposed: float = 1.26
    tp_async: float = 0.642
    cp_imbalance: float = 0.199
    cp_exposed: float = 0.302
    ep_exposed: float = 0.788
    dp_exposed: float = 0.292
    expert_efficiency: float = 0.829
    expert_traffic: float = 5.98
    expert_seconds: float = 0.00727
    expert_torch: float = 4.0
    graph_launch: float = 0.262
    op_seconds: float = 5.99e-06
    step_seconds: float = 0.045
    bias: float = 0.12


TIME = TimeConstants()


UNFUSED_CAST = 4
"""Factor on the cost of quantizing in eager PyTorch; and by rows under tensor parallelism, whose shards are cast
separately (github.com/pytorch/torchtitan/issues/1207)."""

READ_TWICE = 1.5
"""Factor of TransformerEngine's current scaling over a scale by block or from earlier steps. It reads a tensor once
more, for its largest value (6 bytes per number against 4: two reads in bfloat16 and a write in both layouts). Compiled
code takes that value where it writes the tensor."""

TILE = 256
"""Width of a tile of a GPU's matmul (github.com/NVIDIA/cutlass: 128 x 256 is the largest on Hopper). If it does not
divide a matmul, the last tile is computed in full."""


@dataclass(frozen=True)
class Rates:
    """Reached rates, not peaks.

    Attributes:
        flops: FLOP/s of matmuls of blocks in the precision that they run in.
        wide_flops: FLOP/s of matmuls that stay in bfloat16 (below float32): the output layer's, the experts' router's.
        attention_flops: FLOP/s of attention.
        bytes: bytes per second of elementwise operations.
        traffic: seconds per operand number of a matmul of the blocks.
        cast: seconds to quantize one operand number; 0 if nothing is quantized.
        wide_traffic: ``traffic`` of matmuls that stay in bfloat16.
        elementwise: bytes of activations that a layer moves, as a multiple of one pass.
        op_seconds: seconds to launch one operation.
        experts: factor on permutation and routing to experts.
        tile: unit that the features of a matmul are rounded up to.
        recast: share of the microbatches in which weights are quantized: all, as FSDP gathers them again for each.
    """

    flops: float
    wide_flops: float
    attention_flops: float
    bytes: float
    traffic: float
    cast: float
    wide_traffic: float
    elementwise: float
    op_seconds: float
    experts: float
    tile: int
    recast: float = 1.0

    def matmuls(self, tokens: float, sizes: Iterable[tuple[float, float]], experts: float = 1.0) -> float:
        """Seconds of the matmuls' forward: FLOPs, and operands through the memory.

        Args:
            tokens: rows of the activations.
            sizes: features in and out.
            experts: matmuls of each size that the rows are spread over.
        """
        flops = weights = activations = 0.0
        for features_in, features_out in sizes:
            # each is the width of an output: of the forward, of the input's gradient, and both of the weight's gradient
            flops += self._tiled(features_in) * self._tiled(features_out)
            weights += experts * features_in * features_out
            activations += tokens * (features_in + features_out)
        moved = (weights + activations) * self.traffic + (self.recast * weights + activations) * self.cast
        return 2 * tokens * flops / self.flops + moved

    def _tiled(self, features: float) -> float:
        return math.ceil(features / self.tile) * self.tile


def rates(workload: Workload, hardware: Hardware, constants: TimeConstants) -> Rates:
    """Rates that ``hardware`` reaches in this workload."""
    recipe = workload.float8_recipe
    compiled = workload.compile
    on_cpu = hardware.generation == "cpu"
    is_wide = workload.precision == "float32"
    attention_peak = hardware.float32_flops if on_cpu or is_wide else hardware.bfloat16_flops
    efficiency, attention = _efficiencies(hardware, constants, attention_peak)
    memory = (hardware.memory_efficiency or constants.memory) * hardware.memory_bandwidth
    wide_peak, wide_bytes = (hardware.float32_flops, 4) if is_wide else (hardware.bfloat16_flops, 2)
    peak, relative, operand_bytes = _narrow(workload, hardware, constants)
    flops = peak * efficiency * relative if peak else wide_peak * efficiency
    casts_fused = compiled and not ("rowwise" in recipe and workload.layout.tp > 1)
    cast = constants.cast_traffic * (1 if casts_fused else UNFUSED_CAST) * 2 if peak else 0.0
    if "current_scaling" in recipe:
        cast *= READ_TWICE
    # measured rates include it
    bias = 1.0 if hardware.measured else math.e**constants.bias
    passes = constants.elementwise_compiled if compiled else constants.elementwise_eager
    return Rates(
        flops=flops / bias,
        wide_flops=wide_peak * efficiency / bias,
        attention_flops=attention_peak * attention / bias,
        bytes=memory / bias,
        traffic=constants.matmul_traffic * (operand_bytes if peak else wide_bytes) / memory,
        cast=cast / memory,
        wide_traffic=constants.matmul_traffic * wide_bytes / memory,
        elementwise=wide_bytes / 2 * passes,
        op_seconds=constants.op_seconds if hardware.op_seconds is None else hardware.op_seconds,
        experts=constants.expert_torch,
        tile=1 if on_cpu else TILE,
    )


def _efficiencies(hardware: Hardware, constants: TimeConstants, attention_peak: float) -> tuple[float, float]:
    """Efficiencies of matmuls and of attention."""
    matmul, attention = {
        "ampere": (constants.matmul_ampere, constants.attention_ampere),
        "ada": (constants.matmul_ampere, constants.attention_ampere),
        "blackwell": (constants.matmul_blackwell, constants.attention_blackwell),
        "blackwell_ultra": (constants.matmul_blackwell_ultra, constants.attention_blackwell),
        "cdna3": (constants.matmul_cdna3, constants.attention_hopper),
        "cpu": (0.8, 0.3),
    }.get(hardware.generation, (constants.matmul_hopper, constants.attention_hopper))
    if hardware.generation not in ("ampere", "ada", "cpu"):
        attention = min(attention, constants.flash2_flops / attention_peak)
    is_blackwell = hardware.generation.startswith("blackwell")
    limit = hardware.power ** (constants.power_exponent_blackwell if is_blackwell else constants.power_exponent)
    return hardware.matmul_efficiency or matmul * limit, hardware.attention_efficiency or attention * limit


def _narrow(workload: Workload, hardware: Hardware, constants: TimeConstants) -> tuple[float, float, float]:
    """Peak, efficiency relative to bfloat16's, and bytes per operand, of matmuls below 16 bits; else a peak of 0."""
    precision = workload.precision
    if precision in ("float32", "bfloat16"):
        return 0.0, 1.0, 2.0
    if precision == "nvfp4" and hardware.float4_flops:
        return hardware.float4_flops, constants.nvfp4, 0.5
    if "rowwise" in workload.float8_recipe:
        return hardware.float8_flops, constants.float8_rowwise, 1.0
    relative = constants.float8_tensorwise * (constants.mxfp8 if precision == "mxfp8" else 1.0)
    return hardware.float8_flops, relative, 1.0


@lru_cache(maxsize=1024)
def linears(layer: Layer, tp: int) -> tuple[tuple[float, float], ...]:
    """Features in and out of each linear layer that computes every token, on one of ``tp`` ranks.

    A layer that writes to the residual stream splits its input, the others split their output.
    """
    return tuple(_split(weight.shape, tp, weight.to_residual) for weight in layer.weights if weight.kind == "linear")


@lru_cache(maxsize=1024)
def expert_matmuls(layer: Layer, tp: int) -> tuple[tuple[float, float], ...]:
    """The same for one routed expert; empty if there is none."""
    experts = (weight for weight in layer.weights if weight.kind == "expert")
    return tuple(_split(weight.shape[1:], tp, weight.to_residual) for weight in experts)


def _split(shape: tuple[int, ...], tp: int, by_input: bool) -> tuple[float, float]:
    features_out, features_in = shape
    if tp == 1:
        return features_in, features_out
    return (features_in / tp, features_out) if by_input else (features_in, features_out / tp)


@lru_cache(maxsize=1024)
def numbers(layer: Layer, *kinds: str) -> int:
    """Numbers of the weights of ``kinds``."""
    return sum(weight.numel for weight in layer.weights if weight.kind in kinds)


HEAD_BYTES = {"eager": 48.0, "chunked": 24.0, "compiled": 20.0, "fused": 14.0}
"""Bytes per logit that the loss and its gradient move, by ``Workload.loss``: passes over it in float32 and bfloat16."""


@dataclass(frozen=True)
class Compute:
    """Seconds by kind."""

    matmul: float
    attention: float
    elementwise: float

    @property
    def total(self) -> float:
        """Sum of all seconds."""
        return self.matmul + self.attention + self.elementwise

    def times(self, factor: float) -> "Compute":
        """Seconds of ``factor`` times as many layers."""
        return Compute(factor * self.matmul, factor * self.attention, factor * self.elementwise)

    def plus(self, other: "Compute") -> "Compute":
        """Seconds of both."""
        return Compute(
            self.matmul + other.matmul, self.attention + other.attention, self.elementwise + other.elementwise
        )


def passes(workload: Workload) -> int:
    """Number of matmuls per weight: forward, for the gradient of the input and, unless it is frozen, for its own
    gradient.

    The cost of adapters is left out: at rank 16 it is 1 % of a layer 4,096 wide.
    """
    return 3 if workload.model.adapted is None else 2


def recomputed(workload: Workload) -> tuple[float, float]:
    """Shares of the matmuls and of attention that the backward computes again."""
    mode = workload.activation_checkpoint
    every = workload.selective_layers
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
    model = workload.model
    layout = workload.layout
    attention = workload.model.attention
    tp = layout.tp
    tokens = workload.tokens
    matmul = 0.0
    for count, layer in (model.dense, model.experts):
        if layer:
            seconds = rates.matmuls(tokens, linears(layer, tp)) + _routed(workload, layer, rates, constants, tokens)
            matmul += count / layout.pp * seconds
    spread = 1 + constants.cp_imbalance * (layout.cp - 1) / layout.cp
    width = attention.num_heads * (attention.head_dim + attention.value_dim)
    scores = tokens * workload.seq_len * width / tp  # half of them, as attention is causal
    causal = (workload.seq_len + 1) / 2
    seen = sum(count * layer.attention.mean_context(workload.seq_len) / causal for count, layer in model.layers)
    return Compute(
        matmul=matmul,
        attention=seen / layout.pp * scores / rates.attention_flops * spread,
        elementwise=_elementwise(workload, rates, constants, tokens / tp) / rates.bytes,
    )


def _routed(workload: Workload, layer: Layer, rates: Rates, constants: TimeConstants, tokens: float) -> float:
    """Seconds of the matmuls of routed experts."""
    experts = layer.feed_forward
    if not experts.num_experts:
        return 0.0
    local = max(1.0, experts.num_experts / workload.layout.ep)
    tp = workload.layout.tp
    if not workload.splits_experts:  # experts are whole, and each rank sends its part of a sequence
        tokens, tp = tokens / tp, 1
        rates = replace(rates, flops=rates.wide_flops, traffic=rates.wide_traffic, cast=0.0)  # not in float8 either
    routed = rates.matmuls(tokens * experts.top_k, expert_matmuls(layer, tp), local)
    return routed / (constants.expert_efficiency if workload.model.is_routed else 1.0)


def _elementwise(workload: Workload, rates: Rates, constants: TimeConstants, tokens: float) -> float:
    """Bytes that norms, rotary embedding, residuals, gates and the permutation to experts move in all layers."""
    model = workload.model
    numbers = 0.0
    for count, layer in (model.dense, model.experts):
        if layer:
            attention = layer.attention
            feed_forward = layer.feed_forward
            heads = attention.num_heads + attention.num_kv_heads
            width = 10 * model.dim + 3 * heads * attention.rotary_dim
            hidden = feed_forward.width + feed_forward.top_k * feed_forward.expert_width
            routed = constants.expert_traffic * rates.experts * feed_forward.top_k * model.dim * model.is_routed
            numbers += count * (rates.elementwise * (width + (5 if feed_forward.gated else 3) * hidden) + routed)
    return 2 * tokens * numbers / workload.layout.pp


def head(workload: Workload, rates: Rates) -> Compute:
    """Forward and backward of the output layer and the loss."""
    model = workload.model
    tokens = workload.tokens
    rows = model.vocab_size / workload.layout.tp
    numbers = tokens * (model.dim + rows) + model.dim * rows
    matmul = 2 * tokens * model.dim * rows / rates.wide_flops + numbers * rates.wide_traffic
    return Compute(passes(workload) * matmul, 0.0, HEAD_BYTES[workload.loss] * tokens * rows / rates.bytes)
