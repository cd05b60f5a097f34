"""Real gloo ranks: local workers over a FileStore, and ranks that torchrun started.

This file is also the program under test: ``python test_launcher.py TARGET RUN_DIR`` is one run.
"""

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import crius
from crius.launch.environment import joined_placement
from crius.launch.local import run_single, run_workers
from crius.launch.report import leave
from crius.launch.status import status

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def join(place):
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    options = {}
    if place.rendezvous.startswith("file:"):
        store = dist.FileStore(place.rendezvous.removeprefix("file:"), place.world_size)
        options = {"store": store, "rank": place.rank, "world_size": place.world_size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **options)


def sum_ranks(place):
    join(place)
    total = torch.tensor([place.rank + 1.0])
    dist.all_reduce(total)
    record = {"total": total.item(), "launcher": place.launcher, "listens": listening_addresses()}
    (place.log_dir / f"result-{place.rank}.json").write_text(json.dumps(record))
    dist.destroy_process_group()


def listening_addresses():
    """Hexadecimal local addresses on which this process accepts connections."""
    inodes = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(entry.path).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = row.split()
            if columns[3] == "0A" and columns[9] in inodes:
                found.append(columns[1].split(":")[0])
    return found


def raise_on_rank_2(place):
    join(place)
    for step in range(1, 6):
        status.update(step=step, phase="forward")
        if (step, place.rank) == (5, 2):
            raise ValueError("loss is a banana")
        dist.all_reduce(torch.ones(4))


def kill_rank_3(place):
    join(place)
    for step in range(1, 4):
        status.update(step=step, phase="forward")
        if (step, place.rank) == (3, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4))


@pytest.fixture
def environ():
    kept = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    return kept | {"PYTHONPATH": str(Path(crius.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def run(target, run_dir, environ):
    line = [sys.executable, __file__, target.__name__, str(run_dir)]
    return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=120)


def results(run_dir, num_ranks):
    return [json.loads((run_dir / f"logs/result-{rank}.json").read_text()) for rank in range(num_ranks)]


def test_four_local_workers_meet_in_a_file_store(tmp_path, environ):
    done = run(sum_ranks, tmp_path, environ)
    assert (done.returncode, done.stderr) == (0, "")
    found = results(tmp_path, 4)
    assert [record["total"] for record in found] == [10.0] * 4
    # 127.0.0.1, in the byte order of this machine
    assert {address for record in found for address in record["listens"]} == {"0100007F"}


@pytest.mark.long
def test_the_rank_that_raised_is_blamed_not_those_that_lost_it(tmp_path, environ):
    done = run(raise_on_rank_2, tmp_path, environ)
    assert done.returncode == 1
    assert "\nFAILED rank 2 step 5: ValueError: loss is a banana\n" in done.stderr
    assert done.stderr.endswith("also failed: rank 0, 1, 3 (lost their peer)\n")


@pytest.mark.long
def test_the_rank_that_was_killed_is_blamed_not_those_that_lost_it(tmp_path, environ):
    done = run(kill_rank_3, tmp_path, environ)
    assert done.returncode == 1
    assert "\nFAILED rank 3 step 3: killed by SIGKILL (out of memory killer?)\n" in done.stderr
    assert done.stderr.endswith("also failed: rank 0, 1, 2 (lost their peer)\n")


@pytest.mark.long
def test_ranks_that_torchrun_started_join_it(tmp_path, environ):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    line = [*torchrun, __file__, "sum_ranks", str(tmp_path)]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [(record["total"], record["launcher"]) for record in results(tmp_path, 2)] == [(3.0, "torchrun")] * 2


@pytest.mark.long
def test_torchrun_shows_the_error_of_a_rank(tmp_path, environ):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=3", "--standalone"]
    line = [*torchrun, __file__, "raise_on_rank_2", str(tmp_path)]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "FAILED rank 2 step 5: ValueError: loss is a banana" in done.stderr
    # of the rank that failed; one that torchrun ended for it may be reported too, and has no file
    assert "error_file: <N/A>" not in done.stderr.partition("Root Cause")[2]
    assert "Root Cause" in done.stderr


def main(name, run_dir):
    """The program under test."""
    placement = joined_placement(os.environ)
    if placement is None:
        return run_workers(globals()[name], 4, Path(run_dir))
    leave(run_single(globals()[name], placement, Path(run_dir)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
