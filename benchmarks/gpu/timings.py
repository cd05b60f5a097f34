"""Time and memory of the loss, of projections and of attention by themselves.

    python -m benchmarks.gpu.timings cuda|cpu [tiny]

The last line out is JSON. B batch, T tokens, D model dim, N query heads, K key/value heads, H head dim, V vocabulary
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from crius.config.resolve import BLOCK_BYTES, CHUNK_BYTES
from crius.kernels.linear_cross_entropy import Chunks, linear_cross_entropy, reference, score_block
from crius.models.layers import CausalAttention, DocumentMask

MIB = 1 << 20


def attention(where: str, is_tiny: bool) -> list[dict]:
    """Which kernel of scaled_dot_product_attention takes each kind of attention, its time and its memory."""
    tokens = 64 if is_tiny else 4096
    cases = [
        (mask, heads, kv_heads, head_dim, dtype)
        for mask in ("causal", "document")
        for heads, kv_heads, head_dim in ((32, 8, 64), (32, 8, 128), (32, 32, 128))
        for dtype in (torch.bfloat16, torch.float32)
    ][: 2 if is_tiny else None]
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
        row["milliseconds"], row["peak_mib"] = _in_turns({"": both_ways}, where, rounds=10)[""]
    except RuntimeError as error:  # such as no memory for the plain path of float32; the other cases still tell
        row["error"] = str(error).strip().splitlines()[0]
    return row


def projections(where: str, is_tiny: bool) -> list[dict]:
    """Queries, keys and values by one matmul or by three; gate and up by one or by two. Forward and backward."""
    shapes = {"8B": (8192, 4096, 1024, 14_336), "1B": (8192, 2048, 512, 8192)}
    if is_tiny:
        shapes = {"tiny": (32, 64, 16, 96)}
    rows = []
    for model, (tokens, dim, kv_dim, ffn_dim) in shapes.items():
        for what, widths in {"q, k, v": (dim, kv_dim, kv_dim), "gate, up": (ffn_dim, ffn_dim)}.items():
            found = _in_turns(_projections(where, tokens, dim, widths), where)
            apart, together = (found[name][0] for name in ("apart", "together"))
            gain = round(100 * (apart / together - 1), 1)
            row = {"model": model, "what": what, "tokens": tokens}
            rows.append({**row, "apart_ms": apart, "together_ms": together, "gain_percent": gain})
    return rows


def _projections(where: str, tokens: int, dim: int, widths: tuple[int, ...]) -> dict[str, Callable[[], None]]:
    dtype = torch.bfloat16
    x = torch.randn(tokens, dim, device=where, dtype=dtype, requires_grad=True)
    weights = [torch.randn(width, dim, device=where, dtype=dtype, requires_grad=True) for width in widths]
    whole = torch.randn(sum(widths), dim, device=where, dtype=dtype, requires_grad=True)
    gradients = [torch.randn(tokens, width, device=where, dtype=dtype) for width in widths]

    def run(outputs: Sequence[Tensor], parameters: list[Tensor]) -> None:
        torch.autograd.grad(outputs, [x, *parameters], gradients)

    return {
        "apart": lambda: run([F.linear(x, weight) for weight in weights], weights),
        "together": lambda: run(F.linear(x, whole).split(widths, dim=-1), [whole]),
    }


def loss(where: str, is_tiny: bool) -> list[dict]:
    """Output layer and loss of 32k tokens and the vocabulary of Llama 3, forward and backward: whole and in chunks."""
    tokens, dim, vocabulary = (64, 32, 512) if is_tiny else (32_768, 4096, 128_256)
    default = CHUNK_BYTES[where] // (vocabulary * 2)  # as a run without --kernels.loss_chunk_tokens has it
    sizes = (16,) if is_tiny else (512, 2048, default)
    block = max(1, BLOCK_BYTES[where] // (4 * vocabulary))
    hidden = torch.randn(1, tokens, dim, device=where, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, dim, device=where, dtype=torch.bfloat16).mul_(dim**-0.5).requires_grad_()
    labels = torch.randint(vocabulary, (1, tokens), device=where)
    compiled = torch.compile(score_block, backend="eager" if is_tiny else "inductor", dynamic=False)

    def both_ways(losses: Callable[..., Tensor], *arguments: object) -> Callable[[], None]:
        return lambda: torch.autograd.grad(losses(hidden, weight, labels, *arguments), [hidden, weight]) and None

    works = {"whole": both_ways(reference)}
    for size in sizes:
        works[f"chunks of {size}"] = both_ways(linear_cross_entropy, Chunks(size, min(size, block)))
    works[f"chunks of {sizes[-1]}, compiled"] = both_ways(linear_cross_entropy, Chunks(sizes[-1], sizes[-1], compiled))
    found = _in_turns(works, where, rounds=5)
    whole = found["whole"][0]
    size = f"T {tokens}, D {dim}, V {vocabulary}, bfloat16"
    return [
        {"loss": name, "size": size, "milliseconds": time, "peak_mib": peak, "speedup": round(whole / time, 3)}
        for name, (time, peak) in found.items()
    ]


def _in_turns(
    works: dict[str, Callable[[], None]], where: str, rounds: int = 11
) -> dict[str, tuple[float, float | None]]:
    """Median milliseconds of each work over ``rounds`` after a warm one, and its peak memory on a GPU in MiB."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    peaks: dict[str, float | None] = {}
    for _ in range(rounds + 1):
        for name, work in works.items():
            seconds, peaks[name] = _once(work, where)
            samples[name].append(1000 * seconds)
    return {name: (round(statistics.median(times[1:]), 3), peaks[name]) for name, times in samples.items()}


def _once(work: Callable[[], None], where: str) -> tuple[float, float | None]:
    """Seconds of ``work`` from an idle device to an idle device, and what it takes there on top at its peak, in MiB."""
    before = 0
    if where == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    work()
    if where == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return seconds, round((torch.cuda.max_memory_allocated() - before) / MIB, 1) if where == "cuda" else None


QUESTIONS = {"loss": loss, "projections": projections, "attention": attention}


def main(where: str, *words: str) -> None:
    """Print the rows of each question, or in place of them what went wrong, such as too little memory."""
    found: dict[str, object] = {}
    for name, question in QUESTIONS.items():
        try:
            found[name] = question(where, "tiny" in words)
        except RuntimeError as error:
            found[name] = str(error).strip().splitlines()[0]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
