"""Which launcher started a process, and how many GPUs it may use, as tables."""

import os
import platform
import pty

import pytest

from crius.errors import EnvironmentError
from crius.launch.environment import Placement, first_host, hosts_of_ranks, joined_placement, sees_own_gpu, visible_gpus

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "16",
    "SLURM_TASKS_PER_NODE": "8(x2)",
    "SLURM_JOB_ID": "4501",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "gpu[003-006,9]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


def test_torchrun_variables_are_the_placement():
    assert joined_placement(TORCHRUN) == Placement(5, 1, 8, 4, "torchrun", "tcp:n0:29500")


@pytest.mark.parametrize(
    ("environ", "shown", "want"),
    [
        (SRUN, "3", True),
        (SRUN, "GPU-8f2a", True),
        (TORCHRUN, "1", True),
        (SRUN, "0,1,2,3", False),
        (SRUN, "", False),
        (
            SRUN | {"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0", "SLURM_PROCID": "1"},
            "0",
            False,
        ),
    ],
)
def test_a_task_with_one_visible_gpu_among_many_sees_its_own(environ, shown, want):
    environ = environ | {"CUDA_VISIBLE_DEVICES": shown}
    assert sees_own_gpu(joined_placement(environ), environ) is want


def test_torchrun_inside_a_slurm_step_wins():
    assert joined_placement(TORCHRUN | SRUN).launcher == "torchrun"


@pytest.mark.parametrize("name", TORCHRUN)
def test_an_incomplete_torchrun_set_names_what_is_missing(name):
    with pytest.raises(EnvironmentError, match=f"but {name} is not") as caught:
        joined_placement(without(TORCHRUN, name))
    assert "unset" in caught.value.fix


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"LOCAL_RANK": "4"}, "local rank 4 of 4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "of 9"),
        ({"WORLD_SIZE": "eight"}, "WORLD_SIZE=eight"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http"),
    ],
)
def test_impossible_torchrun_values_are_named(change, message):
    with pytest.raises(EnvironmentError, match=message):
        joined_placement(TORCHRUN | change)


def test_a_rendezvous_address_alone_is_no_launcher():
    assert joined_placement({"MASTER_ADDR": "n0", "MASTER_PORT": "29500"}) is None


def test_srun_variables_are_the_placement():
    assert joined_placement(SRUN) == Placement(11, 3, 16, 8, "slurm", "tcp:gpu003:61001")


@pytest.mark.parametrize(
    ("change", "rendezvous"),
    [
        ({"MASTER_PORT": "29501"}, "tcp:gpu003:29501"),
        ({"MASTER_ADDR": "10.1.1.1"}, "tcp:10.1.1.1:61001"),
        ({"SLURM_STEP_ID": "1"}, "tcp:gpu003:61998"),
        ({"SLURM_STEP_NODELIST": "gpu[005-006]"}, "tcp:gpu005:61001"),
        ({"SLURM_JOB_NODELIST": ""}, "tcp:10.0.0.1:61001"),
        ({"SLURM_TASKS_PER_NODE": "16"}, "tcp:127.0.0.1:61001"),
        ({"WORLD_SIZE": "16"}, "tcp:gpu003:61001"),  # job scripts often export it beside srun
    ],
)
def test_slurm_rendezvous(change, rendezvous):
    assert joined_placement(SRUN | change).rendezvous == rendezvous


@pytest.mark.parametrize(
    ("change", "local_world_size"),
    [
        ({"SLURM_TASKS_PER_NODE": "8(x2)"}, 8),
        ({"SLURM_TASKS_PER_NODE": "12,4"}, 4),
        ({"SLURM_TASKS_PER_NODE": "6(x2),4", "SLURM_NODEID": "2"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x4)"}, 4),
    ],
)
def test_slurm_tasks_of_this_node(change, local_world_size):
    assert joined_placement(SRUN | change).local_world_size == local_world_size


def test_slurm_falls_back_to_the_tasks_asked_for_per_node():
    environ = without(SRUN, "SLURM_TASKS_PER_NODE") | {"SLURM_NTASKS_PER_NODE": "4"}
    assert joined_placement(environ).local_world_size == 4


@pytest.mark.parametrize("extra", [{"SLURM_STEPID": "0"}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}])
def test_the_least_of_slurm_is_enough_on_one_node(extra):
    least = {"SLURM_NTASKS": "2", **extra}
    places = [joined_placement({**least, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}) for rank in ("0", "1")]
    assert [(place.rank, place.local_rank, place.world_size, place.local_world_size) for place in places] == [
        (0, 0, 2, 2),
        (1, 1, 2, 2),
    ]
    assert places[0].rendezvous == places[1].rendezvous


