"""Replaces linear layers by low-precision layers, on the meta device and before sharding. Also checks which
low-precision matmuls a device has.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from crius.config.low_precision import LinearChoice, kind
from crius.config.training import DenseQuantizeConfig
from crius.errors import EnvironmentError, PlanError
from crius.plugins import REQUIREMENTS, install_line, release
from crius.silence import quiet_torchao

_NEED = REQUIREMENTS["torchao"]  # docs/decisions/014-torchao.md
OLDEST_TORCHAO = release(_NEED.partition(">=")[2])

FLOAT8_CAPABILITY = (8, 9)  # Ada; torch._scaled_mm refuses older GPUs
MXFP8_CAPABILITY = (10, 0)  # Blackwell, whose tensor cores apply one scale per 32 elements
_ROCM_FLOAT8 = ("gfx94", "gfx95", "gfx12")  # MI300, MI350, RDNA 4


@dataclass(frozen=True)
class Converted:
    """Numbers of replaced linear layers in one part of a model.

    Attributes:
        linears: replaced layers.
        gathered: replaced layers whose weights FSDP gathers in float8.
    """

    linears: int
    gathered: int = 0


def convert(
    model: nn.Module,
    choices: Sequence[LinearChoice],
    dense: DenseQuantizeConfig,
    *,
    emulate: bool,
    shard_degree: int = 1,
) -> Converted:
    """Replace the chosen linear layers of ``model``, in place. Parameters stay, or are wrapped for a float8 gather.
    A bias is added in high precision.

    Args:
        model: the whole model or one pipeline stage, on the meta device.
        choices: choices for all linear layers of the whole model.
        dense: the section.
        emulate: round, but multiply in high precision, since the device lacks such matmuls.
        shard_degree: ranks over which FSDP will split each weight. If it does not divide the rows of a weight, torchao
            cannot gather the weight in float8, and it is gathered in high precision.

    Raises:
        EnvironmentError: torchao is missing or too old.
        PlanError: a linear layer of the model is not in ``choices``, or has another shape there.
    """
    known = {choice.name: choice for choice in choices}
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, linear in linears.items():
        if name not in known or known[name].shape != tuple(linear.weight.shape):
            raise PlanError(
                f"linear layer {name} of shape {tuple(linear.weight.shape)} is not in linears() of the model's config.",
                fix="add it there with its shape",
            )
    chosen = {name: linear for name, linear in linears.items() if known[name].is_converted}
    if not chosen:
        return Converted(0)
    with usable_torchao():
        from crius.quantize.backend import maker  # noqa: PLC0415
    make = maker(dense, emulate=emulate)
    gathers = kind(dense) == "float8" and dense.float8.enable_fsdp_float8_all_gather
    owners = Counter(module.weight for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding)))
    shared = {weight for weight, count in owners.items() if count > 1}
    gathered = 0
    for name, linear in chosen.items():
        choice = known[name]
        new = make(linear)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, new)
        if gathers and linear.weight not in shared and choice.local[0] % shard_degree == 0:
            new.gather_in_float8()
            gathered += 1
    return Converted(len(chosen), gathered)


def precompute_scales(parts: Sequence[nn.Module], shards: dist.ProcessGroup) -> None:
    """Compute the scales of all weights that are gathered in float8, with one small all-reduce per part.

    Call on all ranks after each update of the weights, while they are sharded. Without this call, each weight has its
    own all-reduce before its gather. Do not call before the first step: FSDP may still replace the weights.

    Args:
        parts: this rank's stages of the model, sharded.
        shards: ranks that together hold one copy of each weight, or of its tensor-parallel part.
    """
    with usable_torchao():  # on a stage without converted layers this is the first import
        from crius.quantize.backend import gathered_weights, set_scales  # noqa: PLC0415

    with torch.no_grad():
        for part in parts:
            weights = gathered_weights(part)
            if weights:
                amax = torch.stack(torch._foreach_norm([weight._tensor for weight in weights], math.inf))
                dist.all_reduce(amax, dist.ReduceOp.MAX, group=shards)
                set_scales(weights, amax)


@contextmanager
def usable_torchao() -> Iterator[None]:
    """Import ``crius.quantize.backend``, and with it torchao, inside of this context.

    Raises:
        EnvironmentError: torchao is missing or too old.
    """
    version = _torchao_version()
    if release(version) < OLDEST_TORCHAO:
        raise EnvironmentError(
            f"low precision needs {_NEED}; " + (f"this Python has {version}." if version else "it is not installed."),
            where="--quantize.dense",
            fix=install_line(_NEED),
        )
    with quiet_torchao(), _unknown_keys_dropped():
        yield


@contextmanager
def _unknown_keys_dropped() -> Iterator[None]:
    """Allow imports of Triton kernels that are tuned by arguments which the kernels lack.

    torchao 0.18 has such kernels, for experts. Older Triton drops unknown arguments. Triton 3.9, of torch 2.15, refuses
    them, and then all of torchao's layers fail on a GPU.
    """
    if not torch.cuda.is_available() or find_spec("triton") is None:  # without a GPU torchao defines no kernels
        yield
        return
    tuner = import_module("triton.runtime.autotuner").Autotuner
    original = tuner.__init__

    def init(self: Any, fn: Any, names: list[str], configs: Any, key: list[str], *more: Any, **options: Any) -> None:
        original(self, fn, names, configs, [name for name in key if name in names], *more, **options)

    with mock.patch.object(tuner, "__init__", init):
        yield


def _torchao_version() -> str:
    """The installed version; empty if torchao is not installed."""
    try:
        return metadata.version("torchao")
    except metadata.PackageNotFoundError:
        return ""


def missing_matmuls(kind: Literal["float8", "mxfp8"], device_type: str) -> str:
    """Why the device of this process lacks matmuls of ``kind``; empty if it has them.

    Args:
        kind: number format.
        device_type: ``cpu`` or ``cuda``, which is also ROCm's name.
    """
    words = {"float8": "float8", "mxfp8": "MXFP8"}[kind]
    if device_type != "cuda":
        return f"this device has no {words} matmuls"
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties().gcnArchName.split(":")[0]
        # torchao's MXFP8 casts for AMD need an extra package, which torchao does not choose by itself
        return "" if kind == "float8" and name.startswith(_ROCM_FLOAT8) else f"{name} has no {words} matmuls"
    capability = torch.cuda.get_device_capability()
    needed = FLOAT8_CAPABILITY if kind == "float8" else MXFP8_CAPABILITY
    if capability < needed:
        return f"{words} matmuls need compute capability {_dotted(needed)}, this GPU has {_dotted(capability)}"
    return ""


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
