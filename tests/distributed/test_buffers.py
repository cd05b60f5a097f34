"""Buffers are state, counters count each token of a step once, and ``after_update`` follows each update."""

import functools
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import BATCH, contents, flags
from counting import SHIFT, CountingBlock, CountingConfig, use_counting_blocks
from harness import run, steps_of, train
from test_verify import verify

from crius.checkpoint.contents import whole_tensor
from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import read_manifest
from crius.checkpoint.names import step_name
from crius.tools.verify.compare import parity
from crius.tools.verify.init import init

SAVE = ("--checkpoint.interval", "2")
STEPS = 4


@pytest.fixture(autouse=True)
def counting(monkeypatch):
    use_counting_blocks(monkeypatch)


def curve(records):
    return [(record["loss"], record["grad_norm"]) for record in steps_of(records)]


def shifts(run_dir, step=STEPS):
    """Buffers by name, as the checkpoint of a step has them."""
    disk, folder = open_disk(str(run_dir / "checkpoints")), step_name(step)
    entries = read_manifest(disk, folder).tensors
    assert not any("seen" in name for name in entries)
    found = {name: entry for name, entry in entries.items() if name.endswith("shift")}
    assert {entry.dtype for entry in found.values()} == {"F32"}
    return {name: whole_tensor(disk, folder, entry).view(np.float32).ravel().tolist() for name, entry in found.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        use_counting_blocks(patch)
        records = train(flags("1", *SAVE, steps=STEPS), folder)
    return curve(records), folder


def test_the_hook_moves_the_buffers_by_the_counts_of_the_step(alone, monkeypatch, tmp_path):
    losses, folder = alone
    want = torch.tensor(0.5)
    for _ in range(STEPS):
        want += SHIFT * torch.tensor(BATCH * 32)
    found = shifts(folder)
    assert list(found) == ["model.layers.0.shift", "model.layers.1.shift"]
    assert all(tokens == want.item() and 0.5 < positive < tokens for tokens, positive in found.values())
    monkeypatch.setattr(CountingBlock, "after_update", lambda block: None)
    still = curve(train(flags("1", steps=STEPS), tmp_path))
    assert still[0] == losses[0]
    assert abs(still[1][0] - losses[1][0]) > 1e-4


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["fsdp2_accum2", "tp2", "pp2", "cp2", "1+full", "fsdp2+selective"])
def test_every_layout_counts_each_token_once(layout, alone, tmp_path):
    losses, folder = alone
    got = curve(train(flags(layout, *SAVE, steps=STEPS), tmp_path))
    for one, other in zip(got, losses, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=0)
    assert shifts(tmp_path) == shifts(folder)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2+interleave_1f1b", "pp2+zbv_zero_bubble", "pp2+dualpipev"])
def test_every_schedule_counts_each_token_once(layout, tmp_path):
    deeper = (*SAVE, "--model.num_layers", "4")
    train(flags("1", *deeper, steps=STEPS), tmp_path / "alone")
    train(flags(layout, *deeper, steps=STEPS), tmp_path / "stages")
    assert shifts(tmp_path / "stages") == shifts(tmp_path / "alone")


@pytest.mark.parametrize(
    "more",
    [("--validation.interval", "1", "--validation.num_samples", "8"), ("--sdc.recompute_interval", "1")],
    ids=["validation", "recompute"],
)
def test_a_pass_that_is_not_of_the_step_counts_nothing(more, alone, tmp_path):
    losses, folder = alone
    assert curve(train([*flags("1", *SAVE, steps=STEPS), *more], tmp_path)) == losses
    assert contents(tmp_path, STEPS) == contents(folder, STEPS)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["fsdp2", "pp2"])
