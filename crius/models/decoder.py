"""``Decoder``: embedding, layers, norm, output layer and loss, the contract that every layout relies on.

Parallelism, checkpoints and the planner rely on these rules. ``check_decoder`` checks them together.

- The children of a decoder are ``tok_embeddings``, ``layers``, ``norm``, ``output`` and ``loss``, in the order of the
  forward. A model supplies only the block of ``layers``. ``layers`` is a dict by number, so that a pipeline stage,
  which holds some layers, keeps their names. A child that belongs to another stage is an ``nn.Identity``: the forward
  takes token ids where the stage has the embedding, else the hidden state ``(B, T, D)``.
- A block is built as ``Block(config, index)``. It is called with the hidden state, cos and sin of the rotary angles
  (None for a layer without positions), and the mask, the last two as its kind of attention has them. It returns
  ``(B, T, D)``. It sees one device. It takes the number of heads from its input tensors, since tensor parallelism gives
  each rank only some of the heads.
- Parameters match the description in name, shape and order. Linear layers are ``crius.models.layers.Linear``. Every
  parameter is in exactly one FSDP unit and, where a plan has tensor-parallel rows, in one such row.
- ``ties`` names the tied parameters. A stage that holds only one module of a tied pair has a copy of the weight, and
  ``crius.parallel.pipeline`` keeps the two copies equal.
- Buffers match the description in name, shape and dtype. Every rank that has the layer has the whole buffer. No block
  changes a buffer in its forward. A persistent buffer is state. A buffer with ``persistent=False`` is a counter: int64,
  0 at the start of each step. A block with counters returns a tuple: the hidden state, then for each counter in order
  the increment from its part of the tokens. No two ranks count the same tokens. The decoder adds the increments
  outside of compiled and recomputed code. Validation, and tokens computed twice for comparison, are not counted.
- A block, or a module in it, may define ``after_update()``. Every rank that has the module calls it after each update
  of the weights, without gradients, when its counters are already summed over all ranks. It computes the new state
  from the counters and the old state, the same on every rank. Weights are shards at that time. A step whose update is
  skipped changes no state.
- The loss is a sum over tokens. The step divides it by the global number of tokens.

B batch, T tokens, D model dim, H head dim, V vocabulary
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from crius.errors import PlanError
from crius.kernels.attention import Mask, ends_of_rows, softcapped
from crius.models.config import DecoderConfig, RoutedConfig
from crius.models.description import Layer, ModelDescription
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
)
from crius.models.rope import Rope, YarnScaling
from crius.named import is_persistent


class Block(nn.Module):
    """One decoder layer: attention and feed-forward or experts, with norms and residual connections, as described.

    Args:
        config: sizes of the decoder.
        index: number of the layer.
    """

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        layer = config.described(index)
        self.residual_multiplier = config.residual_multiplier

        def norm() -> RMSNorm:
            return RMSNorm(config.dim, config.norm_eps, plus_one=config.norm_plus_one)

        self.attention_norm = norm() if config.norms != "post" else None
        self.attention = self.build_attention(config, layer)
        self.attention_post_norm = norm() if config.norms != "pre" else None
        self.ffn_norm = norm() if config.norms != "post" else None
        self.feed_forward = self.build_feed_forward(config, layer)
        self.ffn_post_norm = norm() if config.norms != "pre" else None

    def build_attention(self, config: DecoderConfig, layer: Layer) -> nn.Module:
        """The attention; a model whose attention differs overrides this."""
        return Attention(config, layer.attention)

    def build_feed_forward(self, config: DecoderConfig, layer: Layer) -> nn.Module:
        """The feed-forward; a model whose feed-forward differs overrides this."""
        wide = layer.feed_forward
        if wide.num_experts:
            from crius.models.moe import MixtureOfExperts  # noqa: PLC0415  its kernels import torch's compiler

            assert isinstance(config, RoutedConfig)
            return MixtureOfExperts(config)
        biased = any(weight.kind == "bias" for weight in wide.weights)
        return FeedForward(config.dim, wide.width, bias=biased, activation=wide.activation)

    def forward(
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Mask | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Output, ``(B, T, D)``; a layer with experts also returns its counts."""
        normed = x_BTD if self.attention_norm is None else self.attention_norm(x_BTD)
        h_BTD = x_BTD + self._added(self.attention(normed, rope, mask), self.attention_post_norm)
        fed = self.feed_forward(h_BTD if self.ffn_norm is None else self.ffn_norm(h_BTD))
        if isinstance(fed, tuple):
            return h_BTD + self._added(fed[0], self.ffn_post_norm), fed[1]
        return h_BTD + self._added(fed, self.ffn_post_norm)

    def _added(self, y_BTD: Tensor, norm: RMSNorm | None) -> Tensor:
        """What is added to the residual stream."""
        y_BTD = y_BTD if norm is None else norm(y_BTD)
        return y_BTD if self.residual_multiplier == 1.0 else y_BTD * self.residual_multiplier


