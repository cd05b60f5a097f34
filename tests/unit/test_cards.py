"""What a process does before its first CUDA call, on a machine without a GPU: torch's answers are patched."""

import functools
import logging
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.callback import callback_handler
from torch.profiler import profile

from crius.config.operation import ProfilerConfig
from crius.config.run import RunConfig
from crius.errors import EffectError, EnvironmentError, OutOfMemoryError
from crius.launch.environment import joined_placement, sees_own_gpu
from crius.launch.status import status
from crius.metrics.ledger import TimeLedger
from crius.parallel import interface, runtime
from crius.parallel.interface import GLOO, NCCL, choose_interface
from crius.parallel.runtime import pick_device
from crius.train import setup
from crius.train.effects import check, of_cuda_only
from crius.train.setup import Compilations, profiler, record_memory
from crius.train.tools import explained


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
    with pytest.raises(EnvironmentError, match="local rank 3 needs its own GPU, but torch .* can use 1"):
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
            with pytest.raises(EnvironmentError, match="needs its own GPU"):
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


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the address of an interface")
def test_the_loopback_has_its_address_and_an_unknown_interface_none():
    assert interface._address("lo") == interface._source("127.0.0.1") == "127.0.0.1"
    assert interface._address("none-such") == ""


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


def test_a_gpu_that_another_rank_has_is_refused():
    store = dist.HashStore()
    for rank, uuid in enumerate(("GPU-0", "GPU-1")):  # each process sees one of its own, index 0
        runtime.claim_gpu(store, uuid, rank)
    with pytest.raises(EnvironmentError, match="two ranks have the same GPU") as error:
        runtime.claim_gpu(store, "GPU-1", 2)  # CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node 2
    assert "rank 1 and rank 2 have GPU-1" in str(error.value)


def test_an_error_that_nobody_knows_stays():
    assert runtime._no_meeting(RuntimeError("something else"), "") is None
    assert runtime._no_meeting(RuntimeError(""), "") is None


@pytest.fixture
def cuda_calls(monkeypatch):
    """What the profiler asks of CUDA; files that it writes are empty."""
    calls = []
    monkeypatch.setattr(status, "phase", "start")
    monkeypatch.setattr(status, "limit_seconds", 10.0)
    monkeypatch.setattr(profile, "export_chrome_trace", lambda self, path: record("trace", path))
    memory, nvtx = torch.cuda.memory, torch.cuda.nvtx
    monkeypatch.setattr(memory, "_record_memory_history", lambda **known: calls.append(("history", known)))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: record("memory", path))
    monkeypatch.setattr(nvtx, "range_push", lambda text: calls.append(("push", text)))
    monkeypatch.setattr(nvtx, "range_pop", lambda: calls.append(("pop", "")))

    def record(kind, path):
        Path(path).touch()
        calls.append((kind, status.phase))

    return calls


def taken(config, run_dir, steps, *, first=1, device="cpu"):
    """Files of so many steps of a process whose first one is step ``first`` of its run, and each step's limit after."""
    limits = []
    with profiler(config, run_dir, 0, device) as step:
        for number in range(first, first + steps):
            status.update(step=number, phase="optimizer")
            step(number)
            limits.append(status.limit_seconds)
            status.limit_seconds = 10.0  # as the reports say at the end of a step
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()), limits


def test_a_trace_is_written_in_a_phase_of_its_own_and_the_next_step_may_wait_for_it(tmp_path, cuda_calls):
    _, limits = taken(ProfilerConfig(enable=True, start_step=3, num_steps=1), tmp_path, 6)
    assert cuda_calls == [("trace", "profiler")]
    assert status.phase == "optimizer"
    assert limits == [0.0, 0.0, 0.0, 10.0, 10.0, 10.0]  # from the step before the trace, in which it warms up


@pytest.mark.parametrize(
    ("flags", "steps", "first", "windows"),
    [
        ({"start_step": 3}, 9, 1, [3]),
        ({"start_step": 3}, 9, 101, [103]),  # a run that resumes
        ({"start_step": 1, "num_steps": 1}, 3, 1, [1]),
        ({"start_step": 2, "interval": 3}, 9, 1, [2, 5, 8]),
        ({"start_step": 2, "interval": 2}, 5, 1, [2, 4]),
        ({"start_step": 2, "interval": 4, "num_steps": 3}, 6, 1, [2, 6]),  # the last one has a step
        ({"start_step": 2, "interval": 4, "num_steps": 3}, 5, 1, [2]),
    ],
)
def test_windows_of_steps_come_back_each_with_files_of_its_own(flags, steps, first, windows, tmp_path, cuda_calls):
    found, _ = taken(ProfilerConfig(enable=True, **flags), tmp_path, steps, first=first)
    assert found == [f"traces/step-{step}/rank-0.json" for step in windows]


