"""``training.reproducible``: the same bits on any number of data-parallel ranks."""

import functools
import json
import time

import pytest
import torch
from harness import SMALL, num_ranks, parse, run_job

from crius.launch.local import run_workers
from crius.parallel import reproducible
from crius.parallel.runtime import World
from crius.shards import named_parameters
from crius.tools.verify.parameters import checksums
from crius.train import job, loop

# 8 virtual shards of 2 sequences; the rows of a vocabulary of 257 split unevenly
BASE = [*SMALL, "--model.num_layers", "2", "--model.vocab_size", "257", "--validation.interval", "0"]
BASE += ["--training.steps", "4", "--training.reproducible", "--training.virtual_shards", "8"]
REPLICATE, SHARD = "--parallelism.data_parallel_replicate_degree", "--parallelism.data_parallel_shard_degree"
TENSOR, CONTEXT = "--parallelism.tensor_parallel_degree", "--parallelism.context_parallel_degree"


def write_bits(config, run_dir, change, placement):
    """Train as one rank; rank 0 writes what must not depend on the layout, to the last bit."""
    found = {"loss": [], "grad_norm": []}

    def keep(*args):
        result = train_step(*args)
        for name, values in found.items():
            values.append(getattr(result, name).item().hex())
        return result

    def run_and_write(loop, run_dir, *args):
        run(loop, run_dir, *args)
        state = loop.state
        ranks = World(placement.rank, placement.world_size, torch.device("cpu"))
        parameters = named_parameters(state.parts)
        held = {name: parameter for name, parameter in parameters}
        for name, parameter in parameters:
            moments = state.optimizer.state[parameter].items()
            held |= {f"{moment} of {name}": value for moment, value in moments if value.dim()}
        sums = checksums(list(held.items()), list(held), ranks)
        if ranks.rank == 0:
            (run_dir / "bits.json").write_text(json.dumps({**found, "sums": sums}))

    train_step, run = loop.train_step, job._run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", keep)
        patch.setattr(job, "_run", run_and_write)
        if change:
            patch.setattr(*change)
        run_job(config, run_dir, time.monotonic(), placement)


def bits(flags, run_dir, change=None):
    """Losses and gradient norms of each step, checksums of weights and moments after the last."""
    config = parse([*BASE, *flags])
    run_dir.mkdir(parents=True, exist_ok=True)
    code = run_workers(functools.partial(write_bits, config, run_dir, change), num_ranks(config), run_dir)
    assert code == 0
    found = json.loads((run_dir / "bits.json").read_text())
    assert all(found["sums"].values())
    assert len(found["loss"]) == config.training.steps
    return found


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return bits([], tmp_path_factory.mktemp("one"))


# 4, 2, 4 and 2 microbatches a rank
LAYOUTS = {
    "fsdp2": [SHARD, "2"],
    "fsdp4": [SHARD, "4"],
    "ddp2": [REPLICATE, "2"],
    "hsdp2x2": [REPLICATE, "2", SHARD, "2"],
}


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_data_parallel_layout_has_the_bits_of_one_device(layout, one_device, tmp_path):
    assert bits(LAYOUTS[layout], tmp_path) == one_device


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("beside", "data"), [([TENSOR, "2"], REPLICATE), ([CONTEXT, "2"], SHARD)], ids=["tp2-ddp2_tp2", "cp2-fsdp2_cp2"]
)
def test_data_parallel_ranks_beside_a_fixed_degree_change_no_bit(beside, data, tmp_path):
    beside = [*beside, "--training.steps", "2", "--training.virtual_shards", "4"]
    assert bits([*beside, data, "2"], tmp_path / "two") == bits(beside, tmp_path / "one")


@pytest.mark.long
def test_a_plain_order_of_sums_is_seen(one_device, tmp_path):
    found = bits(LAYOUTS["fsdp4"], tmp_path, (reproducible, "tree_sum", lambda parts: parts.sum(dim=0)))
    assert found["loss"][0] == one_device["loss"][0]
    assert found["loss"][1:] != one_device["loss"][1:]
    assert found["sums"] != one_device["sums"]
