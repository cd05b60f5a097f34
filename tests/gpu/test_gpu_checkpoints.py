"""Checkpoints of one process on a GPU: what its CPU twins claim in tests/distributed/test_checkpoints.py."""

import re
import shutil

import pytest
from checkpoint_runs import contents
from gpu_runs import GOLDEN_RUN, train_all
from harness import TEXT

from crius.checkpoint.names import step_name

pytestmark = pytest.mark.gpu

SAVE = [*GOLDEN_RUN, "--checkpoint.interval", "10", "--debug.deterministic"]
VARIANTS = {
    "fused": [],
    "bfloat16": ["--training.mixed_precision_param", "bfloat16", "--optimizer.state_dtype", "bfloat16"],
    "8bit": ["--optimizer.state_dtype", "8bit"],
    "offload": ["--training.enable_cpu_offload"],
    "float8": [
        *("--quantize.dense.float8.enable", "--quantize.dense.float8.enable_fsdp_float8_all_gather"),
        *("--quantize.dense.auto_filter", "off", "--training.mixed_precision_param", "bfloat16"),
    ],
}


def test_a_run_in_two_parts_is_the_run_in_one_on_a_gpu(tmp_path):
    runs = {name: [*SAVE, *flags] for name, flags in VARIANTS.items()}
    whole = train_all(tmp_path / "whole", runs)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for name in runs:
        shutil.rmtree(tmp_path / "parts" / name / "checkpoints" / step_name(20))
    again = {name: [*flags, "--checkpoint.restart"] for name, flags in runs.items()}
    parts = train_all(tmp_path / "parts", again)
    for name in runs:
        assert parts[name].losses == whole[name].losses, name
        assert contents(tmp_path / "parts" / name, 20) == contents(tmp_path / "whole" / name, 20), name


def test_random_streams_of_a_gpu_go_on_where_they_were(tmp_path, monkeypatch):
    monkeypatch.setenv("CRIUS_FAULT", "dropout:p=0.1")
    whole = train_all(tmp_path / "whole", {"run": SAVE})["run"]
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "run" / "checkpoints" / step_name(20))
    again = train_all(tmp_path / "parts", {"run": [*SAVE, "--checkpoint.restart"]})
    assert again["run"].losses == whole.losses


def test_an_async_save_on_a_gpu_waits_less_than_a_sync_one(tmp_path, monkeypatch):
    # 1.5 GB per checkpoint
    large = ["--model.flavor", "1b", "--model.num_layers", "2", "--model.vocab_size", "2048"]
    large += ["--training.steps", "2", "--checkpoint.interval", "1"]
    large += ["--data.source", "text", "--data.path", str(TEXT), "--validation.interval", "0"]
    large += ["--training.seq_len", "64"]
    # The first save decides, for the last one is waited for. It allocates page-locked memory, which may take as long as
    # writing to a fast disk. So each of its 60 writes or more is slow, whatever other tests do at the same time.
    monkeypatch.setenv("CRIUS_FAULT", "disk:save=1-2,error=slow,seconds=0.05")
    waited = {}
    for mode in ("sync", "async"):
        output = train_all(tmp_path / mode, {"run": [*large, "--checkpoint.mode", mode]})["run"].output
        waited[mode] = [float(text) for text in re.findall(r"training waited ([0-9.]+) s", output)]
    assert waited["async"][0] < min(waited["sync"])


def test_recomputed_gradients_are_equal_on_a_gpu(tmp_path):
    flags = [*GOLDEN_RUN, "--debug.deterministic", "--sdc.recompute_interval", "5"]
    runs = train_all(tmp_path, {"checked": flags, "plain": [*GOLDEN_RUN, "--debug.deterministic"]})
    assert runs["checked"].losses == runs["plain"].losses
