"""The models by name, found by folder. Facts are at hand without torch; a model's code is imported only to build it."""

import importlib
import pkgutil
from typing import TYPE_CHECKING

import crius.models
from crius.models.description import ModelDescription
from crius.models.spec import ModelSpec

if TYPE_CHECKING:
    from crius.models.decoder import Decoder


def _found() -> dict[str, ModelSpec]:
    """The ``SPEC`` of every folder of ``crius/models`` that has one."""
    folders = [name for _, name, is_folder in pkgutil.iter_modules(crius.models.__path__) if is_folder]
    modules = [importlib.import_module(f"crius.models.{name}") for name in folders]
    return {module.SPEC.name: module.SPEC for module in modules if hasattr(module, "SPEC")}


SPECS: dict[str, ModelSpec] = _found()


def build(model: ModelDescription) -> "Decoder":
    """The model's ``nn.Module`` on the current default device (meta, when shapes are all that is needed)."""
    from crius.models.decoder import Decoder

    block = model.block
    if isinstance(block, str):
        module, name = block.split(":")
        block = getattr(importlib.import_module(module), name)
    return Decoder(model.config, block)
