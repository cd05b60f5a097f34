"""``crius plan check``: closed form and dry run of the real code agree, for every recipe and some layouts."""

import contextlib
import functools
import io
import json

import pytest
from harness import GPUS

from crius import cli
from crius.config.load import recipe_names
from crius.launch.local import run_workers

P = "--parallelism."
SHORT = ["--flavor", "debug", "--seq_len", "256"]
CASES = {
    **{name: ["--recipe", name, "--gpus", str(GPUS.get(name, 4))] for name in recipe_names() if name != "tune"},
    "tune": ["--recipe", "tune", "--flavor", "1b", "--gpus", "4"],  # its model is that of the weights
    "fsdp, unequal shards, recomputed": [*SHORT, "--gpus", "3", "--activation_checkpoint.mode", "selective"],
    "tensor parallel": [
        *SHORT,
        "--gpus",
        "4",
        f"{P}tensor_parallel_degree",
        "2",
        f"{P}data_parallel_shard_degree",
        "2",
    ],
    "tensor parallel on a CPU, fused kernels": [
        *("--recipe", "llama3_debug", "--gpu", "cpu", "--gpus", "4", f"{P}tensor_parallel_degree", "4"),
    ],
    "Muon in 8 bits": [
        *("--recipe", "llama3_debug", "--gpu", "cpu", "--gpus", "2", f"{P}data_parallel_shard_degree", "2"),
        *("--optimizer.name", "muon", "--optimizer.state_dtype", "8bit"),
    ],
    "two of eight layers recomputed, in a pipeline": [
        *(*SHORT, "--gpus", "4", f"{P}pipeline_parallel_degree", "2", "--global_batch_size", "8"),
        *("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_option", "3"),
    ],
    "pipeline": [*SHORT, "--gpus", "4", f"{P}pipeline_parallel_degree", "2", "--global_batch_size", "8"],
}


def _check(flags, path, placement):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(["plan", "check", *flags, "--json"])
    path.write_text(json.dumps({"code": code, **json.loads(out.getvalue())}))


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a dry run of all ranks of a large model
@pytest.mark.parametrize("flags", CASES.values(), ids=CASES)
def test_the_plan_agrees_with_the_dry_run(flags, tmp_path):
    """State to the byte, activations within 5 %."""
    path = tmp_path / "plan.json"
    assert run_workers(functools.partial(_check, flags, path), 1, tmp_path) == 0
    found = json.loads(path.read_text())
    rows = {(row["rank"], row["kind"]): row for row in found["check"]["rows"]}
    assert {kind for _, kind in rows} == {"parameters", "gradients", "optimizer", "activations", "peak"}
    for (_, kind), row in rows.items():
        assert row["counted"] > 0
        if kind == "activations":
            assert row["planned"] == pytest.approx(row["counted"], rel=0.05)
        elif kind != "peak":
            assert row["planned"] == row["counted"]
    assert found["check"]["agrees"] and found["code"] == 0
