"""Models that can be planned: models that Crius trains, some that it does not train yet, and sizes from a TOML file."""

import dataclasses
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from crius.config.load import did_you_mean
from crius.errors import ConfigError, CriusError
from crius.models.config import WORDS, DecoderConfig, decoder_layer, feed_forward, gqa, routed_feed_forward
from crius.models.description import Attention, Layer, ModelDescription, Weight
from crius.models.plan import decoder_plan
from crius.models.registry import SPECS
from crius.models.rope import Rope
from crius.models.spec import described
from crius.untrusted import parse_toml, text_named

# Multi-head latent attention of DeepSeek-V2 and -V3 (arXiv:2405.04434, 2412.19437)
MLA_QUERY_RANK = 1536
MLA_KEY_RANK = 512
MLA_ROPE_DIM = 64
MLA_VALUE_DIM = 128
MLA_LITE_DIM = 2048  # V2-Lite and other narrow models do not compress the query

_ROWS = {
    "layers.*.attention.wq_b": "colwise",
    "layers.*.attention.wkv_b": "colwise",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedConfig(DecoderConfig):
    """Sizes of a decoder that is planned but not built, dense or with experts.

    Attributes:
        gated: whether the feed-forward has three matrices (SwiGLU), not two.
        num_experts: routed experts per layer; 0: a dense model.
        top_k: routed experts that a token visits.
        expert_ffn_dim: hidden width of one routed expert.
        shared_ffn_dim: hidden width of the shared experts together.
        num_dense_layers: leading layers with a dense feed-forward in a model with experts.
        attention: ``gqa``, or ``mla`` (DeepSeek-V2, arXiv:2405.04434).
        head_norms: whether queries and keys are normalised, each head alone.
        biases: whether all linear layers, the router and the experts have biases, and each query head a sink (gpt-oss).
    """

    gated: bool = True
    num_experts: int = 0
    top_k: int = 0
    expert_ffn_dim: int = 0
    shared_ffn_dim: int = 0
    num_dense_layers: int = 0
    attention: Literal["gqa", "mla"] = "gqa"
    head_norms: bool = False
    biases: bool = False

    def layer(self, index: int) -> Layer:
        """A layer with a dense feed-forward, or with experts after the first ``num_dense_layers``."""
        attention = self._mla() if self.attention == "mla" else self._gqa()
        if not self.num_experts or index < self.num_dense_layers:
            return decoder_layer(self.dim, attention, feed_forward(self.dim, self.ffn_dim, gated=self.gated))
        experts = routed_feed_forward(
            self.dim,
            num_experts=self.num_experts,
            top_k=self.top_k,
            width=self.expert_ffn_dim,
            shared_width=self.shared_ffn_dim,
            gated=self.gated,
            biases=self.biases,
        )
        return decoder_layer(self.dim, attention, experts)

    def _gqa(self) -> Attention:
        found = gqa(
            self.dim,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            rope=Rope(theta=self.rope_theta, dim=self.head_dim),
            qk_norm="head" if self.head_norms else "none",
            qkv_bias=self.biases,
            o_bias=self.biases,
        )
        sinks = (Weight("sinks", (self.num_heads,), "bias"),) if self.biases else ()
        return dataclasses.replace(found, weights=(*found.weights, *sinks))

    def _mla(self) -> Attention:
        queries = self.num_heads * self.head_dim
        latent = MLA_KEY_RANK + MLA_ROPE_DIM
        values = self.num_heads * (self.head_dim - MLA_ROPE_DIM + MLA_VALUE_DIM)
        whole = (Weight("wq.weight", (queries, self.dim), "linear"),)
        compressed = (
            Weight("wq_a.weight", (MLA_QUERY_RANK, self.dim), "linear"),
            Weight("q_norm.weight", (MLA_QUERY_RANK,), "norm"),
            Weight("wq_b.weight", (queries, MLA_QUERY_RANK), "linear"),
        )
        return Attention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_dim=MLA_VALUE_DIM,
            rope=Rope(theta=self.rope_theta, dim=MLA_ROPE_DIM),
            weights=(
                *(whole if self.dim <= MLA_LITE_DIM else compressed),
                Weight("wkv_a.weight", (latent, self.dim), "linear"),
                Weight("kv_norm.weight", (MLA_KEY_RANK,), "norm"),
                Weight("wkv_b.weight", (values, MLA_KEY_RANK), "linear"),
                Weight("wo.weight", (self.dim, self.num_heads * MLA_VALUE_DIM), "linear", to_residual=True),
            ),
        )


