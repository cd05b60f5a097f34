"""``ModelSpec``: the description of an architecture, without torch."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from typing import Any

from crius.errors import ConfigError
from crius.models.config import DecoderConfig, RoutedConfig, resized
from crius.models.description import ModelDescription
from crius.models.huggingface import HuggingFace
from crius.models.plan import ShardingPlan, decoder_plan
from crius.models.rope import parse_rope_scaling
from crius.models.words import parse_words

BLOCK = "crius.models.decoder:Block"
CUSTOM = "custom"
"""A flavor of every model, without sizes. A size that is not given has the default of the model's config class."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelSpec:
    """One architecture: a folder of ``crius/models``, or a module outside of it.

    Attributes:
        name: value of ``--model.name``.
        flavors: sizes by name.
        plan: function from a config to its sharding plan; by default that of ``crius.models.decoder.Block``.
        block: class of a decoder layer, or its dotted path and name, which is imported only to build it.
        hf: Hugging Face's names; None: transformers has no such model.
    """

    name: str
    flavors: Mapping[str, DecoderConfig]
    plan: Callable[[Any], ShardingPlan] = decoder_plan
    block: str | type = BLOCK
    hf: HuggingFace | None = None

    @property
    def known_flavors(self) -> tuple[str, ...]:
        """Flavors that ``describe`` takes."""
        return (*self.flavors, CUSTOM)

    def describe(self, flavor: str, **sizes: Any) -> ModelDescription:
        """The description of ``flavor``, with ``sizes`` in place of its own (``crius.models.config.resized``).

        Raises:
            ConfigError: the text of ``rope_scaling`` or of ``words`` is not valid, flavor custom lacks a size that it
                needs, or the model has no size of that name; ``where`` is the field.
        """
        own, routed = (
            {size.name for size in fields(kind)} for kind in (type(next(iter(self.flavors.values()))), RoutedConfig)
        )
        if strange := [name for name in sizes if name in routed - own]:
            raise ConfigError(
                f"{self.name} has no {', '.join(strange)}: its layers have no experts.",
                where=f"model.{strange[0]}",
                fix=f"leave out {', '.join(f'--model.{name}' for name in strange)}, or name a model with experts",
            )
        if isinstance(text := sizes.get("rope_scaling"), str):
            try:
                sizes["rope_scaling"], sizes["rope_float32"] = parse_rope_scaling(text)
            except ValueError as error:
                example = '{"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, '
                example += '"original_max_position_embeddings": 8192}'
                what = f"model.rope_scaling {text} is not valid: {error}."
                fix = f"--model.rope_scaling none, or '{example}'"
                raise ConfigError(what, where="model.rope_scaling", fix=fix) from None
        if "words" in sizes and (text := sizes.pop("words")):
            try:
                words = parse_words(text)
                if {"mlp_bias", "activation"} & words.keys() and "num_experts" in own:
                    raise ValueError("layers with experts have neither mlp_bias nor activation")
                sizes |= words
            except ValueError as error:
                raise ConfigError(
                    f"model.words {text[:200]} is not valid: {error}.",
                    where="model.words",
                    fix="""--model.words '{"qkv_bias": true}' for example: docs/models.md lists the words""",
                ) from None
        config = self._custom(sizes) if flavor == CUSTOM else self.flavors[flavor]
        return _described(self, resized(config, **sizes) if sizes else config, f"{self.name}/{flavor}")

    def _custom(self, sizes: Mapping[str, Any]) -> DecoderConfig:
        kind = type(next(iter(self.flavors.values())))
        missing = [size.name for size in fields(kind) if size.default is MISSING and size.name not in sizes]
        if missing:
            raise ConfigError(
                f"flavor {CUSTOM} has no sizes of its own, and {', '.join(missing)} "
                f"{'are' if missing[1:] else 'is'} not given.",
                where="model.flavor",
                fix=" ".join(f"--model.{name} N" for name in missing)
                + f", or --model.flavor with one of {', '.join(self.flavors)}",
            )
        return kind(**sizes)


@lru_cache(maxsize=256)
def _described(spec: ModelSpec, config: DecoderConfig, name: str) -> ModelDescription:
    return described(name, config, spec.plan(config), spec.block)


def described(name: str, config: DecoderConfig, plan: ShardingPlan, block: str | type = "") -> ModelDescription:
    """The description of ``config``; without a ``block``, of a model that Crius cannot train yet."""
    return ModelDescription(name=name, config=config, plan=plan, block=block, layers=config.layers())
