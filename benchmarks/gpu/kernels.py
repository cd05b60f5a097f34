"""Kernel paths of Crius one by one beside float64: ``python -m benchmarks.gpu.kernels GROUP cuda|cpu``.

A group is a process of its own: a kernel that breaks the CUDA context spoils the checks of no other group. What a line
says is in ``checks.py``. The exit code is 0 when all checks of the group have run, whatever they found. ``--list``
prints the groups and their numbers of checks.

B batch, T tokens, N query heads, K key/value heads, H head dim, M rows, D model dim, F output dim, V vocabulary,
E experts
"""

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import system
from benchmarks.gpu.checks import GROUPS, LIMITS, Check, Outcome, compare, run_group
from benchmarks.gpu.system import milliseconds, rate_of
from crius.config.low_precision import kind
from crius.config.resolve import BLOCK_BYTES, CHUNK_BYTES
from crius.config.training import DenseQuantizeConfig
from crius.data.loader import Batch
from crius.kernels import choice
from crius.kernels.attention import Mask, causal_attention, document_mask, masked_attention
from crius.kernels.grouped_mm import grouped_linear
from crius.kernels.linear_cross_entropy import IGNORE_INDEX, Chunks, linear_cross_entropy, score_block
from crius.parallel.runtime import let_segments_grow
from crius.quantize.convert import FLOAT8_CAPABILITY, MXFP8_CAPABILITY, missing_matmuls, usable_torchao

BF16 = "bfloat16"
F32 = "float32"


def drawn(shape: Sequence[int], dtype: str, device: str, scale: float = 1.0) -> Tensor:
    """Random numbers that need a gradient. They are drawn on the host, so every device gets the same ones."""
    return torch.randn(shape).mul_(scale).to(device, getattr(torch, dtype)).requires_grad_()


def compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """``function`` compiled as a whole, without anything that earlier checks compiled. On a CPU it is only traced."""
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="inductor" if device == "cuda" else "eager")


def beside_float64(
    names: Sequence[str],
    path: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    limit: float,
) -> Outcome:
    """Compare the result and the gradients of ``path`` with those of ``plain``, which gets the inputs in float64.

    Args:
        names: names of the result and of the gradient of each input.
        path: function to judge.
        plain: the same function in plain PyTorch, called on the host.
        inputs: arguments of both.
        limit: see ``checks.compare``.
    """
    result = path(*inputs)
    upstream = torch.randn(result.shape).to(result)
    got = [result, *torch.autograd.grad(result, inputs, upstream)]
    inputs64 = [x.detach().double().cpu().requires_grad_() for x in inputs]
    result64 = plain(*inputs64)
    want = [result64, *torch.autograd.grad(result64, inputs64, upstream.double().cpu())]
    return compare(names, got, want, limit)


# ---- attention


@dataclass(frozen=True)
class Attention:
    """A case of attention: two sequences, 8 query heads, 2 key/value heads.

    Attributes:
        kernel: value of ``kernels.attention``. ``dense`` is a mask of all pairs of tokens. Attention is by document
            with ``varlen``, ``flex`` and ``dense``, and causal with the others.
        dtype: dtype of queries, keys and values.
        tokens: length of the sequences.
        head_dim: size of a head.
        is_compiled: whether attention is in a compiled function.
    """

    kernel: str
    dtype: str
    tokens: int
    head_dim: int = 128
    is_compiled: bool = False

    @property
    def has_documents(self) -> bool:
        """Whether attention is by document."""
        return self.kernel in ("varlen", "flex", "dense")

    def check(self) -> Check:
        """The check of this case."""
        kind = "document" if self.has_documents else "causal"
        words = [kind, self.kernel, self.dtype, f"T{self.tokens}", f"H{self.head_dim}"]
        words += ["in a compiled function"] if self.is_compiled else []
        is_for_gpu = self.kernel in ("cudnn", "efficient", "varlen", "flex")
        return Check(" ".join(words), partial(attention, self), needs_gpu=is_for_gpu)


