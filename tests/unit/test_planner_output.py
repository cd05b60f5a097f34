"""What ``crius plan`` prints: 12 lines, which card, what fits instead, and commands that run."""

import functools
import re

import pytest
from harness import commands, llama, parse

from crius import cli
from crius.host import Machine
from crius.launch.local import run_workers
from crius.tools.plan.hardware import hardware, shared
from crius.tools.plan.legal import violations
from crius.tools.plan.memory import memory
from crius.tools.plan.plan import PLAN_RULES
from crius.tools.plan.workload import from_config
from crius.train.inputs import describe_known_model, resolve

SMALL = ["--flavor", "8b", "--gpus", "8"]
NO_CP = ["--parallelism.context_parallel_degree", "1"]
NO_AXES = [f"--parallelism.{axis}_parallel_degree=1" for axis in ("tensor", "pipeline", "context")]


PLANNED = {
    "J4": ["--model", "llama3", "--flavor", "8b", "--gpus", "8", "--gpu", "h100"],
    "a pipeline": ["--flavor", "70b", "--gpus", "64", "--parallelism.pipeline_parallel_degree", "4"],
    "float8, TP": [
        "--flavor",
        "8b",
        "--gpus",
        "16",
        "--precision",
        "float8",
        "--parallelism.tensor_parallel_degree",
        "2",
    ],
    "long sequences": ["--flavor", "8b", "--gpus", "8", "--seq_len", "131072", "--gpu", "h200"],
    "a CPU": ["--recipe", "llama3_debug", "--gpus", "2", "--gpu", "cpu"],
    "one card": ["--flavor", "1b", "--gpus", "1", "--gpu", "rtx-4090", "--optimizer.state_dtype", "bfloat16"],
}


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_is_12_lines_and_its_command_is_that_run(name, plan, planned):
    """The command passes the rules of a run, and its settings need what was planned."""
    code, out, _ = plan(*PLANNED[name])
    assert code == 0 and len(out.splitlines()) <= 12
    for said in ("recommended: ", " tokens/s per GPU, MFU ", " GiB per GPU", "fewest GPUs that fit", "--explain"):
        assert said in out
    _, data = planned(*PLANNED[name])
    [flags] = commands(out, "crius train")
    if "--recipe" not in flags:
        flags = ["--recipe", "llama3_debug", *flags]  # as crius train does
    on_gpu = data["gpu"] != "cpu"
    run = resolve(parse(flags), Machine(device="cuda" if on_gpu else "cpu"), rows_are_given=True).config
    facts = describe_known_model(run)
    assert violations(run, facts, data["num_gpus"], PLAN_RULES) == []
    workload = from_config(run, facts, data["num_gpus"], device="cuda" if on_gpu else "cpu")
    assert memory(workload, shared(hardware(data["gpu"]), data["num_gpus"])).total == pytest.approx(
        data["recommended"]["memory_bytes"]
    )


@pytest.mark.long
def test_a_faster_layout_that_is_not_taken_is_explained_in_the_12_lines(plan):
    tied = plan("--flavor", "70b", "--gpus", "256", "--gpu", "a100")[1].splitlines()
    assert len(tied) <= 12
    [gain] = [re.search(r" GiB per GPU; others gain (.*)% at most, too little for ", line)[1] for line in tied[3:4]]
    first, second = (float(line.split()[-4]) for line in tied if line[:2] in ("1 ", "2 "))
    assert float(gain) == pytest.approx(100 * (second / first - 1), abs=0.5)
    assert "too little for" not in plan(*SMALL)[1]


def run_dry(flags, placement):
    assert cli.main(["train", *flags, "--dry_run"]) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        ["--flavor", "debug", "--gpus", "2", "--seq_len", "256"],
        *(pytest.param(PLANNED[name], marks=pytest.mark.slow) for name in ("J4", "a CPU")),
    ],
)
def test_the_command_of_a_plan_runs_dry(plan, flags, tmp_path):
    [command] = commands(plan(*flags)[1], "crius train")
    assert run_workers(functools.partial(run_dry, command), 1, tmp_path) == 0