def counted(block: nn.Module, result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The hidden state in the result of ``block``. The counts in the result are added to the counters of ``block``."""
    if isinstance(result, Tensor):
        return result
    h_BTD, *seen = result
    counters = [buffer for name, buffer in block.named_buffers() if not is_persistent(block, name)]
    with torch.no_grad():
        for counter, more in zip(counters, seen, strict=True):
            counter += more
    return h_BTD


class Decoder(nn.Module):
    """The decoder. Building it allocates shapes only; ``crius.parallel.init`` sets the weights.

    Args:
        config: sizes of the decoder.
        block: class of a layer.
    """

    def __init__(self, config: DecoderConfig, block: Callable[[Any, int], nn.Module] = Block) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): block(config, i) for i in range(config.num_layers)})
        self.norm = RMSNorm(config.dim, config.norm_eps, plus_one=config.norm_plus_one)
        self.output = Output(config.dim, config.vocab_size, bias=False)
        self.loss = Loss(config.logits_softcap)
        self.ties = config.ties
        self._frequencies: dict[tuple[Rope, torch.device], Tensor] = {}
        if config.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight
        has_windows = any(layer.attention.window for _, layer in config.layers())
        if config.attention_mask == "document" or has_windows or config.attention_softcap:
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
            positions_BT: position of each token, from which its rotary angles follow; None counts from the start of
                the sequence. Under the ``document`` attention mask, position 0 starts a document.
            labels_BT: label of each token; ``IGNORE_INDEX`` where the token has no label.
            ends_BM: ends of the documents of each row; None: they follow from ``positions_BT``.
        """
        h_BTD = self.hidden(tokens_BT, positions_BT, ends_BM)
        result: Tensor = self.logits(h_BTD) if labels_BT is None else self.loss(h_BTD, labels_BT, self.output)
        return result

    def logits(self, h_BTD: Tensor) -> Tensor:
        """Logits ``(..., V)`` of the result of ``hidden``, ``(..., D)``."""
        return softcapped(self.output(h_BTD), self.config.logits_softcap)

    def hidden(self, tokens_BT: Tensor, positions_BT: Tensor | None = None, ends_BM: Tensor | None = None) -> Tensor:
        """Input of the output layer, ``(B, T, D)``; arguments as in ``forward``."""
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        h_BTD = self._embedded(tokens_BT)
        ropes: dict[Rope | None, tuple[Tensor, Tensor] | None] = {None: None}
        masks: dict[int, Mask | None] = {}
        if self.config.attention_mask == "causal":
            if not self.config.attention_softcap:
                masks[0] = None
            # of whole sequences; a rank may have a part of the hidden state
            ends_BM = ends_of_rows(tokens_BT.shape[0], positions_BT.shape[1], positions_BT.device)
        for index, layer in self.layers.items():
            kind = self.config.described(int(index)).attention
            if kind.window not in masks:
                masks[kind.window] = self.document_mask(positions_BT, ends_BM, kind.window)
            if kind.rope is not None and kind.rope not in ropes:
                ropes[kind.rope] = self._cos_sin(positions_BT, kind.rope)
            h_BTD = counted(layer, layer(h_BTD, ropes[kind.rope], masks[kind.window]))
        y: Tensor = self.norm(h_BTD)
        divides = self.config.logits_divisor != 1.0 and not isinstance(self.norm, nn.Identity)
        return y / self.config.logits_divisor if divides else y

    def _embedded(self, tokens_BT: Tensor) -> Tensor:
        """The embeddings ``(B, T, D)``; on a later pipeline stage the input, which is the hidden state."""
        config = self.config
        x_BTD: Tensor = self.tok_embeddings(tokens_BT)
        if config.embedding_multiplier == 1.0 or isinstance(self.tok_embeddings, nn.Identity):
            return x_BTD
        multiplier = config.embedding_multiplier
        if config.embedding_multiplier_rounded:
            multiplier = torch.tensor(multiplier, dtype=x_BTD.dtype, device="cpu").item()
        return x_BTD * multiplier

    def _cos_sin(self, positions_BT: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        device = positions_BT.device
        kept = (rope, device)
        if kept in self._frequencies:
            frequencies = self._frequencies[kept]
        else:
            frequencies = rotary_frequencies(rope, device).to(device)
            if rope.is_float32:  # kept, since a copy to a GPU would wait for it in every step
                self._frequencies[kept] = frequencies
        magnitude = rope.scaling.magnitude if isinstance(rope.scaling, YarnScaling) else 1.0
        return rotary_cos_sin(positions_BT, frequencies, magnitude)


def check_decoder(decoder: nn.Module, model: ModelDescription) -> None:
    """Check a built decoder against its description, its sharding plan and the rules at the top of this file.

    Raises:
        PlanError: names every mismatch and every broken rule.
    """
    problems = [*_differences(decoder, model), *_broken_rules(decoder)]
    problems += model.plan.gaps(
        [name for name, _ in decoder.named_modules() if name], [name for name, _ in decoder.named_parameters()]
    )
    if problems:
        raise PlanError(
            f"{model.name} does not match its description:" + "".join(f"\n  - {problem}" for problem in problems),
            why="checkpoints, every layout and the planner rely on the description",
            fix="correct the config's layer(), the plan, or the block: docs/adding_a_model.md",
        )


def _differences(decoder: nn.Module, model: ModelDescription) -> Iterator[str]:
    built = {name: f"{tuple(parameter.shape)}" for name, parameter in decoder.named_parameters()}
    told = {name: f"{shape}" for name, shape in model.parameter_shapes.items()}
    yield from _compared(built, told, "parameter", "weight")
    if built.keys() == told.keys() and list(built) != list(told):
        name = next(name for name, other in zip(built, told, strict=True) if name != other)
        yield f"parameter {name} has another position in the description"
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
            yield f"{name} is a {type(module).__name__}, not crius.models.layers.Linear, the class that kernels replace"
        if isinstance(module, nn.modules.dropout._DropoutNd):
            yield f"{name} is a dropout, whose random numbers would depend on the layout"
    for name, buffer in decoder.named_buffers():
        if not is_persistent(decoder, name) and buffer.dtype != torch.int64:
            yield f"{name} is a counter of {buffer.dtype}, whose sums depend on the layout; use torch.int64"
