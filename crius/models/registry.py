"""The models by name: those of ``crius/models``, found by folder, and those of modules that a command line names.

Facts are at hand without torch; a model's code is imported only to build it.
"""

import importlib
import pkgutil
import traceback
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import crius.models
from crius.errors import ConfigError
from crius.models.description import ModelDescription
from crius.models.spec import ModelSpec

if TYPE_CHECKING:
    from crius.models.decoder import Decoder

SPECS: dict[str, ModelSpec] = {}
FLAVORS: set[str] = set()
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
    for name in modules:
        if name in IMPORTED:
            continue
        try:
            spec = getattr(importlib.import_module(name), "SPEC", None)
        except Exception as error:  # whatever a stranger's module raises
            frames = traceback.extract_tb(error.__traceback__)
            raised = [frame for frame in frames if frame.filename not in (__file__, importlib.__file__)]
            last = next((frame for frame in reversed(raised) if not frame.filename.startswith("<frozen ")), None)
            raise ConfigError(
                f"module {name} cannot be imported: {type(error).__name__}: {error}",
                where=where,
                why=f"raised in {last.filename}, line {last.lineno}" if last else "",
                fix="name a module as import does, in this folder or on PYTHONPATH: --import mymodel for mymodel.py",
            ) from None
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


def build(model: ModelDescription) -> "Decoder":
    """The model's ``nn.Module`` on the current default device (meta, when shapes are all that is needed)."""
    from crius.models.decoder import Decoder

    block = model.block
    if isinstance(block, str):
        module, name = block.split(":")
        block = getattr(importlib.import_module(module), name)
    return Decoder(model.config, block)
