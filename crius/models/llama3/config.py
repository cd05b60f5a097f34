"""Dimensions of Llama 3, with the published flavors."""

from dataclasses import dataclass, replace
from typing import Literal

from crius.models.spec import ModuleFacts


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the low rotary frequencies for longer contexts (arXiv:2407.21783 and its code).

    Attributes:
        factor: low frequencies are divided by this.
        low_freq_factor: wavelengths above ``original_context / low_freq_factor`` tokens are stretched in full.
        high_freq_factor: wavelengths below ``original_context / high_freq_factor`` tokens stay.
        original_context: tokens of context the base model was trained with.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, kw_only=True)
class Llama3Config:
    """Sizes of one Llama 3 model; heads, layers and vocabulary are counts, ``dim`` and ``ffn_dim`` are widths."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int = 128_256
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    attention_mask: Literal["causal", "document"] = "causal"

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.num_heads

    def layer_matmul_parameters(self) -> int:
        """Weights of the seven linear layers of a block."""
        attention = self.dim * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.dim * self.ffn_dim

    def num_parameters(self) -> int:
        """All trained numbers, a tied weight once."""
        embeddings = self.vocab_size * self.dim * (1 if self.tied_embeddings else 2)
        norms = (2 * self.num_layers + 1) * self.dim
        return embeddings + norms + self.num_layers * self.layer_matmul_parameters()

    def matmul_parameters(self) -> int:
        """Weights that a token is multiplied with: with the output layer, without the embedding lookup."""
        return self.num_layers * self.layer_matmul_parameters() + self.vocab_size * self.dim

    def flops_per_token(self, mean_visible_context: float) -> float:
        """Model FLOPs of one token's forward and backward (PaLM, arXiv:2204.02311, appendix B, but causal).

        ``6 * matmul_parameters + 12 * num_layers * num_heads * head_dim * mean_visible_context``.

        Args:
            mean_visible_context: tokens that a token attends to, on average; ``(T + 1) / 2`` for causal attention.
        """
        return sum(module.flops_per_token for module in self.modules(mean_visible_context))

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every trained parameter by name, in the model's order; a tied weight once, under its first name."""
        shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (self.vocab_size, self.dim)}
        for i in range(self.num_layers):
            block = f"layers.{i}"
            shapes[f"{block}.attention_norm.weight"] = (self.dim,)
            shapes |= {f"{block}.attention.{name}.weight": shape for name, shape in self._attention_linears().items()}
            shapes[f"{block}.ffn_norm.weight"] = (self.dim,)
            shapes |= {f"{block}.feed_forward.{name}.weight": shape for name, shape in self._ffn_linears().items()}
        shapes["norm.weight"] = (self.dim,)
        return shapes if self.tied_embeddings else shapes | {"output.weight": (self.vocab_size, self.dim)}

    def linears(self) -> dict[str, tuple[int, int]]:
        """``(out_features, in_features)`` of every linear layer by name, in the model's order."""
        shapes: dict[str, tuple[int, int]] = {}
        for i in range(self.num_layers):
            shapes |= {f"layers.{i}.attention.{name}": shape for name, shape in self._attention_linears().items()}
            shapes |= {f"layers.{i}.feed_forward.{name}": shape for name, shape in self._ffn_linears().items()}
        return shapes | {"output": (self.vocab_size, self.dim)}

    def _attention_linears(self) -> dict[str, tuple[int, int]]:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {"wq": (queries, self.dim), "wk": (keys, self.dim), "wv": (keys, self.dim), "wo": (self.dim, queries)}

    def _ffn_linears(self) -> dict[str, tuple[int, int]]:
        return {"w1": (self.ffn_dim, self.dim), "w2": (self.dim, self.ffn_dim), "w3": (self.ffn_dim, self.dim)}

    def modules(self, mean_visible_context: float) -> list[ModuleFacts]:
        """Embedding, layers, norm and output layer in forward order, with parameters and FLOPs."""
        attention = 12 * self.num_heads * self.head_dim * mean_visible_context
        weights, embedding = self.layer_matmul_parameters(), self.vocab_size * self.dim
        layers = [
            ModuleFacts(f"layers.{i}", weights + 2 * self.dim, 6 * weights + attention) for i in range(self.num_layers)
        ]
        output = ModuleFacts("output", 0 if self.tied_embeddings else embedding, 6 * embedding)
        return [ModuleFacts("tok_embeddings", embedding, 0), *layers, ModuleFacts("norm", self.dim, 0), output]


_LLAMA_3_1 = RopeScaling(factor=8.0)

FLAVORS: dict[str, Llama3Config] = {
    "debug": Llama3Config(dim=128, num_layers=8, num_heads=8, num_kv_heads=4, ffn_dim=384, vocab_size=512),
    "6m": Llama3Config(  # of the comparison with other trainers on a CPU: benchmarks/README.md
        dim=256, num_layers=6, num_heads=8, num_kv_heads=4, ffn_dim=768, vocab_size=2048, rope_theta=10_000.0
    ),
    "1b": Llama3Config(  # Llama 3.2
        dim=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        ffn_dim=8192,
        rope_scaling=RopeScaling(factor=32.0),
        tied_embeddings=True,
    ),
    "8b": Llama3Config(dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14_336, rope_scaling=_LLAMA_3_1),
    "70b": Llama3Config(dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=28_672, rope_scaling=_LLAMA_3_1),
    "405b": Llama3Config(
        dim=16_384, num_layers=126, num_heads=128, num_kv_heads=8, ffn_dim=53_248, rope_scaling=_LLAMA_3_1
    ),
}


def customize(flavor: Llama3Config, **sizes: object) -> Llama3Config:
    """``flavor`` with some fields replaced."""
    return replace(flavor, **sizes)  # type: ignore[arg-type]
