"""The models by name: those of ``crius/models``, found by folder, those of modules that a command line names, and those
of installed packages.

Facts are at hand without torch; a model's code is imported only to build it.
"""

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import crius.models
from crius import plugins
from crius.errors import ConfigError
from crius.models.description import ModelDescription
from crius.models.spec import CUSTOM, ModelSpec

if TYPE_CHECKING:
    from crius.models.decoder import Decoder

SPECS: dict[str, ModelSpec] = {}
FLAVORS: set[str] = {CUSTOM}
IMPORTED: list[str] = []
"""Modules outside of Crius whose models are known."""


def _register(spec: ModelSpec) -> None:
    SPECS[spec.name] = spec
    FLAVORS.update(spec.flavors)


def _folders() -> Iterator[ModelSpec]:
    for _, name, is_folder in pkgutil.iter_modules(crius.models.__path__, "crius.models."):
        spec = getattr(importlib.import_module(name), "SPEC", None) if is_folder else None
        if spec is not None:
            yield spec


for _spec in _folders():
    _register(_spec)


def import_models(modules: Iterable[str], where: str) -> None:
    """Import ``modules`` and make the model known that each has as ``SPEC``.

    This runs their code, so names come from a command line or its environment, and never from a configuration.

    Raises:
        ConfigError: one cannot be imported, or has no model, or one of a name that is taken.
    """
    how = "name a module as import does, in this folder or on PYTHONPATH: --import mymodel for mymodel.py"
    for name in modules:
        if name in IMPORTED:
            continue
        module = plugins.imported(partial(importlib.import_module, name), f"module {name}", where, how)
        spec = getattr(module, "SPEC", None)
        if not isinstance(spec, ModelSpec):
            raise ConfigError(
                f"module {name} has no model: SPEC is {type(spec).__name__}.",
                where=where,
                why="what --import names has a crius.models.spec.ModelSpec in a variable SPEC",
                fix="docs/adding_a_model.md shows one",
            )
        if spec.name in SPECS:
            raise ConfigError(
                f"module {name} calls its model {spec.name}, which is one of Crius.",
                where=where,
                fix="give it another name: ModelSpec(name=...)",
            )
        _register(spec)
        IMPORTED.append(name)


def find_spec(name: str) -> ModelSpec | None:
    """The model of this name; that of an installed package is loaded when it is asked for. None: there is none.

    Raises:
        ConfigError: a package has it, and it cannot be used.
    """
    if name not in SPECS and (found := plugins.load(plugins.MODELS, name, ModelSpec)) is not None:
        _register(replace(found, name=name))
    return SPECS.get(name)


def build(model: ModelDescription) -> "Decoder":
    """The model's ``nn.Module`` on the current default device (meta, when shapes are all that is needed)."""
    from crius.models.decoder import Decoder

    block = model.block
    if isinstance(block, str):
        module, name = block.split(":")
        block = getattr(importlib.import_module(module), name)
    return Decoder(model.config, block)
