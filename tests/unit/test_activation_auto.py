"""``activation_checkpoint.mode auto``: the estimate against the measurement, and what is chosen by it."""

import functools
import json
import re
import time
import tomllib

import pytest
from harness import SMALL, parse, read_metrics, run_job, steps_of
from test_rules import facts_of

from crius.config.resolve import with_dtype
from crius.config.rules_layout import activation_checkpoint_options
from crius.config.run import replace_fields
from crius.launch.local import run_workers
from crius.tools.dry_run.run import dry_run
from crius.tools.plan.memory import memory
from crius.tools.plan.recomputation import choose_mode, estimates
from crius.tools.plan.workload import Estimate, from_config
from crius.tools.verify import worker
from crius.tools.verify.parameters import Shards
from crius.tools.verify.run import run as run_task
from crius.tools.verify.worker import Task
from crius.train import setup
from crius.train.inputs import describe_model

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
def test_the_first_mode_that_fits_is_chosen_and_else_the_last(budget, expected):
    found = {mode: Estimate({"activations": size}) for mode, size in zip(MODES, (30.0, 20.0, 10.0), strict=True)}
    assert choose_mode(found, budget) == expected


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
    assert re.findall(r"auto: (\w+): .*, chosen", log) == ["none", "full"]
    assert "may not fit: lower --training.local_batch_size" in log


def gpu_estimates(flags):
    """Of one rank on a GPU."""
    config = with_dtype(parse(flags), on_gpu=True)
    return estimates(config, describe_model(config), 1, on_gpu=True)


def test_an_update_in_host_memory_does_not_hide_what_the_gpu_holds():
    """On the host it is the largest moment of the step; on the GPU the activations are, 82 GiB of them."""
    flags = ["--model.flavor", "8b", "--training.seq_len", "8192", "--training.local_batch_size", "2"]
    found = gpu_estimates([*flags, "--training.enable_cpu_offload", "--optimizer.implementation", "foreach"])
    assert choose_mode(found, 72 * 2**30) != "none" and found["none"].parts["activations"] > 72 * 2**30
    for one in found.values():
        assert one.note != "update"
        assert [one.parts[name] for name in ("parameters", "gradients", "optimizer")] == [0, 0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_a_snapshot_to_go_back_to_needs_memory_of_the_host_only(mode):
    plain, rollback = parse(TINY), parse([*TINY, "--stability.nonfinite", "rollback"])
    before, after = estimated(plain, mode), estimated(rollback, mode)
    assert after.total - before.total == pytest.approx(before.parts["parameters"] + before.parts["optimizer"])
    on_gpu = [estimated(config, mode, device="cuda") for config in (plain, rollback)]
    assert on_gpu[0].total == on_gpu[1].total


def test_weights_can_be_drawn_where_auto_has_no_batch_to_be_decided_for(tmp_path):
    found = [
        run_task(worker.start, Task(parse([*TINY, *more]), tmp_path / name, 60, Shards(tmp_path, is_whole=True)), 1)
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
    more = {"parallelism.pipeline_parallel_degree": 2, "parallelism.pipeline_parallel_schedule": "zbv_zero_bubble"}
    more["model.num_layers"] = 4
    config = replace_fields(parse([*TINY, *AUTO]), more)
    found = estimates(config, describe_model(config), 2, on_gpu=False)
    assert list(found) == ["none"]


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
