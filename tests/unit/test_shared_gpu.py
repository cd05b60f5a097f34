"""``CRIUS_SHARE_GPU=1``: ranks of a test on one GPU, on a machine without a GPU; torch's answers are patched."""

import contextlib
import logging
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import ROOT

from crius import cli, plugins
from crius.errors import EnvironmentError
from crius.host import gpu_sharing
from crius.launch import environment
from crius.parallel import runtime
from crius.parallel.runtime import pick_device

SHARE, MULTI = "CRIUS_SHARE_GPU", "NCCL_MULTI_RANK_GPU_ENABLE"
GPU = torch.device("cuda", 0)


@pytest.fixture
def share(monkeypatch):
    """The environment of ranks that share a GPU over NCCL or Gloo, and a version of NCCL in the process."""

    def over(library, nccl=(2, 30, 2)):
        monkeypatch.setenv(SHARE, "1")
        monkeypatch.setenv(MULTI, "1" if library == "nccl" else "0")
        monkeypatch.setattr(runtime, "loaded_nccl", lambda: nccl)

    return over


@pytest.fixture
def one_gpu(monkeypatch):
    """A GPU, and a process group that is asked for and not made; gives what was asked."""
    asked = []
    store = dist.HashStore()
    monkeypatch.delenv(SHARE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: asked.append((backend, options["device_id"]))
    )
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(runtime._Meeting, "store", lambda meeting, rendezvous: store)
    monkeypatch.setattr(runtime._Meeting, "meet", lambda meeting, store: None)
    monkeypatch.setattr(runtime, "choose_interface", lambda environ, master: "lo")
    monkeypatch.setattr(runtime, "_default_timeout", lambda timeout: contextlib.nullcontext())
    return asked


@pytest.mark.parametrize(
    ("environ", "want"),
    [
        ({}, ""),
        ({SHARE: "0"}, ""),
        ({MULTI: "1"}, ""),
        ({SHARE: "1"}, "gloo"),
        ({SHARE: "1", MULTI: "0"}, "gloo"),
        ({SHARE: "1", MULTI: "1"}, "nccl"),
        ({SHARE: "gloo", MULTI: "1"}, "gloo"),
        ({SHARE: "nccl"}, "nccl"),
    ],
)
def test_ranks_share_over_nccl_where_its_own_variable_allows_it_else_over_gloo(environ, want):
    assert gpu_sharing(environ) == want


def test_another_value_is_refused_with_one_that_works():
    with pytest.raises(EnvironmentError, match="CRIUS_SHARE_GPU=yes is none of 0, 1, nccl and gloo") as error:
        gpu_sharing({SHARE: "yes"})
    name, value = re.search(r"export (\w+)=(\w+)", error.value.fix).groups()
    assert gpu_sharing({name: value}) == "gloo"


def test_the_variable_is_read_in_one_place():
    files = [path for path in (ROOT / "crius").rglob("*.py") if f'"{SHARE}' in path.read_text()]
    assert [path.name for path in files] == ["host.py"]


def test_four_ranks_take_the_first_gpu_and_a_fifth_is_refused(one_gpu, share):
    share("gloo")
    assert [pick_device("auto", rank) for rank in range(4)] == [GPU] * 4
    with pytest.raises(EnvironmentError, match="local rank 4 would share a GPU with 4 others") as error:
        pick_device("cuda", 4)
    assert "start at most 4 ranks" in error.value.fix


