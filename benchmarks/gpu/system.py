"""Checks around the kernels: process group, memory, streams, optimizer, and the ceilings of the card.

D model dim, B batch, T tokens, N query heads, K key/value heads, H head dim
"""

import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.checks import LIMITS, Check, Outcome, compare
from crius.checkpoint.tensors import StagedPlanner
from crius.optim.adamw import AdamW
from crius.parallel.reproducible import hash_bits
from crius.parallel.runtime import pick_device, world

MIB = 2**20


def milliseconds(work: Callable[[], object], rounds: int = 10) -> float:
    """Median time of ``work`` on the GPU, after three calls that are not timed."""
    for _ in range(3):
        work()
    times = []
    for _ in range(rounds):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def world_of_one(device: str) -> Outcome:
    """Collectives of one rank, and gradients under FSDP2 of one rank beside those without it, both in bfloat16."""
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(device)
    sharded = copy.deepcopy(plain)
    x_BD = torch.randn(8, 64).to(device, torch.bfloat16)
    with world(0, 1, pick_device(device, 0), "", 60) as ranks:
        values = torch.arange(4.0, device=device)
        is_summed = torch.equal(ranks.sum(values.clone()), values)
        is_gathered = ranks.gather_json({"rank": 0}) == [{"rank": 0}]
        mesh = init_device_mesh(device, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for unit in (*sharded, sharded):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        sharded(x_BD).float().square().sum().backward()
        got = [parameter.grad.full_tensor() for parameter in sharded.parameters()]
        backend = torch.distributed.get_backend()
    plain.to(torch.bfloat16)(x_BD).float().square().sum().backward()
    want = [parameter.grad for parameter in plain.parameters()]
    gradients = [torch.cat([gradient.float().flatten() for gradient in some]) for some in (got, want)]
    outcome = compare(("gradients",), gradients[:1], gradients[1:], LIMITS["bfloat16"])
    detail = f"{backend}, sum {is_summed}, gather {is_gathered}"
    return Outcome(is_summed and is_gathered and outcome.ok, detail, outcome.figures)


GROWING_MIB = (64, 128, 192, 256)
SPARE_MIB = 64
"""The allocator rounds segments up to 20 MiB; without expandable segments 640 MiB are reserved, 384 more."""


def segments_grow(device: str) -> Outcome:
    """Tensors that replace each other and grow: with expandable segments they take the memory of the largest."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for size in GROWING_MIB:
        torch.empty(size * MIB, dtype=torch.uint8, device=device)
    reserved = (torch.cuda.memory_reserved() - before) / MIB
    most = max(GROWING_MIB) + SPARE_MIB
    setting = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return Outcome(reserved <= most, str(setting), {"reserved_mib": reserved, "limit": most})


def hash_of_bits(device: str) -> Outcome:
    """The same hash on host and device, and another one if a single bit differs."""
    values = torch.randn(1_000_003)
    flipped = values.clone()
    flipped.view(torch.int32)[777_777] ^= 1
    here, there, changed = (hash_bits(x) for x in (values, values.to(device), flipped.to(device)))
    is_same = torch.equal(here, there.cpu())
    is_sharp = not torch.equal(here, changed.cpu())
    return Outcome(is_same and is_sharp, f"same on host and device {is_same}, another for one bit {is_sharp}")


def skipped_update(device: str) -> Outcome:
    """A step of fused AdamW with ``found_inf`` changes neither weights nor moments; a step without it does."""
    weight = nn.Parameter(torch.randn(1000).to(device))
    optimizer = AdamW([weight], lr=0.1, fused=True)

    def stepped(gradient: float, found_inf: float) -> list[Tensor]:
        weight.grad = torch.full_like(weight, gradient)
        optimizer.found_inf = torch.tensor(found_inf, device=device)
        optimizer.step()
        return [tensor.detach().clone() for tensor in (weight, *optimizer.state[weight].values())]

    start = weight.detach().clone()
    first = stepped(1.0, found_inf=0.0)
    second = stepped(float("nan"), found_inf=1.0)
    is_updated = not torch.equal(first[0], start)
    is_skipped = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return Outcome(is_updated and is_skipped, f"updated without {is_updated}, skipped with found_inf {is_skipped}")


def bits_of_splits(device: str) -> Outcome:
    """Fused AdamW gives a weight the same bits for every split into shards: ``training.reproducible`` relies on it."""
    weight = torch.randn(100_003).to(device)
    gradient = torch.randn(100_003).to(device)

    def stepped(size: int) -> Tensor:
        shards = [nn.Parameter(part.clone()) for part in weight.split(size)]
        optimizer = AdamW(shards, lr=1e-3, fused=True)
        for shard, part in zip(shards, gradient.split(size), strict=True):
            shard.grad = part.clone()
        optimizer.step()
        optimizer.step()
        return torch.cat([shard.detach() for shard in shards])

    whole = stepped(len(weight))
    different = {f"different_of_{size}": int((stepped(size) != whole).sum()) for size in (50_002, 12_347, 1_001)}
    return Outcome(not any(different.values()), figures=different)


MOST_OF_COPY = 0.5
"""Largest share of the time of a staged copy that the host may spend on starting it: it does not wait for the copy."""


def staging(device: str) -> Outcome:
    """A checkpoint's copy to the host on a stream of its own, with a change of the tensor queued right behind it."""
    tensor = torch.ones(64 * MIB, device=device)
    planner = StagedPlanner()
    plan, _ = planner.agree({"weight": tensor}, 0, lambda value: [value])
    (item,) = plan.items
    planner.stage()  # allocates page-locked memory, which takes long
    planner.before_change()
    tensor.fill_(2.0)
    torch.cuda.synchronize()

    begin = time.perf_counter()
    planner.stage()
    started = time.perf_counter() - begin
    planner.before_change()
    tensor.fill_(3.0)
    copied = planner.lookup_object(item.index)  # waits for the copy
    took = time.perf_counter() - begin
    is_whole = bool((copied == 2.0).all())
    share = started / took
    figures = {"gb_per_s": tensor.nbytes / took / 1e9, "host_share": share, "limit": MOST_OF_COPY}
    return Outcome(is_whole and share < MOST_OF_COPY, f"copy right {is_whole}", figures)


def memory_snapshot(device: str) -> Outcome:
    """The allocator's record has an allocation, and its file is written."""
    size = 4 * MIB
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=1000)
    try:
        torch.empty(size, dtype=torch.uint8, device=device)
        events = [event for trace in torch.cuda.memory._snapshot()["device_traces"] for event in trace]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "memory.pickle")
            torch.cuda.memory._dump_snapshot(str(path))
            written = path.stat().st_size
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    is_recorded = any(event["action"] == "alloc" and event["size"] == size for event in events)
    return Outcome(is_recorded and written > 0, f"recorded {is_recorded}", {"bytes": written})