CAUSAL = (
    ("auto", BF16),
    ("cudnn", BF16),
    ("flash", BF16),
    ("efficient", BF16),
    ("math", BF16),
    ("auto", F32),
    ("efficient", F32),
    ("math", F32),
)
SIZES = ((512, 128), (300, 64), (77, 128))
"""Tokens and head dim: whole blocks, and lengths that no block divides."""

MASKED = (("varlen", BF16), ("flex", BF16), ("dense", BF16), ("dense", F32))
LENGTHS = (512, 300)

ATTENTION = [
    *(Attention(kernel, dtype, tokens, head_dim) for kernel, dtype in CAUSAL for tokens, head_dim in SIZES),
    *(Attention(kernel, dtype, tokens) for kernel, dtype in MASKED for tokens in LENGTHS),
    Attention("varlen", BF16, 512, is_compiled=True),
    Attention("flex", BF16, 512, is_compiled=True),
    Attention("flex", BF16, 300, is_compiled=True),
    Attention("flex", BF16, 512, head_dim=64, is_compiled=True),
]


def chosen(kernel: str, device: str, *, has_mask: bool = False) -> choice.Choice:
    """The choice that a run makes on this device if ``kernels.attention`` is ``kernel``."""
    on_gpu = device == "cuda"
    if kernel == "dense":
        kernel = "efficient" if on_gpu else "auto"
    return choice.resolve(
        "auto",
        "auto",
        kernel,  # type: ignore[arg-type]
        device_type=device,
        capability=torch.cuda.get_device_capability() if on_gpu else None,
        cudnn=torch.backends.cudnn.version() if on_gpu else None,
        has_mask=has_mask,
    )


def attend(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Mask | None) -> Tensor:
    """Attention as a model calls it, with tokens before heads: ``(B, T, N, H)``."""
    q_BNTH, k_BKTH, v_BKTH = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    if mask is None:
        return causal_attention(q_BNTH, k_BKTH, v_BKTH).transpose(1, 2)
    return masked_attention(q_BNTH, k_BKTH, v_BKTH, mask).transpose(1, 2)


