"""``activation_checkpoint.mode auto``: the estimate against the measurement, and what is chosen by it."""

import functools
import json
import os
import re
import time
import tomllib

import pytest
from harness import SMALL, parse, read_metrics, run_job, steps_of
from test_rules import facts_of

from crius.cli.settings import run_of
from crius.config.rules_layout import activation_checkpoint_options
from crius.config.run import replace_fields
from crius.host import Machine
from crius.launch.local import run_workers
from crius.tools.dry_run.run import dry_run
from crius.tools.plan.fit import FitCandidate, candidates, choose, fit
from crius.tools.plan.hardware import KNOWN
from crius.tools.plan.memory import memory
from crius.tools.plan.workload import Estimate, from_config
from crius.tools.verify import worker
from crius.tools.verify.parameters import Shards
from crius.tools.verify.run import run as run_task
from crius.tools.verify.worker import WorkerTask
from crius.train import setup
from crius.train.inputs import describe_model, resolve, run_batch_sizes

MODE = "activation_checkpoint.mode"
MODES = ("none", "selective", "full")
AUTO = [f"--{MODE}", "auto"]
TINY = [*SMALL, "--model.num_layers", "2", "--training.steps", "3", "--validation.interval", "0"]


def estimated(config, mode, num_ranks=1, device="dry_run"):
    config = replace_fields(config, {MODE: mode})
    return memory(from_config(config, describe_model(config), num_ranks, device=device), counting="tensors")


def measure(configs, num_ranks, path, placement):
    """Bytes at the peak of a dry run of each, to ``path``."""
    reports = [dry_run(config, num_ranks, 0, time.monotonic()) for config in configs]
    path.write_text(json.dumps([max(rank.peak.total() for rank in report.ranks) for report in reports]))


@pytest.mark.parametrize(
    ("flags", "num_ranks", "modes"),
    [
        (["--training.mixed_precision_param", "float32", "--model.num_layers", "2"], 1, MODES),
        (
            [
                *("--training.mixed_precision_param", "bfloat16"),
                *("--model.flavor", "6m", "--model.num_layers", "2", "--training.seq_len", "2048"),
                *("--training.local_batch_size", "1", "--parallelism.data_parallel_shard_degree", "8"),
            ],
            8,
            ["selective"],
        ),
    ],
    ids=["debug", "6m_fsdp8"],
)
@pytest.mark.long
def test_the_estimate_is_within_5_percent_of_the_dry_run(flags, num_ranks, modes, tmp_path):
    configs = [parse([*flags, f"--{MODE}", mode]) for mode in modes]
    target = functools.partial(measure, configs, num_ranks, tmp_path / "peaks.json")
    assert run_workers(target, 1, tmp_path) == 0
    measured = dict(zip(modes, json.loads((tmp_path / "peaks.json").read_text()), strict=True))
    found = {mode: estimated(configs[0], mode, num_ranks).total for mode in modes}
    assert found == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("budget", "expected"), [(30.0, "none"), (29.0, "selective"), (20.0, "selective"), (19.0, "full"), (1.0, "full")]
)
def test_the_first_that_fits_is_chosen_and_else_the_smallest(budget, expected):
    sizes = zip(MODES, (30.0, 20.0, 10.0), (1.0, 2.0, 3.0), strict=True)
    found = [FitCandidate(mode, 1, Estimate({"activations": size}), seconds) for mode, size, seconds in sizes]
    assert choose(found, budget).mode == expected


def run(flags, run_dir, gib):
    """Train where a rank can have ``gib``."""

    def target(placement):
        setup._memory = lambda ranks: gib * 2**30 / setup.USABLE
        run_job(parse(flags), run_dir, time.monotonic(), placement)

    run_dir.mkdir()
    assert run_workers(target, 1, run_dir) == 0
    records = [(record["loss"], record["grad_norm"]) for record in steps_of(read_metrics(run_dir))]
    return tomllib.loads((run_dir / "run.toml").read_text())["activation_checkpoint"]["mode"], records


def test_a_run_takes_what_fits_and_computes_the_same_bits(tmp_path, capfd):
    """Between the estimates of selective and full, and below all of them."""
    config = parse(TINY)
    sizes = [estimated(config, mode, device="cpu").total / 2**30 for mode in MODES]
    modes, curves = zip(
        run([*TINY, *AUTO], tmp_path / "all", gib=100),
        run([*TINY, *AUTO], tmp_path / "none", gib=sizes[2] / 100),
        strict=True,
    )
    assert modes == ("auto", "auto") and curves[0] == curves[1]  # of run.toml, which decides anew
    log = "".join(capfd.readouterr())
    assert re.findall(r"auto: activation_checkpoint (\w+) with 8 per microbatch", log) == ["none", "full"]
    assert "may not fit: lower --training.local_batch_size" in log


def found_for(flags, ranks=1, device="cuda"):
    """The ways to train these flags on some ranks, and the run, resolved."""
    resolved = resolve(run_of("--config", os.devnull, *flags), Machine(device=device, ranks=ranks))
    return candidates(resolved.config, resolved.model, Machine(device=device, ranks=ranks)), resolved


