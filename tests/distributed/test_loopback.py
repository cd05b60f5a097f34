"""A run on one machine can be reached by no other: all its sockets that accept connections are on the loopback."""

import functools
import json
import os
import socket
import sys

import pytest
import torch
import torch.distributed as dist
from test_launcher import listening_addresses

from crius.launch.environment import joined_placement
from crius.launch.local import run_workers
from crius.parallel.runtime import world

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def write_listeners(rendezvous, place):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        del os.environ[name]  # srun sets none
    torch.set_num_threads(1)
    with world(place.rank, place.world_size, torch.device("cpu"), rendezvous or place.rendezvous, 60) as ranks:
        total = ranks.sum(torch.ones(3))
        (place.log_dir / f"{place.rank}.json").write_text(json.dumps([total.tolist(), listening_addresses()]))
        dist.barrier()  # the listeners of the others are looked at while all are there


def one_node_under_slurm(port):
    step = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2"}
    return joined_placement(step | {"SLURM_STEP_ID": "0", "MASTER_PORT": str(port)}).rendezvous


@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_nothing_listens_off_the_loopback(launcher, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = one_node_under_slurm(port) if launcher == "slurm" else ""
    assert run_workers(functools.partial(write_listeners, meeting), 2, tmp_path) == 0
    found = [json.loads((tmp_path / f"logs/{rank}.json").read_text()) for rank in range(2)]
    assert [total for total, _ in found] == [[2.0] * 3] * 2
    addresses = [address for _, listeners in found for address in listeners]
    assert set(addresses) == {"0100007F"}  # 127.0.0.1, in the byte order of this machine
    assert len(addresses) >= (3 if launcher == "slurm" else 2)  # gloo's of each rank, and the store's
