"""Linear layers swapped for low-precision ones, on the meta device and before anything is sharded; and which
low-precision matmuls a device has.
"""

import math
import re
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
from crius.plugins import REQUIREMENTS, install_line
from crius.silence import quiet_torchao

_NEED = REQUIREMENTS["torchao"]  # docs/decisions/014-torchao.md
OLDEST_TORCHAO = tuple(map(int, _NEED.partition(">=")[2].split(".")))

FLOAT8_CAPABILITY = (8, 9)  # Ada; torch._scaled_mm refuses older ones
MXFP8_CAPABILITY = (10, 0)  # Blackwell, whose tensor cores apply scales of 32 elements
_ROCM_FLOAT8 = ("gfx94", "gfx95", "gfx12")  # MI300, MI350, RDNA 4


@dataclass(frozen=True)
class Converted:
    """What became of the linear layers of one part of a model.

    Attributes:
        linears: layers swapped.
        gathered: those of them whose weights FSDP gathers in float8.
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
    """Swap the chosen linear layers of ``model``, in place; their parameters stay, or are wrapped for a float8 gather.

    Args:
        model: on the meta device; the whole model, or what is left of it in a pipeline stage.
        choices: of all linear layers of the whole model.
        dense: the section.
        emulate: multiply in high precision what was rounded, where the device has no such matmuls.
        shard_degree: ranks over which FSDP will split each weight. torchao gathers no weight in float8 whose rows they
            do not divide: such a one is gathered as it is.

    Raises:
        EnvironmentError: torchao is missing, or too old.
        PlanError: the model has a linear layer that ``choices`` does not know, or has it in another shape.
    """
    known = {choice.name: choice for choice in choices}
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, linear in linears.items():
        if name not in known or known[name].shape != tuple(linear.weight.shape) or linear.bias is not None:
            raise PlanError(
                f"linear layer {name} of shape {tuple(linear.weight.shape)} is not in linears() of the model's config.",
                fix="name it there, with its shape; low precision takes layers without a bias",
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
    """Compute the scales of all weights that will be gathered in float8, with one small all-reduce a part.

    Call on all ranks after each update of the weights, while they are sharded; without it each weight has an all-reduce
    of its own before its gather. Before the first step there is nothing to call: FSDP may still replace the weights.

    Args:
        parts: this rank's stages of the model, sharded.
        shards: the ranks that hold one copy of each weight as tensor parallelism left it.
    """
    with usable_torchao():  # a stage without a layer to convert imports it here
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
    """Import ``crius.quantize.backend``, which imports torchao, inside.

    Raises:
        EnvironmentError: torchao is missing, or too old.
    """
    version = _torchao_version()
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TORCHAO:
        raise EnvironmentError(
            f"low precision needs {_NEED}; " + (f"this Python has {version}." if version else "it is not installed."),
            where="--quantize.dense",
            fix=install_line(_NEED),
        )
    with quiet_torchao(), _unknown_keys_dropped():
        yield


@contextmanager
def _unknown_keys_dropped() -> Iterator[None]:
    """Import kernels of Triton inside that are tuned by arguments which they do not have.

    torchao 0.18 has such kernels, for experts. Triton drops what it does not know; 3.9, of torch 2.15, refuses it, and
    with it all of torchao's layers on a GPU.
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
    """As installed; empty where it is not."""
    try:
        return metadata.version("torchao")
    except metadata.PackageNotFoundError:
        return ""


def missing_matmuls(kind: Literal["float8", "mxfp8"], device_type: str) -> str:
    """What keeps the device of this process from matmuls of ``kind``; empty where nothing does.

    Args:
        kind: of number.
        device_type: ``cpu`` or ``cuda``, which ROCm calls itself too.
    """
    words = {"float8": "float8", "mxfp8": "MXFP8"}[kind]
    if device_type != "cuda":
        return f"this device has no {words} matmuls"
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties().gcnArchName.split(":")[0]
        # torchao's MXFP8 casts for AMD need a package of their own, which it does not choose by itself
        return "" if kind == "float8" and name.startswith(_ROCM_FLOAT8) else f"{name} has no {words} matmuls"
    capability = torch.cuda.get_device_capability()
    needed = FLOAT8_CAPABILITY if kind == "float8" else MXFP8_CAPABILITY
    if capability < needed:
        return f"{words} matmuls need compute capability {_dotted(needed)}, this GPU has {_dotted(capability)}"
    return ""


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
