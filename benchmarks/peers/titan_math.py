"""The mathematics of torchtitan's Llama 3 in a plain PyTorch loop, re-enacted from its papers and documents.

What it does as torchtitan does: rotary positions by complex multiplication of neighbouring pairs, ``nn.RMSNorm``, SDPA
(cuDNN, then flash, then efficient) or flex attention, selective activation checkpointing that keeps attention and every
other matmul, the loss in 8 chunks of the sequence or whole and compiled, ``torch.compile`` of each block, FSDP2 with
bfloat16 weights and float32 sums around it, on one device too, and fused AdamW (torchtitan: arXiv:2410.06511).

B batch, T tokens, D model dim, N query heads, K key/value heads, H head dim
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from crius.models.llama3 import Llama3Config

CHUNKS = 8
IGNORED = -100
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the loop computes.

    Attributes:
        attention: sdpa or flex.
        loss: in 8 chunks of the sequence, or whole.
        recompute: selective activation checkpointing.
        backend: of torch.compile; empty: eager.
        float8: recipe of torchao's float8 training for all linear layers but the output layer; empty: none.
    """

    attention: Literal["sdpa", "flex"] = "sdpa"
    loss: Literal["chunks", "whole"] = "chunks"
    recompute: bool = True
    backend: str = "inductor"
    float8: str = ""


