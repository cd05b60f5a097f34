"""W&B itself, without network: what a run and its resume leave for ``wandb sync``."""

import re

import pytest
from harness import SMALL, crius, read_metrics

pytestmark = pytest.mark.real
pytest.importorskip("wandb")

FLAGS = [*SMALL, "--model.num_layers", "1", "--validation.interval", "2", "--metrics.log_interval", "1"]
KEY = "0123456789abcdef0123456789abcdef01234567"


def train(folder, steps, num_ranks=1, **environ):
    flags = ["--parallelism.data_parallel_shard_degree", str(num_ranks), "--training.steps", str(steps)]
    flags += ["--metrics.enable_wandb", "--checkpoint.interval", "2"]
    done = crius("train", *FLAGS, *flags, "--job.run_dir", str(folder), **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_and_its_resume_are_one_run_in_wandbs_own_files(tmp_path):
    for steps, num_ranks in ((3, 1), (5, 2)):  # rank 0 alone sends
        out = train(tmp_path / "run", steps, num_ranks, WANDB_MODE="offline", WANDB_API_KEY=KEY)
        assert re.search(r"^W&B: run [0-9a-f]{12} in .*wandb, offline$", out, re.MULTILINE)
    identity = (tmp_path / "run" / "wandb_id.txt").read_text().strip()
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{identity}.wandb"] * 2
    for file in files:
        content = file.read_bytes()
        assert b"loss_metrics/global_avg_loss" in content and b"validation_metrics/loss" in content
        assert b"optimizer.lr" in content and KEY.encode() not in content
        assert content.count(b"loss_metrics/global_avg_loss") >= 2  # one a step


def test_without_a_key_the_run_goes_on_and_says_so(tmp_path):
    environ = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    out = train(tmp_path / "run", 2, **environ)
    assert "W&B failed and gets no more records: UsageError: No API key configured." in out
    assert [record["step"] for record in read_metrics(tmp_path / "run") if "loss" in record] == [1, 2]
