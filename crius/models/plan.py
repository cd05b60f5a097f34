"""``ShardingPlan``: how a model is laid out on a mesh, as a table of strings."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from crius.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """Rows ``module pattern -> style``; a ``*`` in a pattern stands for one path component.

    Attributes:
        block: repeated module, which is the unit of FSDP, activation checkpointing, compile and pipeline cuts.
        fsdp_units: modules that are gathered together, in forward order; ``a+b`` is one unit of several modules.
        embeddings: modules that look up rows of their weight. By default they get no weight decay.
        sensitive: linear layers that stay in high precision unless a config says otherwise, such as the output layer.
        tensor_parallel: module pattern to the name of a style in ``crius.parallel.tensor``; empty: tensor parallelism
            is refused.
        heads: counts of the model that tensor parallelism splits: query heads first, then key/value heads.
        experts: pattern of the modules whose parameters have the experts of a layer in their first dim. Expert
            parallelism splits them. Empty without experts.
        routers: pattern of the modules that choose experts. Their matrices have their own optimizer group. Empty
            without experts.
    """

    block: str
    fsdp_units: tuple[str, ...]
    embeddings: tuple[str, ...]
    sensitive: tuple[str, ...] = ()
    tensor_parallel: Mapping[str, str] = field(default_factory=dict)
    heads: tuple[str, ...] = ("num_heads", "num_kv_heads")
    experts: str = ""
    routers: str = ""

    def style_of(self, name: str) -> str:
        """The tensor-parallel style of the module ``name``; empty without a row for it."""
        return next((style for pattern, style in self.tensor_parallel.items() if match(pattern, name)), "")

    def expand_units(self, module_names: Iterable[str]) -> list[tuple[str, ...]]:
        """The FSDP units of a model, in order, each as the names of its modules.

        Raises:
            PlanError: a pattern matches no module.
        """
        names = list(module_names)
        units: list[tuple[str, ...]] = []
        for unit in self.fsdp_units:
            parts = [_matches(pattern, names) for pattern in unit.split("+")]
            if len(parts) == 1:
                units.extend((name,) for name in parts[0])
            else:
                units.append(tuple(name for part in parts for name in part))
        return units

    def gaps(self, module_names: Iterable[str], parameter_names: Iterable[str]) -> Iterator[str]:
        """Mismatches of the plan and a model. Every pattern must match a module. Every parameter must be in one FSDP
        unit and, if the plan has tensor-parallel rows, in one of them.
        """
        names = list(module_names)
        patterns = (*(part for unit in self.fsdp_units for part in unit.split("+")), self.block)
        patterns = (*patterns, *self.embeddings, *self.sensitive, *self.tensor_parallel)
        patterns = (*patterns, *filter(None, (self.experts, self.routers)))
        unmatched = [pattern for pattern in patterns if not any(match(pattern, name) for name in names)]
        yield from (f"the sharding plan's row {pattern!r} matches no module of the model" for pattern in unmatched)
        if unmatched:
            return
        units = self.expand_units(names)
        for parameter in parameter_names:
            owners = [unit for unit in units if any(parameter.startswith(f"{name}.") for name in unit)]
            if len(owners) != 1:
                where = "no FSDP unit" if not owners else f"{len(owners)} FSDP units"
                yield f"parameter {parameter} is in {where} of the sharding plan"
            if self.tensor_parallel and not self.style_of(parameter.rpartition(".")[0]):
                yield f"no tensor-parallel row of the sharding plan covers {parameter}"


@lru_cache(maxsize=1 << 16)  # a plan of adapters asks for the same names thousands of times
def match(pattern: str, name: str) -> bool:
    """Whether ``name`` fits ``pattern``; ``*`` is one path component."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def _matches(pattern: str, names: list[str]) -> list[str]:
    matching = [name for name in names if match(pattern, name)]
    if not matching:
        raise PlanError(f"the sharding plan's row {pattern!r} matches no module of the model.", fix="correct the row")
    return matching


EXPERTS = "layers.*.feed_forward.experts"
ROUTERS = "layers.*.feed_forward.router"
GATHER = "gather_sequence"
_FEED_FORWARD = {"": GATHER, ".w1": "colwise", ".w3": "colwise", ".w2": "rowwise"}


_QK_NORM = {"none": "", "head": "head_norm", "all": "heads_norm"}


def decoder_plan(config: Any, rows: Mapping[str, str] | None = None) -> ShardingPlan:
    """The plan of a decoder whose layers are ``crius.models.decoder.Block``, or differ from it only by ``rows``.

    Args:
        config: sizes and words of the decoder (``crius.models.config.DecoderConfig``).
        rows: tensor-parallel rows of the modules that a ``Block`` of ``config`` lacks.
    """
    routed = getattr(config, "num_experts", 0) > 0
    wide = [f"layers.{number}" for number in range(config.num_dense_layers)] if routed else ["layers.*"]
    feed_forwards = [f"{layer}.feed_forward" for layer in wide]
    if routed and config.shared_ffn_dim:
        feed_forwards.append("layers.*.feed_forward.shared")
    norms = [name for name, lacks in (("norm", "post"), ("post_norm", "pre")) if config.norms != lacks]
    styles = {f"layers.*.{part}_{norm}": "sequence" for part in ("attention", "ffn") for norm in norms}
    styles |= {
        "tok_embeddings": "vocab",
        "layers.*.attention": GATHER,  # once for wq, wk and wv
        "layers.*.attention.wq": "colwise",
        "layers.*.attention.wk": "colwise_heads",  # replicated where the model has fewer heads than ranks
        "layers.*.attention.wv": "colwise_heads",
        "layers.*.attention.wo": "rowwise",
        "norm": "sequence",
        "output": "logits",
    }
    styles |= {f"{name}{part}": style for name in feed_forwards for part, style in _FEED_FORWARD.items()}
    if style := _QK_NORM[config.qk_norm]:
        styles |= {"layers.*.attention.q_norm": style, "layers.*.attention.k_norm": style}
    if routed:
        styles |= {ROUTERS: "router", EXPERTS: "experts"}
    ends = ("tok_embeddings", "layers.*", "norm+output")  # norm is too small to gather alone
    return ShardingPlan(
        block="layers.*",
        fsdp_units=("tok_embeddings+norm+output", "layers.*") if config.tied_embeddings else ends,
        embeddings=("tok_embeddings",),
        sensitive=("output",),
        tensor_parallel={**styles, **(rows or {})},
        experts=EXPERTS if routed else "",
        routers=ROUTERS if routed else "",
    )
