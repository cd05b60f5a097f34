"""``ModelSpec``: all that Crius knows of an architecture, without torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from crius.models.config import DecoderConfig, resized
from crius.models.description import ModelDescription
from crius.models.plan import ShardingPlan

BLOCK = "crius.models.decoder:Block"


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelSpec:
    """One architecture: a folder of ``crius/models``, or a module outside of it.

    Attributes:
        name: what ``--model.name`` calls it.
        flavors: sizes by name.
        plan: the sharding plan of a config.
        block: class of a decoder layer, or its dotted path and name, which is imported only to build it.
        hf_names: our parameter name patterns to Hugging Face's; ``*`` is the layer number.
    """

    name: str
    flavors: Mapping[str, DecoderConfig]
    plan: Callable[[Any], ShardingPlan]
    block: str | type = BLOCK
    hf_names: Mapping[str, str] = field(default_factory=dict)

    def describe(self, flavor: str, **sizes: Any) -> ModelDescription:
        """What a model of ``flavor`` is, with ``sizes`` in place of its own (``crius.models.config.resized``)."""
        config = self.flavors[flavor]
        return _described(self, resized(config, **sizes) if sizes else config, f"{self.name}/{flavor}")


@lru_cache(maxsize=256)
def _described(spec: ModelSpec, config: DecoderConfig, name: str) -> ModelDescription:
    return described(name, config, spec.plan(config), spec.block)


def described(name: str, config: DecoderConfig, plan: ShardingPlan, block: str | type = "") -> ModelDescription:
    """The description of ``config``; without a ``block`` of a model that Crius does not train yet."""
    return ModelDescription(name=name, config=config, plan=plan, block=block, layers=config.layers())
