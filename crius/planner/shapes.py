"""Models that can be planned: those that Crius trains, some it does not train yet, and shapes from a TOML file."""

import dataclasses
import tomllib
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from crius.config.load import did_you_mean
from crius.errors import ConfigError, CriusError
from crius.models.registry import SPECS
from crius.planner.workload import ModelShape


def _with_experts(
    name: str,
    layers: int,
    dim: int,
    heads: tuple[int, int, int],
    vocab: int,
    experts: tuple[int, int, int],
    **more: Any,
) -> ModelShape:
    """``heads``: query heads, key/value heads, width; ``experts``: how many, visited, hidden width."""
    return ModelShape(
        name=name,
        num_layers=layers,
        dim=dim,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        vocab_size=vocab,
        num_experts=experts[0],
        top_k=experts[1],
        expert_ffn_dim=experts[2],
        **{"ffn_dim": experts[2], **more},
    )


NOT_TRAINABLE_YET: dict[str, ModelShape] = {  # from the config.json of each model on the Hugging Face hub
    shape.name: shape
    for shape in (
        _with_experts(
            *("deepseek-v3-671b", 61, 7168, (128, 128, 192), 129_280, (256, 8, 2048)),
            ffn_dim=18_432,
            shared_ffn_dim=2048,
            num_dense_layers=3,
            attention="mla",
            num_parameters_known=671_025_397_760,
        ),
        _with_experts(
            *("deepseek-v2-lite-16b", 27, 2048, (16, 16, 192), 102_400, (64, 6, 1408)),
            ffn_dim=10_944,
            shared_ffn_dim=2816,
            num_dense_layers=1,
            attention="mla",
            num_parameters_known=15_706_357_760,
        ),
        _with_experts("qwen3-30b-a3b", 48, 2048, (32, 4, 128), 151_936, (128, 8, 768)),
        _with_experts("qwen3-235b-a22b", 94, 4096, (64, 4, 128), 151_936, (128, 8, 1536)),
        _with_experts("mixtral-8x7b", 32, 4096, (32, 8, 128), 32_000, (8, 2, 14_336)),
        _with_experts("mixtral-8x22b", 56, 6144, (48, 8, 128), 32_768, (8, 2, 16_384)),
        _with_experts("gpt-oss-120b", 36, 2880, (64, 8, 64), 201_088, (128, 4, 2880)),
    )
}
"""Shapes with experts, by name."""


def shape_named(model: str, flavor: str) -> ModelShape:
    """A shape that Crius does not train yet.

    Args:
        model: a name of ``NOT_TRAINABLE_YET``, its part before the size, or the path of a TOML file.
        flavor: the size; empty where ``model`` has it.

    Raises:
        ConfigError: there is no such shape or file, or what is wrong with the file.
    """
    if model.endswith(".toml"):
        return _from_file(Path(model).expanduser())
    name = f"{model}-{flavor}" if flavor else model
    if name in NOT_TRAINABLE_YET:
        return NOT_TRAINABLE_YET[name]
    known = [*SPECS, *NOT_TRAINABLE_YET]
    sizes = [other for other in NOT_TRAINABLE_YET if other.startswith(f"{model}-")]
    raise ConfigError(
        f"no model is called {name}{did_you_mean(name, known) or '.'}",
        where="--model",
        why=f"{', '.join(SPECS)} can be trained; planned only: {', '.join(NOT_TRAINABLE_YET)}",
        fix=f"use {' or '.join(sizes or known)}, or a TOML file with the sizes: docs/planner.md",
    )


def _from_file(path: Path) -> ModelShape:
    """The shape of a TOML file with the fields of ``ModelShape``."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"model file {path} cannot be read: {error}.",
            where="--model",
            fix="give a TOML file with the model's sizes",
        ) from None
    table.setdefault("name", path.stem)
    kinds, problems = get_type_hints(ModelShape), []
    for key, value in table.items():
        if key not in kinds:
            problems.append(f"there is no field {key}{did_you_mean(key, kinds) or '.'}")
        elif not _suits(value, kinds[key]):
            problems.append(f"{key} = {value!r} is not {_kind_named(kinds[key])}.")
    needed = [field.name for field in dataclasses.fields(ModelShape) if field.default is dataclasses.MISSING]
    problems += [f"{name} is missing." for name in needed if name not in table]
    if not problems and table.get("num_experts") and not (table.get("top_k") and table.get("expert_ffn_dim")):
        problems.append("a model with num_experts needs top_k and expert_ffn_dim.")
    if not problems and table["num_heads"] % table["num_kv_heads"]:
        problems.append(f"num_kv_heads {table['num_kv_heads']} does not divide num_heads {table['num_heads']}.")
    if problems:
        errors: list[CriusError] = [
            ConfigError(problem, where=str(path), fix=f"the fields are {', '.join(kinds)}") for problem in problems
        ]
        raise ConfigError.together(errors)
    return ModelShape(**table)


def _suits(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return any(_suits(value, part) for part in get_args(kind))
    if kind is int:  # counts and widths; those that may be 0 have it as their default
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return isinstance(value, kind)


def _kind_named(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return {bool: "true or false", str: "a text"}.get(kind, "a whole number above 0")