def attend_plainly(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, seen_BTT: Tensor) -> Tensor:
    """Attention with all scores, where ``seen_BTT`` is True."""
    shared = q_BTNH.shape[2] // k_BTKH.shape[2]
    k_BTNH = k_BTKH.repeat_interleave(shared, dim=2)
    v_BTNH = v_BTKH.repeat_interleave(shared, dim=2)
    scores_BNTT = torch.einsum("btnh,bsnh->bnts", q_BTNH, k_BTNH) * q_BTNH.shape[-1] ** -0.5
    shares_BNTT = scores_BNTT.masked_fill(~seen_BTT[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bnts,bsnh->btnh", shares_BNTT, v_BTNH)


def attention(case: Attention, device: str) -> Outcome:
    """One kernel of attention, forward and backward. Only the second sequence ever has more than one document."""
    inputs = [drawn((2, case.tokens, heads, case.head_dim), case.dtype, device) for heads in (8, 2, 2)]
    documents = (1, 70, case.tokens - 71) if case.has_documents else (case.tokens,)
    second = torch.cat([torch.arange(length) for length in documents])
    positions_BT = torch.stack((torch.arange(case.tokens), second))
    documents_BT = (positions_BT == 0).cumsum(-1)
    seen_BTT = (documents_BT[:, :, None] == documents_BT[:, None, :]).tril()
    batch = Batch(positions_BT, positions_BT, positions_BT, (0, 1))
    if case.kernel == "varlen":
        batch = batch.with_ends(case.tokens)
    batch = batch.to(device)
    function = compiled(attend, device) if case.is_compiled else attend
    with choice.applied(chosen(case.kernel, device, has_mask=case.has_documents)):
        mask = document_mask(batch.positions_BT, batch.ends_BM) if case.has_documents else None
        return beside_float64(
            ("y", "dq", "dk", "dv"),
            lambda q, k, v: function(q, k, v, mask),
            lambda q, k, v: attend_plainly(q, k, v, seen_BTT),
            inputs,
            LIMITS[case.dtype],
        )


def fastest_is_taken(device: str) -> Outcome:
    """The operator to which PyTorch dispatches causal attention by default."""
    inputs = [drawn((1, 512, heads, 128), BF16, device) for heads in (8, 2, 2)]
    taken = chosen("auto", device)
    with choice.applied(taken), profile(activities=[ProfilerActivity.CPU]) as trace:
        attend(*inputs, None)
    names = sorted({event.name for event in trace.events() if "_scaled_dot_product" in event.name})
    wanted = "flash"
    if device == "cuda" and torch.cuda.get_device_capability()[0] in choice.CUDNN_GENERATIONS:
        wanted = "cudnn"
    return Outcome(any(wanted in name for name in names), f"{', '.join(names)}; {taken}")


def attention_checks() -> list[Check]:
    """All checks of attention."""
    fastest = Check("causal auto is cuDNN on Hopper, else flash", fastest_is_taken)
    return [*(case.check() for case in ATTENTION), fastest]


# ---- loss


def loss(dtype: str, device: str, *, is_compiled: bool = False) -> Outcome:
    """The loss in chunks of 300 tokens, of which each seventh has no label."""
    score = compiled(score_block, device) if is_compiled else score_block
    labels_BT = torch.randint(1000, (1, 300))
    labels_BT[0, ::7] = IGNORE_INDEX
    inputs = (drawn((1, 300, 64), dtype, device), drawn((1000, 64), dtype, device, scale=64**-0.5))
    return beside_float64(
        ("loss", "dx", "dw"),
        lambda x, w: linear_cross_entropy(x, w, labels_BT.to(device), Chunks(128, 64, score)),
        lambda x, w: F.cross_entropy((x @ w.t())[0], labels_BT[0], ignore_index=IGNORE_INDEX, reduction="sum"),
        inputs,
        LIMITS[dtype],
    )


LARGE = (8192, 4096, 128_256)
"""Tokens, model dim and vocabulary, as of Llama 3 8B."""
MOST_OF_LOGITS = 0.5
"""Largest peak of the loss, beyond inputs and gradients, as a share of all logits in float32. Counted tensor by tensor
it is 0.31: a chunk of 1 GiB in bfloat16 is 0.25, blocks in float32 and a part of a product are the rest."""


def large_loss(device: str) -> Outcome:
    """The loss with the vocabulary of Llama 3 and the default chunks: gradients of 64 tokens, time and peak memory."""
    tokens, dim, vocabulary = LARGE
    x_MD = torch.randn(tokens, dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    w_VD = torch.randn(vocabulary, dim, device=device, dtype=torch.bfloat16).mul_(dim**-0.5).requires_grad_()
    labels_M = torch.randint(vocabulary, (tokens,), device=device)
    chunks = Chunks(CHUNK_BYTES[device] // (2 * vocabulary), BLOCK_BYTES[device] // (4 * vocabulary))

    def both_ways() -> tuple[Tensor, ...]:
        return torch.autograd.grad(linear_cross_entropy(x_MD, w_VD, labels_M, chunks), (x_MD, w_VD))

    some = slice(0, tokens, tokens // 64)
    got = both_ways()[0][some]
    x64_MD = x_MD[some].detach().double().requires_grad_()
    whole = F.cross_entropy(F.linear(x64_MD, w_VD.detach().double()), labels_M[some], reduction="sum")
    (want,) = torch.autograd.grad(whole, x64_MD)
    outcome = compare(("dx",), [got], [want], LIMITS["bfloat16"])
    del whole, want

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both_ways()
    peak = torch.cuda.max_memory_allocated() - before
    beyond = peak - 4 * w_VD.numel() - x_MD.nbytes  # the gradient of the weight is summed in float32
    share = beyond / (4 * tokens * vocabulary)
    figures = {
        **rate_of(6 * tokens * dim * vocabulary, milliseconds(both_ways)).figures,
        "peak_gib": peak / 2**30,
        "share_of_logits": share,
        "most_of_logits": MOST_OF_LOGITS,
        **outcome.figures,
    }
    return Outcome(outcome.ok and share < MOST_OF_LOGITS, figures=figures)


def loss_checks() -> list[Check]:
    """All checks of the loss."""
    return [
        Check("loss in chunks bfloat16", partial(loss, BF16)),
        Check("loss in chunks float32", partial(loss, F32)),
        Check("loss in chunks bfloat16 compiled", partial(loss, BF16, is_compiled=True)),
        Check("loss of 8192 tokens and 128256 words: gradient, peak", large_loss, needs_gpu=True),
    ]


# ---- experts


@dataclass(frozen=True)
class Experts:
    """A case of the experts' matmul.

    Attributes:
        name: what is special about it.
        counts: rows of each expert.
        dtype: dtype of rows and weights.
        widths: numbers of a row, and of a row of the result.
        is_compiled: whether the matmul is in a compiled function.
    """

    name: str
    counts: tuple[int, ...]
    dtype: str
    widths: tuple[int, int] = (128, 256)
    is_compiled: bool = False

    def check(self) -> Check:
        """The check of this case."""
        return Check(f"experts {self.dtype} {self.name}", partial(experts, self))


UNEVEN = (7, 0, 129, 1, 63, 0, 300, 12)
ONE_FULL = (0, 0, 512, 0)
ALIGNED = (64,) * 8

EXPERTS = [
    Experts("uneven and empty groups", UNEVEN, BF16),
    Experts("uneven and empty groups", UNEVEN, F32),
    Experts("one full group", ONE_FULL, BF16),
    Experts("one full group", ONE_FULL, F32),
    Experts("aligned groups", ALIGNED, BF16),
    Experts("aligned groups", ALIGNED, F32),
    Experts("rows of no multiple of 16 bytes", UNEVEN, BF16, widths=(132, 36)),
    Experts("128 experts of 0 to 4 rows", tuple(index % 5 for index in range(128)), BF16, widths=(256, 64)),
    Experts("uneven and empty groups compiled", UNEVEN, BF16, is_compiled=True),
]


def experts(case: Experts, device: str) -> Outcome:
    """The matmul of groups of rows. Its gradient of the weights is the product of two matrices, group by group."""
    dim, out = case.widths
    ends_E = torch.tensor(case.counts).cumsum(0).to(device, torch.int32)
    function = compiled(grouped_linear, device) if case.is_compiled else grouped_linear
    inputs = (
        drawn((sum(case.counts), dim), case.dtype, device),
        drawn((len(case.counts), out, dim), case.dtype, device, scale=dim**-0.5),
    )

    def one_by_one(x_MD: Tensor, w_EFD: Tensor) -> Tensor:
        groups = zip(x_MD.split(case.counts), w_EFD.unbind(), strict=True)
        return torch.cat([rows @ weight.t() for rows, weight in groups])

    return beside_float64(
        ("y", "dx", "dw"), lambda x, w: function(x, w, ends_E), one_by_one, inputs, LIMITS[case.dtype]
    )


EXPERTS_OF_30B = (128, 65_536, 2048, 768)
"""Experts, rows, numbers of a row, and numbers of a row of the result, as of w1 of Qwen3-30B-A3B with 8,192 tokens."""


def experts_speed(device: str) -> Outcome:
    """Time of the matmul, forward and backward."""
    num_experts, rows, dim, out = EXPERTS_OF_30B
    counts_E = torch.multinomial(torch.ones(num_experts), rows, replacement=True).bincount(minlength=num_experts)
    ends_E = counts_E.cumsum(0).to(device, torch.int32)
    x_MD = torch.randn(rows, dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    w_EFD = torch.randn(num_experts, out, dim, device=device, dtype=torch.bfloat16).mul_(dim**-0.5).requires_grad_()
    upstream_MF = torch.randn(rows, out, device=device, dtype=torch.bfloat16)
    took = milliseconds(lambda: torch.autograd.grad(grouped_linear(x_MD, w_EFD, ends_E), (x_MD, w_EFD), upstream_MF))
    return rate_of(6 * rows * dim * out, took)


def experts_checks() -> list[Check]:
    """All checks of the experts' matmul."""
    speed = Check("experts speed of Qwen3-30B-A3B, a measurement", experts_speed, needs_gpu=True)
    return [*(case.check() for case in EXPERTS), speed]


# ---- low precision

DEFAULT = DenseQuantizeConfig()
MXFP8 = dataclasses.replace(DEFAULT, mxfp8=dataclasses.replace(DEFAULT.mxfp8, enable=True))


def float8(recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]) -> DenseQuantizeConfig:
    """The section with float8 by ``recipe``."""
    return dataclasses.replace(DEFAULT, float8=dataclasses.replace(DEFAULT.float8, enable=True, recipe=recipe))


def low_precision(
    dense: DenseQuantizeConfig, device: str, *, is_emulated: bool = False, is_compiled: bool = False
) -> Outcome:
    """A low-precision linear layer, forward and backward. On a CPU it is emulated, as in a run.

    A layer that stayed in bfloat16 would be closer to float64 than any in low precision, and fails too.
    """
    with usable_torchao():
        from crius.quantize.backend import maker  # noqa: PLC0415  torchao is optional

    plain = nn.Linear(512, 384, bias=False).to(device, torch.bfloat16)
    layer = maker(dense, emulate=is_emulated or device != "cuda")(plain)
    function = compiled(layer, device) if is_compiled else layer
    inputs = (drawn((256, 512), BF16, device), layer.weight)
    outcome = beside_float64(("y", "dx", "dw"), lambda x, w: function(x), F.linear, inputs, LIMITS[kind(dense)])
    is_rounded = outcome.figures["y"] > LIMITS["bfloat16"]
    return dataclasses.replace(outcome, ok=outcome.ok and is_rounded, detail=f"rounded {is_rounded}")


def mxfp8_matmuls(device: str) -> Outcome:
    """MXFP8 by its own matmuls, where the device has them."""
    missing = missing_matmuls("mxfp8", device)
    return Outcome(None, missing) if missing else low_precision(MXFP8, device)


def matmuls_are_found(words: Literal["float8", "mxfp8"], capability: tuple[int, int], device: str) -> Outcome:
    """Whether Crius takes the matmuls of a number format exactly on GPUs from ``capability`` on."""
    missing = missing_matmuls(words, device)
    has_them = device == "cuda" and torch.cuda.get_device_capability() >= capability
    return Outcome((missing == "") == has_them, missing or "the device has them")


def low_precision_checks() -> list[Check]:
    """All checks of low precision."""
    checks = []
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        layer = partial(low_precision, float8(recipe))
        checks.append(Check(f"float8 {recipe}", layer))
        checks.append(Check(f"float8 {recipe} compiled", partial(layer, is_compiled=True), needs_gpu=True))
    return [
        *checks,
        Check("float8 tensorwise emulated", partial(low_precision, float8("tensorwise"), is_emulated=True)),
        Check("float8 matmuls are refused before Ada", partial(matmuls_are_found, "float8", FLOAT8_CAPABILITY)),
        Check("mxfp8 matmuls are refused before Blackwell", partial(matmuls_are_found, "mxfp8", MXFP8_CAPABILITY)),
        Check("mxfp8 emulated", partial(low_precision, MXFP8, is_emulated=True)),
        Check("mxfp8 by its matmuls", mxfp8_matmuls),
    ]


CHECKS: dict[str, Callable[[], list[Check]]] = {
    "attention": attention_checks,
    "loss": loss_checks,
    "experts": experts_checks,
    "low_precision": low_precision_checks,
    "system": system.checks,
}


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", nargs="?", choices=GROUPS)
    parser.add_argument("device", nargs="?", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--list", action="store_true", help="print the groups and their numbers of checks")
    arguments = parser.parse_args()
    if arguments.list:
        for name in GROUPS:
            print(f"{name} {len(CHECKS[name]())}")
        return
    if arguments.group is None:
        parser.error("name a group, or --list")
    let_segments_grow(os.environ)  # as each run does, before anything is allocated
    run_group(CHECKS[arguments.group](), arguments.device)


if __name__ == "__main__":
    main()
