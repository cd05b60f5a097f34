"""A bit that flips on one rank is found and its rank named; without one nothing is found and nothing changes."""

import functools
import time

import pytest
import torch
from harness import SMALL, num_ranks, parse, run_job, steps_of, train

from crius.launch.local import run_workers
from crius.models.layers import Loss
from crius.shards import local_shard
from crius.train.sdc import SdcCheck, odd_ones

RECOMPUTE, REPLICAS = "--sdc.recompute_interval", "--sdc.replica_interval"
REPLICATE, SHARD = "--parallelism.data_parallel_replicate_degree", "--parallelism.data_parallel_shard_degree"
TENSOR = "--parallelism.tensor_parallel_degree"
# the vocabulary of 257 splits unevenly: FSDP pads what it sends
FLAGS = [*SMALL, "--model.num_layers", "2", "--model.vocab_size", "257", "--training.steps", "10"]
FLAGS += ["--training.global_batch_size", "12", "--validation.interval", "0", "--metrics.log_interval", "1"]


def flip(tensor, index=0, bit=9):
    """One bit of one number."""
    ints = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.view(ints).view(-1)[index] ^= 1 << bit


def flip_gradient(call, rank):
    """In the backward of the ``call``-th microbatch that this rank computes."""
    score, calls = Loss.forward, []

    def forward(loss, hidden, labels, output):
        calls.append(labels)
        if len(calls) == call:
            hidden.register_hook(flipped)
        return score(loss, hidden, labels, output)

    def flipped(gradient):
        gradient = gradient.clone()
        flip(gradient)
        return gradient

    return Loss, "forward", forward


def flip_weight(step, rank):
    """Before the weights are compared after ``step``."""
    after = SdcCheck.after_step

    def after_step(check, number):
        if number == step:
            [parameter] = [p for *_, p in check._replicas._held if p.numel() == 128][-1:]
            flip(local_shard(parameter)[0])
        after(check, number)

    return SdcCheck, "after_step", after_step


def run_with_flip(config, run_dir, plant, rank, placement):
    with pytest.MonkeyPatch.context() as patch:
        if placement.rank == rank:
            patch.setattr(*plant(rank=rank))
        run_job(config, run_dir, time.monotonic(), placement)


def error_of(flags, plant, rank, run_dir, capfd):
    """What a run says that ends with exit code 1."""
    config = parse([*FLAGS, *flags])
    run = functools.partial(run_with_flip, config, run_dir, plant, rank)
    assert run_workers(run, num_ranks(config), run_dir) == 1
    out, err = capfd.readouterr()
    return out + err


# steps 2, 4, ... have two microbatches more: of step 2 the 2nd and the 3rd that a rank computes
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "call", "rank"),
    [([SHARD, "2"], 3, 1), ([REPLICATE, "2"], 2, 0), ([], 3, 0)],
    ids=["fsdp2", "ddp2", "1"],
)
def test_a_gradient_that_differs_the_second_time_names_its_rank_and_unit(layout, call, rank, tmp_path, capfd):
    plant = functools.partial(flip_gradient, call)
    error = error_of([*layout, RECOMPUTE, "2", "--training.local_batch_size", "6"], plant, rank, tmp_path, capfd)
    assert "CorruptionError: step 2, computed twice" in error
    assert f"rank {rank} on host " in error
    assert f"rank {1 - rank} on host" not in error
    assert "gradients of 4 of 4 units, first norm+output" in error


def test_a_flipped_weight_names_the_odd_one_of_three_replicas(tmp_path, capfd):
    plant = functools.partial(flip_weight, 4)
    error = error_of([REPLICATE, "3", REPLICAS, "2"], plant, 1, tmp_path, capfd)
    assert "CorruptionError: after step 4 replicas of norm.weight differ: rank 1 on host " in error
    assert "rank 0 on host" not in error
    assert "rank 2 on host" not in error


def test_of_two_replicas_both_are_named_also_those_of_tensor_parallelism(tmp_path, capfd):
    plant = functools.partial(flip_weight, 2)
    error = error_of([TENSOR, "2", REPLICAS, "1"], plant, 1, tmp_path, capfd)
    assert "CorruptionError: after step 2 replicas of norm.weight differ: rank 0 on host " in error
    assert ", rank 1 on host " in error


CLEAN = {
    "ddp2": [REPLICATE, "2", REPLICAS, "1", "--training.local_batch_size", "2"],
    "fsdp2": [SHARD, "2", "--training.gradient_sync", "deferred", "--training.local_batch_size", "3"],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", CLEAN)
def test_ten_clean_steps_raise_no_alarm_and_are_those_without_checks(layout, tmp_path, monkeypatch):
    """Dropout draws random numbers: a check that used some up would change what follows."""
    monkeypatch.setenv("CRIUS_FAULT", "dropout:p=0.1")
    checked = train([*FLAGS, *CLEAN[layout], RECOMPUTE, "1"], tmp_path / "checked")
    plain = train([*FLAGS, *CLEAN[layout]], tmp_path / "plain")
    assert len(steps_of(checked)) == 10
    assert [(step["loss"], step["grad_norm"]) for step in steps_of(checked)] == [
        (step["loss"], step["grad_norm"]) for step in steps_of(plain)
    ]


@pytest.mark.parametrize(
    ("hashes", "odd"),
    [("aa", []), ("ab", [0, 1]), ("aba", [1]), ("baaa", [0]), ("aabb", [0, 1, 2, 3]), ("abc", [0, 1, 2])],
)
def test_the_minority_is_odd_and_without_a_majority_all_are(hashes, odd):
    assert odd_ones([(rank, (ord(letter),)) for rank, letter in enumerate(hashes)]) == odd