def planned(name: str, config: PlannedConfig, published_parameters: int | None = None) -> ModelDescription:
    """The description of a model that is planned only."""
    plan = decoder_plan(config, _ROWS)
    return dataclasses.replace(described(name, config, plan), published_parameters=published_parameters)


_TABLES = parse_toml(text_named(Path(__file__).with_name("models.toml")))
NOT_TRAINABLE_YET = {name: planned(name, PlannedConfig(**sizes)) for name, sizes in _TABLES.items()}
"""Models with experts, by name."""

_NO_SIZES = ("rope_theta", "rope_scaling", "rope_float32", "norm_eps", "attention_mask", *WORDS)
_KINDS = {name: kind for name, kind in get_type_hints(PlannedConfig).items() if name not in _NO_SIZES}
_NEEDED = ("num_layers", "dim", "ffn_dim", "num_heads", "num_kv_heads", "vocab_size")


def trained_as(model: str, flavor: str) -> tuple[str, str] | None:
    """Name and flavor of Crius's model for a name in one word, such as ``qwen3-30b-a3b``; None if there is none.

    Args:
        model: the whole name, or its part before the size.
        flavor: the size; empty if ``model`` has it.
    """
    name = f"{model}-{flavor}" if flavor else model
    for spec in SPECS.values():
        for size in spec.flavors:
            if name in (f"{spec.name}-{size}", f"{spec.name.removesuffix('_moe')}-{size}"):
                return spec.name, size
    return None


def shape_named(model: str, flavor: str) -> ModelDescription:
    """A model that Crius does not train yet.

    Args:
        model: a name of ``NOT_TRAINABLE_YET``, its part before the size, or the path of a TOML file.
        flavor: the size; empty if ``model`` has it.

    Raises:
        ConfigError: there is no such model or file, or the file is wrong; the message lists its errors.
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


def _from_file(path: Path) -> ModelDescription:
    """The model of a TOML file with the sizes of ``PlannedConfig``, and a ``name``."""
    try:
        table = parse_toml(text_named(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model file {path} cannot be read: {error}.",
            where="--model",
            fix="give a TOML file with the model's sizes",
        ) from None
    kinds: dict[str, Any] = {"name": str, **_KINDS}
    problems = []
    for key, value in table.items():
        if key not in kinds:
            problems.append(f"there is no field {key}{did_you_mean(key, kinds) or '.'}")
        elif not _suits(value, kinds[key]):
            problems.append(f"{key} = {value!r} is not {_kind_named(kinds[key])}.")
    problems += [f"{name} is missing." for name in _NEEDED if name not in table]
    if not problems and table.get("num_experts") and not (table.get("top_k") and table.get("expert_ffn_dim")):
        problems.append("a model with num_experts needs top_k and expert_ffn_dim.")
    if not problems and table["num_heads"] % table["num_kv_heads"]:
        problems.append(f"num_kv_heads {table['num_kv_heads']} does not divide num_heads {table['num_heads']}.")
    if problems:
        errors: list[CriusError] = [
            ConfigError(problem, where=str(path), fix=f"the fields are {', '.join(kinds)}") for problem in problems
        ]
        raise ConfigError.together(errors)
    return planned(table.pop("name", path.stem), PlannedConfig(**table))


def _suits(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return any(_suits(value, part) for part in get_args(kind))
    if kind is int:  # counts and widths; only fields with the default 0 may be 0
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return isinstance(value, kind)


def _kind_named(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return {bool: "true or false", str: "a text"}.get(kind, "a whole number above 0")
