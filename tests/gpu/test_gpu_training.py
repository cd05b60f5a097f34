"""What is claimed of one process on a CPU, on a GPU."""

import re

import pytest
from gpu_runs import DEVICE, GOLDEN_RUN, document_run, train_all
from harness import SMALL, crius

pytestmark = pytest.mark.gpu

BFLOAT16 = ["--training.mixed_precision_param", "bfloat16"]
COMPILE = ["--compile.enable"]
CPU = ["--training.device", "cpu"]


def assert_same_start(got, want):
    """Step 1: the same weights and tokens, float32 sums in another order, 1e-7 each over 8 layers. Step 5: AdamW's
    first updates are near lr times the sign of a gradient, so a gradient near 0 can turn a whole update around."""
    assert got[0] == pytest.approx(want[0], rel=1e-5, abs=0)
    assert got[4] == pytest.approx(want[4], rel=1e-4, abs=0)


def test_float32_on_a_gpu_follows_the_cpu(tmp_path):
    runs = train_all(tmp_path, {"gpu": GOLDEN_RUN, "cpu": [*GOLDEN_RUN, *CPU]})
    assert_same_start(runs["gpu"].losses, runs["cpu"].losses)


def test_each_kernel_of_the_document_mask_hides_what_the_cpu_hides(tmp_path):
    document = document_run(tmp_path)
    flags = {"cpu": [*document, *CPU], "causal": [*document, *CPU, "--model.attention_mask", "causal"]}
    flags |= {"float32": document, "varlen": [*document, *BFLOAT16, "--kernels.attention", "varlen"]}
    flags |= {"flex": [*document, *BFLOAT16, "--kernels.attention", "flex"]}
    runs = train_all(tmp_path, flags)
    assert_same_start(runs["float32"].losses, runs["cpu"].losses)
    for name, kernel in {"float32": "sdpa", "varlen": "varlen", "flex": "flex"}.items():
        assert re.search(rf"^document_mask {kernel}: (\d+) of \1 masks", runs[name].output, re.MULTILINE), name
        # on a CPU bfloat16 moves these losses by 0.03 in all, the causal mask by 0.16
        assert distance(runs[name], runs["cpu"]) < distance(runs[name], runs["causal"]) / 2, name


def distance(run, other):
    """Sum of the differences of the losses from step 11 on. A mask changes little before the model has learned."""
    return sum(abs(mine - its) for mine, its in zip(run.losses[10:], other.losses[10:], strict=True))


def test_bfloat16_trains_and_follows_float32(tmp_path):
    runs = train_all(tmp_path, {"float32": GOLDEN_RUN, "bfloat16": [*GOLDEN_RUN, *BFLOAT16]})
    low, full = runs["bfloat16"].losses, runs["float32"].losses
    assert low[-1] < low[0] - 0.3  # the golden curve falls by more than 1 in its 20 steps
    # a rounding of bfloat16 is up to 0.2 %; the mean over 512 tokens averages it, 20 updates let the curves drift
    assert low == pytest.approx(full, rel=1e-2, abs=0)


def test_all_implementations_of_adamw_agree(tmp_path):
    names = ("fused", "foreach", "for-loop")
    runs = train_all(tmp_path, {name: [*GOLDEN_RUN, "--optimizer.implementation", name] for name in names})
    for name in names:
        assert f"optimizer: adamw {name}," in runs[name].output
        # an update differs in the last bits, 1e-7, which 20 steps amplify as another order of sums does
        assert runs[name].losses == pytest.approx(runs["for-loop"].losses, rel=1e-4, abs=0), name


def test_compiled_blocks_train_as_eager_ones_do(tmp_path):
    flags = {"eager": GOLDEN_RUN, "compiled": [*GOLDEN_RUN, *COMPILE]}
    flags |= {f"{name}_bfloat16": [*runs, *BFLOAT16] for name, runs in flags.items()}
    runs = train_all(tmp_path, flags)
    assert runs["compiled"].num_graphs > 0 and runs["compiled_bfloat16"].num_graphs > 0
    assert runs["eager"].num_graphs == 0
    assert_same_start(runs["compiled"].losses, runs["eager"].losses)
    # a fused kernel rounds to bfloat16 once where eager ones round several times
    assert runs["compiled_bfloat16"].losses == pytest.approx(runs["eager_bfloat16"].losses, rel=1e-2, abs=0)


