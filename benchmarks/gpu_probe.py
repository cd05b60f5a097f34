"""Two questions to torch, each in a process of its own: ``device`` and ``attention``. The last line out is JSON.

B batch, T tokens, N query heads, K key/value heads, H head dim
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from crius.models.layers.attention import CausalAttention, DocumentMask

MIB = 1 << 20


def device() -> dict:
    """What torch finds, and why it finds no GPU."""
    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": None, "why": ""}
    if torch.version.cuda is None:
        return {**found, "why": f"torch {torch.__version__} is built without CUDA"}
    if not torch.cuda.is_available():
        return {**found, "why": "torch is built for CUDA but can use no GPU; nvidia-smi tells whether the driver can"}
    properties = torch.cuda.get_device_properties(0)
    return {
        **found,
        "device": properties.name,
        "gpus": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / (1 << 30), 1),
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def attention(where: str, tokens: int) -> list[dict]:
    """Which kernel of scaled_dot_product_attention takes each kind of attention, its time and its memory."""
    cases = [
        (mask, heads, kv_heads, head_dim, dtype)
        for mask in ("causal", "document")
        for heads, kv_heads, head_dim in ((32, 8, 64), (32, 8, 128), (32, 32, 128))
        for dtype in (torch.bfloat16, torch.float32)
    ]
    return [_case(where, tokens, *case) for case in cases]


def _case(
    where: str, tokens: int, kind: str, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[str, object]:
    shape = f"B 1, T {tokens}, N {heads}, K {kv_heads}, H {head_dim}"
    row: dict[str, object] = {"mask": kind, "shape": shape, "dtype": str(dtype).removeprefix("torch.")}
    mask = None
    if kind == "document":
        mask = DocumentMask()((torch.arange(tokens, device=where) % (tokens // 4))[None])  # four documents
    inner = CausalAttention()
    q, k, v = (
        torch.randn(1, tokens, number, head_dim, device=where, dtype=dtype, requires_grad=True)
        for number in (heads, kv_heads, kv_heads)
    )

    def both_ways() -> None:
        inner(q, k, v, mask).sum().backward()

    try:
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            both_ways()
        names = {event.name for event in trace.events() if "_scaled_dot_product" in event.name}
        row["ops"] = ", ".join(sorted(name.removeprefix("aten::") for name in names))
        row["milliseconds"], row["peak_mib"] = _time(both_ways, where)
    except RuntimeError as error:  # such as no memory for the plain path of float32; the other cases still tell
        row["error"] = str(error).strip().splitlines()[0]
    return row


def _time(work: Callable[[], None], where: str) -> tuple[float, float | None]:
    """Median milliseconds of ten runs after a warm one, and the peak memory of a GPU in MiB."""
    seconds = []
    for _ in range(11):
        if where == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        work()
        if where == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = round(torch.cuda.max_memory_allocated() / MIB, 1) if where == "cuda" else None
    return round(1000 * statistics.median(seconds[1:]), 3), peak


if __name__ == "__main__":
    answer = device() if sys.argv[1] == "device" else attention(sys.argv[2], int(sys.argv[3]))
    print(json.dumps(answer))
