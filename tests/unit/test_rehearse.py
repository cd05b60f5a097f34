"""``--checkpoint.rehearse``: each new checkpoint is restored beside the run, and has the loss that the run had."""

import json
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from harness import crius, read_metrics, train

from crius.checkpoint.names import step_name
from crius.errors import CheckpointError
from crius.tools.report.runs import run_lines, run_row
from crius.tools.verify import rehearse
from crius.tools.verify.rehearse import Rehearsals
from crius.tools.verify.restored_loss import restored_loss

TINY = (
    "--training.steps 4 --model.num_layers 2 --model.dim 32 --training.seq_len 32 "
    "--training.device cpu --validation.num_samples 16 --training.global_batch_size 8 --metrics.log_interval 1"
).split()
LAYOUTS = {
    "fsdp2_ep2": "--model.name qwen3_moe --layout fsdp2_ep2",
    "pp2": "--layout pp2 --training.mixed_precision_param bfloat16",
    "cp2": "--layout cp2 --model.attention_mask document",
    "tp2": "--layout tp2 --lora.rank 2",
}


def rehearsals(run_dir):
    return [json.loads(line) for line in (run_dir / "rehearsals.jsonl").read_text().splitlines()]


def curve(run_dir):
    return [(record["step"], record.get("loss"), record.get("val_loss")) for record in read_metrics(run_dir)]


def asked(run_dir, step=4):
    rows = torch.arange(64).reshape(2, 32)
    return {
        "path": str(run_dir / "checkpoints" / step_name(step)),
        "step": step,
        "tokens": rows.tolist(),
        "positions": (rows % 32).tolist(),
        "labels": (rows + 1).tolist(),
        "loss": 1.0,
        "tolerance": 1e-4,
    }


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rehearsed")
    train([*TINY, "--checkpoint.rehearse"], folder / "run")
    return folder / "run"


def test_the_last_checkpoint_is_restored_with_the_loss_of_the_run(rehearsed):
    last = rehearsals(rehearsed)[-1]
    assert (last["step"], last["problem"]) == (4, "")
    assert last["loss"] == pytest.approx(last["wanted"], rel=1e-5)
    assert run_lines([run_row(rehearsed)])[-1].split()[-1] == "4"


def test_a_rehearsal_leaves_the_curve_bit_for_bit(rehearsed, tmp_path):
    train(TINY, tmp_path / "run")
    assert curve(rehearsed) == curve(tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if name in ("cp2", "tp2") else []) for name in LAYOUTS]
)
def test_any_layout_is_restored_on_one_process(layout, tmp_path):
    base = []
    if "lora" in LAYOUTS[layout]:
        train(TINY, tmp_path / "base")
        base = ["--checkpoint.init_from", str(tmp_path / "base")]
    saves = ["--checkpoint.interval", "2", "--checkpoint.rehearse", "--job.run_dir", str(tmp_path / "run")]
    words = [*TINY, *saves, *LAYOUTS[layout].split(), *base]
    done = crius("train", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(row["step"], row["problem"]) for row in rehearsals(tmp_path / "run")][-1] == (4, "")
    assert "rehearsal: step 4 restored" in done.stderr + done.stdout


def test_a_flipped_bit_is_named(rehearsed, tmp_path):
    with pytest.raises(CheckpointError, match="have hash"):
        restored_loss(asked(_flipped(rehearsed, tmp_path)))


def _flipped(run_dir, to):
    shutil.copytree(run_dir, to / "run")
    file = next((to / "run/checkpoints" / step_name(4)).glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return to / "run"


def outcome(run_dir, job, caplog):
    """A rehearsal in a process, as the run starts it and tells of it."""
    ours = Rehearsals(run_dir)
    folder = SimpleNamespace(steps=lambda: [4])
    ours._checkpoints = SimpleNamespace(saver=SimpleNamespace(failures=0), committed=4, folder=folder)
    ours._next = job
    while ours._next or ours._process:
        ours._poll()
        time.sleep(0.05)
    return rehearsals(run_dir)[-1]["problem"], caplog.text


@pytest.mark.full
def test_other_weights_than_those_of_the_run_are_told(rehearsed, tmp_path, caplog):
    problem, said = outcome(tmp_path, asked(rehearsed), caplog)
    assert "the loss of its batch is" in problem and "in the run it was 1.000000" in problem
    assert "step 4 CANNOT BE RESTORED" in said and str(rehearsed) in said
    (tmp_path / "run.toml").write_text("")
    assert run_lines([run_row(tmp_path)])[-1].endswith("4 FAILED")


def test_a_run_that_is_stopped_leaves_no_rehearsal_behind(tmp_path):
    ours = Rehearsals(tmp_path)
    ours._loop = SimpleNamespace(stop=SimpleNamespace(number=signal.SIGTERM))
    with ours.around(None, None):
        ours._process = process = rehearse._started(asked(tmp_path))
    assert process.returncode == -signal.SIGKILL


def test_a_run_that_saves_nothing_rehearses_nothing(tmp_path):
    (tmp_path / "own.toml").write_text("[checkpoint]\nenable = false\nrehearse = true\n")
    done = crius("train", *TINY, "--config", "own.toml", "--job.run_dir", "run", cwd=tmp_path)
    assert done.returncode == 0 and not (tmp_path / "run/rehearsals.jsonl").exists(), done.stderr