def test_a_run_that_is_killed_goes_on_to_the_bit_and_on_another_layout(layout, tmp_path, monkeypatch, capfd):
    own = ("--training.dtype", "bfloat16")  # of the weights: ``shifts`` sees that buffers stay float32
    whole = train(flags(layout, *own, *SAVE, steps=STEPS), tmp_path / "whole")
    monkeypatch.setenv("CRIUS_FAULT", "kill:step=4")
    assert run(flags(layout, *own, *SAVE, steps=STEPS), tmp_path / "parts", is_supervised=True) == 0
    assert contents(tmp_path / "parts", STEPS) == contents(tmp_path / "whole", STEPS)
    monkeypatch.delenv("CRIUS_FAULT")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / step_name(STEPS))
    other = "pp2" if layout == "fsdp2" else "1"
    last = curve(train(flags(other, *own, *SAVE, "--checkpoint.restart", steps=STEPS), tmp_path / "parts"))[-1]
    assert "starts from zero" not in "".join(capfd.readouterr())
    assert last == pytest.approx(curve(whole)[-1], rel=1e-3)  # bfloat16
    tokens = {name: of_one[0] for name, of_one in shifts(tmp_path / "whole").items()}
    assert {name: of_one[0] for name, of_one in shifts(tmp_path / "parts").items()} == tokens


class Wider(CountingBlock):
    """Its state has three numbers."""

    def __init__(self, config, index):
        super().__init__(config, index)
        self.shift = torch.zeros(3)


class WiderConfig(CountingConfig):
    def layer(self, index):
        layer = super().layer(index)
        return replace(layer, buffers=(layer.buffers[0]._replace(shape=(3,)), layer.buffers[1]))


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (
            None,
            use_counting_blocks,
            "2 that the run has and the checkpoint lacks: model.layers.0.shift, model.layers.1",
        ),
        (
            use_counting_blocks,
            None,
            "2 that the checkpoint has and the run lacks: model.layers.0.shift, model.layers.1",
        ),
        (
            use_counting_blocks,
            functools.partial(use_counting_blocks, block=Wider, kind=WiderConfig),
            "2 of another shape: model.layers.0.shift: [2] in the checkpoint, [3] in the run",
        ),
    ],
    ids=["missing", "extra", "shape"],
)
def test_a_checkpoint_with_other_buffers_is_refused_by_name(before, after, named, monkeypatch, tmp_path, capfd):
    for use, steps, code in ((before, 1, 0), (after, 2, 1)):
        monkeypatch.undo()
        if use:
            use(monkeypatch)
        assert run(flags("1", "--checkpoint.enable", steps=steps), tmp_path) == code
    out, err = capfd.readouterr()
    assert named in out + err


def test_replicas_of_a_buffer_are_compared(monkeypatch, tmp_path, capfd):
    def uneven(block):
        block.shift += dist.get_rank()

    monkeypatch.setattr(CountingBlock, "after_update", uneven)
    assert run(flags("ddp2", "--sdc.replica_interval", "1", steps=2), tmp_path) == 1
    out, err = capfd.readouterr()
    assert "after step 1 replicas of layers.0.shift and of 1 more" in out + err


@pytest.mark.long
def test_verify_compares_buffers(monkeypatch, tmp_path, capsys):
    code, rows = verify(init, tmp_path, capsys, "1,fsdp2,pp2")
    assert code == 0, rows
    code, rows = verify(parity, tmp_path, capsys, "fsdp2,pp2", steps=2)
    assert code == 0, rows

    def moved(block):  # the second update is the last: no loss shows it
        after_update(block)
        block.updates = getattr(block, "updates", 0) + 1
        block.shift += 0.1 * (block.updates == 2 and dist.get_world_size() == 2)

    after_update = CountingBlock.after_update
    monkeypatch.setattr(CountingBlock, "after_update", moved)
    code, rows = verify(parity, tmp_path, capsys, "fsdp2", steps=2)
    assert code == 1 and rows["fsdp2"]["status"] == "FAIL"
    assert ".shift" in rows["fsdp2"]["note"]
