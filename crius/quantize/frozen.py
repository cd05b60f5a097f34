"""Frozen linear layers whose weight is stored in 8 or 4 bits, rounded by torchao: the base of LoRA.

A weight is rounded whole, once, when it is loaded, so that every layout has the same numbers. It is stored as plain
tensors of integers and factors. FSDP splits and gathers them like any other tensor, at any place.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crius.config.lora import NF4_BLOCK, NF4_SCALES, LoraConfig, block_linears, is_quantized
from crius.errors import CheckpointError
from crius.models.description import ModelDescription
from crius.models.layers import Linear, plus
from crius.quantize.convert import usable_torchao
from crius.shards import local_shard

_CODES = 16  # numbers that 4 bits can encode


class _FrozenProduct(torch.autograd.Function):
    """``x`` times a weight that is unpacked for the forward and again for the backward, and not kept in between."""

    @staticmethod
    def unpacked(kept: tuple[Tensor, ...], width: int) -> Tensor:
        """The unpacked weight ``(out, width)`` in float32."""
        raise NotImplementedError


class _Int8Product(_FrozenProduct):
    @staticmethod
    def unpacked(kept: tuple[Tensor, ...], width: int) -> Tensor:
        codes, scales = kept
        return codes.to(torch.float32).mul_(scales[:, None])

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        ctx.width = width
        return F.linear(x, _Int8Product.unpacked(kept, width).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        return grad @ _Int8Product.unpacked(kept, ctx.width).to(grad.dtype), None, *(None for _ in kept)


class _Nf4Product(_FrozenProduct):
    @staticmethod
    def unpacked(kept: tuple[Tensor, ...], width: int) -> Tensor:
        codes, scales, factors = kept
        numbers = factors[:_CODES]
        mean = factors[_CODES]
        per_block = factors[_CODES + 1 :]
        pairs = torch.stack((numbers.repeat_interleave(_CODES), numbers.repeat(_CODES)), dim=1)  # one pair per byte
        scale = (scales.view(-1, NF4_SCALES) / per_block[:, None]).add_(mean)
        weight = F.embedding(codes.to(torch.int32), pairs)
        return weight.view(-1, NF4_BLOCK).mul_(scale.view(-1, 1)).view(-1, width)

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        ctx.width = width
        return F.linear(x, _Nf4Product.unpacked(kept, width).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        return grad @ _Nf4Product.unpacked(kept, ctx.width).to(grad.dtype), None, *(None for _ in kept)


class QuantizedLinear(nn.Module):
    """A linear layer ``(out, in)`` whose weight is integers and factors. None of them is trained, nor is its bias."""

    product: type[_FrozenProduct]
    bias: nn.Parameter | None

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.register_parameter("bias", linear.bias)
        for name, (shape, dtype) in self.layout().items():
            empty = torch.empty(shape, dtype=dtype, device=linear.weight.device)
            setattr(self, name, nn.Parameter(empty, requires_grad=False))

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the stored tensors, by name."""
        raise NotImplementedError

    def rounded(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The stored tensors of ``weight`` ``(out, in)`` in float32, in the order of ``layout``."""
        raise NotImplementedError

    def kept(self) -> tuple[Tensor, ...]:
        """The stored tensors, gathered or this rank's parts of them."""
        return tuple(getattr(self, name) for name in self.layout())

    def multiply(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """``x`` ``(..., in)`` to ``(..., out)`` in its dtype; ``weight`` exists to match ``Linear.multiply``."""
        y: Tensor = self.product.apply(x, self.in_features, *self.kept())
        return y

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in)`` to ``(..., out)``."""
        return plus(self.multiply(x), self.bias)


class Int8Linear(QuantizedLinear):
    """A weight in int8. The largest magnitude of each row is 127."""

    product = _Int8Product

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """See ``QuantizedLinear``."""
        shape = (self.out_features, self.in_features)
        return {"codes": (shape, torch.int8), "scales": (shape[:1], torch.float32)}

    def rounded(self, weight: Tensor) -> tuple[Tensor, ...]:
        """See ``QuantizedLinear``."""
        with usable_torchao():
            from torchao.prototype.quantized_training.int8 import quantize_int8_rowwise  # noqa: PLC0415
        codes, scales = quantize_int8_rowwise(weight)
        return codes, scales


class Nf4Linear(QuantizedLinear):
    """A weight in nf4, with two numbers per byte and scales that are rounded to 8 bits.

    ``factors`` has the 16 numbers that codes stand for, the mean of the scales, and one factor per 256 scales.
    """

    product = _Nf4Product

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """See ``QuantizedLinear``."""
        numel = self.out_features * self.in_features
        blocks = numel // NF4_BLOCK
        return {
            "codes": ((numel // 2,), torch.uint8),
            "scales": ((blocks,), torch.int8),
            "factors": ((_CODES + 1 + blocks // NF4_SCALES,), torch.float32),
        }

    def rounded(self, weight: Tensor) -> tuple[Tensor, ...]:
        """See ``QuantizedLinear``."""
        with usable_torchao():
            from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor  # noqa: PLC0415
        made = NF4Tensor.from_tensor(weight, NF4_BLOCK, NF4_SCALES)
        factors = torch.cat((made.nf4, made.scaler_mean.reshape(1), made.quantization_factor))
        return made.quantized_data, made.quantized_scalers, factors


_KINDS: Mapping[str, type[QuantizedLinear]] = {"int8": Int8Linear, "nf4": Nf4Linear}


def quantize_base(model: nn.Module, facts: ModelDescription, lora: LoraConfig) -> int:
    """Replace the block linears that are stored in fewer bits, in place, on the meta device. Returns their number.

    Args:
        model: the whole model, or the modules of one pipeline stage.
        facts: description of the whole model.
        lora: the section.
    """
    names = [name for name, shape in block_linears(facts).items() if is_quantized(lora, shape)]
    there = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    chosen = [name for name in names if name in there]
    for name in chosen:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, _KINDS[lora.base](there[name]))
    return len(chosen)


def quantized_linears(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """The layers of ``model`` that are stored in fewer bits, with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLinear))


@torch.no_grad()
def fill(name: str, linear: QuantizedLinear, weight: Tensor) -> None:
    """Round the whole ``weight`` ``(out, in)`` and store this rank's part.

    Raises:
        CheckpointError: the weight has numbers that are not finite, or a range that no scale covers.
    """
    device = local_shard(linear.kept()[0])[0].device
    parts = linear.rounded(weight.to(device, torch.float32))
    if not parts[-1].isfinite().all():  # the scales or factors, the only numbers that are not integers
        raise CheckpointError(
            f"{name}.weight cannot be rounded to {type(linear).__name__.removesuffix('Linear').lower()}.",
            where="--lora.base",
            why="it has numbers that are not finite, or all its blocks have one scale",
            fix="--lora.base keep",
        )
    for target, part in zip(linear.kept(), parts, strict=True):
        local, offset = local_shard(target)
        for dim, (start, size) in enumerate(zip(offset, local.shape, strict=True)):
            part = part.narrow(dim, min(start, part.shape[dim]), size)
        local.copy_(part)
