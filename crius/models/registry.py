"""The models by name. Facts are at hand without torch; the code of a model is imported only when it is built."""

import importlib
from typing import TYPE_CHECKING

from crius.models.llama3 import SPEC as LLAMA3
from crius.models.spec import ModelFacts, ModelSpec

if TYPE_CHECKING:
    from torch import nn

SPECS: dict[str, ModelSpec] = {spec.name: spec for spec in (LLAMA3,)}


def build(spec: ModelSpec, facts: ModelFacts) -> "nn.Module":
    """The model's ``nn.Module`` on the current default device (meta, when shapes are all that is needed)."""
    module, name = spec.module.split(":")
    built: nn.Module = getattr(importlib.import_module(module), name)(facts)
    return built
