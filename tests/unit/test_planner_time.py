"""The closed form of time: its parts, what it is made of, and the hardware that it is for."""

import time
import timeit
from dataclasses import replace

import pytest
from harness import llama
from planner.trainers import TRAINERS, Other, planned_speed

from crius.config.layout import Layout
from crius.errors import ConfigError
from crius.models.registry import SPECS
from crius.tools.plan.hardware import ALIASES, KNOWN, hardware
from crius.tools.plan.holdings import model_parameters
from crius.tools.plan.rates import TIME, linears, rates
from crius.tools.plan.shapes import NOT_TRAINABLE_YET, trained_as
from crius.tools.plan.time import Communication, all_to_all, exposed, group, step_time, tokens_per_second
from crius.tools.plan.workload import Workload

LLAMA3 = {flavor: llama(flavor) for flavor in SPECS["llama3"].flavors}
H100, A100, CPU = KNOWN["h100-80g"], KNOWN["a100-80g"], KNOWN["cpu"]
PARTS = {"matmul", "attention", "elementwise", "bubble", "optimizer", "other"}
PARTS |= {f"communication_{axis}" for axis in ("fsdp", "tp", "cp", "ep", "pp", "dp")}


def workload(flavor="8b", **changes):
    degrees = {
        name: changes.pop(name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep") if name in changes
    }
    return Workload(model=LLAMA3[flavor], layout=Layout(**degrees or {"dp_shard": 8}), seq_len=8192, **changes)


@pytest.mark.parametrize("gpu", KNOWN.values(), ids=list(KNOWN))
def test_parts_of_a_step_are_named_and_sum_to_it(gpu):
    found = step_time(workload(dp_shard=8, tp=2, pp=2, cp=2, num_microbatches=4), gpu)
    assert set(found.parts) == PARTS
    assert all(seconds >= 0 for seconds in found.parts.values())
    assert found.total == sum(found.parts.values())
    assert found.note == max(found.parts, key=found.parts.__getitem__)


def test_an_axis_that_is_not_used_costs_nothing():
    parts = step_time(workload(dp_shard=1), H100).parts
    assert {name for name, seconds in parts.items() if seconds == 0} == {
        "bubble",
        *(f"communication_{axis}" for axis in ("fsdp", "tp", "cp", "ep", "pp", "dp")),
    }


@pytest.mark.parametrize(("microbatches", "stages"), [(8, 1), (32, 1), (8, 2), (32, 4)])
def test_the_bubble_is_that_of_narayanan(microbatches, stages):
    """(p - 1) / (v m) of what the microbatches take; FSDP over one rank sends nothing once a step."""
    one = workload(pp=4, num_microbatches=microbatches, stages_per_rank=stages, schedule="interleave_1f1b")
    parts = step_time(one, H100).parts
    repeated = sum(parts[name] for name in PARTS - {"bubble", "optimizer", "other"})
    repeated += parts["other"] - TIME.step_seconds
    assert parts["bubble"] == pytest.approx(3 / stages / microbatches * repeated)


def test_fsdp_sees_all_network_cards_of_a_node_and_under_tensor_parallelism_one():
    alone, beside_tp = group(64, 1, H100, TIME), group(64, 8, H100, TIME)
    assert beside_tp.bandwidth == H100.nic_bandwidth * TIME.nic
    assert alone.bandwidth == min(H100.link_bandwidth * TIME.link, 8 * beside_tp.bandwidth)
    assert group(8, 1, H100, TIME).bandwidth == H100.link_bandwidth * TIME.link
    assert beside_tp.latency == pytest.approx(8 * alone.latency)  # 64 nodes against 8


def test_what_compute_hides_costs_only_its_share():
    assert exposed(3.0, 10.0, 0.1) == pytest.approx(0.3)
    assert exposed(12.0, 10.0, 0.1) == pytest.approx(2.0 + 1.0)
    assert exposed(12.0, 0.0, 0.1) == 12.0


def test_tokens_to_experts_of_other_nodes_take_the_network_card():
    inside = all_to_all(8, 1, H100, TIME, 1e9)
    assert inside == pytest.approx(1e9 * 7 / 8 / (H100.link_bandwidth * TIME.link) + TIME.hop_seconds)
    assert all_to_all(32, 1, H100, TIME, 1e9) == pytest.approx(
        1e9 * 24 / 32 / (H100.nic_bandwidth * TIME.nic) + TIME.hop_seconds
    )
    assert all_to_all(1, 1, H100, TIME, 1e9) == 0


@pytest.mark.parametrize("flavor", LLAMA3)
def test_weights_that_are_sent_are_the_models_matrices(flavor):
    """All but the norms, which are less than a thousandth."""
    one = workload(flavor, dp_shard=8)
    sent = Communication(one, H100, TIME)
    assert sent.weights == pytest.approx(model_parameters(one.model), rel=2e-3)
    assert sent.own_weights * 8 == pytest.approx(sent.weights)


def test_float8_all_gather_leaves_experts_in_bfloat16():
    mixtral = SPECS["mixtral"].describe("8x7b")
    one = Workload(model=mixtral, layout=Layout(dp_shard=64), seq_len=4096, precision="float8")
    both = [Communication(replace(one, float8_all_gather=wide), H100, TIME)._gathers()[0] for wide in (False, True)]
    experts = 32 * 8 * 3 * 4096 * 14336
    assert both[1] / both[0] == pytest.approx(1 - (1 - experts / mixtral.num_parameters) / 2, rel=0.02)


@pytest.mark.parametrize("name", ["deepseek-v3-671b", "qwen3-235b-a22b", "gpt-oss-120b", "mixtral-8x7b"])
def test_active_parameters_of_experts_are_as_published(name):
    """37, 22, 5.1 and 12.9 billion a token, with or without the embedding (the model cards)."""
    active = {"deepseek-v3-671b": 37, "qwen3-235b-a22b": 22, "gpt-oss-120b": 5.1, "mixtral-8x7b": 12.9}[name]
    found = trained_as(name, "")
    shape = SPECS[found[0]].describe(found[1]) if found else NOT_TRAINABLE_YET[name]
    weights = shape.matmul_parameters / 1e9
    embedding = shape.vocab_size * shape.dim / 1e9
    assert weights - embedding <= active * 1.02 and weights + embedding >= active * 0.98


def test_tensor_parallelism_splits_the_last_matmuls_input_and_the_others_output():
    _, layer = LLAMA3["8b"].dense
    assert linears(layer, 2)[-3:] == ((4096, 14_336 / 2), (14_336 / 2, 4096), (4096, 14_336 / 2))
    assert sum(a * b for a, b in linears(layer, 4)) == layer.matmul_parameters / 4


def test_float8_is_faster_where_matmuls_are_large_and_compiled():
    def seconds(**changes):
        one = workload("70b", dp_shard=64, activation_checkpoint="full", **changes)
        return step_time(one, H100).total

    assert seconds(compile=True, precision="float8", float8_recipe="tensorwise") < 0.85 * seconds(compile=True)
    assert seconds(compile=True, precision="float8", float8_recipe="rowwise") < seconds(compile=True)


def test_float32_is_slower_than_bfloat16_by_the_peaks():
    assert step_time(workload(precision="float32", param_bytes=4), H100).total > 8 * step_time(workload(), H100).total


def test_what_a_calibration_measures_replaces_what_is_fitted():
    one = workload("debug", dp_shard=1, precision="float32", param_bytes=4)
    found = replace(CPU, matmul_efficiency=0.5, attention_efficiency=0.2, memory_efficiency=0.4, op_seconds=1e-5)
    slow, fast = step_time(one, found), step_time(one, replace(found, matmul_efficiency=1.0))
    assert slow.parts["matmul"] > fast.parts["matmul"] > slow.parts["matmul"] / 2  # the rest is traffic, which stays
    reached = rates(one, replace(found, measured="today"), TIME)
    assert reached.wide_flops == pytest.approx(0.5 * CPU.float32_flops)
    assert reached.attention_flops == pytest.approx(0.2 * CPU.float32_flops)
    assert reached.bytes == pytest.approx(0.4 * CPU.memory_bandwidth)
    launched = step_time(one, replace(found, op_seconds=2e-5)).total - slow.total
    layers, passes, operations = one.model.num_layers, 3, 60
    assert launched == pytest.approx(layers * passes * operations * 1e-5)


def test_crius_balances_its_stages_and_others_do_not():
    """32 layers and an output layer over 4 ranks: 8 layers and the output layer on the last, or fewer there."""
    one = workload(pp=4, num_microbatches=64)
    other = Other(**vars(one), framework="torchtitan", **TRAINERS["torchtitan"])
    assert planned_speed(one, H100) > planned_speed(other, H100)
    given = replace(one, stage_layers=(8, 8, 8, 8))
    assert planned_speed(given, H100) == pytest.approx(planned_speed(other, H100))


def test_a_plan_takes_less_than_half_a_millisecond_of_the_cpu():
    """A tenth on a quiet machine. The search asks for tens of thousands; the best of many, as others may run."""
    one = workload(dp_shard=8, tp=8, pp=4, cp=2, num_microbatches=8)
    seconds = timeit.repeat(lambda: step_time(one, H100), timer=time.process_time, number=50, repeat=20)
    assert min(seconds) / 50 < 5e-4


def test_known_hardware_is_consistent():
    for name, one in KNOWN.items():
        assert one.name == name
        assert one.bfloat16_flops > 0 and one.memory_bandwidth > 1e9 and one.link_bandwidth >= one.nic_bandwidth
        assert one.float8_flops in (0, pytest.approx(2 * one.bfloat16_flops, rel=0.01))
    assert {KNOWN[name].name for name in ALIASES.values()} == set(ALIASES.values())
    assert hardware("H100") is KNOWN["h100-80g"]
    assert KNOWN["h100-96g"].power == pytest.approx(5 / 7)


def test_a_hardware_file_takes_the_rest_from_a_known_gpu(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('like = "h100-80g"\nnic_bandwidth = 1e9\ngpus_per_node = 4\n')
    assert hardware(str(file)) == replace(H100, name="mine", nic_bandwidth=1e9, gpus_per_node=4)
    slow, fast = (tokens_per_second(workload(dp_shard=64), gpu) for gpu in (hardware(str(file)), H100))
    assert slow < fast / 2


def test_a_hardware_file_reports_all_its_problems(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = 3\nbfloat16_flops = "many"\nmatmul_efficiency = 70\nwatt = 1\nfloat32_flops = -1\ngeneration = "x"\n'
    )
    with pytest.raises(ConfigError) as caught:
        hardware(str(file))
    for text in ("name = 3", "'many'", "not a percentage", "'watt'", "float32_flops = -1", "generation = 'x'", "lacks"):
        assert text in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("like", ["3", "[1]", '"voodoo2"'])
def test_a_hardware_file_may_only_be_like_a_known_gpu(tmp_path, like):
    file = tmp_path / "mine.toml"
    file.write_text(f"like = {like}\n")
    with pytest.raises(ConfigError, match="is not known"):
        hardware(str(file))


@pytest.mark.parametrize("text", ["not = [toml", "\x00"])
def test_a_damaged_hardware_file_is_named(tmp_path, text):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="mine.toml cannot be read"):
        hardware(str(file))


def test_an_unknown_gpu_is_told_the_known_ones():
    with pytest.raises(ConfigError, match="h100-96g"):
        hardware("voodoo2")
