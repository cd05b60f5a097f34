"""Async tensor parallelism is counted from what runs, and says what is missing where it cannot run."""

import functools
import json
from unittest.mock import patch

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import distributed as dist
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch.distributed import _functional_collectives as collectives
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from crius.launch.local import run_workers
from crius.parallel.tensor import count_fused, enable_async_tensor_parallel

NUM_RANKS = 4


def column(x_shard, weight, group):
    """A column-parallel linear behind a sequence-parallel norm."""
    return all_gather(x_shard, group) @ weight


def row(x, weight, group):
    """A row-parallel linear before a sequence-parallel residual."""
    return collectives.wait_tensor(
        torch.ops._c10d_functional.reduce_scatter_tensor(x @ weight, "sum", NUM_RANKS, group)
    )


def gather_alone(x_shard, weight, group):
    return all_gather(x_shard, group) + weight.sum()


def all_gather(x, group):
    return collectives.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(x, NUM_RANKS, group))


LINEARS = {"column": column, "row": row, "gather_alone": gather_alone}


def trace(folder, kind, placement):
    """Counts before and after the pass on the traced linear, on one of four ranks that do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    group = dist.group.WORLD.group_name
    graph = make_fx(LINEARS[kind], tracing_mode="fake")(torch.randn(16, 8), torch.randn(8, 8), group)
    before = count_fused(graph.code)
    with symmetric_memory._test_mode(), patch("torch.distributed.is_nccl_available", return_value=True):
        micro_pipeline_tp_pass(graph.graph)
    graph.recompile()
    (folder / "counts.json").write_text(json.dumps([before, count_fused(graph.code)]))


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("column", [0, 1], [1, 1]), ("row", [0, 1], [1, 1]), ("gather_alone", [0, 1], [0, 1])],
)
def test_a_collective_beside_a_matmul_is_fused_and_counted(kind, before, after, tmp_path):
    assert run_workers(functools.partial(trace, tmp_path, kind), 1, tmp_path) == 0
    assert json.loads((tmp_path / "counts.json").read_text()) == [before, after]


def test_comments_and_names_of_generated_code_do_not_count():
    code = """
    # Topologically Sorted Source Nodes: torch.ops._c10d_functional.all_gather_into_tensor.default(x)
    #   %ag : call_function[target=torch.ops.symm_mem.fused_all_gather_matmul.default](args = (%x,))
    buf0 = torch.ops.symm_mem.fused_all_gather_matmul.default(arg0, [arg1], 0, '1')
    buf1 = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter.default(arg0, arg1)
    buf2 = torch.ops._c10d_functional.reduce_scatter_tensor.default(buf1, 'sum', 4, '1')
    buf3 = torch.ops._c10d_functional.wait_tensor.default(buf2)
    """
    assert count_fused(code) == (2, 3)


def enable(folder, device_type, placement):
    """What enabling says and sets for a mesh of ranks without a GPU or NCCL."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
    with patch("torch.distributed.is_nccl_available", return_value=False):
        async_tp = enable_async_tensor_parallel(mesh, device_type)
    found = [async_tp.reason(), async_tp.count(), inductor_config._micro_pipeline_tp]
    (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.parametrize(("device_type", "reason"), [("cpu", "needs CUDA"), ("cuda", "needs NCCL")])
def test_a_device_without_it_is_left_alone_and_says_why(device_type, reason, tmp_path):
    assert run_workers(functools.partial(enable, tmp_path, device_type), 1, tmp_path) == 0
    assert json.loads((tmp_path / "found.json").read_text()) == [reason, {"forward": [0, 0], "backward": [0, 0]}, False]
