"""What must hold of memory and time whatever the layout: thousands of random workloads, the same ones in every run."""

from dataclasses import replace
from random import Random

import pytest
from harness import llama
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from crius.config.layout import Layout
from crius.models.registry import SPECS
from crius.tools.plan.hardware import KNOWN
from crius.tools.plan.holdings import stage_layers
from crius.tools.plan.memory import memory
from crius.tools.plan.shapes import NOT_TRAINABLE_YET, planned
from crius.tools.plan.time import step_time
from crius.tools.plan.workload import Workload

EXPERTS = [*NOT_TRAINABLE_YET.values(), SPECS["qwen3_moe"].describe("30b-a3b"), SPECS["mixtral"].describe("8x7b")]
DENSE = {name: llama(name) for name in SPECS["llama3"].flavors}
GPUS = [gpu for gpu in KNOWN.values() if gpu.generation != "cpu"]
MODES = ("none", "selective", "full")
SLACK = 1 + 1e-9  # sums in another order

often = settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def with_layers(model, number):
    """``model`` with another number of layers, of which those with a dense feed-forward stay."""
    config = replace(model.config, num_layers=number)
    if not model.num_experts:
        return llama(config)
    return planned("other", replace(config, num_dense_layers=min(config.num_dense_layers, number - 1)))


@st.composite
def workloads(draw, pipeline=None, tensor=None, experts=None):
    """Any legal mix of degrees, batch and options of a known model; the arguments force an axis on or off.

    Hypothesis draws a seed, which is much faster than drawing every choice.
    """
    pick = Random(draw(st.integers(0, 2**32 - 1))).choice
    with_experts = pick([True, False]) if experts is None else experts
    model = pick(EXPERTS if with_experts else [*DENSE.values()])
    if pick([True, False, False]):  # of few layers, where no moment is like another
        few = pick([1, 2, 3, 5])
        model = with_layers(model, few)
    tp = pick([2, 4, 8] if tensor else [1] if tensor is False else [1, 1, 2, 4, 8])
    assume(model.num_heads % tp == 0 and (model.num_kv_heads % tp == 0 or tp % model.num_kv_heads == 0))
    pp = pick([2, 4] if pipeline else [1] if pipeline is False else [1, 1, 2, 4])
    assume(pp <= model.num_layers)
    layout = Layout(
        pp=pp,
        tp=tp,
        dp_replicate=pick([1, 1, 2]),
        dp_shard=pick([1, 2, 8, 64]),
        cp=pick([1, 1, 2, 4]),
    )
    if with_experts:
        inner = layout.fsdp * tp
        degrees = [ep for ep in (1, 2, 4, 8) if inner % ep == 0 and model.num_experts % ep == 0]
        layout = replace(layout, ep=pick(degrees))
    interleaved = pp > 1 and 2 * pp <= model.num_layers and pick([True, False])
    compiled = pick([True, False])
    precision = pick(["bfloat16", "float8", "float32"] if compiled else ["bfloat16", "float32"])
    loss = pick(["eager", "compiled", "chunked"])
    return Workload(
        model=model,
        layout=layout,
        seq_len=pick([128, 1024, 2048, 4096, 8192, 32_768]),
        microbatch=pick([1, 2, 4]),
        num_microbatches=pp * pick([1, 2, 4, 8]),
        # as a run would split them at one length: another split is another run
        stage_layers=stage_layers(model, pp * (2 if interleaved else 1), 8192) if pp > 1 else (),
        schedule="interleave_1f1b" if interleaved else "1f1b",
        stages_per_rank=2 if interleaved else 1,
        activation_checkpoint=pick(MODES),
        compile=compiled,
        precision=precision,
        param_bytes=4 if precision == "float32" else 2,
        moment_bytes=pick([4, 2]),
        reshard=pick(["default", "never"]) if pp == 1 else "default",
        gradient_sync="deferred" if pp > 1 else pick(["immediate", "deferred"]),
        async_tp=tp > 1 and compiled and pick([True, False]),
        loss=loss,
        loss_tokens=pick([256, 1000, 4096]) if loss == "chunked" else None,
        score_tokens=256 if loss == "chunked" else 0,
    )


gpus = st.sampled_from(GPUS)


def nbytes(work):
    return memory(work).total


def seconds(work, gpu):
    return step_time(work, gpu).total


def state(work):
    """Bytes that stay from step to step, of the rank that holds most at the peak: weights and optimizer state."""
    parts = memory(work).parts
    return parts["parameters"] + parts["optimizer"]


