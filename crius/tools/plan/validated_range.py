"""What published measurements support, and what they do not. Torch-free."""

from crius.tools.plan.hardware import Hardware
from crius.tools.plan.trainer import CRIUS
from crius.tools.plan.weights import model_parameters
from crius.tools.plan.workload import Workload

# Of the rows of benchmarks/planner/measurements.csv
GENERATIONS = ("ampere", "hopper", "blackwell", "blackwell_ultra", "cdna3")
PARAMETERS = (0.3e9, 700e9)
GPUS = 2048
SEQ_LEN = (512, 262_144)
DEGREES = {"tp": 16, "cp": 8, "pp": 16, "ep": 64}
SHARDS = 512
WITHOUT_PIPELINE = 203e9
"""Parameters of one tensor-parallel rank that FSDP split without a pipeline: half of 405 billion."""
SCHEDULES = ("1f1b", "interleave_1f1b")
UNMEASURED = ("rtx-4090", "a10g", "l4", "cpu", "h100-pcie", "h100-nvl", "h800", "gh200")


def is_narrow_on_cpu(workload: Workload, hardware: Hardware) -> bool:
    """Whether a CPU computes in fewer bits than the runs that calibrate it: elementwise operations convert there."""
    return hardware.generation == "cpu" and workload.precision != "float32"


def validated_range(workload: Workload, hardware: Hardware) -> list[str]:
    """Why no published measurement supports a plan of ``workload`` on ``hardware``; empty where they do."""
    model, layout = workload.model, workload.layout
    reasons = []
    is_measured = hardware.generation in GENERATIONS and hardware.name not in UNMEASURED
    if not hardware.measured and not is_measured:
        reasons.append(f"no measurement on {hardware.name}: crius plan --calibrate")
    parameters = model_parameters(model)
    if not PARAMETERS[0] <= parameters <= PARAMETERS[1] and not hardware.measured:
        reasons.append(f"{parameters / 1e9:.3g} billion parameters: measured are 0.3 to 700")
    if is_narrow_on_cpu(workload, hardware):
        reasons.append(f"{workload.precision} on a CPU, where it was measured to be 2.5 times slower than planned")
    if layout.num_ranks > GPUS:
        reasons.append(f"{layout.num_ranks} GPUs: measured are up to {GPUS}")
    if not SEQ_LEN[0] <= workload.seq_len <= SEQ_LEN[1] and not hardware.measured:
        reasons.append(f"sequences of {workload.seq_len} tokens: measured are {SEQ_LEN[0]} to {SEQ_LEN[1]}")
    for axis, most in DEGREES.items():
        degree = getattr(layout, axis)
        if degree > most:
            reasons.append(f"{axis} {degree}: measured is up to {most}")
    if layout.fsdp > SHARDS:
        reasons.append(f"weights in {layout.fsdp} shards: measured are up to {SHARDS}")
    if layout.pp == 1 and parameters / layout.tp > WITHOUT_PIPELINE:
        whole, measured = parameters / layout.tp / 1e9, WITHOUT_PIPELINE / 1e9
        reasons.append(f"FSDP of {whole:.0f} billion parameters without a pipeline: measured are up to {measured:.0f}")
    if layout.pp > 1 and workload.schedule not in SCHEDULES:
        reasons.append(f"no measurement of schedule {workload.schedule}")
    if workload.cpu_offload:
        reasons.append("no measurement with weights offloaded to the host")
    has_none = not hardware.float8_flops or (workload.precision == "mxfp8" and not hardware.has_mxfp8)
    if workload.precision in ("float8", "mxfp8", "nvfp4") and has_none:
        reasons.append(f"{hardware.name} has no {workload.precision}")
    elif workload.precision == "nvfp4" and not hardware.float4_flops:
        reasons.append(f"{hardware.name} has no nvfp4: planned as float8")
    elif workload.precision == "float8" and hardware.generation == "cdna3" and "rowwise" not in workload.float8_recipe:
        reasons.append(f"one measurement of tensorwise float8 on {hardware.name}, 1.4 times slower than planned")
    if workload.trainer is CRIUS and hardware.generation != "cpu":
        if workload.reshard not in ("default", "always", "never"):
            reasons.append("no measurement of partial resharding")
    return reasons