def test_a_snapshot_of_the_memory_is_written_at_the_end_of_each_window(tmp_path, cuda_calls):
    config = ProfilerConfig(memory_snapshot=True, start_step=2, interval=3)
    record_memory(config, torch.device("cuda", 0))
    found, _ = taken(config, tmp_path, 7, device="cuda")
    assert found == [f"traces/step-{step}/rank-0.memory.pickle" for step in (2, 5)]
    assert cuda_calls == [("history", {"stacks": "python", "max_entries": 100_000}), *[("memory", "profiler")] * 2]


def test_what_cannot_be_written_ends_no_run(tmp_path, cuda_calls, caplog):
    (tmp_path / "traces").touch()
    logging.getLogger("crius").propagate = True
    taken(ProfilerConfig(enable=True, memory_snapshot=True, start_step=1), tmp_path, 3, device="cuda")
    assert "memory.pickle cannot be written" in caplog.text and "rank-0.json cannot be written" in caplog.text


def test_phases_are_nvtx_ranges_while_the_steps_run(tmp_path, cuda_calls):
    taken(ProfilerConfig(nvtx=True), tmp_path, 2, device="cuda")
    assert cuda_calls == [("pop", ""), ("push", "optimizer 1"), ("pop", ""), ("push", "optimizer 2")]
    status.update(phase="forward")
    assert len(cuda_calls) == 4


def test_nothing_is_asked_of_cuda_on_a_cpu_and_that_is_said(tmp_path, cuda_calls):
    config = ProfilerConfig(memory_snapshot=True, nvtx=True, start_step=1)
    record_memory(config, torch.device("cpu"))
    assert taken(config, tmp_path, 3)[0] == [] == cuda_calls
    found = of_cuda_only(config, "cpu")
    assert [str(effect) for effect in found] == [
        "memory_snapshot: 0 written (needs CUDA)",
        "nvtx: 0 ranges (needs CUDA)",
    ]
    with pytest.raises(EffectError, match="memory_snapshot, nvtx"):
        check(found, strict=True)
    assert of_cuda_only(config, "cuda") == []


def test_a_run_that_is_out_of_memory_leaves_a_snapshot_of_it(tmp_path, cuda_calls):
    with pytest.raises(OutOfMemoryError), explained(tmp_path, 3, None) as story:
        story.config, story.device = RunConfig(profiler=ProfilerConfig(memory_snapshot=True)), torch.device("cuda", 0)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert (tmp_path / "incidents" / "out-of-memory-rank-3.pickle").exists()


def test_a_compilation_is_a_phase_of_its_own_and_its_time_no_time_of_the_phase_around_it(monkeypatch):
    monkeypatch.setattr(status, "phase", "start")
    monkeypatch.setattr(callback_handler, "start_callbacks", [])
    monkeypatch.setattr(callback_handler, "end_callbacks", [])
    compilations = Compilations()
    compilations.watch()
    compilations.watch()  # a second job of the same process
    status.update(phase="forward")
    begin = time.monotonic()
    ledger = TimeLedger(begin, lambda: compilations.seconds)
    phases = []

    def backend(graph, inputs):
        phases.append(status.phase)
        time.sleep(0.3)
        return graph

    with ledger.phase("validation"):
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert (phases, status.phase) == (["compile"], "forward")
    assert ledger.seconds["compile"] >= 0.3
    assert ledger.seconds["compile"] + ledger.seconds["validation"] < time.monotonic() - begin


def test_ranks_share_the_memory_of_their_host_and_the_least_of_any_counts(monkeypatch):
    hosts = [["a", 12], ["a", 14], ["b", 9]]
    ranks = SimpleNamespace(device=torch.device("cpu"), gather_json=lambda own: hosts)
    assert setup._memory(ranks) == 6
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80))
    ranks = SimpleNamespace(device=torch.device("cuda"), gather_json=lambda own: [own, 48.0])
    assert setup._memory(ranks) == 48
