"""Layouts and batches that the trainer accepts, listed fast; the rules of a run then check the winners."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from crius.config.facts import Facts, Rule
from crius.config.layout import DEGREES, Layout
from crius.config.lora import target_names
from crius.config.parallelism import ParallelismConfig
from crius.config.pipeline import microbatches_allowed
from crius.config.resolve import AUTO_GLOBAL_BATCH_SIZE
from crius.config.rules import RULES
from crius.config.run import RunConfig, replace_fields
from crius.config.toml_file import flatten
from crius.errors import CriusError
from crius.host import usable_cores
from crius.models.adapted import Adapted
from crius.models.description import ModelDescription
from crius.models.registry import SPECS
from crius.tools.plan.hardware import Hardware

MOST_TOKENS_A_STEP = 16 * 2**20
"""Most tokens of a default batch: Llama 3 405B was trained with at most 16 Mi tokens per step (arXiv:2407.21783)."""

LEAST_CONTEXT_SHARD = 2048
"""Fewest tokens of a sequence on a context-parallel rank: with fewer its matmuls are small."""

MOST_PIPELINE_RANKS = 32
MOST_MICROBATCH = 64
MOST_MICROBATCH_TOKENS = 2**18
STAGES_PER_RANK = (2, 4, 8)
"""Most stages per rank of the interleaved schedule."""

PREFIX = "parallelism."


@dataclass(frozen=True, kw_only=True)
class Case:
    """The task of a search for a layout.

    Attributes:
        config: the run; fields in ``pinned`` stay as they are here, all others are searched.
        shape: description of the model.
        hardware: hardware of every rank.
        num_gpus: number of ranks.
        pinned: dotted fields that were given.
    """

    config: RunConfig
    shape: ModelDescription
    hardware: Hardware
    num_gpus: int
    pinned: frozenset[str] = frozenset()

    @property
    def facts(self) -> ModelDescription | None:
        """``shape``; None if Crius does not train the model yet."""
        return self.shape if self.shape.block else None

    def given(self, field: str) -> Any:
        """The value of a pinned field; None if the search may choose."""
        value = self.values[field] if field in self.pinned else None
        return None if value == -1 else value

    @cached_property
    def values(self) -> dict[str, Any]:
        """The dotted fields of ``config``."""
        return flatten(self.config)

    def on(self, num_gpus: int) -> "Case":
        """The same case with another number of ranks; ranks on a CPU share its memory."""
        each = self.hardware.memory_bytes * (1 if self.on_gpu else self.num_gpus / num_gpus)
        return replace(self, num_gpus=num_gpus, hardware=replace(self.hardware, memory_bytes=each))

    @property
    def with_any_degrees(self) -> "Case":
        """The same case without the given degrees."""
        return replace(self, pinned=self.pinned - set(DEGREES.values()))

    def with_fields(self, fields: Mapping[str, Any]) -> "Case":
        """The same case with further given fields."""
        config = replace_fields(self.config, dict(fields))
        shape = self.shape
        if any(name.startswith("lora.") for name in fields):
            shape = replace(shape, adapted=Adapted(config.lora.rank, target_names(config.lora, shape)))
        return replace(self, config=config, shape=shape, pinned=self.pinned | set(fields))

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks are GPUs."""
        return self.hardware.generation != "cpu"

    @cached_property
    def global_batch_size(self) -> int:
        """Sequences per step: as given, or else a multiple of the GPUs of at least 8.

        If that is above ``MOST_TOKENS_A_STEP``, it is a multiple of the largest number of data-parallel ranks that
        stays below.
        """
        given = self.config.training.global_batch_size
        if given != -1:
            return given
        size = self.given("training.local_batch_size") or 1
        unit = self.num_gpus * size
        most = max(AUTO_GLOBAL_BATCH_SIZE, MOST_TOKENS_A_STEP // self.config.training.seq_len)
        wanted = -(-AUTO_GLOBAL_BATCH_SIZE // unit) * unit
        if wanted <= most:
            return wanted
        ranks = max((ranks for ranks in divisors(self.num_gpus) if ranks * size <= most), default=1)
        return max(1, most // (ranks * size)) * ranks * size


def violations(
    config: RunConfig,
    facts: ModelDescription,
    num_ranks: int,
    rules: Iterable[Rule] = RULES,
    origin: Callable[[str], str] = lambda name: "default",
) -> list[CriusError]:
    """Why a run with ``config`` would not start on ``num_ranks`` ranks of a cluster: the errors of the first broken
    rule.

    Args:
        config: the run.
        facts: description of its model.
        num_ranks: number of ranks.
        rules: rules to check.
        origin: gives the origin of a dotted field.
    """
    known = Facts(
        asked=config,
        config=config,
        reasons={},
        origin=origin,
        specs=SPECS,
        model=facts,
        num_ranks=num_ranks,
        asked_ranks=num_ranks,
        asked_by="",
        num_gpus=0,
        num_cores=usable_cores(),
        local_ranks=num_ranks,
        is_dry=True,
    )
    return next((found for rule in rules if (found := list(rule(known)))), [])


def divisors(number: int) -> list[int]:
    """Divisors of a positive number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def layouts(case: Case) -> Iterator[Layout]:
    """Degrees whose product is the number of GPUs and that divide the model, its sequence and its batch.

    Models with experts have most of them, so not all are listed: unless given, there is no CP with TP, no TP above 2
    with experts beyond a node, and replicas only of one node, of half or of all of the ranks.
    """
    total = case.global_batch_size
    is_sparse = case.shape.num_experts > 0
    for tp in _tensor_degrees(case):
        for cp in _context_degrees(case, tp):
            if is_sparse and cp > 1 and tp > 1 and not case.given(DEGREES["cp"]) and not case.given(DEGREES["tp"]):
                continue
            for pp in _pipeline_degrees(case, tp * cp):
                batch, rest = divmod(case.num_gpus, tp * cp * pp)
                if rest or total % batch:
                    continue
                for replicas in _replicas(case, batch, cp * tp):
                    if not _reshards_to_groups(case, batch // replicas * cp, tp * pp):
                        continue
                    for ep in _expert_degrees(case, batch // replicas * cp * tp, tp):
                        yield Layout(pp=pp, dp_replicate=replicas, dp_shard=batch // replicas, cp=cp, tp=tp, ep=ep)


def _reshards_to_groups(case: Case, shards: int, others: int) -> bool:
    """Whether an integer ``reshard_after_forward_mode`` gives groups of some of the shards, and of nothing else."""
    group = case.given(f"{PREFIX}reshard_after_forward_mode")
    return not isinstance(group, int) or (others == 1 and 1 < group < shards and shards % group == 0)


def schedules(case: Case, layout: Layout) -> Iterator[tuple[str, int]]:
    """Pipeline schedules with their stages per rank. Zero-bubble schedules exclude compile and recomputation."""
    given = case.given(f"{PREFIX}pipeline_parallel_schedule")
    each = case.given(f"{PREFIX}pipeline_parallel_stages_per_rank")
    if layout.pp == 1:
        yield "1f1b", 1
        return
    if given in (None, "1f1b", "gpipe") and each in (None, 1):
        yield given or "1f1b", 1
    if given in (None, "interleave_1f1b"):
        for stages in (each,) if each else STAGES_PER_RANK:
            if stages > 1 and layout.pp * stages <= case.shape.num_layers:
                yield "interleave_1f1b", stages
    elif given not in ("1f1b", "gpipe"):
        yield given, each or 2


def microbatches(case: Case, layout: Layout, schedule: str, stages: int) -> Iterator[tuple[int, int]]:
    """Sequences per microbatch, and microbatches per step."""
    share = case.global_batch_size // layout.batch
    parallelism = _pipeline_of(layout.pp, schedule, stages)
    given = case.given("training.local_batch_size")
    training = case.config.training
    if training.reproducible:  # a microbatch is a virtual shard
        given = max(1, case.global_batch_size // training.virtual_shards)
    sizes: Sequence[int] = (given,) if given else divisors(share)
    for size in sizes:
        is_large = size > MOST_MICROBATCH or (size > 1 and size * training.seq_len > MOST_MICROBATCH_TOKENS)
        if share % size or (is_large and not given):
            continue
        count = share // size
        # fewer microbatches than stages leave most of a pipeline idle
        if microbatches_allowed(parallelism, count) and (count >= layout.pp or layout.pp == 1):
            yield size, count


@lru_cache(maxsize=1024)
def _pipeline_of(pp: int, schedule: str, stages: int) -> ParallelismConfig:
    return ParallelismConfig(
        pipeline_parallel_degree=pp,
        pipeline_parallel_schedule=schedule,  # type: ignore[arg-type]
        pipeline_parallel_stages_per_rank=stages,
    )


def _tensor_degrees(case: Case) -> list[int]:
    """Tensor-parallel degrees within a node that split whole heads."""
    shape = case.shape
    given = case.given(DEGREES["tp"])
    legal = [
        tp
        for tp in divisors(case.num_gpus)
        if shape.num_heads % tp == 0
        and shape.ffn_dim % tp == 0
        and (shape.num_kv_heads % tp == 0 or tp % shape.num_kv_heads == 0)
        and case.config.training.seq_len % tp == 0
    ]
    return [tp for tp in legal if (tp == given if given else tp <= case.hardware.gpus_per_node)]


def _context_degrees(case: Case, tp: int) -> list[int]:
    given = case.given(DEGREES["cp"])
    length = case.config.training.seq_len
    legal = [
        cp
        for cp in divisors(case.num_gpus // tp)
        if cp == 1 or (length % (2 * cp * tp) == 0)  # an early and a late part for each rank
    ]
    return [cp for cp in legal if (cp == given if given else cp == 1 or length // cp >= LEAST_CONTEXT_SHARD)]


def _pipeline_degrees(case: Case, others: int) -> list[int]:
    shape = case.shape
    given = case.given(DEGREES["pp"])
    legal = [pp for pp in divisors(case.num_gpus // others) if pp == 1 or pp <= shape.num_layers]
    return [pp for pp in legal if (pp == given if given else pp <= MOST_PIPELINE_RANKS)]


def _replicas(case: Case, batch: int, inner: int) -> list[int]:
    """Numbers of replicas among ``batch`` data-parallel ranks; a group of shards fills whole nodes or divides one."""
    given = case.given(DEGREES["dp_replicate"])
    shards = case.given(DEGREES["dp_shard"])
    node = case.hardware.gpus_per_node

    def is_legal(replicas: int) -> bool:
        if given or shards:
            return replicas == given if given else batch // replicas == shards
        group = batch // replicas * inner
        if case.shape.num_experts:
            return replicas in (1, 2) or group == node
        return replicas == 1 or group % node == 0 or node % group == 0

    found = [replicas for replicas in divisors(batch) if is_legal(replicas)]
    return [replicas for replicas in found if not shards or batch // replicas == shards]


def _expert_degrees(case: Case, ranks: int, tp: int) -> list[int]:
    """Numbers of ranks that can share the experts, among the ranks of one replica and stage."""
    given = case.given(DEGREES["ep"])
    experts = case.shape.num_experts
    if not experts:
        return [1] * (given in (None, 1))
    node = case.hardware.gpus_per_node
    most = max(64, node) if tp <= 2 or case.given(DEGREES["tp"]) else node
    legal = [ep for ep in divisors(math.gcd(experts, ranks)) if _experts_split(case, ep, ranks // ep)]
    return [ep for ep in legal if (ep == given if given else ep <= most)]


def _experts_split(case: Case, ep: int, shards: int) -> bool:
    """Whether FSDP can split the experts of a rank: by expert, or inside each into even parts if there are too few."""
    sizes = (case.shape.experts[1].feed_forward.expert_width, case.shape.dim) if case.shape.experts[1] else ()
    if isinstance(case.given(f"{PREFIX}reshard_after_forward_mode"), int):  # torch reshards splits by expert
        return ep == 1 and case.shape.num_experts >= shards
    return case.shape.num_experts // ep >= shards or all(size % shards == 0 for size in sizes)
