"""Layouts whose ranks share the one GPU: their collectives run on CUDA streams. Nothing is shown of speed."""

import pytest
from gpu_runs import DEVICE
from harness import crius

from crius.plugins import loaded_nccl

pytestmark = pytest.mark.gpu

BY_NCCL = loaded_nccl() >= (2, 30)
"""Whether ranks can share it over NCCL: docs/gpu.md says how pytest gets such a library."""
# two blocks of a collective: those of all ranks must find room on the GPU at the same time
OF_NCCL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
SHARED = {"CRIUS_SHARE_GPU": "nccl", **OF_NCCL} if BY_NCCL else {"CRIUS_SHARE_GPU": "gloo"}


@pytest.mark.parametrize(
    "layouts",
    [
        "fsdp2,tp2,cp2,hsdp2x2",
        pytest.param("pp2", marks=pytest.mark.skipif(not BY_NCCL, reason="Gloo sends host memory only")),
    ],
)
def test_ranks_on_one_gpu_train_as_one_device(layouts, tmp_path):
    flags = ["--layouts", layouts, "--training.device", DEVICE, "--timeout", "90", "--job.run_dir", str(tmp_path)]
    done = crius("verify", "parity", *flags, timeout=280, **SHARED)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [path.read_text() for path in tmp_path.rglob("rank-0.log")]
    over = "over NCCL" if BY_NCCL else "over Gloo"
    assert sum(f"ranks share one GPU, {over}" in log for log in logs) == len(layouts.split(","))
