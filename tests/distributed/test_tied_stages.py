"""A tied weight under a pipeline: two copies, equal to the last bit, and a save that looks whether they are."""

import functools
import time

import pytest
import torch
from checkpoint_runs import flags
from harness import TIED, num_ranks, parse, run_job

from crius.launch.local import run_workers
from crius.shards import local_tensor, named_parameters
from crius.train.state import leaves

NAME = "tok_embeddings.weight"
SMALL_STATES = ("--optimizer.state_dtype", "8bit")
BFLOAT16 = ("--training.dtype", "bfloat16", "--optimizer.state_dtype", "bfloat16")
ENDS = {"pp2": (0, 1), "pp2_fsdp2": (0, 2), "pp2+zbv_zero_bubble": (0, 0), "pp2_tp2": (0, 2)}


pytestmark = pytest.mark.usefixtures("imported_torchao")


def copies(loop):
    """The copies that this rank has, and what the optimizer holds of them."""
    found = [parameter for name, parameter in named_parameters(loop.state.parts) if name == NAME]
    states = (loop.state.optimizer.state[parameter] for parameter in found)
    return [
        {"weight": local_tensor(parameter), **{key: local_tensor(value) for key, value in state.items()}}
        for parameter, state in zip(found, states, strict=True)
    ]


def keep_copies(config, folder, placement):
    """Train, and leave the copies of this rank in ``folder``."""
    held = []
    run_job(config, folder, time.monotonic(), placement, prepare=lambda loop: held.append(loop) or loop)
    torch.save(copies(held[0]), folder / f"copies-{placement.rank}.pt")


def disturb(config, folder, placement):
    """Train from weights of which the last stage's copy has one number that is another."""

    def prepare(loop):
        if placement.rank == placement.world_size - 1:
            with torch.no_grad():
                leaves(named_parameters(loop.state.parts)[-1][1])["_local_tensor."][3, 5] += 1e-3
        return loop

    run_job(config, folder, time.monotonic(), placement, prepare=prepare)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "own"),
    [
        ("pp2", SMALL_STATES),
        ("pp2_fsdp2", BFLOAT16),
        ("pp2_tp2", (*BFLOAT16, "--optimizer.param_groups", f"{NAME}:optimizer=muon weight_decay=0.1")),
        ("pp2+zbv_zero_bubble", SMALL_STATES),
    ],
    ids=["8bit", "bfloat16", "muon_bfloat16", "v_8bit"],
)
def test_both_copies_have_the_same_bits(layout, own, tmp_path):
    config = parse(flags(layout, *TIED, *own, "--checkpoint.interval", "2", layers=4))
    assert run_workers(functools.partial(keep_copies, config, tmp_path), num_ranks(config), tmp_path) == 0
    first, last = (torch.load(tmp_path / f"copies-{rank}.pt") for rank in ENDS[layout])
    one, other = first[0], last[-1]
    assert one.keys() == other.keys() and len(one) >= 3
    assert one["step"] == 3
    for key, value in one.items():
        assert torch.equal(value, other[key]), key
    assert (one["weight"].dtype == torch.bfloat16) == (own is not SMALL_STATES)


def test_copies_that_differ_are_not_saved(tmp_path, capfd):
    config = parse(flags("pp2", *TIED, "--checkpoint.interval", "1"))
    assert run_workers(functools.partial(disturb, config, tmp_path), 2, tmp_path) == 1
    said = capfd.readouterr().err
    assert f"after step 1 replicas of {NAME} differ: rank 0 on host" in said
    assert "a tied weight: the first and the last pipeline stage have a copy each" in said
    assert not list((tmp_path / "checkpoints").glob("step-*1"))
