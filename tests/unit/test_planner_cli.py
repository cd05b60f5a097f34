"""``crius plan``: what it prints, its exit codes, and that it needs no torch."""

import os
import resource
import subprocess
import sys
import time

import pytest
from harness import ROOT, commands, llama, parse

from crius.config.toml_file import flatten
from crius.host import Machine
from crius.tools.plan.validate import compare_dry_run
from crius.train.inputs import resolve

SMALL = ["--flavor", "8b", "--gpus", "8"]
_MAIN = """
import sys
sys.modules["torch"] = None
from crius.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
def test_512_gpus_take_seconds_and_no_torch():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [
        sys.executable,
        "-c",
        _MAIN,
        "plan",
        "--model",
        "llama3",
        "--flavor",
        "405b",
        "--gpus",
        "512",
        "--explain",
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=120, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    for said in (
        "recommended: ",
        "MFU",
        "how it was decided",
        "not taken",
        "fewest GPUs that fit",
        "what one change would do",
    ):
        assert said in done.stdout


def test_adapters_are_planned_in_seconds(plan):
    """70B has 1,120 of them: their names are matched once, not for every candidate."""
    began = time.process_time()
    code, out, _ = plan("--flavor", "70b", "--gpus", "1", "--gpu", "h100", "--lora.rank", "16")
    assert code == 1 and "fewest GPUs that fit: 3 x h100-80g" in out, "only adapters have an optimizer state"
    assert time.process_time() - began < 4


def test_the_command_of_a_plan_can_be_pasted(plan):
    """Also without a recipe, where ``crius train`` begins with that of the debug model."""
    code, out, _ = plan(*SMALL, "--precision", "float8")
    assert code == 0
    [command] = commands(out, "crius train")
    settings = flatten(resolve(parse(command), Machine(device="cuda")).config)
    for name, value in {
        "model.flavor": "8b",
        "training.seq_len": 8192,
        "training.global_batch_size": 8,
        "training.mixed_precision_param": "bfloat16",
        "parallelism.data_parallel_shard_degree": 8,
        "compile.enable": True,
        "quantize.dense.float8.enable": True,
    }.items():
        assert settings[name] == value


ON_ONE_CARD = ["--flavor", "70b", "--gpus", "1", "--gpu", "h100"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (ON_ONE_CARD, ["fits: --lora.rank 16 --lora.base nf4: 59.", "70b --lora.rank 16 --lora.base nf4 --gpus 1"]),
        ([*ON_ONE_CARD, "--lora.rank", "8"], ["fits: --lora.base nf4: 57.", "--lora.rank 8 --lora.base nf4 --gpus 1"]),
        (
            ["--flavor", "8b", "--gpus", "1", "--gpu", "a100-40g"],
            ["fits: --lora.rank 16: 33.", "trains adapters alone"],
        ),
    ],
    ids=["all weights", "lora", "of a small model"],
)
def test_where_nothing_fits_lora_is_named_if_it_would(plan, flags, said):
    code, out, _ = plan(*flags)
    assert code == 1 and all(part in out for part in said)


@pytest.mark.parametrize("flags", [[*ON_ONE_CARD[:-1], "a100-40g"], [*ON_ONE_CARD, "--optimizer.name", "muon"]])
def test_lora_is_not_named_where_it_does_not_fit_or_go(plan, flags):
    code, out, _ = plan(*flags)
    assert code == 1 and "--lora" not in out


def test_json_has_all_that_is_printed(planned):
    code, found = planned(*SMALL)
    assert code == 0 and found["fits"] and found["model"]["trainable"]
    assert found["recommended"]["layout"] == "fsdp8"
    for name, total in (("memory", "memory_bytes"), ("time", "step_seconds")):
        assert sum(found["recommended"][name].values()) == pytest.approx(found["recommended"][total], rel=0.01)
    assert len(found["best"]) == 5
    assert all(row["reason"] for row in found["rejected"])
    assert found["least_gpus"] >= 1
    assert {"sensitivity", "explanation", "outside_validated_range", "flags", "settings"} <= set(found)


def test_what_is_given_stays_and_the_rest_is_searched(planned):
    _, found = planned(*SMALL, "--parallelism.tensor_parallel_degree", "4", "--activation_checkpoint.mode", "full")
    for one in found["best"]:
        assert (one["degrees"]["tp"], one["activation_checkpoint"]) == (4, "full")
    assert found["settings"]["activation_checkpoint.mode"] == "full"


def test_a_recipe_is_named_in_the_command_and_not_repeated(plan):
    code, out, _ = plan("--recipe", "llama3_debug", "--gpus", "2", "--gpu", "cpu")
    assert code == 0
    [command] = commands(out, "crius train")
    assert command[:2] == ["--recipe", "llama3_debug"]
    assert "optimizer.lr" not in out and "training.seq_len" not in out


def test_nodes_are_whole(planned):
    assert planned("--flavor", "8b", "--nodes", "2")[1]["num_gpus"] == 16


def test_an_impossible_case_says_how_many_gpus_and_what_to_change(plan, planned):
    impossible = ["--flavor", "8b", "--gpus", "1", "--gpu", "rtx-4090"]
    code, out, _ = plan(*impossible, "--explain")
    assert code == 1
    assert "does not fit: the smallest layout" in out
    assert "fewest GPUs that fit: " in out
    assert "fits: --training.enable_cpu_offload" in out
    assert "not enough: --optimizer.state_dtype 8bit" in out
    code, found = planned(*impossible)
    assert (code, found["fits"], found["recommended"]) == (1, False, None)
    assert found["least_gpus"] > 1
    assert found["smallest"]["memory_bytes"] > found["usable_bytes"]
    assert any(one["fits"] for one in found["remedies"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "host", "is_proposed"),
    [
        (["8b", "--gpus", "1", "--gpu", "rtx-4090"], "needs 120 GiB of memory on the host", True),
        (["405b", "--gpus", "8"], "needs 6,048 GiB of memory on a host of 8 GPUs, more than most hosts have", False),
        (["8b", "--gpus", "1", "--gpu", "rtx-4090", "--training.no_enable_cpu_offload"], "", False),
    ],
)
def test_offloading_is_proposed_where_a_host_may_hold_it_and_nobody_refused(case, host, is_proposed, plan):
    code, out, _ = plan("--flavor", *case)
    assert code == 1
    assert ("fits: --training.enable_cpu_offload" in out) == bool(host) and host in out
    assert ("with --training.enable_cpu_offload:" in out) == is_proposed


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "name", "count"),
    [
        (["mixtral", "--flavor", "8x7b"], "mixtral/8x7b", 46_702_792_704),
        (["qwen3-30b-a3b"], "qwen3_moe/30b-a3b", 30_532_122_624),
        (["deepseek-v3", "--flavor", "671b"], "deepseek-v3-671b", 671_026_404_352),
    ],
)
def test_models_with_experts_are_planned_by_name_and_flavor_or_in_one_word(planned, model, name, count):
    code, found = planned("--model", *model, "--gpus", "512", "--seq_len", "4096")
    assert code == 0
    assert found["model"] == {"name": name, "parameters": count, "trainable": "/" in name}


def test_flags_of_a_plan_with_experts_are_those_of_a_run(planned):
    degree = "parallelism.expert_parallel_degree"
    _, found = planned("--model", "qwen3-30b-a3b", "--gpus", "64", "--seq_len", "4096", f"--{degree}", "8")
    settings = found["settings"]
    assert (settings["model.name"], settings["model.flavor"], settings[degree]) == ("qwen3_moe", "30b-a3b", 8)
    run = parse([part for name, value in settings.items() for part in (f"--{name}", f"{value}")])
    assert run.parallelism.total_ranks(64) == 64


@pytest.mark.long
def test_float8_makes_linears_faster_and_leaves_experts_as_they_are(planned):
    flags = ["--gpus", "64", "--gpu", "b200", "--seq_len", "4096", "--parallelism.tensor_parallel_degree", "1"]
    low = {"bfloat16": [], "float8": ["--precision", "float8"], "mxfp8": ["--quantize.dense.mxfp8.enable"]}
    seconds = {}
    for name, asked in low.items():
        code, found = planned("--model", "mixtral", "--flavor", "8x7b", *flags, *asked)
        assert (code, found["recommended"]["precision"]) == (0, name)
        seconds[name] = found["recommended"]["time"]["matmul"]
    for name in ("float8", "mxfp8"):  # experts have nine tenths of the FLOPs of a token
        assert 0.85 * seconds["bfloat16"] < seconds[name] < seconds["bfloat16"]


def test_experts_that_do_not_fit_have_remedies(planned):
    code, found = planned("--model", "deepseek-v2-lite-16b", "--gpus", "2", "--gpu", "h100-80g", "--seq_len", "4096")
    assert code == 1
    assert {one["flags"]: one["fits"] for one in found["remedies"]} == {
        "--training.enable_cpu_offload": True,
        "--optimizer.state_dtype 8bit --training.dtype bfloat16": True,
        "--optimizer.state_dtype bfloat16 --training.dtype bfloat16": True,
        "--optimizer.state_dtype 8bit": False,
        "--optimizer.state_dtype bfloat16": False,
        "--training.dtype bfloat16": False,
    }
    for one in found["remedies"]:
        assert one["nbytes"] == pytest.approx(found["smallest"]["memory_bytes"] - one["saved"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--flavor", "8c"], "no flavor 8c"),
        (["--model", "llama4"], "did you mean llama3?"),
        (["--model", "mixtral"], "the size of mixtral is not given"),
        (["--model", "deepseek-v3"], "use deepseek-v3-671b"),
        (["--gpu", "h1000"], "GPU 'h1000' is not known, and there is no such file, did you mean h100?"),
        (["--gpus", "-1"], "a count is at least 1"),
        (["--gpus", "0"], "--gpus 0: a count is at least 1"),
        (["--nodes", "0"], "--nodes 0: a count is at least 1"),
        (
            ["--gpu", "a100", "--quantize.dense.float8.enable"],
            "from   --quantize.dense.float8.enable (command line)",
        ),
        (["--gpu", "h100", "--quantize.dense.mxfp8.enable"], "h100-80g has no mxfp8 matmuls"),
        (["--gpus", "8"], "the size of llama3 is not given"),
        (["--gpu", "a100", "--precision", "float8"], "the size of llama3 is not given"),
        (["--flavor", "8b", "--local_batch_size", "3", "--global_batch_size", "8"], "8 is not a multiple of 3"),
        (
            ["--flavor", "8b", "--parallelism.expert_parallel_degree", "2"],
            "needs a model with experts",
        ),
        (
            [
                *("--flavor", "8b", "--parallelism.pipeline_parallel_degree", "2", "--compile.enable"),
                *("--parallelism.pipeline_parallel_schedule", "zbv_zero_bubble"),
            ],
            "compile.enable does not go with parallelism.pipeline_parallel_schedule zbv_zero_bubble",
        ),
        (
            ["--flavor", "8b", "--gpus", "8", "--parallelism.tensor_parallel_degree", "16"],
            "8 GPUs are not a multiple of 16",
        ),
        (["--gpus", "9", "--nodes", "1"], "--nodes 1 of 8 GPUs are not --gpus 9"),
        (["--gpu", "a100", "--precision", "float8"], "a100-80g has no float8 matmuls"),
        (["--flavor", "8b", "--parallelism.tensor_parallel_degree", "3"], "tensor_parallel_degree 3 does not divide"),
        (["--flavor", "8b", "--activation_checkpoint.mode", "memory_budget"], "memory_budget cannot be planned"),
        (["--parallelism.pipeline_parallel_schedule_csv", "a.csv"], "no effect"),
        (["--gpus", "8", "--check"], "crius plan check --gpus 8"),
        (["--calibrate", "--out", "a.toml"], "crius bench calibrate --out a.toml"),
        (["--validate=a.csv"], "crius plan validate a.csv"),
        (["--compare", "runs/a", "--json"], "crius plan compare runs/a --json"),
        (["--seq_lens", "3"], "unknown flag --seq_lens"),
        (["check", "--model", "gpt-oss-120b", "--gpus", "64"], "not trainable yet"),
    ],
)
def test_a_mistake_is_one_error_with_a_fix(plan, flags, said):
    code, out, err = plan(*flags)
    assert (code, out) == (2, "")
    assert said in err
    assert "  fix    " in err


def test_a_plan_that_differs_from_the_dry_run_says_so():
    config = parse(["--training.mixed_precision_param", "float32"])
    sizes = {"parameter": 6_824_448, "gradient": 6_824_448, "optimizer": 13_649_196, "activation": 180_494_360}
    stage = {"pp_rank": 0, **{f"{kind}_bytes": nbytes for kind, nbytes in sizes.items()}}
    ranks = [{"pp_rank": 0, "peak_bytes": 206_297_484}]
    report = compare_dry_run(config, llama(), 1, {"ranks": ranks, "stages": [stage], "seconds": 1.0})
    assert report.agrees and report.lines()[-1].startswith("they agree")
    for wrong in ({"optimizer_bytes": 13_649_200}, {"activation_bytes": 160_000_000}):
        report = compare_dry_run(config, llama(), 1, {"ranks": ranks, "stages": [stage | wrong], "seconds": 1.0})
        assert not report.agrees
        assert [row.kind for row in report.rows if not row.agrees] == [
            next(iter(wrong)).replace("_bytes", "").replace("activation", "activations")
        ]
        assert any(line.endswith("DIFFERS") for line in report.lines())


def test_what_a_file_says_of_stages_is_said_not_to_be_planned(planned, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_first_stage_less_layers = 2\n")
    code, data = planned(*SMALL, "--config", file)
    (said,) = [reason for reason in data["outside_validated_range"] if "first_stage_less_layers" in reason]
    assert code == 0 and "not planned" in said and "run.toml" in said
