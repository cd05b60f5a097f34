"""``Decoder``: embedding, layers, norm, output layer and loss, the contract that every layout relies on.

What parallelism, checkpoints and the planner take for granted, and ``check_decoder`` checks in one go:

- Its children are ``tok_embeddings``, ``layers``, ``norm``, ``output`` and ``loss``, in the order of the forward; a
  model writes the block of ``layers`` and nothing else. ``layers`` is a dict by number, so that a pipeline stage, which
  has some of them, keeps their names. A child that is in another stage is an ``nn.Identity``: the forward takes token
  ids where the embedding is and the hidden state ``(B, T, D)`` elsewhere.
- A block is called with the hidden state, cos and sin of the rotary angles, and the mask, and returns ``(B, T, D)``. It
  is built as ``Block(config, index)``, sees one device, and takes the number of its heads from the tensors it is given,
  since tensor parallelism leaves it some of them.
- Parameters are those of the description, by name, shape and order. Linear layers are
  ``crius.models.layers.Linear``, without a bias; every parameter is in one FSDP unit and, where a plan has
  tensor-parallel rows, in one of those.
- ``ties`` names the parameters that are another one. A stage that has only such a module has a copy of the weight, and
  ``crius.parallel.pipeline`` keeps the two equal.
- Buffers are those of the description, by name, shape and dtype, each whole on every rank that has its layer. No block
  changes one in its forward. A persistent one is state. One with ``persistent=False`` counts: int64, 0 at the start of
  each step. A block with counters returns a tuple: behind the hidden state, for each counter in order, what it sees of
  its part of the tokens, of which no other rank has the same, and the decoder adds it, outside of what is compiled or
  recomputed. What is validated or computed twice to compare is not counted.
- A block, or a module in it, may have ``after_update()``. It is called after each update of the weights on every rank
  that has the module, without gradients, when its counters are the sums over all ranks; of these and of its state it
  makes the new state, alike on every rank. Weights are shards there. A step whose update is left out changes nothing.
- The loss is a sum over tokens: the step divides by their global number.

B batch, T tokens, D model dim, H head dim, V vocabulary
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from crius.errors import PlanError
from crius.kernels.attention import Mask
from crius.models.config import DecoderConfig
from crius.models.description import ModelDescription
from crius.models.layers import (
    Attention,
    DocumentMask,
    FeedForward,
    Linear,
    Loss,
    Output,
    RMSNorm,
    rotary_cos_sin,
    rotary_frequencies,
    stretched_frequencies,
)
from crius.named import is_persistent


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each behind an RMSNorm and beside a residual."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = self.build_attention(config)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = self.build_feed_forward(config, index)

    def build_attention(self, config: DecoderConfig) -> nn.Module:
        """The attention; a model whose attention differs overrides this."""
        return Attention(config.dim, config.num_heads, config.num_kv_heads, config.head_dim)

    def build_feed_forward(self, config: DecoderConfig, index: int) -> nn.Module:
        """The feed-forward of layer ``index``; a model whose feed-forward differs overrides this."""
        return FeedForward(config.dim, config.ffn_dim)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None) -> Tensor:
        """``(B, T, D)`` to ``(B, T, D)``."""
        h_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope, mask)
        y: Tensor = h_BTD + self.feed_forward(self.ffn_norm(h_BTD))
        return y


def counted(block: nn.Module, result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The hidden state of what ``block`` returned; what it counted is added to its counters."""
    if isinstance(result, Tensor):
        return result
    h_BTD, *seen = result
    counters = [buffer for name, buffer in block.named_buffers() if not is_persistent(block, name)]
    with torch.no_grad():
        for counter, more in zip(counters, seen, strict=True):
            counter += more
    return h_BTD