@pytest.mark.full
@often
@given(workloads(), gpus)
def test_parts_are_not_negative_and_sum_to_the_total(work, gpu):
    for found in (memory(work, gpu), step_time(work, gpu)):
        assert found.total > 0
        assert min(found.parts.values()) >= 0
        assert sum(found.parts.values()) == pytest.approx(found.total, rel=0.01)


@often
@given(workloads(pipeline=False))
def test_more_shards_never_hold_more_state(work):
    more = replace(work, layout=replace(work.layout, dp_shard=2 * work.layout.dp_shard))
    assert state(more) <= state(work) * SLACK


@often
@given(workloads())
def test_more_shards_never_take_more_memory(work):
    assume(work.layout.dp_shard > 1)  # the first split brings the buffers to gather into
    more = replace(work, layout=replace(work.layout, dp_shard=2 * work.layout.dp_shard))
    assert nbytes(more) <= nbytes(work) * SLACK


@often
@given(workloads(pipeline=False))
def test_more_replicas_never_hold_more_state(work):
    more = replace(work, layout=replace(work.layout, dp_replicate=2 * work.layout.dp_replicate))
    assert state(more) <= state(work) * SLACK


@often
@given(workloads(pipeline=False))
def test_a_pipeline_never_holds_more_state(work):
    assume(work.model.num_layers >= 8 and not work.model.tied_embeddings)
    stages = stage_layers(work.model, 2, 8192)
    more = replace(work, layout=replace(work.layout, pp=2), num_microbatches=2, stage_layers=stages)
    assert state(more) <= state(work) * SLACK


@often
@given(workloads())
def test_recomputing_more_never_keeps_more_activations(work):
    found = [memory(replace(work, activation_checkpoint=mode)) for mode in MODES]
    assume(len({one.note for one in found}) == 1)  # at one moment
    kept = [one.parts["activations"] + one.parts["pipeline_in_flight"] for one in found]
    assert kept == sorted(kept, reverse=True)


@often
@given(workloads())
def test_recomputing_more_never_takes_more_memory(work):
    found = [nbytes(replace(work, activation_checkpoint=mode)) for mode in MODES]
    assert found[1] <= found[0] * SLACK
    assert found[2] <= found[1] * SLACK


@often
@given(workloads(), gpus, st.sampled_from([1, 2, 3]))
def test_recomputing_some_layers_is_between_none_and_all(work, gpu, every):
    found = [replace(work, activation_checkpoint=mode) for mode in MODES]
    found[1] = replace(found[1], selective_layers=every)
    bytes_of, seconds_of = ([of(one) for one in found] for of in (nbytes, lambda one: seconds(one, gpu)))
    assert bytes_of[2] / SLACK <= bytes_of[1] <= bytes_of[0] * SLACK
    assert seconds_of[0] / SLACK <= seconds_of[1] <= seconds_of[2] * SLACK


@often
@given(workloads(), gpus)
def test_more_layers_take_no_fewer_bytes_and_no_less_time(work, gpu):
    assume(work.model.num_layers > 1)  # the sums of both ends of a model meet in its only layer
    each = work.layout.pp * work.stages_per_rank
    deeper = with_layers(work.model, work.model.num_layers + each)
    layers = tuple(size + 1 for size in work.stage_layers)
    assert nbytes(replace(work, model=deeper, stage_layers=layers)) >= nbytes(work) / SLACK
    assert seconds(replace(work, model=deeper, stage_layers=layers), gpu) >= seconds(work, gpu) / SLACK


@often
@given(workloads(pipeline=True))
def test_1f1b_never_takes_more_memory_than_gpipe(work):
    one = replace(work, schedule="1f1b", stages_per_rank=1, stage_layers=())
    assert nbytes(one) <= nbytes(replace(one, schedule="gpipe")) * SLACK


@often
@given(workloads(), gpus)
def test_recomputing_more_is_never_faster(work, gpu):
    found = [seconds(replace(work, activation_checkpoint=mode), gpu) for mode in MODES]
    assert found[0] <= found[1] * SLACK
    assert found[1] <= found[2] * SLACK


@often
@given(workloads(tensor=True), gpus)
def test_async_tensor_parallelism_is_never_slower(work, gpu):
    compiled = replace(work, compile=True)
    assert seconds(replace(compiled, async_tp=True), gpu) <= seconds(replace(compiled, async_tp=False), gpu) * SLACK


@often
@given(workloads(pipeline=True), gpus)
def test_more_microbatches_never_make_a_larger_bubble(work, gpu):
    few = step_time(work, gpu)
    many = step_time(replace(work, num_microbatches=2 * work.num_microbatches), gpu)
    assert many.parts["bubble"] / many.total <= few.parts["bubble"] / few.total * SLACK


