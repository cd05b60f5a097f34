"""What a process does before its first CUDA call, on a machine without a GPU: torch's answers are patched."""

import functools
import socket

import pytest
import torch
from torch._dynamo.callback import callback_handler
from torch.profiler import profile

from crius.config.operation import ProfilerConfig
from crius.errors import EnvironmentError
from crius.launch.environment import joined_placement, sees_own_gpu
from crius.launch.status import status
from crius.parallel import interface, runtime
from crius.parallel.interface import GLOO, NCCL, choose_interface
from crius.parallel.runtime import pick_device
from crius.train.setup import beat_while_compiling, profiler


@pytest.fixture
def cards(monkeypatch):
    def show(number):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)

    return show


def test_a_process_takes_the_gpu_of_its_local_rank(cards):
    cards(8)
    assert [pick_device("auto", rank).index for rank in range(8)] == list(range(8))


def test_a_process_that_sees_its_own_gpu_alone_takes_that(cards):
    cards(1)
    assert [pick_device("auto", rank, sees_own_gpu=True).index for rank in range(8)] == [0] * 8


def test_a_process_without_a_gpu_of_its_own_is_refused(cards):
    cards(1)
    with pytest.raises(EnvironmentError, match="local rank 3 needs a GPU of its own, but torch .* can use 1"):
        pick_device("auto", 3)


TORCHRUN = {"RANK": "{rank}", "LOCAL_RANK": "{local}", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{local}", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}
SRUN |= {"SLURM_NODEID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "node[0-1]"}
SRUN |= {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("launcher", "mask", "index"),
    [
        (TORCHRUN, "0,1,2,3", "{local}"),
        (TORCHRUN, None, "{local}"),
        (TORCHRUN, "{local}", "0"),
        (SRUN, "0,1,2,3", "{local}"),
        (SRUN, None, "{local}"),
        (SRUN, "{local}", "0"),
        (SRUN, "0", "0"),
        (SRUN, "GPU-8f2a{local}", "0"),
        (SRUN, "MIG-8f2a{local}", "0"),
        (SRUN, "4,5,6,7", "{local}"),
        (TORCHRUN, "0,1", None),
    ],
)
def test_every_rank_of_torchrun_and_slurm_takes_a_gpu_that_it_is_shown(launcher, mask, index, cards):
    """torch counts what the mask shows, from 0, and of a host with 4 GPUs all where there is none."""
    for rank in range(8):
        here = {"rank": rank, "local": rank % 4}
        environ = {name: value.format(**here) for name, value in launcher.items()}
        environ |= {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask.format(**here)}
        placement = joined_placement(environ)
        assert (placement.rank, placement.local_rank) == (rank, rank % 4)
        shown = 4 if mask is None else len(mask.split(","))
        cards(shown)
        pick = functools.partial(
            pick_device, "auto", placement.local_rank, sees_own_gpu=sees_own_gpu(placement, environ)
        )
        if index is None and rank % 4 >= shown:
            with pytest.raises(EnvironmentError, match="needs a GPU of its own"):
                pick()
        else:
            assert pick().index == int((index or "{local}").format(**here))


@pytest.fixture
def host(monkeypatch):
    """A host with a loopback and two cards, whose packets leave by the second."""
    addresses = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "10.1.0.7", "down": ""}
    monkeypatch.setattr(interface, "_address", addresses.__getitem__)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(addresses, 1)))
    monkeypatch.setattr(interface, "_source", {"node-0": "10.1.0.7", "me": "127.0.1.1", "192.0.2.1": "10.0.0.7"}.get)


@pytest.mark.parametrize(
    ("environ", "master", "want"),
    [
        ({}, None, "lo"),
        ({}, "node-0", "ib0"),
        ({}, "me", "eth0"),
        ({NCCL: "ib"}, "me", "ib0"),
        ({NCCL: "=ib0,eth0"}, "me", "ib0"),
        ({NCCL: "^lo"}, "node-0", "ib0"),
        ({NCCL: "down"}, "node-0", "ib0"),
        ({NCCL: "ib0", GLOO: "eth0"}, "node-0", "eth0"),
    ],
)
def test_gloo_binds_the_interface_of_nccl_or_of_the_route_to_rank_0(environ, master, want, host):
    environ = dict(environ)
    assert choose_interface(environ, master).startswith(want)
    assert environ[GLOO] == want


def test_gloo_chooses_by_itself_where_the_route_is_not_known(host):
    environ = {}
    assert choose_interface(environ, "nobody-knows") == ""
    assert environ == {}


def test_nccl_stays_on_the_loopback_of_one_host_whatever_gloo_has(host):
    environ = {GLOO: "eth0"}
    choose_interface(environ, None)
    assert environ == {GLOO: "eth0", NCCL: "lo"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3b000", "two ranks have the same GPU"),
        ("Gloo connectFullMesh failed with timed out connecting", "by the network interface eth0"),
        ("[enforce] Unable to find address for: eth9", "Gloo cannot use the network interface"),
    ],
)
def test_a_group_that_cannot_be_made_names_what_to_change(text, words):
    error = runtime._no_meeting(RuntimeError(text), "eth0 (the route to node-0)")
    assert isinstance(error, EnvironmentError)
    assert words in str(error)
    assert text.splitlines()[0] in str(error)


def test_an_error_that_nobody_knows_stays():
    assert runtime._no_meeting(RuntimeError("something else"), "") is None
    assert runtime._no_meeting(RuntimeError(""), "") is None


def test_a_trace_is_written_in_a_phase_of_its_own_and_the_next_step_may_wait_for_it(tmp_path, monkeypatch):
    phases = []
    monkeypatch.setattr(status, "phase", "start")
    monkeypatch.setattr(profile, "export_chrome_trace", lambda self, path: phases.append(status.phase))
    monkeypatch.setattr(status, "limit_seconds", 10.0)
    limits = []
    with profiler(ProfilerConfig(enable=True, start_step=3, num_steps=1), tmp_path, 0) as step:
        for _ in range(6):
            status.update(phase="optimizer")
            step()
            limits.append(status.limit_seconds)
            status.limit_seconds = 10.0  # as the reports say at the end of a step
    assert phases == ["profiler"]
    assert status.phase == "optimizer"
    assert limits == [0.0, 0.0, 0.0, 10.0, 10.0, 10.0]  # from the step before the trace, in which it warms up


def test_a_compilation_is_a_phase_of_its_own(monkeypatch):
    monkeypatch.setattr(status, "phase", "start")
    monkeypatch.setattr(callback_handler, "start_callbacks", [])
    monkeypatch.setattr(callback_handler, "end_callbacks", [])
    beat_while_compiling()
    beat_while_compiling()  # a second job of the same process
    status.update(phase="forward")
    phases = []

    def backend(graph, inputs):
        phases.append(status.phase)
        return graph

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert (phases, status.phase) == (["compile"], "forward")