def test_sharing_changes_nothing_on_a_cpu(share, monkeypatch):
    share("gloo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert [pick_device("auto", rank).type for rank in range(8)] == ["cpu"] * 8
    with pytest.raises(EnvironmentError, match="local rank 0 needs its own GPU, but torch .* can use 0"):
        pick_device("cuda", 0)


def join(size, rank):
    with runtime.world(rank, size, GPU, "file:none", 60):
        pass


@pytest.mark.parametrize(
    ("library", "group", "said"),
    [
        ("nccl", ("cpu:gloo,cuda:nccl", GPU), "2 ranks share one GPU, over NCCL 2.30.2; this is for tests, and slow"),
        ("gloo", ("cpu:gloo,cuda:gloo", None), "2 ranks share one GPU, over Gloo; this is for tests, and slow"),
    ],
)
def test_ranks_that_share_a_gpu_meet_and_say_so(library, group, said, one_gpu, share, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("crius"), "propagate", True)
    caplog.set_level(logging.INFO, "crius.parallel")
    share(library)
    join(2, rank=0)
    join(2, rank=1)
    assert one_gpu == [group] * 2
    assert caplog.messages == [f"CRIUS_SHARE_GPU: {said}"] * 2  # ranks above 0 print no such line: start_logging


def test_without_the_variable_two_ranks_on_one_gpu_are_refused(one_gpu):
    join(2, rank=0)
    with pytest.raises(EnvironmentError, match="two ranks have the same GPU"):
        join(2, rank=1)
    assert one_gpu == [("cpu:gloo,cuda:nccl", GPU)]


@pytest.mark.parametrize(
    ("nccl", "named"), [((2, 29, 9), "NCCL 2.29.9"), ((2, 9, 0), "NCCL 2.9.0"), ((), "an unknown version")]
)
def test_an_nccl_that_gives_each_rank_a_gpu_of_its_own_is_refused(nccl, named, one_gpu, share, monkeypatch):
    share("nccl", nccl)
    with pytest.raises(EnvironmentError, match=named) as error:
        join(2, rank=0)
    name, value = re.search(r"export (\w+)=(\w+)", error.value.fix).groups()
    monkeypatch.setenv(name, value)
    join(2, rank=0)
    assert one_gpu == [("cpu:gloo,cuda:gloo", None)]


def test_a_new_nccl_needs_its_own_variable(one_gpu, share, monkeypatch):
    share("nccl")
    monkeypatch.setenv(SHARE, "nccl")
    monkeypatch.delenv(MULTI)
    with pytest.raises(EnvironmentError, match=f"with {MULTI}=1"):
        join(2, rank=0)
    assert one_gpu == []


def test_a_rank_alone_shares_with_nobody(one_gpu, share, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("crius"), "propagate", True)
    caplog.set_level(logging.INFO, "crius.parallel")
    share("gloo")
    join(1, rank=0)
    assert one_gpu == [("cpu:gloo,cuda:nccl", GPU)]
    assert caplog.messages == []


def test_the_version_of_nccl_is_asked_of_the_library_in_the_process(monkeypatch):
    def get_version(number):
        number._obj.value = 23102
        return 0

    opened = []

    def library(name, mode):
        opened.append(name)
        return SimpleNamespace(ncclGetVersion=get_version)

    monkeypatch.setattr(plugins.ctypes, "CDLL", library)
    assert plugins.loaded_nccl() == (2, 31, 2)
    assert opened == ["libtorch_cuda.so"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA and has an NCCL")
def test_a_cpu_build_of_torch_has_no_nccl():
    assert plugins.loaded_nccl() == ()


@pytest.mark.parametrize("verb", ["train", "doctor"])
def test_a_pipeline_over_gloo_is_one_of_the_problems_of_a_run(verb, share, capsys, tmp_path, monkeypatch):
    """All problems come together, and before anything is started."""
    share("gloo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "visible_gpus", lambda environ: 1)
    flags = ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.data_parallel_shard_degree", "4"]
    assert cli.main([verb, *flags, "--training.steps", "0"]) == {"train": 2, "doctor": 1}[verb]
    said = "".join(capsys.readouterr())
    for problem in (
        "parallelism.pipeline_parallel_degree 2 is not possible on a GPU that ranks share over Gloo",
        "8 ranks would share one GPU",
        "training.steps 0",
    ):
        assert problem in said
    assert "visible GPUs" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_grow_unless_the_user_has_set_the_allocator_under_either_name(name):
    given = {name: "max_split_size_mb:64"} if name else {}
    environ = dict(given)
    runtime.let_segments_grow(environ)
    assert environ == (given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
