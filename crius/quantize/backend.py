"""Low-precision linear layers on torchao's matmuls. Import it inside ``crius.quantize.convert.usable_torchao``.

Scales come from the tensors that a rank multiplies: its own tokens, and its part of a weight.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, ScalingGranularity
from torchao.float8._inductor_patch import _patch_inductor_min_max_codegen
from torchao.float8.float8_linear import Float8Linear as TorchaoFloat8Linear
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from crius.config.low_precision import block, kind
from crius.config.training import DenseQuantizeConfig
from crius.models.layers import Linear


class _Padded(Linear):
    """Base of float8 and MXFP8 layers: it takes over parameters and, if asked, pads dims with zeros to whole blocks.

    Zeros change no largest magnitude and no sum, so padding is exact.

    Args:
        linear: layer whose parameters are taken over.
        unit: numbers per block; 0: no padding.
    """

    def __init__(self, linear: nn.Linear, unit: int) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self._unit = unit

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """See ``Linear``. With padding, tokens are padded too, since the gradient of the weight sums over tokens."""
        if not self._unit:
            return self._matmul(x, weight)
        out_features, in_features = weight.shape
        tokens = x.shape[:-1].numel()
        extra_out, extra_in, extra_tokens = (-size % self._unit for size in (out_features, in_features, tokens))
        if not (extra_out or extra_in or extra_tokens):
            return self._matmul(x, weight)
        rows = F.pad(x.reshape(tokens, in_features), (0, extra_in, 0, extra_tokens))
        if extra_out or extra_in:  # else the weight may be gathered in float8, which cannot be padded
            weight = F.pad(weight, (0, extra_in, 0, extra_out))
        y = self._matmul(rows, weight)
        return y[:tokens, :out_features].reshape(*x.shape[:-1], out_features)

    def _matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError


class Float8Linear(_Padded):
    """A linear layer whose three matmuls run in float8, by a recipe of torchao."""

    def __init__(self, linear: nn.Linear, unit: int, config: Float8LinearConfig) -> None:
        super().__init__(linear, unit)
        self._config = config
        sizes = (linear.in_features, linear.out_features)
        self.mm_config = TorchaoFloat8Linear(*sizes, bias=False, device="meta", config=config).linear_mm_config

    def _matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), self.mm_config, self._config)
        return y

    @property
    def rounds_whole_input(self) -> bool:
        """Whether the input is rounded with a single scale, so that it can be rounded before it is gathered."""
        return not self._unit and self._config.cast_config_input.scaling_granularity is ScalingGranularity.TENSORWISE

    def gather_rounded(self, x: Tensor, group_name: str, num_ranks: int) -> Tensor:
        """The whole sequence, gathered after it is rounded for ``multiply``: fewer bytes are sent, the numbers are
        equal.

        The scale comes from the whole sequence, by a maximum over the ranks.

        Args:
            x: this rank's part of the sequence, ``(B, T / ranks, in)``.
            group_name: process group of the ranks.
            num_ranks: number of ranks.
        """
        ops = torch.ops._c10d_functional
        dtype = self._config.cast_config_input.target_dtype
        amax = ops.wait_tensor(ops.all_reduce(x.detach().abs().amax(), "max", group_name))
        rounded = hp_tensor_and_scale_to_float8(
            x, amax_to_scale(amax, dtype), dtype, self.mm_config, GemmInputRole.INPUT
        )
        y: Tensor = _GatherFloat8.apply(rounded, group_name, num_ranks)
        return y

    def gather_in_float8(self) -> None:
        """Wrap the weight so that FSDP gathers it in float8. Call before the weight is sharded."""
        dtype = self._config.cast_config_weight.target_dtype
        wrapped = WeightWithDynamicFloat8CastTensor(self.weight, self.mm_config, dtype)
        self.weight = nn.Parameter(wrapped, requires_grad=self.weight.requires_grad)


@torch._dynamo.allow_in_graph
class _GatherFloat8(torch.autograd.Function):
    """Gathers a float8 sequence, as bytes where Gloo does it. The gradient is scattered in high precision.

    Between the gather and the result is a concatenation of bytes, as in ``torch.distributed``, since the micro-pipeline
    pass of async tensor parallelism matches this code.
    """

    @staticmethod
    def forward(ctx: Any, x_BTD: Float8TrainingTensor, group_name: str, num_ranks: int) -> Float8TrainingTensor:
        """``(B, T / ranks, D)`` to ``(B, T, D)``."""
        ctx.group = (num_ranks, group_name)
        ops = torch.ops._c10d_functional
        own = x_BTD._data.contiguous()
        sent = own if own.is_cuda else own.view(torch.uint8)
        parts = ops.wait_tensor(ops.all_gather_into_tensor(sent, num_ranks, group_name)).chunk(num_ranks)
        whole = torch.cat([part.view(torch.uint8) for part in parts], dim=1).view(own.dtype)
        return Float8TrainingTensor(
            whole, x_BTD._scale, x_BTD._orig_dtype, x_BTD._linear_mm_config, x_BTD._gemm_input_role
        )

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None, None]:
        """``(B, T, D)`` to ``(B, T / ranks, D)``, summed over the ranks."""
        num_ranks, group_name = ctx.group
        ops = torch.ops._c10d_functional
        parts = torch.cat(grad_BTD.chunk(num_ranks, dim=1))
        return ops.wait_tensor(ops.reduce_scatter_tensor(parts, "sum", num_ranks, group_name)), None, None


class MXFP8Linear(_Padded):
    """A linear layer whose three matmuls run in MXFP8: E4M3 elements with one E8M0 scale per 32 elements.

    Scales are rounded up, so that nothing saturates. The OCP specification (1.0, section 6.3) rounds down and leaves
    the choice open. Arithmetic and reasons: arXiv:2506.08027.
    """

    def __init__(self, linear: nn.Linear, unit: int, *, emulate: bool) -> None:
        super().__init__(linear, unit)
        self._kernel = KernelPreference.EMULATED if emulate else KernelPreference.AUTO

    def _matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous()
        y: Tensor = _to_mxfp8_then_scaled_mm(
            x, weight.contiguous(), self._kernel, ScaleCalculationMode.RCEIL, wgrad_with_hp=False
        )
        return y.to(x.dtype)  # the kernel returns bfloat16


def maker(dense: DenseQuantizeConfig, *, emulate: bool) -> Callable[[nn.Linear], Any]:
    """The function that turns a linear layer into a low-precision layer, by the section."""
    _patch_inductor_min_max_codegen()  # Triton writes garbage for some float8 stores (triton-lang/triton#11111)
    unit = block(dense) if dense.pad_inner_dim else 0
    if kind(dense) == "mxfp8":
        return functools.partial(MXFP8Linear, unit=unit, emulate=emulate)
    recipe = Float8LinearConfig.from_recipe_name(dense.float8.recipe)
    if not emulate and dense.float8.recipe != "tensorwise":
        # compiled, the scale of a recomputed row can be NaN if the intermediate rounding is skipped (pytorch#150859)
        inductor_config.emulate_precision_casts = True
    gathers = dense.float8.enable_fsdp_float8_all_gather
    config = replace(recipe, emulate=emulate, enable_fsdp_float8_all_gather=gathers)
    return functools.partial(Float8Linear, unit=unit, config=config)


def gathered_weights(model: nn.Module) -> list[Any]:
    """This rank's shards of the weights of ``model`` that FSDP gathers in float8, as torchao's wrappers."""
    # not detached: FSDP reads the scale from this object itself
    local = [weight._local_tensor for weight in model.parameters() if isinstance(weight, DTensor)]
    return [tensor for tensor in local if isinstance(tensor, WeightWithDynamicFloat8CastTensor)]


def set_scales(weights: Sequence[Any], amax: Tensor) -> None:
    """Set the scales of ``weights`` from their largest magnitudes ``amax``, float32 ``(num weights,)``."""
    if weights:
        scales = amax_to_scale(amax, weights[0]._dtype)
        for weight, scale in zip(weights, scales.unbind(), strict=True):
            weight._precomputed_scale = scale
