"""Bytes and seconds of 200 plans, to six digits: a slip in any term of the closed forms shows."""

from dataclasses import replace
from random import Random

import pytest
from harness import GOLDEN, llama

from crius.config.layout import Layout
from crius.models.adapted import Adapted
from crius.models.registry import SPECS
from crius.tools.plan.hardware import KNOWN, shared
from crius.tools.plan.memory import memory, rank_bytes
from crius.tools.plan.shapes import NOT_TRAINABLE_YET
from crius.tools.plan.time import OPTIMIZER_BYTES, step_time
from crius.tools.plan.workload import MOMENT_BYTES, Workload

PLANS = GOLDEN / "plans.txt"
NUMBERS = range(200)
MEASURED = {"measured": "today", "matmul_efficiency": 0.6, "memory_efficiency": 0.7, "hop_seconds": 1e-5}


def model_drawn(pick):
    if pick([True, False]):
        return pick([*NOT_TRAINABLE_YET.values()])
    model = pick([llama("1b"), llama("8b"), llama("70b"), SPECS["qwen3_moe"].describe("30b-a3b")])
    if pick([True, False, False]):
        names = tuple(
            name for name in model.linears if name.endswith(pick([("wq", "w2"), ("wv",), ("wo", "w1", "w2")]))
        )
        return replace(model, adapted=Adapted(16, names))
    return model


CHOICES = {
    "seq_len": [64, 512, 4096, 32_768],
    "microbatch": [1, 3],
    "activation_checkpoint": ["none", "selective", "full"],
    "selective_layers": [None, 2, 3],
    "compile": [True, False],
    "float8_all_gather": [True, False],
    "weight_bytes": [4, 2],
    "reduce_bytes": [4, 2],
    "moment_bytes": [*MOMENT_BYTES.values()],
    "reshard": ["default", "never", "always", "2"],
    "gradient_sync": ["immediate", "deferred"],
    "async_tp": [True, False],
    "loss": ["eager", "compiled", "chunked", "fused"],
    "loss_tokens": [1000],
    "score_tokens": [256],
    "optimizer": [*OPTIMIZER_BYTES],
    "cpu_offload": [True, False, False],
    "pointwise": [None, "operators", "norms"],
    "muon": [True, False],
    "splits_experts": [True, False],
    "sequence_parallel": [True, True, False],
    "keeps_mask": [True, False],
    "keeps_probabilities": [True, False],
    "snapshot": [True, False],
    "lora_base": ["keep", "int8", "nf4"],
}
DEGREES = {"pp": [1, 1, 2, 4], "dp_replicate": [1, 2], "dp_shard": [1, 2, 8], "cp": [1, 1, 2], "tp": [1, 2, 8]}


def workload_drawn(pick):
    model = model_drawn(pick)
    degrees = {name: pick(values) for name, values in DEGREES.items()}
    pp = degrees["pp"]
    schedule = pick(["gpipe", "1f1b", "interleave_1f1b", "zbv_zero_bubble", "interleave_zero_bubble"])
    precision = pick(["bfloat16", "float32", "float8", "mxfp8", "nvfp4"])
    return Workload(
        model=model,
        layout=Layout(ep=pick([1, 2]) if model.num_experts and degrees["dp_shard"] > 1 else 1, **degrees),
        num_microbatches=pp * pick([1, 2, 3]),
        schedule=schedule if pp > 1 else "1f1b",
        stages_per_rank=1 if pp == 1 or schedule in ("gpipe", "1f1b") else 2,
        precision=precision,
        float8_recipe=pick(["tensorwise", "rowwise", "current_scaling"]) if precision == "float8" else "",
        param_bytes=4 if precision == "float32" else 2,
        zero_stage=3 if model.adapted else pick([3, 3, 3, 2, 1, 0]),
        **{name: pick(values) for name, values in CHOICES.items()},
    )


def plan_of(number):
    """Names of what is largest, and numbers: of the last rank, of the fullest at its peak, of a step."""
    pick = Random(number).choice
    work = workload_drawn(pick)
    gpu = pick([*KNOWN.values()])
    gpu = pick([gpu, shared(gpu, 3), replace(gpu, **MEASURED)])
    counted = memory(work, gpu, counting=pick(["tensors", "allocated", "reserved", "reserved"]))
    seconds = step_time(work, gpu)
    estimates = (rank_bytes(work, work.layout.pp - 1), counted.parts, seconds.parts)
    return f"{counted.note}; {seconds.note}", [value for parts in estimates for value in parts.values()]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_plan_has_its_golden_numbers(number):
    """After a deliberate change this module, run with ``tests`` on the path, writes them anew; give the reason."""
    note, values = plan_of(number)
    numbers, _, want = PLANS.read_text().splitlines()[1 + number].partition(" # ")
    assert values == pytest.approx([float(text) for text in numbers.split()], rel=1e-5)
    assert note == want


if __name__ == "__main__":
    lines = ["# reason: first written"]
    for number in NUMBERS:
        note, values = plan_of(number)
        lines.append(" ".join(f"{value:.6g}" for value in values) + f" # {note}")
    PLANS.write_text("\n".join(lines) + "\n")
