"""Stages, microbatches and bubbles of a pipeline: arithmetic, without a process group."""

from itertools import combinations

import pytest
import torch
from harness import llama

from crius.config.parallelism import ParallelismConfig
from crius.config.pipeline import (
    EMBEDDING_COST,
    SPLIT_BACKWARD,
    cost,
    describe_stages,
    is_layer,
    join_names,
    legal_microbatches,
    microbatch_unit,
    microbatches_allowed,
    num_stages,
    placement,
    settle_stages,
    split_stages,
    splits_backward,
    stages_per_rank,
)
from crius.config.resolve import BatchSizes, batch_sizes, open_microbatches
from crius.config.schedule import read_schedule, run_order
from crius.config.training import TrainingConfig
from crius.errors import LayoutError
from crius.models import registry
from crius.parallel.pipeline import forward_steps
from crius.parallel.stages import TORCH_SCHEDULES, order_of, prune, simulate, stage_costs, stage_table


def pipeline(degree, schedule="1f1b", **fields):
    names = {f"pipeline_parallel_{name}": value for name, value in fields.items()}
    return ParallelismConfig(pipeline_parallel_degree=degree, pipeline_parallel_schedule=schedule, **names)


def modules(num_layers, **sizes):
    return llama(num_layers=num_layers, **sizes).modules(31)


def layers(stages):
    return [sum(map(is_layer, names)) for names in stages]


@pytest.mark.parametrize("schedule", TORCH_SCHEDULES)
@pytest.mark.parametrize("num_layers", [30, 31, 32])
def test_every_module_is_on_one_stage_and_every_stage_has_a_layer(schedule, num_layers):
    parallelism, whole = pipeline(4, schedule), modules(num_layers)
    stages = split_stages(whole, num_stages(parallelism), parallelism)
    assert [name for names in stages for name in names] == [module.name for module in whole]
    assert sum(layers(stages)) == num_layers and min(layers(stages)) >= 1
    assert stages[0][0] == "tok_embeddings" and stages[-1][-2:] == ("norm", "output")


def test_a_large_output_layer_gets_fewer_layers():
    stages = split_stages(modules(16, vocab_size=20_000), 4, pipeline(4))
    assert layers(stages)[3] == min(layers(stages)) < layers(stages)[1]


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_the_greatest_cost_is_as_small_as_any_cut_makes_it(stages):
    whole = modules(9, vocab_size=3000)
    names = [module.name for module in whole]
    found = stage_costs(whole, split_stages(whole, stages, pipeline(stages)))
    cuts = [(0, *cut, len(names)) for cut in combinations(range(2, 10), stages - 1)]  # before layers 1 to 8
    every = [stage_costs(whole, [names[a:b] for a, b in zip(cut, cut[1:], strict=False)]) for cut in cuts]
    least = min(map(max, every)) * (1 + 1e-12)  # sum order
    squares = min(sum(cost * cost for cost in costs) for costs in every if max(costs) <= least)
    assert max(found) <= least and sum(cost * cost for cost in found) == pytest.approx(squares, rel=1e-12)


def test_a_lookup_costs_half_a_flop_for_each_parameter():
    embeddings, _, norm, output = modules(1)
    assert (EMBEDDING_COST, cost(output)) == (0.5, output.flops_per_token)
    assert [cost(part) for part in (embeddings, norm)] == [embeddings.parameters / 2, norm.parameters / 2]


@pytest.mark.parametrize("schedule", TORCH_SCHEDULES)
def test_without_a_pipeline_one_rank_has_one_stage_and_takes_any_microbatches(schedule):
    alone = pipeline(1, schedule)
    assert (num_stages(alone), placement(alone), splits_backward(alone)) == (1, [[0]], False)
    assert microbatch_unit(alone) == 1 and legal_microbatches(alone, 3) == [1, 3]


@pytest.mark.parametrize(
    ("num_layers", "stages", "first", "last", "want"),
    [
        (9, 4, 0, 0, [2, 3, 2, 2]),
        (11, 4, 0, 0, [3, 3, 3, 2]),
        (9, 4, 2, 1, [1, 3, 3, 2]),
    ],
)
def test_layers_are_dealt_evenly_and_the_rest_goes_to_the_middle(num_layers, stages, first, last, want):
    parallelism = pipeline(stages, first_stage_less_layers=first, last_stage_less_layers=last)
    assert layers(split_stages(modules(num_layers), stages, parallelism)) == want


def test_less_layers_on_the_first_and_last_stage():
    parallelism = pipeline(4, first_stage_less_layers=1, last_stage_less_layers=1)
    assert layers(split_stages(modules(30), 4, parallelism)) == [7, 8, 8, 7]
    with pytest.raises(LayoutError, match="leave a stage with"):
        split_stages(modules(4), 4, parallelism)


