"""Ranks that wait for each other at the start: they say for whom, end when asked to, and give up with one error."""

import multiprocessing
import os
import platform
import signal
import socket
import sys
import time

import pytest
import torch.distributed as dist

from crius import cli
from crius.launch.stop import PREEMPTED
from crius.parallel import runtime
from crius.train import job

FORK = multiprocessing.get_context("fork")
HERE = platform.node()
STOPPED = "stopped by SIGTERM before the ranks had met; nothing that was saved has changed"
FLAGS = ["--training.steps", "1", "--training.seq_len", "32", "--validation.interval", "0", "--checkpoint.no_enable"]


def sleep_there(folder):
    def sleep(*arguments, **options):
        (folder / "there").touch()
        time.sleep(60)

    return sleep


def train(folder, environ, flags, stuck_in):
    """The program under test: a rank that a launcher has started."""
    output = os.open(folder / f"rank-{environ['RANK']}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.environ.update(environ)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a command that ended in the process of the tests ignores it
    runtime._SAY_SECONDS = 0.3
    if stuck_in:
        module, name = stuck_in
        setattr(module, name, sleep_there(folder))
    os._exit(cli.main(["train", *FLAGS, "--job.run_dir", str(folder / "run"), *flags]))


class Rank:
    def __init__(self, folder, environ, flags, stuck_in):
        self.output = folder / f"rank-{environ['RANK']}.txt"
        self.process = FORK.Process(target=train, args=(folder, environ, flags, stuck_in))
        self.process.start()

    def says(self, text):
        deadline = time.monotonic() + 20
        while not (self.output.exists() and text in self.output.read_text()):
            assert self.process.is_alive(), self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.02)

    def ends(self, seconds):
        self.process.join(seconds)
        return self.process.exitcode

    def ends_by_sigterm(self):
        os.kill(self.process.pid, signal.SIGTERM)
        return self.ends(3), self.output.read_text().count(STOPPED)


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture
def start(tmp_path, port):
    """Start a rank of several, as torchrun does on the first of hosts with two ranks each."""
    ranks = []

    def one(rank, size, *flags, stuck_in=None, **environ):
        place = {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": 2}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        texts = {name: str(value) for name, value in (place | where | environ).items()}
        ranks.append(Rank(tmp_path, texts, list(flags), stuck_in))
        return ranks[-1]

    yield one
    for rank in ranks:
        rank.process.kill()
        rank.process.join()


def test_the_rank_that_serves_the_store_names_the_others_and_ends_by_sigterm(start):
    rank = start(0, 4)
    rank.says(f"waiting for ranks 1 ({HERE}), 2, 3 of 4: 0 s")
    assert rank.ends_by_sigterm() == (PREEMPTED, 1)


@pytest.mark.full
def test_a_client_names_rank_0_and_ends_by_sigterm(start):
    rank = start(2, 4)
    rank.says("waiting for rank 0 (127.0.0.1) of 4: 0 s")
    assert rank.ends_by_sigterm() == (PREEMPTED, 1)


@pytest.mark.full
def test_a_rank_on_torchruns_store_names_the_others_and_ends_by_sigterm(start, port):
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    rank = start(0, 4, TORCHELASTIC_USE_AGENT_STORE="True")
    rank.says(f"waiting for ranks 1 ({HERE}), 2, 3 of 4: 0 s")
    assert rank.ends_by_sigterm() == (PREEMPTED, 1)
    del store


@pytest.mark.full
def test_a_rank_that_came_and_stopped_is_named_and_a_stop_reaches_all_that_wait(start):
    first = start(0, 3)
    stopped = start(1, 3)
    first.says("waiting for rank 2 of 3")
    os.kill(stopped.process.pid, signal.SIGSTOP)
    last = start(2, 3)
    first.says(f"waiting for rank 1 ({HERE}) of 3")
    assert first.ends_by_sigterm() == (PREEMPTED, 1)
    assert last.ends(3) == PREEMPTED


@pytest.mark.full
@pytest.mark.parametrize("stuck_in", [(dist, "init_process_group"), (job, "one_layout")], ids=["group", "gather"])
def test_a_rank_whose_peer_is_stuck_in_the_first_connections_ends_by_sigterm(stuck_in, start, tmp_path):
    rank = start(0, 2)
    start(1, 2, stuck_in=stuck_in)
    deadline = time.monotonic() + 20
    while not (tmp_path / "there").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)
    assert rank.ends_by_sigterm() == (PREEMPTED, 1)


@pytest.mark.full
@pytest.mark.parametrize(("rank", "named"), [(0, f"ranks 1 ({HERE}), 2, 3 of 4"), (2, "rank 0 (127.0.0.1) of 4")])
def test_the_time_out_names_ranks_and_hosts(rank, named, start):
    late = start(rank, 4, "--comm.timeout_seconds", "1")
    assert late.ends(20) == 1
    said = late.output.read_text()
    assert said.count("Error") == said.count(f"EnvironmentError: {named} did not come within 1 s.\n") == 1


@pytest.mark.full
def test_a_port_that_is_busy_is_one_error(start, port):
    with socket.create_server(("127.0.0.1", port)):
        rank = start(0, 2)
        assert rank.ends(20) == 1
    said = rank.output.read_text()
    assert f"EnvironmentError: the ranks cannot meet at port {port} of 127.0.0.1" in said
    assert "Address already in use" in said and "Traceback" not in said
