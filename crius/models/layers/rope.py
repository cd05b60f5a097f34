"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), computed from positions: no buffer to keep or refill.

B batch, T tokens, N heads, H head dim
"""

import math

import torch
from torch import Tensor


def rotary_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """``head_dim / 2`` angular frequencies in radians a token, float64, made on the device without a copy to it."""
    return theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / -head_dim)


def stretched_frequencies(
    frequencies: Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> Tensor:
    """Llama 3.1's scaling: low frequencies divided by ``factor``, high ones kept, a linear blend between."""
    turns = original_context * frequencies / (2 * math.pi)  # of each frequency in the original context
    blend = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (blend + (1 - blend) / factor)


def rotary_cos_sin(positions_BT: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles for ``crius.kernels.rotary``, float32, each ``(B, T, 1, H)``.

    The two halves of H are alike, but that the first one of sin is negated.
    """
    angles = positions_BT[..., None, None].to(torch.float32) * frequencies.to(torch.float32)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
