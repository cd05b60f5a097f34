"""LoRA adapters in a checkpoint: reading them, and merging them into their base. No torch."""

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
"""Rows of a weight that are merged at a time. The number is fixed, so that a weight gets the same bits each time."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapters of a checkpoint, or of a folder of PEFT.

    Attributes:
        lora: section of its run.
        tensors: tensors by our names, such as ``layers.0.attention.wq.lora_A``.
        base: kind, path and hash of the weights that they were trained on.
        where: path of the checkpoint or folder.
        num_parameters: number of elements.
    """

    lora: LoraConfig
    tensors: Mapping[str, TensorSource]
    base: Mapping[str, str]
    where: str
    num_parameters: int

    @property
    def linears(self) -> list[str]:
        """Names of the adapted layers, in the order of the model."""
        return [name.removesuffix(".lora_A") for name in self.tensors if name.endswith(".lora_A")]


def read_adapters(
    lora: LoraConfig,
    there: Mapping[str, TensorSource],
    model: ModelDescription,
    base: Mapping[str, str],
    where: str,
) -> Adapters:
    """Read the adapters of a checkpoint or of a folder of PEFT, which has no other weights.

    Args:
        lora: section of its run.
        there: tensors of the checkpoint by our names.
        model: description of the model, without adapters.
        base: the checkpoint's record of the weights that the adapters were trained on.
        where: path of the checkpoint.

    Raises:
        CheckpointError: the tensors do not match the settings of the checkpoint.
    """
    facts = replace(model, adapted=Adapted(lora.rank, target_names(lora, model)))
    wanted = {weight.name: weight.shape for weight in facts.adapters}
    wanted |= {buffer.name: buffer.shape for buffer in facts.buffers if buffer.persistent}
    problems = misfits({name: tensor.shape for name, tensor in there.items()}, wanted, "the checkpoint", "its adapters")
    wrong = sorted({tensor.dtype for tensor in there.values()} - FLOATS.keys())
    if problems or wrong or not {"path", "digest"} <= base.keys():
        raise CheckpointError(
            f"the tensors of {where} do not match the adapters in its settings.",
            why=problems or (f"some have dtype {', '.join(wrong)}" if wrong else "it has no record of its base"),
            fix="use another checkpoint of the run, or the base that the adapter was trained on; or merge the adapter "
            "with PEFT first, model.merge_and_unload()",
        )
    tensors = {weight.name: there[weight.name] for weight in facts.adapters}
    return Adapters(lora=lora, tensors=tensors, base=base, where=where, num_parameters=facts.num_trained)


def merged(adapters: Adapters, base: Mapping[str, TensorSource]) -> tuple[dict[str, TensorSource], dict[str, str]]:
    """The tensors of ``base``, with ``W + scale * B A`` in place of each adapted weight.

    The sum is computed in float64 and rounded once, to float32.

    Args:
        adapters: adapters of a checkpoint.
        base: tensors by our names.

    Returns:
        The tensors, and the dtype in which a merged one is written unless another is asked for: that of its base.

    Raises:
        CheckpointError: a weight of the base has a dtype to which nothing can be added.
    """
    found = dict(base)
    dtypes = {}
    for name in adapters.linears:
        weight = f"{name}.weight"
        dtypes[weight] = dtype = base[weight].dtype
        if dtype not in FLOATS:
            raise CheckpointError(f"no adapter can be added to {weight}, which has dtype {dtype}.")
        parts = base[weight], adapters.tensors[f"{name}.lora_A"], adapters.tensors[f"{name}.lora_B"]
        read = partial(_merge, parts, adapters.lora.scale)
        shape = base[weight].shape
        piece = Piece((0,) * len(shape), shape, read, None, base[weight].pieces[0].place)
        found[weight] = TensorSource(weight, TORCH_NAMES["float32"], shape, (piece,))
    return found, dtypes


def _merge(parts: Sequence[TensorSource], scale: float) -> memoryview:
    weight, a, b = (_numbers(tensor) for tensor in parts)
    result = np.empty(weight.shape, dtype=np.float32)
    factor = a.astype(np.float64) * scale
    for first in range(0, len(result), _ROWS):
        rows = slice(first, first + _ROWS)
        result[rows] = weight[rows].astype(np.float64) + b[rows].astype(np.float64) @ factor
    return result.reshape(-1).view(np.uint8).data


def _numbers(tensor: TensorSource) -> np.ndarray[Any, Any]:
    """The numbers of a tensor. bfloat16, which numpy lacks, becomes float32."""
    held = np.frombuffer(tensor.read(), dtype=FLOATS[tensor.dtype])
    numbers = (held.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == "BF16" else held
    assert numbers.size == math.prod(tensor.shape)
    return numbers.reshape(tensor.shape)
