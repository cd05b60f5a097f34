"""LoRA: a pass that freezes a model and gives its linear layers adapters, ``W x + scale * B (A x)``.

The layer keeps its class, sharding and forward. Tensor parallelism calls its ``multiply`` with this rank's part of the
input and weight, and ``multiply`` adds the product of this rank's parts of the adapters. A is split like the columns of
W, and B like its rows. So each rank adds its part of the output, or its summand of it.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from crius.config.lora import LoraConfig
from crius.errors import PlanError
from crius.kernels.cpu.linear import linear as multiply
from crius.models.description import ModelDescription
from crius.parallel.tensor import local_adapters, split_adapters


def _adapted(linear: Any, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """``(..., in)`` to ``(..., out)``: the output of the frozen layer plus the output of its adapters."""
    y: Tensor = linear._frozen(x, weight)
    # in the dtype of the activations, as if FSDP gathered them; their gradients are cast back
    a, b = (part.to(x.dtype) for part in local_adapters(linear))
    # scaled at the narrow point, whose width is the rank of the adapter, not the layer's width
    return y + linear._times(linear._times(x, a) * linear._scale, b)


def apply_lora(model: nn.Module, facts: ModelDescription, lora: LoraConfig, dtype: torch.dtype) -> list[str]:
    """Freeze ``model``, on the meta device, and add the adapters of ``facts``, in place. Returns log lines.

    Args:
        model: the whole model, or the modules of one pipeline stage, after tensor parallelism.
        facts: description of the whole model.
        lora: the section.
        dtype: dtype that adapters are stored and updated in.

    Raises:
        PlanError: the class of a linear layer lacks ``multiply``, which adapters need.
    """
    assert facts.adapted is not None
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    there = [name for name in facts.adapted.linears if name in modules]
    for name in there:
        linear = modules[name]
        if not hasattr(linear, "multiply"):
            raise PlanError(
                f"{name} is a {type(linear).__name__}, which takes no adapter.", fix="leave it out of --lora.targets"
            )
        add_adapter(linear, facts.adapted.rank, lora.scale, dtype)
    weights = [weight for weight in facts.adapters if weight.name.rpartition(".")[0] in there]
    numel = sum(weight.numel for weight in weights)
    return [f"lora: {len(there)} linears here, {numel:,} parameters in {dtype}, scale {lora.scale:g}, all else frozen"]


def add_adapter(linear: Any, rank: int, scale: float, dtype: torch.dtype) -> None:
    """Give one layer its adapter: ``lora_A`` ``(rank, in)`` and ``lora_B`` ``(out, rank)``, not initialised."""
    device = next(linear.parameters()).device
    shapes = {"lora_A": (rank, linear.in_features), "lora_B": (linear.out_features, rank)}
    for name, shape in shapes.items():
        setattr(linear, name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))
    split_adapters(linear)
    linear._scale = scale
    linear._frozen = linear.multiply
    linear._times = F.linear if isinstance(linear.lora_A, DTensor) else multiply  # as sharded layers are multiplied
    linear.multiply = MethodType(_adapted, linear)