def test_explain_has_what_the_12_lines_leave_out(plan):
    brief, whole = plan(*SMALL)[1], plan(*SMALL, "--explain")[1]
    for said in ("how it was decided", "not taken", "memory of the fullest rank", "what one change would do"):
        assert said in whole and said not in brief


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ("h100", "h100 is planned as h100-80g; other cards: h100-96g, h100-pcie, h100-nvl"),
        ("", "h100 is planned as h100-80g"),
        ("a100", "a100 is planned as a100-80g; other cards: a100-40g"),
        ("h100-80g", None),
        ("4090", None),
        ("h200", None),
    ],
)
def test_a_name_of_several_cards_says_which_one_is_planned(plan, gpu, said):
    lines = plan(*SMALL, *(["--gpu", gpu] if gpu else []))[1].splitlines()
    found = [line for line in lines if "is planned as" in line]
    assert (found == lines[1:2] and found[0].startswith(said)) if said else not found


def test_a_plan_without_measurements_says_so_before_it_recommends(plan):
    lines = plan(*SMALL, "--gpu", "rtx-4090")[1].splitlines()
    assert lines[1] == "outside the validated range: no measurement on rtx-4090: crius bench calibrate"
    impossible = plan("--flavor", "8b", "--gpus", "1", "--gpu", "rtx-4090")[1].splitlines()
    assert impossible[1] == lines[1]


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        (["--flavor", "8b", "--gpus", "1", "--gpu", "rtx-4090"], "--gpus 8 --gpu rtx-4090"),
        (["--model", "mixtral", "--flavor", "8x7b", "--gpus", "4", "--gpu", "h100"], "--gpus 16 --gpu h100"),
        pytest.param(
            ["--flavor", "8b", "--gpus", "8", "--gpu", "a10g", "--seq_len", "4000000"],
            "--seq_len 32768 --gpus 8 --gpu a10g",
            marks=pytest.mark.slow,
        ),
        (["--flavor", "8b", "--gpus", "1", "--gpu", "cpu"], "--gpus 2 --gpu h100-80g"),
        (
            ["--flavor", "8b", "--gpus", "2", "--gpu", "a100", *NO_AXES, "--global_batch_size", "3"],
            "--global_batch_size 3 --gpus 2 --gpu a100",
        ),
    ],
)
@pytest.mark.long
def test_what_does_not_fit_ends_with_a_command_that_does(plan, planned, flags, end):
    code, out, _ = plan(*flags)
    assert code == 1 and len(out.splitlines()) <= 12
    assert out.rstrip().splitlines()[-1].startswith("crius plan ")
    assert out.rstrip().endswith(end)
    for command in commands(out, "crius plan"):
        assert planned(*command)[1]["fits"]


@pytest.mark.long
@pytest.mark.parametrize("model", ["deepseek-v2-lite-16b", "q32.toml"])
def test_of_a_model_that_is_not_trainable_no_command_is_printed(plan, planned, tmp_path, monkeypatch, model):
    """There is none that a run takes; the flags of its layout hold for the day on which there is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q32.toml").write_text(
        "num_layers = 8\ndim = 4096\nffn_dim = 11008\nnum_heads = 32\nnum_kv_heads = 8\nhead_dim = 128\n"
        "vocab_size = 150000\n"
    )
    code, out, _ = plan("--model", model, "--gpus", "32", "--gpu", "h100-80g", *NO_CP)
    assert code == 0 and len(out.splitlines()) <= 12
    assert "crius train" not in out and "--model.name" not in out
    assert "--parallelism.data_parallel_shard_degree" in out
    assert not any(
        name.startswith("model.") for name in planned("--model", model, "--gpus", "32", *NO_CP)[1]["settings"]
    )


def test_mfu_is_that_of_a_run_at_the_planned_speed(planned):
    """Of the bfloat16 peak, in float8 too, as the log of a run has it."""
    _, found = planned(*SMALL, "--precision", "float8")
    facts = llama("8b")
    for row in [found["recommended"], *found["best"]]:
        flops = row["tokens_per_second"] * facts.flops_per_token(found["seq_len"])
        assert row["mfu"] == pytest.approx(flops / 989.4e12)
    assert planned("--recipe", "llama3_debug", "--gpus", "2", "--gpu", "cpu")[1]["recommended"]["mfu"] is None