EXPLICIT = {
    ("tok_embeddings,layers.0-2", "layers.3,norm,output"): "",
    ("tok_embeddings,layers.0-2", "layer.3,norm,output"): "no module layer.3, did you mean layers.3",
    ("tok_embeddings,layers.0-2", "layers.2-3,norm,output"): "layers.2 is on 2 stages",
    ("tok_embeddings,layers.0-1", "layers.3,norm,output"): "no stage has module layers.2",
    ("tok_embeddings,layers.1,layers.0,layers.2", "layers.3,norm,output"): "layers.1 is out of order",
    ("tok_embeddings", "layers.0-3,norm,output"): "stage 0 has no layer",
    ("tok_embeddings,layers.0-3,norm,output",): "1 lists of modules are given, but there are 2 stages",
}


@pytest.mark.parametrize(("given", "message"), EXPLICIT.items())
def test_explicit_modules(given, message):
    parallelism = pipeline(2, module_names_per_stage=given)
    if message:
        with pytest.raises(LayoutError, match=message):
            split_stages(modules(4), 2, parallelism)
    else:
        assert layers(split_stages(modules(4), 2, parallelism)) == [3, 1]


def test_names_are_shown_as_they_are_given():
    names = ["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.4", "output"]
    assert join_names(names) == "tok_embeddings, layers.0-2, layers.4, output"


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["interleave_1f1b", "interleave_zero_bubble", "zbv_zero_bubble", "dualpipev"])
def test_legal_microbatches_are_what_torch_takes(schedule, degree):
    parallelism = pipeline(degree, schedule)
    for count in range(1, 21):
        try:
            order_of(parallelism, count)  # builds torch's schedule
            is_taken = True
        except ValueError:
            is_taken = False
        assert microbatches_allowed(parallelism, count) == is_taken, count


def test_1f1b_needs_a_microbatch_for_each_stage():
    assert legal_microbatches(pipeline(4), 24) == [4, 6, 8, 12, 24]
    assert legal_microbatches(pipeline(4, "gpipe"), 6) == [1, 2, 3, 6]


@pytest.mark.parametrize(
    ("given", "ranks", "unit", "sizes", "choices"),
    [
        # sequences of a microbatch (or -1) and of a step; the unit of microbatches
        ((-1, 48), 2, 1, BatchSizes(8, 48, 3), [8, 6, 4, 3, 2, 1]),
        ((-1, 48), 2, 2, BatchSizes(3, 48, 8), [3, 2, 1]),
        ((-1, 24), 1, 5, BatchSizes(1, 24, 24), [1]),
        ((-1, 6), 1, 2, BatchSizes(1, 6, 6), [1]),
        ((-1, -1), 2, 3, BatchSizes(1, 12, 6), [1]),
        ((2, -1), 2, 3, BatchSizes(2, 12, 3), [2]),
    ],
)
def test_a_microbatch_leaves_four_for_each_place_of_the_pipeline(given, ranks, unit, sizes, choices):
    training = TrainingConfig(local_batch_size=given[0], global_batch_size=given[1])
    assert batch_sizes(training, ranks, unit) == sizes
    assert open_microbatches(training, ranks, unit) == choices


@pytest.mark.parametrize("schedule", TORCH_SCHEDULES)
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_every_multiple_of_the_unit_is_legal_and_runs_to_its_end(schedule, degree):
    parallelism = pipeline(degree, schedule)
    for count in range(microbatch_unit(parallelism), 30, microbatch_unit(parallelism)):
        order = order_of(parallelism, count)
        assert microbatches_allowed(parallelism, count)
        assert len(run_order(order)) == sum(map(len, order))
        assert [sorted({action.stage for action in row}) for row in order] == placement(parallelism)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("schedule", TORCH_SCHEDULES)
def test_the_bubble_is_what_the_papers_say(schedule, degree):
    parallelism, count = pipeline(degree, schedule), 4 * degree
    chunks = stages_per_rank(parallelism)
    bubble = simulate(order_of(parallelism, count), [1.0] * num_stages(parallelism)).bubble
    closed = (degree - 1) / (count * chunks + degree - 1)  # arXiv:2104.04473, section 2.2, as a share of the step
    if schedule in SPLIT_BACKWARD:
        assert bubble < closed / 2
    else:
        assert bubble == pytest.approx(closed, rel=1e-9)  # the same sum in another order


def test_1f1b_holds_as_many_microbatches_as_stages_follow_and_gpipe_all():
    assert simulate(order_of(pipeline(4), 16), [1.0] * 4).in_flight == [4, 3, 2, 1]
    assert simulate(order_of(pipeline(4, "gpipe"), 16), [1.0] * 4).in_flight == [16] * 4
    assert simulate(order_of(pipeline(4), 16), [1.0] * 4).step == 3 * (16 + 4 - 1)


