"""What ``make setup`` installs is enough for float8, compiled and asynchronous runs on eight local workers."""

import subprocess
import sys
import tomllib

import pytest
from harness import ROOT

FSDP = "--parallelism.data_parallel_shard_degree"
TENSOR = "--parallelism.tensor_parallel_degree"
PIPELINE = "--parallelism.pipeline_parallel_degree"
FLOAT8 = "--quantize.dense.float8.enable"
ASYNC = "--parallelism.enable_async_tensor_parallel"
SHORT = ["--training.steps", "2", "--validation.interval", "0", "--checkpoint.no_enable"]
SCHEDULE = ["--parallelism.pipeline_parallel_schedule", "interleave_1f1b"]


def test_setup_installs_float8_tokenizers_and_their_chat_templates():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name.partition(">")[0] for name in extras["standard"]} == {"torchao", "tokenizers", "jinja2"}
    recipe = (ROOT / "Makefile").read_text().split("\n$(STAMP):")[1].split("\n\n")[0]
    assert "-e '.[standard]'" in recipe


@pytest.mark.slow  # eight workers that compile: 150 CPU seconds
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "flags",
    [
        [FSDP, "8", "--compile.enable", FLOAT8, *SHORT],
        [FSDP, "4", TENSOR, "2", ASYNC, "--compile.enable", *SHORT],
        [FSDP, "8", TENSOR, "8", PIPELINE, "8", *SCHEDULE, FLOAT8, "--model.flavor", "405b", "--dry_run"],
    ],
    ids=["fsdp8_float8", "fsdp4_tp2_async", "405b"],
)
def test_the_commands_for_eight_ranks_and_for_512_run_here(flags, tmp_path):
    done = subprocess.run([sys.executable, ROOT / "train.py", *flags], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
