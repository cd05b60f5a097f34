"""Every way to keep an optimizer's state updates the weights of a sharded model as those of a whole one."""

import functools
import json

import pytest
from harness import SMALL, layout_flags, num_ranks, parse

from crius.tools.verify.parameters import Shards
from crius.tools.verify.worker import RESULT, WorkerTask, train

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
# are equal to 3e-8 (measured), as in tests/parity/test_layouts.py. Moments and roundings are element by element and
# their random bits do not know the layout, so that only the order of sums in the gradients differs: now and then one
# of its last bits carries an element over the threshold of a rounding, by 2**-9 of a moment, 2**-8 of a weight.
# In 8 bits the numbers of a block share a scale. A block lies along the shard, so tensor parallelism, which cuts the
# rows of wo and w2 (here shorter than two blocks), groups other numbers together: measured 9e-3, and 3e-6 in the loss.
# Muon iterates whole float32 matrices on one rank, whatever the layout.
RUNS = [
    # measured 3e-5 on AMD; on Intel 1.2e-4, of norm.weight: one of 128 moments rounds the other way, 2**-9 / 128**0.5
    ("bf16 states", "pp2_fsdp2", [], 1e-7, 5e-4),
    ("bf16 states", "fsdp2_tp2", [], 1e-7, 5e-4),  # measured 1.2e-4
    ("8bit states", "pp2_fsdp4", [], 1e-7, 5e-4),  # measured 1.1e-4; shards of wk that are too small to quantize alone
    ("8bit states", "fsdp2_tp2", [], 1e-5, 3e-2),
    ("bf16 weights", "pp2_fsdp2", [], 1e-7, 1e-3),  # measured 4e-4
    ("bf16 weights", "hsdp2x2_tp2", [], 1e-7, 2e-3),  # measured 7e-4: sums end next to a rounding
    ("muon", "pp2_fsdp2", [], 1e-7, 1e-4),  # measured 2e-5
    ("muon", "hsdp2x2_tp2", [], 1e-7, 1e-4),
    ("mixed", "fsdp2", OFFLOAD, 1e-7, 2e-2),  # measured 3e-3: the iteration makes small singular values large
]


@pytest.fixture(scope="module")
def result_of(workers):
    def run(task):
        workers(num_ranks(task.config)).run(functools.partial(train, task), task.run_dir)
        return json.loads((task.run_dir / RESULT).read_text())

    return run


@pytest.fixture(scope="module")
def one_device(tmp_path_factory, result_of):
    """Losses of the run on one device and where its weights are; made once for each optimizer."""

    @functools.cache
    def run(name):
        folder = tmp_path_factory.mktemp("one")
        config = parse([*FLAGS, *layout_flags("1"), *OPTIMIZERS[name]])
        shards = Shards(folder, is_whole=True)
        return result_of(WorkerTask(config, folder / "run", 60, shards, is_reference=True)), shards

    return run


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "layout", "flags", "loss", "update"), RUNS, ids=[f"{a} {b}" for a, b, *_ in RUNS])
def test_a_sharded_step_is_the_whole_step(name, layout, flags, loss, update, one_device, result_of, tmp_path):
    want, shards = one_device(name)
    config = parse([*FLAGS, *layout_flags(layout), *OPTIMIZERS[name], *flags])
    got = result_of(WorkerTask(config, tmp_path / "run", 120, shards))
    assert got["missing"] == []
    assert got["moved"] > 1e-3  # of the whole model's norm: there is something to compare
    assert got["loss"] == pytest.approx(want["loss"], rel=loss, abs=0)
    assert got["update"] < update, got["worst"]