def rotations(frequencies: Tensor, num_tokens: int) -> Tensor:
    """Unit complex numbers ``(T, H / 2)`` for frequencies in radians a token, ``(H / 2,)``."""
    angles = torch.outer(torch.arange(num_tokens, device=frequencies.device), frequencies.float())
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x_BTNH: Tensor, table: Tensor) -> Tensor:
    """Neighbouring pairs of each head times their position's complex number; dtype and shape stay."""
    pairs = torch.view_as_complex(x_BTNH.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table[:, None, :]).flatten(3).type_as(x_BTNH)


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, sizes: Llama3Config) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.wq = nn.Linear(sizes.dim, sizes.num_heads * sizes.head_dim, bias=False)
        self.wk = nn.Linear(sizes.dim, sizes.num_kv_heads * sizes.head_dim, bias=False)
        self.wv = nn.Linear(sizes.dim, sizes.num_kv_heads * sizes.head_dim, bias=False)
        self.wo = nn.Linear(sizes.num_heads * sizes.head_dim, sizes.dim, bias=False)

    def forward(self, x_BTD: Tensor, table: Tensor, mask: BlockMask | None) -> Tensor:
        batch, tokens, _ = x_BTD.shape
        q, k, v = (w(x_BTD).view(batch, tokens, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k, v = rotate(q, table).transpose(1, 2), rotate(k, table).transpose(1, 2), v.transpose(1, 2)
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            y = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        return self.wo(y.transpose(1, 2).contiguous().view(batch, tokens, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Llama3Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.ffn_dim, bias=False)
        self.w2 = nn.Linear(sizes.ffn_dim, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.ffn_dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Block(nn.Module):
    """One layer; with ``recompute`` it keeps what ``_kept`` says."""

    def __init__(self, sizes: Llama3Config, recompute: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.feed_forward = FeedForward(sizes)
        self.recompute = recompute

    def layer(self, x_BTD: Tensor, table: Tensor, mask: BlockMask | None) -> Tensor:
        h_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), table, mask)
        return h_BTD + self.feed_forward(self.ffn_norm(h_BTD))

    def forward(self, x_BTD: Tensor, table: Tensor, mask: BlockMask | None) -> Tensor:
        if not self.recompute:
            return self.layer(x_BTD, table, mask)
        return checkpoint(
            self.layer, x_BTD, table, mask, use_reentrant=False, preserve_rng_state=False, context_fn=_kept
        )


_SAVED = {
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    torch.ops.aten.max.default,  # float8 scales by it
}


def _kept() -> Any:
    """``_SAVED`` and the first, third, ... matmul of a block stay; all else is computed again in the backward."""
    seen = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op == torch.ops.aten.mm.default:
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        else:
            keep = op in _SAVED
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    """The decoder up to its last norm; ``output`` is for the loss to call, in chunks.

    Args:
        sizes: of the model.
        frequencies: rotary, in radians a token, ``(H / 2,)``; on the device that the model is to be on.
        num_tokens: longest sequence.
        options: see there.
    """

    def __init__(self, sizes: Llama3Config, frequencies: Tensor, num_tokens: int, options: Options) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocab_size, sizes.dim)
        self.layers = nn.ModuleList(Block(sizes, options.recompute) for _ in range(sizes.num_layers))
        self.norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.output = nn.Linear(sizes.dim, sizes.vocab_size, bias=False)
        if sizes.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.mask: BlockMask | None = None
        with frequencies.device:  # the weights may be made on the meta device
            self.table = rotations(frequencies, num_tokens)
            if options.attention == "flex":
                size, device = num_tokens, frequencies.device.type
                self.mask = create_block_mask(_causal, None, None, size, size, device=device)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Normed hidden states ``(B, T, D)``."""
        h_BTD = self.tok_embeddings(tokens_BT)
        for layer in self.layers:
            h_BTD = layer(h_BTD, self.table, self.mask)
        return self.norm(h_BTD)


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def from_halves(state: dict[str, Tensor], sizes: Llama3Config) -> dict[str, Tensor]:
    """Weights of Crius's Llama 3, where the halves of a head are rotated together, for neighbours that are."""
    moved = dict(state)
    for name, weight in state.items():
        if name.endswith((".wq.weight", ".wk.weight")):
            heads = weight.unflatten(0, (-1, 2, sizes.head_dim // 2))
            moved[name] = heads.transpose(1, 2).reshape(weight.shape)
    return moved


def prepare(model: Llama, options: Options, param_dtype: torch.dtype, mesh: Any) -> None:
    """Float8, compile and FSDP2, in torchtitan's order, in place.

    Args:
        model: with its weights.
        options: see there.
        param_dtype: of the gathered weights and of the activations; sums stay in float32.
        mesh: of one device; None leaves FSDP out.
    """
    if options.float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415

        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name(options.float8),
            module_filter_fn=lambda module, name: name != "output",
        )
    for layer in model.layers:
        if options.backend:
            # its forward alone: the hooks of FSDP stay outside the graph
            layer.forward = torch.compile(layer.forward, backend=options.backend, fullgraph=True)
    if mesh is None:
        return
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # embedding, last norm and output layer stay gathered from the forward on, for the chunks of the loss
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropies of ``(B, T, V)`` logits, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED)


def loss_function(options: Options) -> Callable[[Tensor, Tensor], Tensor]:
    """``token_loss``, compiled where the blocks are."""
    return torch.compile(token_loss, backend=options.backend) if options.backend else token_loss


def forward_backward(
    model: Llama, tokens_BT: Tensor, labels_BT: Tensor, loss_of: Callable[[Tensor, Tensor], Tensor], options: Options
) -> Tensor:
    """Gradients of the mean loss; returns it, a scalar on the device."""
    valid = (labels_BT != IGNORED).sum()
    hidden_BTD = model(tokens_BT)
    if options.loss == "whole":
        loss = loss_of(model.output(hidden_BTD), labels_BT) / valid
        loss.backward()
        return loss.detach()
    leaves = [part.detach().requires_grad_() for part in hidden_BTD.chunk(CHUNKS, dim=1)]
    losses = []
    for leaf, labels in zip(leaves, labels_BT.chunk(CHUNKS, dim=1), strict=True):
        loss = loss_of(model.output(leaf), labels) / valid
        loss.backward()
        losses.append(loss.detach())
    hidden_BTD.backward(torch.cat([leaf.grad for leaf in leaves], dim=1))
    return torch.stack(losses).sum()


@contextlib.contextmanager
def kernels(device: torch.device) -> Iterator[None]:
    """torchtitan's order of SDPA's kernels on a GPU."""
    with sdpa_kernel(KERNELS, set_priority=True) if device.type == "cuda" else contextlib.nullcontext():
        yield
