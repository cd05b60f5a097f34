"""Every way to keep an optimizer's state updates the weights of a sharded model as those of a whole one."""

import functools
import json

import pytest
from harness import SMALL, layout_flags, num_ranks, parse

from crius.launch.local import run_workers
from crius.verify.parameters import Shards
from crius.verify.worker import RESULT, Task, train

STEPS = 4
FLAGS = [
    *SMALL,
    *("--model.num_layers", "2", "--training.steps", str(STEPS), "--validation.interval", "0"),
    *("--optimizer.lr", "1e-3", "--lr_scheduler.warmup_steps", "0", "--training.mixed_precision_param", "float32"),
]

MIXED = ["--optimizer.name", "muon", "--optimizer.param_groups", "output: optimizer=muon lr_factor=0.5"]
MIXED += ["--optimizer.state_dtype", "8bit", "--optimizer.implementation", "foreach"]
OPTIMIZERS = {
    "bf16 states": ["--optimizer.state_dtype", "bfloat16"],
    "8bit states": ["--optimizer.state_dtype", "8bit"],
    "bf16 weights": ["--training.dtype", "bfloat16"],
    "muon": ["--optimizer.name", "muon"],
    "mixed": MIXED,
}
OFFLOAD = ["--training.enable_cpu_offload"]

# What an optimizer changed in a parameter, relative to what it changed on one device, in the worst parameter; losses
# are equal to 1e-8 (measured), as in tests/parity/test_layouts.py. Moments and roundings are element by element and
# their random bits do not know the layout, so that only the order of sums in the gradients differs: now and then one
# of its last bits carries an element over the threshold of a rounding, by 2**-9 of a moment, 2**-8 of a weight.
# In 8 bits the numbers of a block share a scale. A block lies along the shard, so tensor parallelism, which cuts the
# rows of wo and w2 (here shorter than two blocks), groups other numbers together: measured 9e-3, and 6e-7 in the loss.
# Muon iterates whole float32 matrices on one rank, whatever the layout.
RUNS = [
    ("bf16 states", "pp2_fsdp2", [], 1e-8, 1e-4),  # measured 3e-5
    ("bf16 states", "fsdp2_tp2", [], 1e-8, 1e-4),
    ("8bit states", "pp2_fsdp4", [], 1e-8, 5e-4),  # measured 9e-5; shards of wk that are too small to quantize if alone
    ("8bit states", "fsdp2_tp2", [], 5e-6, 3e-2),
    ("bf16 weights", "pp2_fsdp2", [], 1e-8, 1e-3),  # measured 4e-4
    ("bf16 weights", "hsdp2x2_tp2", [], 1e-7, 1e-3),  # 1.05e-8 with MKL on Zen 3: sums end next to a rounding
    ("muon", "pp2_fsdp2", [], 1e-8, 1e-4),  # measured 1.2e-5
    ("muon", "hsdp2x2_tp2", [], 1e-8, 1e-4),
    ("mixed", "fsdp2", OFFLOAD, 1e-7, 2e-2),  # measured 3e-3: the iteration makes small singular values large
]


def result_of(task):
    task.run_dir.mkdir()
    assert run_workers(functools.partial(train, task), num_ranks(task.config), task.run_dir) == 0
    return json.loads((task.run_dir / RESULT).read_text())


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Losses of the run on one device and where its weights are; made once for each optimizer."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("one")
            config = parse([*FLAGS, *layout_flags("1"), *OPTIMIZERS[name]])
            shards = Shards(folder, is_whole=True)
            made[name] = result_of(Task(config, folder / "run", 60, shards, is_reference=True)), shards
        return made[name]

    return get


@pytest.mark.parametrize(("name", "layout", "flags", "loss", "update"), RUNS, ids=[f"{a} {b}" for a, b, *_ in RUNS])
def test_a_sharded_step_is_the_whole_step(name, layout, flags, loss, update, one_device, tmp_path):
    want, shards = one_device(name)
    config = parse([*FLAGS, *layout_flags(layout), *OPTIMIZERS[name], *flags])
    got = result_of(Task(config, tmp_path / "run", 120, shards))
    assert got["missing"] == []
    assert got["moved"] > 1e-3  # of the whole model's norm: there is something to compare
    assert got["loss"] == pytest.approx(want["loss"], rel=loss, abs=0)
    assert got["update"] < update, got["worst"]
