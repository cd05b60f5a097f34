"""Whole runs of the real job: what may not change the loss curve does not, and what a run leaves behind."""

import contextlib
import functools
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import ROOT, SMALL, TIED, crius, layout_flags, num_ranks, parse, read_metrics, run_job, steps_of, train

from crius.config.layout import Layout
from crius.data.loader import BatchLoader
from crius.host import Machine
from crius.launch.local import run_workers
from crius.metrics.ledger import TimeLedger
from crius.parallel.mesh import build_mesh
from crius.parallel.runtime import world
from crius.shards import local_tensor
from crius.train import job, loop
from crius.train.build import Job
from crius.train.inputs import describe_model, open_run_corpus
from crius.train.setup import decide, start_logging
from crius.train.step import Accumulation

SHORT = [*SMALL, "--model.num_layers", "2", "--training.steps", "4", "--validation.interval", "0"]
SHORT += ["--metrics.log_interval", "1"]

# float32: equal start, float64 loss sums; only the order of gradient sums differs (see tests/parity/test_layouts.py)
LOSS, GRAD_NORM = 1e-7, 1e-5


def patched_run(patch, config, run_dir, started, placement):
    patch()
    run_job(config, run_dir, started, placement)


def train_with(patch, flags, run_dir):
    """Train with what ``patch`` changes, in the workers only; returns the step records."""
    config = parse(flags)
    target = functools.partial(patched_run, patch, config, run_dir, time.monotonic())
    assert run_workers(target, num_ranks(config), run_dir) == 0
    return steps_of(read_metrics(run_dir))


def assert_same_curve(got, want, loss=LOSS, grad_norm=GRAD_NORM):
    assert [record["step"] for record in got] == [record["step"] for record in want]
    for a, b in zip(got, want, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=loss, abs=0), a["step"]
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=grad_norm, abs=0), a["step"]


# --- optimizer implementations


class Kept(list):
    """A sink."""

    write = list.append

    def close(self):
        pass


def write_implementations(config, run_dir, placement):
    """Train once with each implementation, in one process group, and compare with for-loop's losses and weights."""
    torch.set_num_threads(1)
    start_logging(placement.rank, run_dir, is_own_file=placement.rank > 0)
    cpu = torch.device("cpu")
    found = {}
    with world(placement.rank, placement.world_size, cpu, placement.rendezvous, 60) as ranks:
        mesh = build_mesh(Layout.of(config.parallelism, ranks.size), "cpu")
        corpus = open_run_corpus(config, mesh.layout.batch)
        for name in ("for-loop", "foreach", "fused"):
            run = replace(config, optimizer=replace(config.optimizer, implementation=name))
            with contextlib.ExitStack() as stack:
                records = Kept()
                ledger = TimeLedger(time.monotonic())
                facts = describe_model(run)
                given = Job(decide(run, facts, Machine(device="cpu"), ranks, None), facts, mesh, ranks)
                loop = job.assemble(given, corpus, run_dir, ledger, stack)
                loop.reports.sinks.append(records)
                loop.run()
            weights = [local_tensor(parameter).clone() for parameter in loop.state.parts[0].parameters()]
            losses = [record.loss for record in records]
            base = found.setdefault("for-loop", (losses, weights))
            differences = [(a - b).abs().max().item() for a, b in zip(weights, base[1], strict=True)]
            found[name] = (losses, weights, max(differences))
    result = {name: {"losses": kept[0], "difference": kept[2]} for name, kept in found.items()}
    (run_dir / f"implementations-{placement.rank}.json").write_text(json.dumps(result))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", "fsdp2", "hsdp2x2"])
def test_fused_foreach_and_for_loop_train_alike(layout, tmp_path):
    config = parse([*SHORT, "--training.steps", "10", *layout_flags(layout)])
    ranks = num_ranks(config)
    assert run_workers(functools.partial(write_implementations, config, tmp_path), ranks, tmp_path) == 0
    for rank in range(ranks):
        found = json.loads((tmp_path / f"implementations-{rank}.json").read_text())
        want = found["for-loop"]["losses"]
        assert len(want) == 10 and want[-1] < want[0]
        for name in ("foreach", "fused"):
            # the last bit of a weight between 1 and 2 is 1.2e-7, and that is what is measured; losses: 2e-9
            assert found[name]["difference"] <= 1e-6
            assert found[name]["losses"][-1] == pytest.approx(want[-1], rel=1e-6, abs=0)
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert [line.split()[2].rstrip(",") for line in log.splitlines() if line.startswith("optimizer: adamw")] == [
        *("for-loop", "foreach", "fused"),
    ]


