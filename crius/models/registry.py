"""Models by name: the folders of ``crius/models``, modules named by ``--import``, and models of installed packages.

Descriptions are available without torch; a model's code is imported only to build it.
"""

import importlib
import pkgutil
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import crius.models
from crius import plugins
from crius.errors import ConfigError
from crius.models.config import DecoderConfig
from crius.models.description import Layer, ModelDescription
from crius.models.huggingface import HuggingFace
from crius.models.plan import ShardingPlan
from crius.models.spec import CUSTOM, ModelSpec

if TYPE_CHECKING:
    from crius.models.decoder import Decoder

SPECS: dict[str, ModelSpec] = {}
FLAVORS: set[str] = {CUSTOM}
IMPORTED: list[str] = []
"""Imported modules outside of Crius that define a model."""


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
    """Import ``modules`` and register the model that each defines as ``SPEC``.

    This runs their code, so the names come from a command line or its environment, never from a configuration.

    Raises:
        ConfigError: a module cannot be imported, defines no model, or defines a model whose name is taken.
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
                why="a module named by --import defines a crius.models.spec.ModelSpec in a variable SPEC",
                fix="docs/adding_a_model.md shows an example",
            )
        _check(spec, f"module {name}", where)
        if spec.name in SPECS:
            raise ConfigError(
                f"module {name} calls its model {spec.name}, which is the name of a Crius model.",
                where=where,
                fix="give it another name: ModelSpec(name=...)",
            )
        _register(spec)
        IMPORTED.append(name)


def _check(spec: ModelSpec, what: str, where: str) -> None:
    """Check a ``ModelSpec`` from outside of Crius against the rules that every command relies on.

    Raises:
        ConfigError: a field has the wrong type, or the plan or the layers cannot be computed.
    """
    fix = "docs/adding_a_model.md shows an example"
    configs = dict(spec.flavors)
    problem = "" if configs else "flavors is empty"
    if CUSTOM in configs:
        problem = f"the flavor name {CUSTOM} is reserved for sizes given on a command line"
    for flavor, config in configs.items():
        if not isinstance(config, DecoderConfig):
            problem = f"flavor {flavor} is of type {type(config).__name__}, not a DecoderConfig"
    if not problem and not callable(spec.plan):
        problem = f"plan is {type(spec.plan).__name__}, not a function of a config"
    if isinstance(spec.block, str) and not re.fullmatch(r"[\w.]+:\w+", spec.block):
        problem = f"block {spec.block} is not module:Class"
    if problem:
        raise ConfigError(f"{what}: {problem}.", where=where, fix=fix)
    described = plugins.imported(
        lambda: spec.describe(next(iter(configs))), f"what {what} describes", where, fix, done="read"
    )
    layers = [layer for _, layer in described.layers]
    if not isinstance(described.plan, ShardingPlan) or not all(isinstance(layer, Layer) for layer in layers):
        what = f"{what}: its plan is {type(described.plan).__name__}, its layers {type(layers[0]).__name__}."
        raise ConfigError(what, where=where, why="they must be a ShardingPlan and one Layer each", fix=fix)


def find_spec(name: str) -> ModelSpec | None:
    """The model of this name, or None. A model of an installed package is loaded when its name is first used.

    Raises:
        ConfigError: a package has the model, but it cannot be used.
    """
    if name not in SPECS and (spec := plugins.load(plugins.MODELS, name, ModelSpec)) is not None:
        _check(spec, f"the model {name}", plugins.MODELS)
        _register(replace(spec, name=name))
    return SPECS.get(name)


def families() -> dict[str, HuggingFace]:
    """Hugging Face's names of the models that transformers has too, by our model name."""
    return {spec.name: spec.hf for spec in SPECS.values() if spec.hf}


def foreign_names(
    model: str, ours: Iterable[str], otherwise: str = "", where: str = "model.name"
) -> tuple[HuggingFace, dict[str, str]]:
    """Hugging Face's class of a model, and its tensor names by Crius's names.

    Args:
        model: name of the model.
        ours: Crius's names of tensors.
        otherwise: what a user can do where there are no names, after ``or``; empty: nothing else.
        where: origin of what needs the names, for the message.

    Raises:
        ConfigError: some tensors have no name there.
    """
    family = families().get(model, HuggingFace(model_type="", architecture=""))
    names = {}
    lacking = []
    for name in ours:
        try:
            names[name] = family.translated(name)
        except KeyError as error:
            lacking.append(str(error.args[0]))
    if lacking:
        fix = "hf=HuggingFace(model_type=..., architecture=..., names={...}) in its ModelSpec"
        raise ConfigError(
            f"{model} has no Hugging Face names for {', '.join(dict.fromkeys(lacking))}.",
            where=where,
            why="" if family.model_type else "its ModelSpec has no hf",
            fix=f"{fix}; or {otherwise}" if otherwise else fix,
        )
    return family, names


def build(model: ModelDescription) -> "Decoder":
    """The model's ``nn.Module`` on the current default device; on ``meta`` it has shapes only."""
    from crius.models.decoder import Decoder

    def made() -> "Decoder":
        block = model.block
        if isinstance(block, str):
            module, name = block.split(":")
            block = getattr(importlib.import_module(module), name)
        return Decoder(model.config, block)

    how = "correct it: a block is a module that takes a config and its index (docs/adding_a_model.md)"
    return plugins.imported(made, f"the block of {model.name}", "its ModelSpec", how, done="built")
