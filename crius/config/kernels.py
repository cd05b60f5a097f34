"""``[kernels]``: which implementation computes what, where there is a choice. All give the same numbers but for the
order of sums.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Implementations, chosen per device and case unless named here; the log says which."""

    linear: Literal["auto", "torch", "onednn"] = "auto"
    """Matmuls of float32 linear layers on a CPU. torch: what F.linear takes, MKL on x86. onednn: oneDNN for the forward
    and the gradient of the input. auto: onednn on AMD CPUs with AVX-512, else torch."""

    pointwise: Literal["auto", "torch", "fused"] = "auto"
    """RMSNorm, rotary positions and SwiGLU. torch: as PyTorch differentiates them. fused: with hand-written backwards
    that read and keep less; compiled blocks fuse them in their own way. auto: fused on a CPU, else torch."""

    attention: Literal["auto", "cudnn", "flash", "efficient", "math", "flex", "blocked"] = "auto"
    """Backend of scaled dot-product attention. flex is for the document mask on a GPU. blocked is for a CPU, float32
    and sequences of a multiple of 32 tokens: it keeps the probabilities, seq_len / 2 numbers for each token and head.
    auto: the first of those that the device, dtype and mask allow that was measured to be the fastest; blocked on AMD
    CPUs with AVX-512, up to 512 tokens."""

    linear_cross_entropy: Literal["auto", "off", "chunked"] = "auto"
    """chunked: output layer and loss together, loss_chunk_tokens at a time, so that the logits of all tokens never
    exist. off: logits first, then the loss. auto: chunked, but for an output layer in low precision, and under the
    pipeline schedule gpipe, which would keep a gradient of that layer for each microbatch."""

    loss_chunk_tokens: int = -1
    """Tokens of a chunk of linear_cross_entropy. -1: as many as make 1 GiB of logits on a GPU, 8 MiB on a CPU, at
    least 256. Fewer take less memory; each chunk but one reads and writes the output layer's gradient once more."""
