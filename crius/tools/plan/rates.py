"""What a processor and its memory reach: seconds of matmuls, attention and elementwise passes. Torch-free."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from crius.tools.plan.hardware import Hardware
from crius.tools.plan.time_constants import TimeConstants
from crius.tools.plan.trainer import Trainer
from crius.tools.plan.workload import Workload

UNFUSED_CAST = 4
"""Times that quantizing costs more in eager PyTorch; and by rows under tensor parallelism, whose shards are cast alone
(github.com/pytorch/torchtitan/issues/1207)."""

READ_TWICE = 1.5
"""Times that TransformerEngine's current scaling costs more than a scale by block or from earlier steps: it reads a
tensor once more, for its largest value (6 bytes a number against 4: two reads in bfloat16 and a write in both layouts).
Compiled code takes that value where it writes the tensor."""

TILE = 256
"""Width of a tile of a GPU's matmul (github.com/NVIDIA/cutlass: 128 x 256 is the largest on Hopper); the last one of a
matmul that it does not divide is computed whole."""


@dataclass(frozen=True)
class Rates:
    """Reached, not peak.

    Attributes:
        flops: of matmuls of blocks in the precision that they run in, a second.
        wide_flops: of matmuls that stay in bfloat16 (below float32): the output layer's, experts' router.
        attention_flops: of attention, a second.
        bytes: of elementwise operations, a second.
        traffic: seconds for each operand number of a matmul of the blocks.
        cast: seconds to quantize one of them; 0 where nothing is.
        recast: share of the microbatches in which weights are quantized.
        wide_traffic: the same of those that stay in bfloat16.
        elementwise: bytes of activations that a layer moves, as a multiple of one pass.
        op_seconds: to launch one operation.
        experts: factor on permutation and routing to experts.
        tile: features of a matmul are computed in multiples of it.
    """

    flops: float
    wide_flops: float
    attention_flops: float
    bytes: float
    traffic: float
    cast: float
    recast: float
    wide_traffic: float
    elementwise: float
    op_seconds: float
    experts: float
    tile: int

    def matmuls(self, tokens: float, sizes: Iterable[tuple[float, float]], experts: float = 1.0) -> float:
        """Seconds of the matmuls' forward: FLOPs, and operands through the memory.

        Args:
            tokens: rows of the activations.
            sizes: features in and out.
            experts: matmuls of each size, over which the rows are spread.
        """
        flops = weights = activations = 0.0
        for features_in, features_out in sizes:
            # each is the width of an output: of the forward, of the gradient of the input, and both of the weight's
            flops += self._tiled(features_in) * self._tiled(features_out)
            weights += experts * features_in * features_out
            activations += tokens * (features_in + features_out)
        moved = (weights + activations) * self.traffic + (self.recast * weights + activations) * self.cast
        return 2 * tokens * flops / self.flops + moved

    def _tiled(self, features: float) -> float:
        return math.ceil(features / self.tile) * self.tile


def rates(workload: Workload, hardware: Hardware, constants: TimeConstants) -> Rates:
    """What ``hardware`` reaches in this workload."""
    recipe, compiled = workload.float8_recipe, workload.compile
    trainer = workload.trainer
    casts_fused = (compiled or trainer.fuses_casts) and not ("rowwise" in recipe and workload.layout.tp > 1)
    # FSDP gathers weights anew for every microbatch
    recast = 1 / workload.num_microbatches if trainer.casts_once and workload.zero_stage < 3 else 1.0
    return _rates(hardware, constants, trainer, workload.precision, recipe, compiled, casts_fused, recast)


@lru_cache(maxsize=1024)
def _rates(
    hardware: Hardware,
    constants: TimeConstants,
    trainer: Trainer,
    precision: str,
    recipe: str,
    compiled: bool,
    casts_fused: bool,
    recast: float,
) -> Rates:
    on_cpu = hardware.generation == "cpu"
    attention_peak = hardware.float32_flops if on_cpu or precision == "float32" else hardware.bfloat16_flops
    efficiency, attention = _efficiencies(hardware, constants, trainer, attention_peak)
    memory = (hardware.memory_efficiency or constants.memory) * hardware.memory_bandwidth
    wide_peak = hardware.float32_flops if precision == "float32" else hardware.bfloat16_flops
    wide_bytes = 4 if precision == "float32" else 2
    peak, relative, operand_bytes = _narrow(hardware, constants, trainer, precision, recipe)
    flops = peak * efficiency * relative if peak else wide_peak * efficiency
    cast = constants.cast_traffic * (1 if casts_fused else UNFUSED_CAST) * 2 if peak else 0.0
    if "current_scaling" in recipe:
        cast *= READ_TWICE
    # what is measured has it in it
    bias = 1.0 if hardware.measured else math.e ** (constants.bias if trainer.bias is None else trainer.bias)
    passes = constants.elementwise_compiled if compiled else constants.elementwise_eager
    width = wide_bytes / 2
    return Rates(
        flops=flops / bias,
        wide_flops=wide_peak * efficiency / bias,
        attention_flops=attention_peak * attention / bias,
        bytes=memory / bias,
        traffic=constants.matmul_traffic * (operand_bytes if peak else wide_bytes) / memory,
        cast=cast / memory,
        recast=recast,
        wide_traffic=constants.matmul_traffic * wide_bytes / memory,
        elementwise=width * (passes if trainer.elementwise is None else trainer.elementwise),
        op_seconds=constants.op_seconds if hardware.op_seconds is None else hardware.op_seconds,
        experts=constants.expert_torch if trainer.experts is None else trainer.experts,
        tile=1 if on_cpu else TILE,
    )


def _efficiencies(
    hardware: Hardware, constants: TimeConstants, trainer: Trainer, attention_peak: float
) -> tuple[float, float]:
    """Of matmuls and of attention."""
    matmul, attention = {
        "ampere": (constants.matmul_ampere, constants.attention_ampere),
        "ada": (constants.matmul_ampere, constants.attention_ampere),
        "blackwell": (constants.matmul_blackwell, constants.attention_blackwell),
        "blackwell_ultra": (constants.matmul_blackwell_ultra, constants.attention_blackwell),
        "cdna3": (constants.matmul_cdna3, constants.attention_hopper),
        "cpu": (0.8, 0.3),
    }.get(hardware.generation, (constants.matmul_hopper, constants.attention_hopper))
    if not trainer.own_kernels and hardware.generation not in ("ampere", "ada", "cpu"):
        attention = min(attention, constants.flash2_flops / attention_peak)
    attention *= trainer.attention
    is_blackwell = hardware.generation.startswith("blackwell")
    limit = hardware.power ** (constants.power_exponent_blackwell if is_blackwell else constants.power_exponent)
    return hardware.matmul_efficiency or matmul * limit, hardware.attention_efficiency or attention * limit


def _narrow(
    hardware: Hardware, constants: TimeConstants, trainer: Trainer, precision: str, recipe: str
) -> tuple[float, float, float]:
    """Peak, efficiency relative to bfloat16's, and bytes of an operand, of matmuls below 16 bits; else a peak of 0."""
    if precision in ("float32", "bfloat16"):
        return 0.0, 1.0, 2.0
    if precision == "nvfp4" and hardware.float4_flops:
        return hardware.float4_flops, constants.nvfp4, 0.5
    if "rowwise" in recipe:
        return hardware.float8_flops, constants.float8_rowwise, 1.0
    relative = constants.float8_tensorwise
    if trainer.float8:
        relative = trainer.float8[hardware.generation.startswith("blackwell")]
    return hardware.float8_flops, relative * (constants.mxfp8 if precision == "mxfp8" else 1.0), 1.0
