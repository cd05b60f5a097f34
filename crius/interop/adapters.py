"""Adapters of LoRA in a checkpoint: what they are, and the weights that they make of their base. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from crius.checkpoint.manifest import TORCH_NAMES
from crius.checkpoint.pieces import Piece, TensorSource, misfits
from crius.config.lora import LoraConfig, target_names
from crius.errors import CheckpointError
from crius.interop.casting import FLOATS
from crius.models.adapted import Adapted
from crius.models.description import ModelDescription

_ROWS = 1024
"""Of a weight that are merged at a time: always the same ones, so that a weight has the same bits each time."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapters of a checkpoint.

    Attributes:
        lora: the section of its run.
        tensors: by our name, such as ``layers.0.attention.wq.lora_A``.
        base: kind and path of what they were trained on, and its hash.
        num_parameters: numbers in them.
    """

    lora: LoraConfig
    tensors: Mapping[str, TensorSource]
    base: Mapping[str, str]
    num_parameters: int

    @property
    def linears(self) -> list[str]:
        """Names of the layers that have one, in the order of the model."""
        return [name.removesuffix(".lora_A") for name in self.tensors if name.endswith(".lora_A")]


def read_adapters(
    lora: LoraConfig, there: Mapping[str, TensorSource], model: ModelDescription, base: Mapping[str, str], where: str
) -> Adapters:
    """The adapters among the tensors of a checkpoint, which are all of its weights.

    Args:
        lora: the section of its run.
        there: its tensors by our names.
        model: of the run, without adapters.
        base: what the checkpoint says of the weights that they were trained on.
        where: it is.

    Raises:
        CheckpointError: they are not those that its settings say.
    """
    facts = replace(model, adapted=Adapted(lora.rank, target_names(lora, model)))
    wanted = {weight.name: weight.shape for weight in facts.adapters}
    wanted |= {buffer.name: buffer.shape for buffer in facts.buffers if buffer.persistent}
    problems = misfits({name: tensor.shape for name, tensor in there.items()}, wanted, "the checkpoint", "its adapters")
    wrong = sorted({tensor.dtype for tensor in there.values()} - FLOATS.keys())
    if problems or wrong or not {"path", "digest"} <= base.keys():
        raise CheckpointError(
            f"the tensors of {where} are not the adapters that its settings say.",
            why=problems or (f"some are of {', '.join(wrong)}" if wrong else "it does not say what its base was"),
            fix="take another checkpoint of the run",
        )
    tensors = {weight.name: there[weight.name] for weight in facts.adapters}
    return Adapters(lora=lora, tensors=tensors, base=base, num_parameters=facts.num_trained)


def merged(adapters: Adapters, base: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The tensors of ``base``, those with an adapter as ``W + scale * B A``.

    The sum is computed in float64 and rounded once, to float32.

    Args:
        adapters: of a checkpoint.
        base: tensors by our names.
    """
    found = dict(base)
    for name in adapters.linears:
        weight = f"{name}.weight"
        parts = base[weight], adapters.tensors[f"{name}.lora_A"], adapters.tensors[f"{name}.lora_B"]
        read = partial(_merge, parts, adapters.lora.scale)
        shape = base[weight].shape
        piece = Piece((0,) * len(shape), shape, read, None, base[weight].pieces[0].place)
        found[weight] = TensorSource(weight, TORCH_NAMES["float32"], shape, (piece,))
    return found


def rounded_to(adapters: Adapters, base: Mapping[str, TensorSource]) -> dict[str, str]:
    """The dtype that each merged tensor is written in where none is asked for: that of its base."""
    names = [f"{name}.weight" for name in adapters.linears]
    return {name: base[name].dtype for name in names}


def _merge(parts: Sequence[TensorSource], scale: float) -> memoryview:
    weight, a, b = (_numbers(tensor) for tensor in parts)
    result = np.empty(weight.shape, dtype=np.float32)
    factor = a.astype(np.float64) * scale
    for first in range(0, len(result), _ROWS):
        rows = slice(first, first + _ROWS)
        result[rows] = weight[rows].astype(np.float64) + b[rows].astype(np.float64) @ factor
    return result.reshape(-1).view(np.uint8).data


def _numbers(tensor: TensorSource) -> np.ndarray[Any, Any]:
    """The numbers of a tensor: of bfloat16, which numpy lacks, as float32."""
    held = np.frombuffer(tensor.read(), dtype=FLOATS[tensor.dtype])
    numbers = (held.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == "BF16" else held
    assert numbers.size == math.prod(tensor.shape)
    return numbers.reshape(tensor.shape)