@pytest.mark.parametrize("name", ["SLURM_LOCALID", "SLURM_TASKS_PER_NODE"])
def test_an_incomplete_slurm_step_names_what_is_missing(name):
    with pytest.raises(EnvironmentError, match=name.removeprefix("SLURM_").replace("TASKS_PER", "NTASKS_PER")):
        joined_placement(without(SRUN, name))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        without(SRUN, "SLURM_PROCID"),  # an interactive shell of salloc
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"},  # batch script
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # batch script without --ntasks
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"},  # batch script
        SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
    ],
)
def test_an_allocation_without_several_tasks_is_not_joined(environ):
    assert joined_placement(environ) is None


def joined_in_child(is_job):
    """Whether a child with a terminal joins a step, as its task 0 or as a job of a shell that is task 0."""
    environ = SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_PTY_PORT": "40123"}
    pid, terminal = pty.fork()
    if pid == 0:
        if is_job and (job := os.fork()):
            os._exit(os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]))
        if is_job:
            os.setpgid(0, 0)
        os._exit(int(joined_placement(environ) is not None))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    return bool(code)


def test_a_shell_of_srun_pty_starts_local_workers_and_a_task_of_it_joins():
    assert not joined_in_child(is_job=True)
    assert joined_in_child(is_job=False)


def test_a_world_size_of_1_alone_is_no_launcher():
    assert joined_placement({"WORLD_SIZE": "1"}) is None
    with pytest.raises(EnvironmentError, match="RANK, LOCAL_RANK"):
        joined_placement({"WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("environ", "known"),
    [
        (SRUN, {8: "gpu004", 15: "gpu004"}),
        (SRUN | {"SLURM_DISTRIBUTION": "cyclic"}, {8: None}),
        (TORCHRUN, {0: "n0", 4: platform.node(), 7: platform.node(), 2: None}),
    ],
    ids=["slurm", "cyclic", "torchrun"],
)
def test_the_host_of_a_rank_that_did_not_come_is_named_where_it_is_known(environ, known):
    hosts = hosts_of_ranks(joined_placement(environ), environ)
    assert {rank: hosts.get(rank) for rank in known} == known


def test_rank_0_of_a_slurm_step_is_joined():
    assert joined_placement(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).rank == 0


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu[003-006,9]", "gpu003"),
        ("gpu[9,12-14]-ib,cpu1", "gpu9-ib"),
        ("a1,b[2-3]", "a1"),
        ("rack[1-2]n[01-04]", "rack1n01"),
        ("node-7", "node-7"),
    ],
)
def test_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


CUDA_BUILD = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
CPU_BUILD = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0", 1),
        ("2,3", 2),
        ("0,1,2,3,4,5", 4),
        ("0,-1,1", 1),
        ("0, 1", 2),
        ("GPU-8932f937,GPU-1", 2),
        ("MIG-a,MIG-b,MIG-c,MIG-d,MIG-e", 4),
    ],
)
def test_visible_gpus_follows_cuda_visible_devices(tmp_path, visible, count):
    for number in range(4):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(environ, root=tmp_path, torch_version=CUDA_BUILD) == count
    assert visible_gpus(environ, root=tmp_path, torch_version=CPU_BUILD) == 0


@pytest.mark.parametrize(("cards", "nodes", "count"), [(0, 0, 0), (0, 2, 2), (2, 0, 2), (8, 2, 2), (2, 8, 2)])
def test_visible_gpus_counts_what_both_places_show(tmp_path, cards, nodes, count):
    (tmp_path / "dev").mkdir()
    for number in range(nodes):
        (tmp_path / f"dev/nvidia{number}").touch()
    (tmp_path / "dev/nvidiactl").touch()
    (tmp_path / "dev/nvidia-uvm").touch()
    for number in range(cards):
        (tmp_path / f"proc/driver/nvidia/gpus/{number}").mkdir(parents=True)
    assert visible_gpus({}, root=tmp_path, torch_version=CUDA_BUILD) == count
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, root=tmp_path, torch_version=CUDA_BUILD) == count


def test_visible_gpus_without_torch_is_0(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert visible_gpus({}, root=tmp_path, torch_version="") == 0
