"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), computed from positions: no buffer to keep or refill.

B batch, T tokens, N heads, H head dim
"""

import math

import torch
from torch import Tensor


def rotary_frequencies(head_dim: int, theta: float) -> list[float]:
    """``head_dim / 2`` angular frequencies in radians a token."""
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def stretched_frequencies(
    frequencies: list[float], factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> list[float]:
    """Llama 3.1's scaling: low frequencies divided by ``factor``, high ones kept, a linear blend between."""
    stretched = []
    for frequency in frequencies:
        turns = original_context * frequency / (2 * math.pi)  # of this frequency in the original context
        blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        blend = min(1.0, max(0.0, blend))
        stretched.append(frequency * (blend + (1 - blend) / factor))
    return stretched


def rotary_cos_sin(positions_BT: Tensor, frequencies: list[float]) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, float32, each ``(B, T, 1, H)`` with the two halves of H alike."""
    device = positions_BT.device
    freqs = torch.tensor(frequencies, dtype=torch.float32, device=device)
    angles = positions_BT[..., None, None].to(torch.float32) * freqs
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x_BTNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + H/2)`` of each head by their position's angle, in float32; dtype and shape stay."""
    x = x_BTNH.to(torch.float32)
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x_BTNH.dtype)