@often
@given(workloads(pipeline=True), gpus)
def test_more_stages_a_rank_never_make_a_larger_bubble(work, gpu):
    stages = 2 * work.layout.pp
    assume(work.model.num_layers % stages == 0)  # else one of them cannot split as evenly as the other
    each = work.model.num_layers // stages
    two = replace(work, schedule="interleave_1f1b", stages_per_rank=2, stage_layers=(each,) * stages)
    one = replace(work, schedule="1f1b", stages_per_rank=1, stage_layers=(2 * each,) * work.layout.pp)
    assert step_time(two, gpu).parts["bubble"] <= step_time(one, gpu).parts["bubble"] * SLACK


@often
@given(workloads(), gpus, st.sampled_from([1, 8, 0]))
def test_longer_sequences_take_no_fewer_bytes_and_no_less_time(work, gpu, more):
    """By the least that a layout allows, by eight times that, and twice as long."""
    unit = 2 * work.layout.cp * work.layout.tp
    longer = replace(work, seq_len=work.seq_len + (more * unit or work.seq_len))
    assert nbytes(longer) >= nbytes(work) / SLACK
    assert seconds(longer, gpu) >= seconds(work, gpu) / SLACK


@often
@given(workloads(), gpus)
def test_larger_microbatches_take_no_fewer_bytes_and_no_less_time(work, gpu):
    larger = replace(work, microbatch=work.microbatch + 1)
    assert nbytes(larger) >= nbytes(work) / SLACK
    assert seconds(larger, gpu) >= seconds(work, gpu) / SLACK


@often
@given(workloads(), gpus)
def test_more_microbatches_take_longer_and_no_fewer_bytes(work, gpu):
    # one microbatch defers nothing, and its gradients are copied to be reduced; those that were added up are not
    assume(work.gradient_sync == "immediate" or work.num_microbatches > 1)
    more = replace(work, num_microbatches=2 * work.num_microbatches)
    assert nbytes(more) >= nbytes(work) / SLACK
    assert seconds(more, gpu) > seconds(work, gpu)


@often
@given(workloads(pipeline=False), gpus)
def test_weights_that_stay_gathered_take_more_memory_and_no_more_time(work, gpu):
    stays, goes = replace(work, reshard="never"), replace(work, reshard="default")
    assert nbytes(stays) >= nbytes(goes) / SLACK
    assert seconds(stays, gpu) <= seconds(goes, gpu) * SLACK


@often
@given(workloads(pipeline=False, experts=False), gpus)  # experts that EP splits wholly have nothing to defer
def test_deferred_gradients_take_more_memory_and_no_more_time(work, gpu):
    assume(work.layout.fsdp > 1)  # there is nothing to defer without shards
    assume(work.layout.fsdp > 2 or work.layout.dp_replicate == 1)  # what replicas sum of two shards is as large as both
    accumulates = replace(work, num_microbatches=2 * work.num_microbatches)
    deferred = replace(accumulates, gradient_sync="deferred")
    immediate = replace(accumulates, gradient_sync="immediate")
    assert nbytes(deferred) >= nbytes(immediate) / SLACK
    assert seconds(deferred, gpu) <= seconds(immediate, gpu) * SLACK


@often
@given(workloads())
def test_smaller_numbers_never_take_more_memory(work):
    assert nbytes(replace(work, moment_bytes=2)) <= nbytes(replace(work, moment_bytes=4)) * SLACK
    if work.precision != "float32":  # which computes with copies in float32 of smaller weights
        assert nbytes(replace(work, weight_bytes=2)) <= nbytes(replace(work, weight_bytes=4)) * SLACK
    assert nbytes(replace(work, cpu_offload=True)) <= nbytes(replace(work, cpu_offload=False)) * SLACK


@often
@given(workloads(), gpus)
def test_a_compiled_step_is_never_slower(work, gpu):
    plain = replace(work, precision="bfloat16", async_tp=False)
    assert seconds(replace(plain, compile=True), gpu) <= seconds(replace(plain, compile=False), gpu) * SLACK


@often
@given(workloads(), gpus, st.sampled_from(["link_bandwidth", "nic_bandwidth", "memory_bandwidth", "bfloat16_flops"]))
def test_better_hardware_is_never_slower(work, gpu, rate):
    better = replace(gpu, **{rate: 2 * getattr(gpu, rate)})
    assert seconds(work, better) <= seconds(work, gpu) * SLACK


@often
@given(workloads(pipeline=False, experts=True))
def test_more_expert_ranks_never_hold_more_state(work):
    assume(work.layout.fsdp * work.layout.tp % (2 * work.layout.ep) == 0)
    more = replace(work, layout=replace(work.layout, ep=2 * work.layout.ep))
    assume(work.model.num_experts % more.layout.ep == 0)
    assert state(more) <= state(work) * SLACK