# --- what does not touch the curve


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """fsdp2 with weights kept over microbatches: validation has to leave these alone too."""
    return train(PLAIN, tmp_path_factory.mktemp("plain"))


PLAIN = [*SHORT, *layout_flags("fsdp2_accum2"), "--parallelism.reshard_after_forward_mode", "never"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "flags",
    [
        ["--validation.interval", "1"],
        ["--training.gc_interval", "2"],
        ["--data.prefetch", "0"],
        ["--metrics.enable_tensorboard"],
    ],
    ids=lambda flags: flags[0].removeprefix("--"),
)
def test_curve_is_bit_identical_with(flags, plain, tmp_path):
    got = train([*PLAIN, *flags], tmp_path)
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert [record[name] for record in steps_of(got)] == [record[name] for record in steps_of(plain)]
    assert ("val_loss" in got[-1]) == (flags[0] == "--validation.interval")
    for record in steps_of(got):  # the mean of two ranks that have different tokens lies below the larger one
        assert (record["max_loss"] or 0.0) > record["loss"] if "tensorboard" in flags[0] else record["max_loss"] is None


# --- precision, tied weights


@pytest.fixture(scope="module")
def variant_on_one_device(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = train([*SHORT, *VARIANTS[name], *layout_flags("1")], tmp_path_factory.mktemp(name))
        return made[name]

    return get


VARIANTS = {"plain": ["--training.steps", "10"], "tied": TIED}


@pytest.mark.matrix
@pytest.mark.parametrize(("variant", "layout"), [("tied", "fsdp2"), ("tied", "ddp2_accum2")])
def test_variant_matches_one_device(variant, layout, variant_on_one_device, tmp_path):
    want = variant_on_one_device(variant)
    assert_same_curve(train([*SHORT, *VARIANTS[variant], *layout_flags(layout)], tmp_path), want)
    assert want[-1]["loss"] < want[0]["loss"]
    other = variant_on_one_device("plain")[1]  # the variant took effect
    assert abs(other["loss"] - want[1]["loss"]) > 1e-4


@pytest.mark.long
def test_bfloat16_trains_close_to_float32(variant_on_one_device, tmp_path):
    want = variant_on_one_device("plain")
    flags = ["--training.steps", "10", "--training.mixed_precision_param", "bfloat16"]
    got = train([*SHORT, *flags, *layout_flags("fsdp2")], tmp_path)
    assert got[-1]["loss"] < got[0]["loss"]
    # bfloat16 has 8 bits: 4e-3 relative in each weight and activation, averaged over 512 tokens
    assert got[-1]["loss"] == pytest.approx(want[-1]["loss"], abs=2e-2)
    assert got[-1]["loss"] != pytest.approx(want[-1]["loss"], abs=1e-6)  # it took effect


# --- what a run leaves behind


DATA_SECONDS, COMPUTE_SECONDS, SCORE_SECONDS = 30.0, 60.0, 50.0


def slow_clock():
    """Batches, steps and scores take minutes by the clock, beside which what a busy machine adds is nothing."""
    real, skipped = time.monotonic, [0.0]

    def taking(seconds, call):
        def slowly(*args):
            skipped[0] += seconds
            return call(*args)

        return slowly

    time.monotonic = lambda: real() + skipped[0]
    BatchLoader.__next__ = taking(DATA_SECONDS, BatchLoader.__next__)
    loop.train_step = taking(COMPUTE_SECONDS, loop.train_step)
    scored, train = taking(SCORE_SECONDS, Accumulation.score), Accumulation.score
    Accumulation.score = lambda *args: (train if torch.is_grad_enabled() else scored)(*args)


def test_summary_and_metrics_account_for_the_wall_time(tmp_path):
    flags = [*SHORT, "--training.steps", "10", "--validation.interval", "5", *layout_flags("1")]
    steps = [record["step_seconds"] for record in train_with(slow_clock, flags, tmp_path)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    seconds = summary["seconds"]
    assert set(seconds) >= {"initialise", "data", "compute", "report", "validation"}
    assert sum(seconds.values()) == pytest.approx(summary["wall_seconds"], rel=0.02)
    assert seconds["data"] == pytest.approx(10 * DATA_SECONDS, rel=0.05)
    assert seconds["compute"] == pytest.approx(10 * COMPUTE_SECONDS, rel=0.05)
    assert steps == pytest.approx([DATA_SECONDS + COMPUTE_SECONDS] * 10, rel=0.05)  # step 1 is timed like any other
    validations = [record for record in read_metrics(tmp_path) if "val_loss" in record]
    assert [record["step"] for record in validations] == [5, 10]
    assert min(record["val_seconds"] for record in validations) >= SCORE_SECONDS
    assert sum(record["val_seconds"] for record in validations) == pytest.approx(seconds["validation"], rel=0.05)
    assert (summary["steps"], summary["tokens"]) == (10, 10 * 16 * 32)
    assert summary["val_loss"] == validations[-1]["val_loss"]


@pytest.mark.long
def test_profiler_traces_the_steps_it_was_asked_for(tmp_path):
    flags = ["--profiler.enable", "--profiler.start_step", "2", "--profiler.num_steps", "2", "--profiler.record_shapes"]
    train([*SHORT, *flags, *layout_flags("fsdp2")], tmp_path)
    for rank in (0, 1):
        events = json.loads((tmp_path / "traces" / "step-2" / f"rank-{rank}.json").read_text())["traceEvents"]
        names = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")}
        assert names == {"ProfilerStep#1", "ProfilerStep#2"}  # the profiler counts from 0
        assert any("_allgather_base_" in str(event.get("name")) for event in events)
        assert any(event.get("args", {}).get("Input Dims") for event in events)


def with_few_files(config, run_dir, started, place):
    """Start under a soft limit that leaves three files free, which a run needs more of."""
    used = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(len(used) + 4) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[2] + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    run_job(config, run_dir, started, place)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_raise_their_soft_limit_of_open_files(tmp_path):
    config = parse([*SHORT, *layout_flags("fsdp2")])
    assert run_workers(functools.partial(with_few_files, config, tmp_path, time.monotonic()), 2, tmp_path) == 0


def add_root_of_zero(module, inputs, y):
    """Nothing is added to the hidden state, and NaN to its gradient."""
    zero = torch.sqrt(y * 0)
    return y + zero * 0


def with_a_root(loop):
    next(iter(loop.state.parts[0].layers.children())).attention_norm.register_forward_hook(add_root_of_zero)
    return loop


@pytest.mark.parametrize("flags", [[], layout_flags("fsdp2+full")], ids=["one_device", "fsdp2_recomputed"])
def test_a_nan_of_the_backward_pass_is_named_by_its_line_of_the_forward_pass(flags, tmp_path, capfd):
    flags = [*SHORT, *flags, "--debug.detect_anomaly"]
    config = parse(flags)
    job = functools.partial(run_job, config, tmp_path, time.monotonic(), prepare=with_a_root)
    assert run_workers(job, num_ranks(config), tmp_path) == 1
    error = capfd.readouterr().err
    assert "NonFiniteError: the backward pass of step 1 has its first NaN in SqrtBackward0." in error
    assert f"{__file__}, line " in error and "in add_root_of_zero: zero = torch.sqrt(y * 0)" in error


def test_a_run_without_a_nan_is_the_same_under_detect_anomaly(tmp_path):
    runs = [train([*SHORT, *flags], tmp_path / str(len(flags))) for flags in ([], ["--debug.detect_anomaly"])]
    plain, watched = ([record["loss"] for record in steps_of(records)] for records in runs)
    assert plain == watched


@pytest.mark.slow
def test_eight_processes_train_with_nothing_but_the_degree(tmp_path):
    """The first thing people type: the debug recipe as it is, on 8 CPU workers."""
    flags = ["--parallelism.data_parallel_shard_degree", "8", "--training.steps", "2", "--training.device", "cpu"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *flags, "--job.run_dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record["step"] for record in steps_of(read_metrics(tmp_path))] == [1, 2]
    assert "mesh: pp 1 x dp_replicate 1 x dp_shard 8 x cp 1 x tp 1 = 8 ranks" in done.stdout


@pytest.mark.gpu
def test_one_gpu_trains_with_the_fused_optimizer(tmp_path):
    flags = ["--training.device", "cuda", "--training.steps", "5", "--optimizer.implementation", "fused"]
    done = crius("train", *flags, "--job.run_dir", str(tmp_path), "--nproc", "1", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [record["loss"] for record in steps_of(read_metrics(tmp_path))]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert "optimizer: adamw fused" in done.stdout and Path(tmp_path / "summary.json").exists()
