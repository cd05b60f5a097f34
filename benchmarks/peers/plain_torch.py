"""A training loop as people write it by hand: a Llama in plain PyTorch, fused AdamW, nothing else.

B batch, T tokens, D model dim, N query heads, K key/value heads, H head dim
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.task import MAX_NORM, Task, adamw, read_arguments, turns_of

HF_PARTS = {
    "model.embed_tokens": "embed",
    "model.layers": "layers",
    "model.norm": "norm",
    "lm_head": "head",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Parts of Hugging Face's parameter names, and what they are called here."""


def rotate(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Turn the two halves of each head by the angles of its position."""
    left, right = x_BNTH.chunk(2, dim=-1)
    return x_BNTH * cos_TH + torch.cat((-right, left), dim=-1) * sin_TH


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.head_dim = task.dim // task.num_heads
        self.q = nn.Linear(task.dim, task.num_heads * self.head_dim, bias=False)
        self.k = nn.Linear(task.dim, task.num_kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(task.dim, task.num_kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(task.num_heads * self.head_dim, task.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        """``(B, T, D)`` to ``(B, T, D)``."""
        q, k, v = (part(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotate(q, cos_TH, sin_TH), rotate(k, cos_TH, sin_TH)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return y


class Layer(nn.Module):
    """Attention and SwiGLU, each behind a norm and beside a residual."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(task.dim, eps=task.norm_eps)
        self.attention = Attention(task)
        self.ffn_norm = nn.RMSNorm(task.dim, eps=task.norm_eps)
        self.gate = nn.Linear(task.dim, task.ffn_dim, bias=False)
        self.up = nn.Linear(task.dim, task.ffn_dim, bias=False)
        self.down = nn.Linear(task.ffn_dim, task.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        """``(B, T, D)`` to ``(B, T, D)``."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TH, sin_TH)
        h_BTD = self.ffn_norm(x_BTD)
        y: Tensor = x_BTD + self.down(F.silu(self.gate(h_BTD)) * self.up(h_BTD))
        return y


class Llama(nn.Module):
    """The whole model, with the mean cross-entropy as its output."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.embed = nn.Embedding(task.vocab_size, task.dim)
        self.layers = nn.ModuleList(Layer(task) for _ in range(task.num_layers))
        self.norm = nn.RMSNorm(task.dim, eps=task.norm_eps)
        self.head = nn.Linear(task.dim, task.vocab_size, bias=False)
        half = task.dim // task.num_heads // 2
        frequencies = task.rope_theta ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(task.seq_len).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos_TH", angles.cos(), persistent=False)
        self.register_buffer("sin_TH", angles.sin(), persistent=False)

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Mean loss of the tokens, in nats."""
        x_BTD = self.embed(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, self.cos_TH, self.sin_TH)
        return F.cross_entropy(self.head(self.norm(x_BTD)).flatten(0, 1), labels_BT.flatten())


def own_name(name: str) -> str:
    """A parameter by its Hugging Face name, as it is called here."""
    for theirs, ours in HF_PARTS.items():
        name = f".{name}".replace(f".{theirs}.", f".{ours}.")[1:]
    return name


def main() -> None:
    """Train until the driver says that it is over."""
    task, is_compiled = read_arguments("plain_torch")
    model = Llama(task)
    model.load_state_dict({own_name(name): weight for name, weight in task.first_weights().items()})
    optimizer = adamw(model)
    step = torch.compile(model) if is_compiled else model
    turns = turns_of(task)
    for tokens, labels in task.batches():
        loss = step(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not turns.after_step(loss.detach()):
            return


if __name__ == "__main__":
    main()
