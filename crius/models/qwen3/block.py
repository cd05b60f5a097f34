"""The block of Qwen3.

B batch, T tokens, D model dim, N query heads, K key/value heads, H head dim
"""

from torch import Tensor, nn

from crius.models.config import DecoderConfig
from crius.models.decoder import Block
from crius.models.layers import Attention, RMSNorm
from crius.models.qwen3 import Qwen3Config


class Qwen3Attention(Attention):
    """Attention that normalises queries and keys, each head alone."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.dim, config.num_heads, config.num_kv_heads, config.head_dim)
        self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps)

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values before the rotation by positions: ``(B, T, N, H)`` and twice ``(B, T, K, H)``."""
        q_BTNH, k_BTKH, v_BTKH = super().project(x_BTD)
        return self.q_norm(q_BTNH), self.k_norm(k_BTKH), v_BTKH


class Qwen3Block(Block):
    """A plain decoder layer with Qwen3's attention."""

    def build_attention(self, config: Qwen3Config) -> nn.Module:  # type: ignore[override]
        """Qwen3's attention."""
        return Qwen3Attention(config)
