"""The block of Qwen3 with experts."""

from torch import nn

from crius.models.moe import RoutedBlock
from crius.models.qwen3.block import Qwen3Attention
from crius.models.qwen3_moe import Qwen3MoEConfig


class Qwen3MoEBlock(RoutedBlock):
    """A decoder layer with Qwen3's attention and experts."""

    def build_attention(self, config: Qwen3MoEConfig) -> nn.Module:  # type: ignore[override]
        """Qwen3's attention."""
        return Qwen3Attention(config)
