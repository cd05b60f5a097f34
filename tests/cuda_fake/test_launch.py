"""What a launcher does before a GPU is touched. Needs no shim."""

import os
import subprocess
import sys

import pytest
from harness import ROOT

# not compiled, as a run would be that believes in GPUs: under the probe's profile hook that takes minutes
_FLAGS = (
    "--parallelism.data_parallel_shard_degree 2 --training.steps 1 --model.num_layers 1 --training.seq_len 32 "
    "--compile.no_enable"
)


@pytest.mark.long
def test_the_launcher_calls_nothing_of_cuda_before_it_forks(tmp_path):
    """CUDA in a process that was forked after its parent had used it is broken for good."""
    calls = tmp_path / "calls.txt"
    flags = [*_FLAGS.split(), "--checkpoint.no_enable", "--validation.interval", "0", "--job.run_dir", tmp_path / "run"]
    command = [sys.executable, "-m", "cuda_fake.launch_probe", calls, "train", *flags]
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, timeout=280, stdout=subprocess.DEVNULL)
    lines = calls.read_text().splitlines()
    assert [line for line in lines if line.startswith("parent")] == []
    assert any(line.startswith("worker is_available") for line in lines), "the probe sees workers look for a GPU"
