"""Standing workers run row after row in the same processes; what fails ends them, and nothing is left behind."""

import datetime
import functools
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from workers import RowFailed, Workers

from crius.config.layout import Layout
from crius.parallel.mesh import build_mesh
from crius.parallel.runtime import world


@pytest.fixture
def two():
    standing = Workers(2)
    yield standing
    standing.end()
    shutil.rmtree(standing.folder)


def pid(placement):
    return os.getpid()


def total(placement):
    """Sum over the ranks, in a process group of this row."""
    with world(placement.rank, placement.world_size, torch.device("cpu"), placement.rendezvous, 30) as ranks:
        return int(ranks.sum(torch.tensor(placement.rank + 1)))


def sleep(placement):
    time.sleep(60)


def fail(how, placement):
    if placement.rank == 1:
        how()
    time.sleep(60)


def raise_error():
    raise ValueError("planted")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def is_alive(process):
    return Path(f"/proc/{process}").exists()


def test_rows_share_processes_and_each_has_a_process_group_of_its_own(two, tmp_path):
    before = two.run(pid, tmp_path)
    assert len({*before, os.getpid()}) == 3
    assert [two.run(total, tmp_path) for _ in range(2)] == [[3, 3]] * 2
    assert two.run(pid, tmp_path) == before


@pytest.mark.parametrize(("how", "says"), [(raise_error, "rank 1 .*ValueError: planted"), (die, "rank 1 .*SIGKILL")])
def test_a_rank_that_fails_is_named_and_the_next_row_has_new_workers(how, says, two, tmp_path, monkeypatch):
    monkeypatch.setattr("workers.GRACE_SECONDS", 0.1)
    before = two.run(pid, tmp_path)
    with pytest.raises(RowFailed, match=says):
        two.run(functools.partial(fail, how), tmp_path)
    assert not any(map(is_alive, before))
    after = two.run(pid, tmp_path)
    assert not {*before} & {*after}


def test_a_row_that_hangs_ends_with_its_workers(two, tmp_path):
    before = two.run(pid, tmp_path)
    with pytest.raises(RowFailed, match="not at its end after 0 s"):
        two.run(sleep, tmp_path, seconds=0.2)
    assert not any(map(is_alive, before))


def test_nothing_is_left_behind(two, tmp_path):
    before = two.run(pid, tmp_path)
    two.end()
    assert not any(map(is_alive, before))


def timeouts(placement):
    """Seconds after which a collective of each group of a mesh fails."""
    place = placement.rank, placement.world_size, torch.device("cpu"), placement.rendezvous
    with world(*place, 77):
        build_mesh(Layout(dp_replicate=2, tp=2), "cpu")
        return {
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in distributed_c10d._world.pg_map
        }


def timeouts_of_two_backends(placement):
    """The same where a group has one backend for each device, as on GPUs; that of cuda is a stand-in for NCCL."""
    seen, join = [], dist.init_process_group

    def nccl(store, rank, size, timeout):
        seen.append(timeout.total_seconds())
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    def join_without_nccl(backend, device_id, **options):
        assert (backend, device_id) == ("cpu:gloo,cuda:nccl", torch.device("cuda", 0))
        join("cpu:gloo,cuda:standin", **options)

    dist.Backend.register_backend("standin", nccl, devices=["cuda"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", join_without_nccl)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        gpu = SimpleNamespace(uuid=f"GPU-{placement.rank}")
        patch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        patch.setattr(distributed_c10d, "default_pg_nccl_timeout", datetime.timedelta(minutes=10))
        with world(placement.rank, placement.world_size, torch.device("cuda", 0), placement.rendezvous, 77):
            build_mesh(Layout(dp_replicate=2, tp=2), "cuda")
            asked = [distributed_c10d._get_default_timeout(name).total_seconds() for name in ("nccl", "gloo")]
    return len(seen), {*seen, *asked}


def test_comm_timeout_seconds_reaches_the_groups_of_gpus(workers, tmp_path):
    """That of all ranks, and those of the two axes of each."""
    count, found = zip(*workers(4).run(timeouts_of_two_backends, tmp_path), strict=True)
    assert min(count) >= 3 and found == ({77.0},) * 4


def test_comm_timeout_seconds_reaches_the_group_of_every_axis(workers, tmp_path):
    assert workers(4).run(timeouts, tmp_path) == [{77.0}] * 4
    assert distributed_c10d.default_pg_timeout.total_seconds() != 77.0