class Decoder(nn.Module):
    """The decoder. Building it allocates shapes only; ``crius.parallel.init`` says how the weights start.

    Args:
        config: its sizes.
        block: class of a layer.
    """

    def __init__(self, config: DecoderConfig, block: Callable[[Any, int], nn.Module] = Block) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): block(config, i) for i in range(config.num_layers)})
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.output = Output(config.dim, config.vocab_size, bias=False)
        self.loss = Loss()
        self.ties = config.ties
        if config.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight
        if config.attention_mask == "document":
            self.document_mask = DocumentMask()

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        labels_BT: Tensor | None = None,
        ends_BM: Tensor | None = None,
    ) -> Tensor:
        """Logits ``(B, T, V)``; with labels the sum of the token losses in nats, a float64 scalar.

        Args:
            tokens_BT: token ids.
            positions_BT: position of each token, which turns the rotary angles; None counts from the start of the
                sequence. Under the ``document`` attention mask a 0 starts a document.
            labels_BT: what to predict from each token; ``IGNORE_INDEX`` where nothing is.
            ends_BM: where the documents of each row end; None: they are found by ``positions_BT``.
        """
        h_BTD = self.hidden(tokens_BT, positions_BT, ends_BM)
        result: Tensor = self.output(h_BTD) if labels_BT is None else self.loss(h_BTD, labels_BT, self.output)
        return result

    def hidden(self, tokens_BT: Tensor, positions_BT: Tensor | None = None, ends_BM: Tensor | None = None) -> Tensor:
        """What the output layer reads, ``(B, T, D)``; arguments as ``forward`` takes them."""
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        mask = self.document_mask(positions_BT, ends_BM) if self.config.attention_mask == "document" else None
        rope = rotary_cos_sin(positions_BT, self.frequencies(positions_BT.device))
        h_BTD = self.tok_embeddings(tokens_BT)
        for layer in self.layers.values():
            h_BTD = counted(layer, layer(h_BTD, rope, mask))
        y: Tensor = self.norm(h_BTD)
        return y

    def frequencies(self, device: torch.device) -> Tensor:
        """Rotary frequencies in radians a token, float64 ``(H / 2,)``."""
        plain = rotary_frequencies(self.config.rotary_dim, self.config.rope_theta, device)
        scaling = self.config.rope_scaling
        return stretched_frequencies(plain, **asdict(scaling)) if scaling else plain


def check_decoder(decoder: nn.Module, model: ModelDescription) -> None:
    """Hold a built decoder against its description, its plan and the contract above.

    Raises:
        PlanError: everything that does not fit, each by its name.
    """
    problems = [*_differences(decoder, model), *_broken_rules(decoder)]
    problems += model.plan.gaps(
        [name for name, _ in decoder.named_modules() if name], [name for name, _ in decoder.named_parameters()]
    )
    if problems:
        raise PlanError(
            f"{model.name} is not as it is described:" + "".join(f"\n  - {problem}" for problem in problems),
            why="checkpoints, every layout and the planner rely on the description",
            fix="mend the config's layer(), the plan, or the block: docs/adding_a_model.md",
        )


def _differences(decoder: nn.Module, model: ModelDescription) -> Iterator[str]:
    built = {name: f"{tuple(parameter.shape)}" for name, parameter in decoder.named_parameters()}
    told = {name: f"{shape}" for name, shape in model.parameter_shapes.items()}
    yield from _compared(built, told, "parameter", "weight")
    if built.keys() == told.keys() and list(built) != list(told):
        name = next(name for name, other in zip(built, told, strict=True) if name != other)
        yield f"parameter {name} stands elsewhere in the description"
    buffers = {
        name: _told(tuple(buffer.shape), str(buffer.dtype).removeprefix("torch."), is_persistent(decoder, name))
        for name, buffer in decoder.named_buffers()
    }
    described = {buffer.name: _told(buffer.shape, buffer.dtype, buffer.persistent) for buffer in model.buffers}
    yield from _compared(buffers, described, "buffer", "buffer")


def _compared(built: dict[str, str], told: dict[str, str], part: str, described: str) -> Iterator[str]:
    for name in (name for name in built if name not in told):
        yield f"{part} {name} {built[name]} is not in the description"
    for name in (name for name in told if name not in built):
        yield f"the described {described} {name} {told[name]} is not in the model"
    for name in built:
        if built[name] != told.get(name, built[name]):
            yield f"{part} {name} is {built[name]}, described as {told[name]}"


def _told(shape: tuple[int, ...], dtype: str, persistent: bool) -> str:
    return f"{shape} {dtype}{'' if persistent else ' persistent=False'}"


def _broken_rules(decoder: nn.Module) -> Iterator[str]:
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Linear) and type(module) not in (Linear, Output):
            yield f"{name} is a {type(module).__name__}, not crius.models.layers.Linear, which kernels replace"
        if isinstance(module, nn.Linear) and module.bias is not None:
            yield f"{name} has a bias, which no kernel and no tensor-parallel style adds"
        if isinstance(module, nn.modules.dropout._DropoutNd):
            yield f"{name} is a dropout, whose numbers would depend on the layout"
    for name, buffer in decoder.named_buffers():
        if not is_persistent(decoder, name) and buffer.dtype != torch.int64:
            yield f"{name} counts in {buffer.dtype}, whose sums depend on the layout; those of torch.int64 do not"
