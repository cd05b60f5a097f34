"""Speed of single operations of a step here: matmuls, attention, copies, and a gather of two ranks."""

import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from crius.config.run import RunConfig
from crius.kernels import choice
from crius.kernels.attention import causal_attention
from crius.kernels.cpu.heap import keep_freed_memory
from crius.launch.environment import Placement
from crius.launch.local import run_workers
from crius.models.layers import Linear
from crius.parallel.runtime import pick_device, world
from crius.tools.bench.machine import seconds_of, wait_for
from crius.train.setup import run_kernels
from crius.untrusted import parse_json, read_below

BUDGET_SECONDS = 1.0
"""Seconds spent on one kind of operation, at least three repetitions."""

_TOKENS = {"cpu": 512, "cuda": 8192}
_DIM = {"cpu": 512, "cuda": 4096}
_FFN = {"cpu": 1536, "cuda": 14_336}
_ATTENTION_TOKENS = {"cpu": 512, "cuda": 4096}
_GATHER_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
_TIMEOUT_SECONDS = 120


def least_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Least seconds of ``work``, repeated for ``BUDGET_SECONDS`` but at least three times; the first call is not
    counted.

    The least counts, because other programs can only slow it. The short runs include that slowdown.
    """
    seconds_of(work, device)
    found: list[float] = []
    while len(found) < 3 or (sum(found) < BUDGET_SECONDS and len(found) < 200):
        found.append(seconds_of(work, device))
    return min(found)


def prepare(device: torch.device) -> None:
    """Set this process up to compute like a short run in float32 on a CPU, or like any run on a GPU."""
    config = RunConfig()
    if device.type == "cpu":
        keep_freed_memory()
        training = replace(config.training, mixed_precision_param="float32", seq_len=_ATTENTION_TOKENS["cpu"])
        config = replace(config, training=training)
    choice.apply(run_kernels(config, device))


def matmul_flops(device: torch.device, dtype: torch.dtype, *, is_slow: bool = False) -> float:
    """FLOP/s of a feed-forward's linear layers, forward and backward, with the kernels of a run.

    ``is_slow``: use few tokens, because a CPU without instructions for ``dtype`` would take seconds for more.
    """
    tokens = 32 if is_slow else _TOKENS[device.type]
    dim = _DIM[device.type]
    ffn = _FFN[device.type]
    layers = [
        Linear(features_in, features_out, bias=False, device=device, dtype=dtype)
        for features_in, features_out in ((dim, ffn), (ffn, dim))
    ]
    x = torch.randn(tokens, dim, device=device, dtype=dtype, requires_grad=True)

    def work() -> None:
        (layers[1](layers[0](x)) * 1e-3).sum().backward()

    return 3 * 2 * 2 * tokens * dim * ffn / least_seconds(work, device)


def attention_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of causal attention, forward and backward; the masked half is not counted."""
    heads, dim = (8, 32) if device.type == "cpu" else (32, 128)
    batch = 2
    tokens = _ATTENTION_TOKENS[device.type]
    queries, keys, values = (
        torch.randn(batch, heads, tokens, dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )

    def work() -> None:
        causal_attention(queries, keys, values).sum().backward()

    forward = 2 * 2 * batch * heads * tokens * (tokens / 2) * dim
    return 3.5 * forward / least_seconds(work, device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes, for more data than caches hold."""
    size = (256 << 20) if device.type == "cpu" else (2 << 30)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / least_seconds(functools.partial(target.copy_, source), device)


def gather_speed(device_type: str, num_ranks: int) -> tuple[float, float]:
    """Bytes per second that a rank sends in an all-gather of ``num_ranks`` local ranks, and seconds of an empty
    all-gather.

    The ranks are forked: call it before any other use of torch in this process.
    """
    with tempfile.TemporaryDirectory(prefix="crius-calibrate-") as name:
        folder = Path(name)
        code = run_workers(functools.partial(_gather, device_type, folder / "gather.json"), num_ranks, folder)
        if code:
            raise RuntimeError(f"the workers of the all-gather ended with {code}")
        full, empty = parse_json(read_below(folder, "gather.json"))
    sent = _GATHER_BYTES[device_type] * (num_ranks - 1) / num_ranks
    return sent / max(full - empty, 1e-9), empty


def _gather(device_type: str, result: Path, placement: Placement) -> None:
    device = pick_device("cuda" if device_type == "cuda" else "cpu", placement.local_rank)
    size = placement.world_size
    with world(placement.rank, size, device, placement.rendezvous, _TIMEOUT_SECONDS):
        found = [_gather_seconds(nbytes, size, device) for nbytes in (_GATHER_BYTES[device_type], 4096)]
        if placement.rank == 0:
            result.write_text(json.dumps(found), encoding="utf-8")


def _gather_seconds(nbytes: int, size: int, device: torch.device) -> float:
    own = torch.ones(nbytes // 4 // size, device=device)
    parts = [torch.empty_like(own) for _ in range(size)]
    found: list[float] = []
    for _ in range(8):  # the same number on all ranks
        dist.barrier()
        begin = time.perf_counter()
        dist.all_gather(parts, own)
        wait_for(device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found[2:])