def test_what_a_rank_holds_counts_all_its_stages():
    timeline = simulate(order_of(pipeline(2, "zbv_zero_bubble"), 8), [1.0] * 4)
    assert timeline.in_flight == [4, 3, 2, 1]
    assert timeline.peak(0, [10, 0, 0, 0]) == 40
    assert timeline.peak(0, [1, 0, 0, 1]) == max(timeline.peak(0, [1, 0, 0, 0]), 4)


def write(path, order):
    path.write_text("\n".join(",".join(f"{a.stage}{a.kind}{a.microbatch}" for a in row) for row in order) + "\n")
    return str(path)


@pytest.mark.parametrize("schedule", TORCH_SCHEDULES)
def test_a_schedule_file_says_what_the_schedule_said(schedule, tmp_path):
    known = pipeline(2, schedule)
    path = write(tmp_path / "a.csv", order_of(known, 4))
    file = pipeline(2, schedule_csv=path)
    assert read_schedule(file) == order_of(known, 4)
    assert (stages_per_rank(file), placement(file)) == (stages_per_rank(known), placement(known))
    assert splits_backward(file) == splits_backward(known) == (schedule in SPLIT_BACKWARD)
    assert legal_microbatches(file, 16) == [4, 8, 16]  # it is repeated
    assert len(run_order(order_of(file, 8))) == 2 * sum(map(len, order_of(known, 4)))


@pytest.mark.parametrize(("degree", "layers", "stages"), [(8, 7, 2), (8, 8, 1), (8, 15, 1), (8, 16, 2), (2, 3, 1)])
def test_interleaved_stages_are_as_many_as_the_model_has_layers_for(degree, layers, stages):
    settled = settle_stages(pipeline(degree, "interleave_1f1b"), layers)
    assert stages_per_rank(settled) == stages
    assert bool(describe_stages(settled)) == (stages == 1) and not describe_stages(pipeline(degree))


def test_other_schedules_and_explicit_stages_are_left_alone():
    for given in (pipeline(8, "interleave_zero_bubble"), pipeline(8, "interleave_1f1b", stages_per_rank=2)):
        assert settle_stages(given, 8) == given


def test_interleaving_one_stage_a_rank_has_the_bubble_of_1f1b():
    interleaved = settle_stages(pipeline(4, "interleave_1f1b"), 4)
    bubbles = [simulate(order_of(p, 8), [1.0] * 4).bubble for p in (interleaved, pipeline(4, "1f1b"))]
    assert bubbles[0] == bubbles[1] > 0


BAD_FILES = {
    "0F0,0B0\n": "has 1 rows of actions, but pipeline_parallel_degree is 2",
    "0F0,0SEND_F0,0B0\n1F0,1B0\n": "row 1 has '0SEND_F0'",
    "0F0,0B0\n0F1,0B1\n": "and each stage one rank",
    "0F0,0B0\n1F0\n": "does not run stage 1 forward and backward once",
    "0B0,0F0\n1F0,1B0\n": "waits for itself",
    "": "has 0 rows",
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.items())
def test_a_schedule_file_that_cannot_run_is_refused(text, message, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(LayoutError, match=message):
        read_schedule(pipeline(2, schedule_csv=str(path)))


def test_a_missing_schedule_file_is_refused(tmp_path):
    with pytest.raises(LayoutError, match="cannot be read"):
        read_schedule(pipeline(2, schedule_csv=str(tmp_path / "none.csv")))


def test_the_stage_table_sums_to_the_model():
    parallelism, whole = pipeline(4), modules(30)
    stages = split_stages(whole, 4, parallelism)
    timeline = simulate(order_of(parallelism, 16), stage_costs(whole, stages))
    lines = stage_table(whole, stages, placement(parallelism), timeline)
    assert len(lines) == 1 + 4 + 1 + 1
    assert lines[-2].split()[:3] == ["total", "30", f"{sum(module.parameters for module in whole):,}"]
    assert lines[-1].startswith("bubble ")


def test_a_pruned_model_keeps_its_parameter_names():
    facts = llama(num_layers=4)
    with torch.device("meta"):
        whole = registry.build(facts)
    names = []
    for stage in split_stages(facts.modules(31), 2, pipeline(2)):
        with torch.device("meta"):
            part = registry.build(facts)
        prune(part, stage)
        names += [name for name, _ in part.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]


@pytest.mark.parametrize("schedule", ["1f1b", "interleave_1f1b", "zbv_zero_bubble"])
def test_a_forward_pass_keeps_the_ranks_busy(schedule):
    """Each rank waits only for the first microbatch to arrive and while the last one leaves."""
    ranks = placement(pipeline(4, schedule))
    steps = forward_steps(tuple(map(tuple, ranks)), 8)
    done = [action for actions in steps for action in actions if action is not None]
    assert sorted(done) == [(stage, number) for stage in range(4 * len(ranks[0])) for number in range(8)]
    assert len(steps) <= 8 * len(ranks[0]) + 4 * len(ranks[0])
