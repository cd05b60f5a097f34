"""Checkpoints of real runs on real workers: any layout loads any other's, and a run in two parts is the run in one."""

import shutil

import pytest
from checkpoint_runs import contents, flags
from harness import TIED, run, steps_of, train

from crius.checkpoint.names import step_name
from crius.parallel import init
from crius.train import checkpoints

pytestmark = pytest.mark.usefixtures("imported_torchao")


def losses_of(records):
    return [(record["loss"], record["grad_norm"]) for record in steps_of(records)]


CHAIN = ["1", "tp2", "pp2_fsdp2", "fsdp3", "hsdp2x2", "fsdp2_tp2", "cp2", "ddp2", "pp2_tp2", "1"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("own", "layouts", "layers"),
    [
        pytest.param((), CHAIN, 2, marks=pytest.mark.slow),
        (
            ("--optimizer.state_dtype", "bfloat16", "--training.dtype", "bfloat16", "--optimizer.name", "muon"),
            CHAIN[:4],
            2,
        ),
        (TIED, ["pp2", "fsdp2", "pp2+zbv_zero_bubble", "pp2_tp2", "1"], 4),
    ],
    ids=["adamw", "muon_bfloat16", "tied"],
)
def test_any_layout_loads_what_any_other_saved(own, layouts, layers, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "check_steps_left", lambda step, config: None)
    own = (*own, "--checkpoint.enable", "--model.vocab_size", "257")
    train(flags(layouts[0], *own, layers=layers), tmp_path / "0")
    expected = contents(tmp_path / "0", 3)
    for number, layout in enumerate(layouts[1:], start=1):
        # with nothing left to train it saves what it loaded
        load = ("--checkpoint.load_path", str(tmp_path / str(number - 1) / "checkpoints"))
        train(flags(layout, *own, *load, layers=layers), tmp_path / str(number))
        assert contents(tmp_path / str(number), 3) == expected, layout
        shutil.rmtree(tmp_path / str(number - 1))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "own"),
    [
        ("1", ("--optimizer.state_dtype", "8bit")),
        ("fsdp2", ("--optimizer.state_dtype", "8bit", "--optimizer.name", "muon")),
        ("fsdp2", ("--training.dtype", "bfloat16", "--optimizer.state_dtype", "bfloat16")),
        ("fsdp2", ("--training.enable_cpu_offload",)),
        ("fsdp2", ("--quantize.dense.float8.enable", "--quantize.dense.float8.enable_fsdp_float8_all_gather",
                   "--quantize.dense.float8.precompute_scale", "--quantize.dense.auto_filter", "off",
                   "--training.mixed_precision_param", "float32")),
        ("1", ("--stability.nonfinite", "rollback", "--stability.snapshot_interval", "2")),
        ("pp2+zbv_zero_bubble", (*TIED, "--optimizer.state_dtype", "8bit")),
    ],
    ids=["8bit", "muon_8bit", "bfloat16", "offload", "float8_all_gather", "rollback", "tied_v_8bit"],
)  # fmt: skip
def test_a_run_in_two_parts_is_the_run_in_one(layout, own, tmp_path, monkeypatch):
    if "rollback" in own:  # goes back to the snapshot that belongs to the checkpoint
        monkeypatch.setenv("CRIUS_FAULT", "nan:step=5")
    save = ("--checkpoint.interval", "3")
    layers = 4 if "pp2" in layout else 2
    whole = train(flags(layout, *own, *save, steps=6, layers=layers), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / step_name(6))
    parts = train(flags(layout, *own, *save, "--checkpoint.restart", steps=6, layers=layers), tmp_path / "parts")
    assert [record["step"] for record in steps_of(parts)] == [1, 2, 3, 4, 5, 6]
    assert losses_of(parts) == losses_of(whole)
    assert contents(tmp_path / "parts", 6) == contents(tmp_path / "whole", 6)


def test_the_same_command_goes_back_to_load_step_once(tmp_path, monkeypatch):
    save = ("--checkpoint.interval", "1", "--checkpoint.keep_last", "9")
    train(flags("1", *save, steps=3), tmp_path)
    back = flags("1", *save, "--checkpoint.load_step", "1", steps=4)
    monkeypatch.setenv("CRIUS_FAULT", "kill:step=4")
    assert run(back, tmp_path, is_supervised=True) == 0  # starts again from step 3, not from step 1
    aside = sorted(name.name.partition(".")[0] for name in (tmp_path / "checkpoints").glob("*.aside-*"))
    assert aside == [step_name(2), step_name(3)]
    monkeypatch.delenv("CRIUS_FAULT")
    train([*back, "--optimizer.lr", "1e-4"], tmp_path)  # with another curve in mind it goes back again
    assert len(list((tmp_path / "checkpoints").glob("*.aside-*"))) == 5


def test_load_step_names_a_step_of_load_path(tmp_path, capfd):
    train(flags("1", "--checkpoint.interval", "1"), tmp_path / "old")
    load = ("--checkpoint.load_path", str(tmp_path / "old" / "checkpoints"), "--checkpoint.load_step", "2")
    for steps in (4, 5):  # the second start goes on from a step of its own
        records = train(flags("1", "--checkpoint.enable", *load, steps=steps), tmp_path / "new")
    assert [record["step"] for record in steps_of(records)] == [3, 4, 5]
    assert f"resume: step 4 of {tmp_path / 'new'}" in capfd.readouterr().out


def test_optimizer_state_that_is_not_taken_over_is_said(tmp_path, capfd):
    train(flags("1", "--checkpoint.enable", steps=1), tmp_path)
    allow = ("--checkpoint.allow_changes", "optimizer.name")
    train(flags("1", "--checkpoint.enable", "--optimizer.name", "muon", *allow, steps=2), tmp_path)
    said = capfd.readouterr().out
    assert "resume: 42 tensors of optimizer state are not used, such as optim.layers.0" in said
    assert "resume: optimizer state of 14 parameters starts from zero, such as layers.0" in said


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["1", "pp2_fsdp2", "tp2"])
def test_weights_are_drawn_at_the_start_and_not_where_they_are_loaded(layout, tmp_path, monkeypatch):
    """By any rank. Into the same folder, and from another one."""
    draw = init.draw_rows

    def counting(name, *args):
        with (tmp_path / "drawn").open("a") as file:
            file.write(f"{name}\n")
        return draw(name, *args)

    monkeypatch.setattr(init, "draw_rows", counting)
    train(flags(layout, "--checkpoint.enable", steps=2), tmp_path / "old")
    drawn = (tmp_path / "drawn").read_text().split()
    assert len(set(drawn)) == 2 + 2 * 7
    load = ("--checkpoint.load_path", str(tmp_path / "old" / "checkpoints"))
    for folder, more, steps in (("old", (), 3), ("new", load, 4)):
        train(flags(layout, "--checkpoint.enable", *more, steps=steps), tmp_path / folder)
    assert (tmp_path / "drawn").read_text().split() == drawn


def test_a_weight_that_is_neither_drawn_nor_loaded_ends_the_run(tmp_path, monkeypatch, capfd):
    """What a bug of loading leaves out is NaN, not whatever lay in that memory."""
    train(flags("1", "--checkpoint.enable", steps=2), tmp_path)
    load = checkpoints.load_tensors

    def forget(found, tensors):
        load(found, {name: target for name, target in tensors.items() if "layers.1.attention.wo" not in name})

    monkeypatch.setattr(checkpoints, "load_tensors", forget)
    assert run(flags("1", "--checkpoint.enable"), tmp_path) == 1
    assert "step 3: loss nan" in capfd.readouterr().err
