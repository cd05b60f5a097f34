"""An optimisation that is on and does nothing is named, and ends a ``--strict`` run."""

import pytest
from harness import SMALL, crius

TENSOR = ["--parallelism.tensor_parallel_degree", "2"]
ASYNC = [*TENSOR, "--parallelism.enable_async_tensor_parallel", "--compile.enable"]
SELECTIVE = ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.save_ops", "reduce_scatter"]
FEW = ["--model.num_layers", "2", "--training.steps", "2", "--validation.interval", "0"]

# what is planted: flags, environment, what the error names, why
INACTIVE = {
    "async_tp": (ASYNC, {}, "async_tp", "0 fused (needs CUDA)"),
    "compile": (["--compile.enable"], {"TORCHDYNAMO_DISABLE": "1"}, "compile", "0 of 2 blocks, 0 graphs (switched off"),
    "profiler": (
        ["--profiler.memory_snapshot", "--profiler.nvtx", "--profiler.start_step", "1"],
        {},
        "memory_snapshot, nvtx",
        "nvtx: 0 ranges (needs CUDA)",
    ),
    "save_ops": (SELECTIVE, {}, "save_ops reduce_scatter", "0 results stay per block"),
    "selective": (
        ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_option", "3"],
        {},
        "activation_checkpoint",
        "0 of 2 blocks",
    ),
}


def run(flags, environ, tmp_path):
    return crius("train", *SMALL, *FEW, *flags, "--job.run_dir", str(tmp_path), timeout=200, **environ)


@pytest.mark.matrix
@pytest.mark.parametrize("planted", INACTIVE)
def test_strict_ends_a_run_whose_optimisation_does_nothing_and_names_it(planted, tmp_path):
    flags, environ, name, reason = INACTIVE[planted]
    done = run([*flags, "--strict"], environ, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"asked for but without effect: {name}." in done.stderr
    assert reason in done.stderr
    assert "leave out" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("planted", ["save_ops", "compile"])
def test_without_strict_the_run_goes_on_and_says_so(planted, tmp_path):
    flags, environ, name, reason = INACTIVE[planted]
    done = run(flags, environ, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith(f"{name}: 0")]
    assert reason in line
    assert "step 2/2" in done.stdout


@pytest.mark.long
def test_strict_does_not_stop_a_run_whose_optimisations_work(tmp_path):
    flags = ["--activation_checkpoint.mode", "full", "--compile.enable", "--compile.backend", "aot_eager", "--strict"]
    done = run(flags, {}, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "activation_checkpoint: 2 of 2 blocks (every block keeps only its input)" in done.stdout
    assert "compile: 2 of 2 blocks, 1 graph" in done.stdout
