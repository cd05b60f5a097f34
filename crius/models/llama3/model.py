"""Llama 3 decoder (arXiv:2407.21783). Single device; how it is sharded is in ``plan.py``.

B batch, T tokens, D model dim, N query heads, K key/value heads, H head dim, F hidden dim, V vocabulary
"""

from dataclasses import asdict

import torch
from torch import Tensor, nn

from crius.kernels.attention import Mask
from crius.models.init import Constant, Init, Normal
from crius.models.layers.attention import Attention, DocumentMask
from crius.models.layers.feed_forward import FeedForward
from crius.models.layers.norm import RMSNorm
from crius.models.layers.output import Loss, Output
from crius.models.layers.rope import rotary_cos_sin, rotary_frequencies, stretched_frequencies
from crius.models.llama3.config import Llama3Config


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each behind an RMSNorm and beside a residual."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config.dim, config.num_heads, config.num_kv_heads, config.head_dim)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None) -> Tensor:
        """``(B, T, D)`` to ``(B, T, D)``."""
        h_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope, mask)
        y: Tensor = h_BTD + self.feed_forward(self.ffn_norm(h_BTD))
        return y


class Llama3(nn.Module):
    """The decoder. Building it allocates shapes only; ``init_rules`` says how the weights start."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.num_layers)})
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.output = Output(config.dim, config.vocab_size, bias=False)
        self.loss = Loss()
        if config.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight
        if config.attention_mask == "document":
            self.document_mask = DocumentMask()

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None, labels_BT: Tensor | None = None) -> Tensor:
        """Logits ``(B, T, V)``; with labels the sum of the token losses in nats, a float64 scalar.

        Args:
            tokens_BT: token ids.
            positions_BT: position of each token, which turns the rotary angles; None counts from the start of the
                sequence. Under the ``document`` attention mask a 0 starts a document.
            labels_BT: what to predict from each token; ``IGNORE_INDEX`` where nothing is.
        """
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        mask = self.document_mask(positions_BT) if self.config.attention_mask == "document" else None
        rope = rotary_cos_sin(positions_BT, self.frequencies(positions_BT.device))
        h_BTD = self.tok_embeddings(tokens_BT)
        for layer in self.layers.values():
            h_BTD = layer(h_BTD, rope, mask)
        h_BTD = self.norm(h_BTD)
        result: Tensor = self.output(h_BTD) if labels_BT is None else self.loss(h_BTD, labels_BT, self.output)
        return result

    def frequencies(self, device: torch.device) -> Tensor:
        """Rotary frequencies in radians a token, float64 ``(H / 2,)``."""
        plain = rotary_frequencies(self.config.head_dim, self.config.rope_theta, device)
        scaling = self.config.rope_scaling
        return stretched_frequencies(plain, **asdict(scaling)) if scaling else plain

    def init_rules(self) -> list[tuple[str, Init]]:
        """Name patterns and how those parameters start; the first that fits counts.

        Matrices start at std 0.02, those that write to the residual stream smaller by ``sqrt(2 * num_layers)``
        (GPT-2, section 2.3), the output layer by ``D ** -0.5``.
        """
        residual = 0.02 / (2 * self.config.num_layers) ** 0.5
        embedding = Normal(self.config.dim**-0.5) if self.config.tied_embeddings else Normal(1.0)
        return [
            ("tok_embeddings.weight", embedding),
            ("output.weight", Normal(self.config.dim**-0.5)),
            ("layers.*.attention.wo.weight", Normal(residual)),
            ("layers.*.feed_forward.w2.weight", Normal(residual)),
            ("layers.*.attention.*.weight", Normal(0.02)),
            ("layers.*.feed_forward.*.weight", Normal(0.02)),
            ("layers.*.attention_norm.weight", Constant(1.0)),
            ("layers.*.ffn_norm.weight", Constant(1.0)),
            ("norm.weight", Constant(1.0)),
        ]