def nvtx_ranges(device: str) -> Outcome:
    """The calls of a profiled run, of which the first ends no range. Only a profiler sees more of them."""
    torch.cuda.nvtx.range_pop()
    torch.cuda.nvtx.range_push("check")
    torch.cuda.nvtx.range_pop()
    return Outcome(True, "no call raised an error")


SIZE = 8192
"""Rows and columns of matrices, and tokens of attention."""


def rate_of(flops: float, took: float) -> Outcome:
    """The measurement of a work of ``flops`` that took ``took`` milliseconds."""
    return Outcome(True, figures={"tflop_per_s": flops / took / 1e9, "milliseconds": took})


def matmul_ceiling(device: str) -> Outcome:
    """Square matrices in bfloat16."""
    a, b = (torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    return rate_of(2 * SIZE**3, milliseconds(lambda: a @ b))


def float8_ceiling(device: str) -> Outcome:
    """Square matrices in float8 with one scale each and fast accumulation, as torchao's tensorwise recipe has it."""
    a, b = (torch.randn(SIZE, SIZE, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device=device)
    multiply = partial(torch._scaled_mm, a, b.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)
    return rate_of(2 * SIZE**3, milliseconds(multiply))


def attention_ceiling(backend: SDPBackend, device: str) -> Outcome:
    """Causal attention, forward, with the heads of Llama 3 8B: half of the pairs of tokens count."""
    q_BNTH, k_BKTH, v_BKTH = (
        torch.randn(1, SIZE, heads, 128, device=device, dtype=torch.bfloat16).transpose(1, 2) for heads in (32, 8, 8)
    )
    attend = partial(F.scaled_dot_product_attention, q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=True)
    with sdpa_kernel(backend):
        return rate_of(2 * 2 * SIZE**2 * 32 * 128 / 2, milliseconds(attend))


def copy_ceiling(device: str) -> Outcome:
    """A copy within the GPU's memory; bytes that are read and bytes that are written count."""
    source = torch.ones(2**30, device=device)
    target = torch.empty_like(source)
    took = milliseconds(lambda: target.copy_(source))
    return Outcome(True, figures={"gb_per_s": 2 * source.nbytes / took / 1e6, "milliseconds": took})


def checks() -> list[Check]:
    """All checks of this group. The ceilings are measurements, which are never wrong."""
    of_gpu = {
        "expandable segments": segments_grow,
        "fused AdamW gives the same bits for any split": bits_of_splits,
        "staging on a side stream": staging,
        "memory snapshot": memory_snapshot,
        "nvtx calls raise nothing": nvtx_ranges,
        "ceiling matmul bfloat16": matmul_ceiling,
        "ceiling matmul float8": float8_ceiling,
        "ceiling attention cuDNN": partial(attention_ceiling, SDPBackend.CUDNN_ATTENTION),
        "ceiling attention flash": partial(attention_ceiling, SDPBackend.FLASH_ATTENTION),
        "ceiling copy": copy_ceiling,
    }
    return [
        Check("world of one rank, FSDP2", world_of_one),
        Check("hash of bits", hash_of_bits),
        Check("fused AdamW skips an update", skipped_update),
        *(Check(name, measure, needs_gpu=True) for name, measure in of_gpu.items()),
    ]