def test_equal_bits_are_had_without_a_word_about_kernels(tmp_path):
    flags = [*GOLDEN_RUN, *BFLOAT16, "--training.reproducible", "--sdc.recompute_interval", "5"]
    runs = train_all(tmp_path, {"first": flags, "again": flags})
    assert runs["first"].losses == runs["again"].losses
    assert "optimizer: adamw fused" in runs["first"].output


def test_traces_snapshots_and_ranges_leave_their_files_and_the_losses_as_they_were(tmp_path):
    exact = [*GOLDEN_RUN, "--debug.deterministic"]
    asked = ["--profiler.enable", "--profiler.memory_snapshot", "--profiler.nvtx", "--profiler.start_step", "2"]
    runs = train_all(tmp_path, {"plain": exact, "asked": [*exact, *asked, "--profiler.interval", "9"]})
    assert runs["asked"].losses == runs["plain"].losses
    for step in (2, 11, 20):
        folder = tmp_path / "asked" / "traces" / f"step-{step}"
        assert "cudaLaunchKernel" in (folder / "rank-0.json").read_text()
        assert step == 20 or b"device_traces" in (folder / "rank-0.memory.pickle").read_bytes()


def test_cpu_offload_trains_the_same_in_less_gpu_memory(tmp_path):
    runs = train_all(tmp_path, {"gpu": GOLDEN_RUN, "offload": [*GOLDEN_RUN, "--training.enable_cpu_offload"]})
    assert_same_start(runs["offload"].losses, runs["gpu"].losses)  # the update is computed by the CPU's kernel
    assert runs["offload"].peak_gib < runs["gpu"].peak_gib


LONG = ["--training.seq_len", "512", "--training.global_batch_size", "8", "--training.steps", "6"]
MODE, OPTION = "--activation_checkpoint.mode", "--activation_checkpoint.selective_option"
MODES = {
    "none": [MODE, "none"],
    "op": [MODE, "selective", OPTION, "op"],
    "every_second": [MODE, "selective", OPTION, "2"],
    "full": [MODE, "full"],
}


def test_activation_checkpointing_keeps_every_bit_and_saves_memory_in_the_predicted_order(tmp_path):
    """4096 tokens of 8 layers leave some 400 MB of activations beside 25 MB of state, so that they make the peak."""
    deterministic = [*GOLDEN_RUN, *LONG, "--debug.deterministic"]
    runs = train_all(
        tmp_path, {name: deterministic + flags for name, flags in MODES.items()} | {"again": deterministic}
    )
    assert runs["again"].losses == runs["none"].losses, "the GPU itself does not repeat its bits"
    for name in MODES:
        assert runs[name].losses == runs["none"].losses, name
    peaks = {name: runs[name].peak_gib for name in MODES}
    assert peaks["full"] < peaks["op"] < peaks["none"], peaks
    assert peaks["full"] < peaks["every_second"] < peaks["none"], peaks


def test_verify_finds_every_single_rank_layout_equal_to_one_device():
    layouts = "accum2,1+full,1+selective,1+selective2,1+compile,1+offload"
    done = crius("verify", "parity", "--layouts", layouts, "--training.device", DEVICE, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def test_async_tensor_parallel_fuses_matmuls_on_two_gpus(tmp_path):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("tensor parallelism over 2 ranks needs 2 GPUs")
    flags = ["--parallelism.tensor_parallel_degree", "2", "--parallelism.enable_async_tensor_parallel", *COMPILE]
    flags += ["--nproc", "2", "--strict", "--job.run_dir", str(tmp_path)]
    done = crius("train", *SMALL, *flags, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr  # strict: no fused matmul is an error
    assert "async_tp: " in done.stdout