def test_an_update_in_host_memory_does_not_hide_what_the_gpu_holds():
    """On the host it is the largest moment of the step; on the GPU the activations are, 82 GiB of them."""
    flags = ["--model.flavor", "8b", "--training.seq_len", "8192", "--training.local_batch_size", "2"]
    found, _ = found_for(
        [*flags, "--compile.no_enable", "--training.enable_cpu_offload", "--optimizer.implementation", "foreach"]
    )
    assert choose(found, 72 * 2**30).mode != "none" and found[0].memory.parts["activations"] > 72 * 2**30
    for one in found:
        assert one.memory.note != "update"
        assert [one.memory.parts[name] for name in ("parameters", "gradients", "optimizer")] == [0, 0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_a_snapshot_to_go_back_to_needs_memory_of_the_host_only(mode):
    plain, rollback = parse(TINY), parse([*TINY, "--stability.nonfinite", "rollback"])
    before, after = estimated(plain, mode), estimated(rollback, mode)
    assert after.total - before.total == pytest.approx(before.parts["parameters"] + before.parts["optimizer"])
    on_gpu = [estimated(config, mode, device="cuda") for config in (plain, rollback)]
    assert on_gpu[0].total == on_gpu[1].total


def test_weights_can_be_drawn_where_auto_has_no_batch_to_be_decided_for(tmp_path):
    found = [
        run_task(
            worker.start, WorkerTask(parse([*TINY, *more]), tmp_path / name, 60, Shards(tmp_path, is_whole=True)), 1
        )
        for name, more in (("none", []), ("auto", AUTO))
    ]
    assert found[0].result == found[1].result is not None, found[1].note


@pytest.mark.parametrize(
    ("option", "value"), [("save_ops", "['attention']"), ("selective_option", "2"), ("memory_budget", "0.3")]
)
def test_an_option_that_auto_would_not_heed_is_refused_wherever_it_stands(option, value, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f"[activation_checkpoint]\nmode = 'auto'\n{option} = {value}\n")
    (error,) = activation_checkpoint_options(facts_of(["--config", str(path)]))
    assert f"{option} has no effect with activation_checkpoint.mode auto" in str(error) and str(path) in str(error)
    assert not [*activation_checkpoint_options(facts_of(["--config", str(path), f"--{MODE}", "none"]))]


def test_a_schedule_that_splits_its_backward_keeps_all():
    more = [
        "--model.num_layers",
        "4",
        "--parallelism.pipeline_parallel_degree",
        "2",
        "--parallelism.pipeline_parallel_schedule",
    ]
    found, resolved = found_for([*TINY, *more, "zbv_zero_bubble"], ranks=2)
    assert {one.mode for one in found} == {"none"} and resolved.config.compile.enable is False
    asked = replace_fields(resolved.config, {"training.local_batch_size": 1})
    assert fit(asked, resolved.model, Machine(device="cuda", ranks=2), 1e12) == ({MODE: "none"}, ""), "one way is left"


LLAMA = ["--training.seq_len", "8192", "--model.flavor"]
CARD = KNOWN["h100-80g"].memory_bytes


@pytest.mark.parametrize(("flavor", "ranks"), [("8b", 8), ("70b", 64)])
def test_the_defaults_of_a_gpu_fit_into_its_memory_and_make_the_same_batch(flavor, ranks):
    found, resolved = found_for([*LLAMA, flavor, "--training.global_batch_size", str(8 * ranks)], ranks)
    changes, why = fit(resolved.config, resolved.model, Machine(device="cuda", ranks=ranks), 0.9 * CARD)
    run = replace_fields(resolved.config, changes)
    as_before = replace_fields(resolved.config, {MODE: "none"})
    planned, before = (memory(from_config(one, resolved.model, ranks)).total for one in (run, as_before))
    assert planned <= 0.9 * CARD < CARD < before
    assert why.startswith(f"auto: activation_checkpoint {run.activation_checkpoint.mode} with ") and "fastest" in why
    for one in found:
        way = replace_fields(resolved.config, {MODE: one.mode, "training.local_batch_size": one.microbatch})
        assert run_batch_sizes(way, ranks).total == run_batch_sizes(as_before, ranks).total
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)


@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        ([], [8, 4, 2, 1]),
        (["--training.local_batch_size", "4"], [4]),
        (["--training.reproducible"], [2]),
        (["--parallelism.data_parallel_shard_degree", "2", "--parallelism.pipeline_parallel_degree", "2"], [1]),
        (["--training.global_batch_size", "12"], [6, 4, 3, 2, 1]),
    ],
    ids=["open", "asked", "virtual_shards", "pipeline", "12"],
)
def test_a_microbatch_is_left_to_the_memory_of_a_gpu_only_where_it_is_open(more, sizes):
    ranks = 4 if "--parallelism.pipeline_parallel_degree" in more else 1
    flags = ["--training.global_batch_size", "16", *more, "--model.num_layers", "4"]
    assert list(dict.fromkeys(one.microbatch for one in found_for(flags, ranks)[0])) == sizes
    assert {one.microbatch for one in found_for(flags, ranks, "cpu")[0]} == {sizes[0]}


@pytest.mark.parametrize("mode", MODES)
def test_more_of_everything_needs_more(mode):
    base = parse(TINY)
    small = estimated(base, mode).total
    for name, value in (
        ("model.num_layers", 4),
        ("training.seq_len", 64),
        ("model.vocab_size", 4096),
        ("training.local_batch_size", 16),
    ):
        assert estimated(replace_fields(base, {name: value}), mode).total > small, name
