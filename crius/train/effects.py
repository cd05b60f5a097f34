"""Effect of each optimisation that was asked for: one log line each. ``--strict`` ends a run that has one without
effect."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from crius.config.lora import block_linears, indivisible, is_quantized
from crius.config.low_precision import kind, numberless, summary
from crius.config.operation import ProfilerConfig
from crius.config.resolve import has_mask
from crius.config.training import ActivationCheckpointConfig
from crius.errors import EffectError
from crius.kernels.attention import masks_made
from crius.parallel.activation_checkpoint import CheckpointedBlocks
from crius.parallel.compile import CompileReport
from crius.parallel.runtime import World
from crius.parallel.tensor import AsyncTensorParallel, enable_async_tensor_parallel
from crius.quantize.convert import Converted
from crius.shards import named_parameters
from crius.train.build import Built, Job, LowPrecision
from crius.units import counted

log = logging.getLogger("crius.train")


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One optimisation that is on, and how often it had an effect.

    Attributes:
        name: as in the log, such as ``async_tp``.
        flag: flag that turned it on, such as ``--compile.enable``.
        count: how often it had an effect.
        total: how often it could have had one; None if that is unknown. 0: there was nothing to do on this rank.
        what: things that are counted and further facts, such as ``blocks, 1 graph``.
        reason: why the count is low, or how the optimisation was chosen; may be empty.
        parts: count and total of each part of the count, by its name, such as ``backward``.
    """

    name: str
    flag: str
    count: int
    total: int | None = None
    what: str
    reason: str = ""
    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def is_inactive(self) -> bool:
        """Whether it was asked for and had no effect."""
        return self.count == 0 and self.total != 0

    def __str__(self) -> str:
        of_total = "" if self.total is None else f" of {self.total}"
        parts = "".join(f", {name} {count} of {total}" for name, (count, total) in self.parts.items())
        return f"{self.name}: {self.count}{of_total} {self.what}{parts}" + (f" ({self.reason})" if self.reason else "")


def check(effects: Sequence[Effect], strict: bool, *, rank: int = 0) -> None:
    """Log a line for each effect, and a warning for each optimisation without effect.

    Call it twice: once the model is built, before any step takes time, and after the first step for effects that only a
    step shows.

    Args:
        effects: the optimisations that are on.
        strict: whether an optimisation without effect ends the run.
        rank: only rank 0 logs.

    Raises:
        EffectError: ``strict``, and some optimisations have no effect; the message names all of them.
    """
    inactive = [effect for effect in effects if effect.is_inactive]
    for effect in effects if rank == 0 else ():
        if effect not in inactive:
            log.info("%s", effect)
        elif not strict:
            log.warning("%s", effect)
    if not (strict and inactive):
        return
    names = ", ".join(effect.name for effect in inactive)
    flags = ", ".join(effect.flag for effect in inactive)
    raise EffectError(
        f"asked for but without effect: {names}.",
        where="--strict",
        why="; ".join(str(effect) for effect in inactive),
        fix=f"leave out {flags}; or leave out --strict, and the run continues without",
    )


def over_stages(effects: Sequence[Effect], ranks: World, pipeline_ranks: int) -> list[Effect]:
    """The effects of the whole model, the same on every rank, from the effects of each rank's part.

    All ranks must give the same effects with the same parts in the same order: the config decides which are on.

    Args:
        effects: this rank's.
        ranks: all ranks; ranks with the same part of the model give the same counts.
        pipeline_ranks: ranks that together have one copy of the model.
    """
    pairs = [pair for effect in effects for pair in ((effect.count, effect.total or 0), *effect.parts.values())]
    counts = torch.tensor(pairs, dtype=torch.int64)
    sums = iter((ranks.sum(counts.to(ranks.device)) // (ranks.size // pipeline_ranks)).tolist())
    whole = []
    for effect in effects:
        count, total = next(sums)
        parts = {name: tuple(next(sums)) for name in effect.parts}
        whole.append(replace(effect, count=count, total=None if effect.total is None else total, parts=parts))
    return whole


def of_low_precision(precision: LowPrecision, parts: Sequence[Converted], shards: int) -> list[Effect]:
    """``float8: 56 converted, 1 kept: output (sensitive) (tensorwise)``, and the weights that are gathered in float8.

    Args:
        precision: low precision of the whole model.
        parts: conversion reports of this rank's stages.
        shards: ranks that FSDP splits a weight over.
    """
    dense = precision.dense
    name = kind(precision.dense)
    what = summary(precision.choices).partition(" ")[2]
    linears = sum(part.linears for part in parts)
    flag = f"--quantize.dense.{name}.enable"
    effects = [Effect(name=name, flag=flag, count=linears, what=what, reason=precision.how)]
    if name == "float8" and dense.float8.enable_fsdp_float8_all_gather:
        scales = "of all at once after each update" if dense.float8.precompute_scale else "one by one"
        how = f"scales {scales}" if shards > 1 else "cast but not sent: each rank has whole weights"
        if any(part.gathered < part.linears for part in parts):
            how += "; the rows of the others do not divide into shards"
        effects.append(
            Effect(
                name="float8_all_gather",
                flag="--quantize.dense.float8.enable_fsdp_float8_all_gather",
                count=sum(part.gathered for part in parts),
                total=linears,
                what="weights are gathered in float8",
                reason=how,
            )
        )
    return effects


def of_lora(job: Job, built: Built) -> Effect:
    """``lora: 210 linears, rank 16, 4.9 M of 139.4 M parameters trained``, of this rank's stages."""
    facts = job.facts
    lora = job.config.lora
    names = {name.rpartition(".")[0] for name, _ in named_parameters(built.parts) if name.endswith(".lora_A")}
    numbers = facts.num_trained, facts.num_parameters + facts.num_trained
    trained, total = (f"{count / 1e6:,.1f} M" if count >= 10**5 else f"{count:,}" for count in numbers)
    what = f"linears, rank {lora.rank}, {trained} of {total} parameters trained"
    return Effect(name="lora", flag="--lora.rank", count=len(names), what=what)


def lines_of_base(job: Job) -> list[str]:
    """Which frozen linear layers are kept in fewer bits, and why the others are not."""
    lora = job.config.lora
    linears = block_linears(job.facts)
    kept = {name: shape for name, shape in linears.items() if not is_quantized(lora, shape)}
    lines = [f"lora: base {lora.base}: {len(linears) - len(kept)} of {len(linears)} linears of the blocks"]
    reasons = Counter(f"{numberless(name)} ({indivisible(shape)})" for name, shape in kept.items())
    dtype = job.config.training.mixed_precision_param
    return lines + [f"lora: {count} stay in {dtype}: {reason}" for reason, count in reasons.items()]


def of_activation_checkpoint(parts: Sequence[CheckpointedBlocks]) -> Effect:
    """``activation_checkpoint: 8 of 8 blocks (every block keeps its input only)``."""
    return Effect(
        name="activation_checkpoint",
        flag="--activation_checkpoint.mode",
        count=sum(part.count for part in parts),
        total=sum(part.total for part in parts),
        what="blocks",
        reason=parts[0].description,
    )


def of_save_ops(parts: Sequence[CheckpointedBlocks]) -> list[Effect]:
    """Number of results that each entry of ``save_ops`` keeps per block. Call after the first step."""
    found = [part.matches() for part in parts]
    return [
        Effect(
            name=f"save_ops {entry}",
            flag=f"{entry} of --activation_checkpoint.save_ops",
            count=max(matches[entry] for matches in found),
            what="results stay per block",
        )
        for entry in found[0]
    ]


def over_ranks(effects: Sequence[Effect], ranks: World) -> list[Effect]:
    """Effects that count within one block, as the largest count of any rank; the same on every rank."""
    counts = torch.tensor([effect.count for effect in effects], dtype=torch.int64, device=ranks.device)
    largest = ranks.gather(counts).amax(dim=0).tolist()
    return [replace(effect, count=count) for effect, count in zip(effects, largest, strict=True)]


def of_document_masks(ranks: World) -> list[Effect]:
    """``document_mask varlen: 16 of 16 masks``: masks that each kernel took since the start, over all ranks."""
    names = ("varlen", "flex", "sdpa")
    counts = torch.tensor([masks_made[name] for name in names], dtype=torch.int64, device=ranks.device)
    found: list[int] = ranks.sum(counts).tolist()
    return [
        Effect(
            name=f"document_mask {name}",
            flag="--model.attention_mask document",
            count=n,
            total=sum(found),
            what="masks",
        )
        for name, n in zip(names, found, strict=True)
        if n
    ]


def of_compile(num_blocks: int, report: CompileReport) -> Effect:
    """``compile: 8 of 8 blocks, 1 graph``. Call after ``report.lines()`` or ``report.step``.

    Args:
        num_blocks: what ``compile_blocks`` returned.
        report: counts from before the first step.
    """
    graphs = counted(report.graphs, "graph")
    return Effect(
        name="compile",
        flag="--compile.enable",
        count=num_blocks if report.graphs else 0,
        total=num_blocks,
        what=f"blocks, {graphs}",
        reason=report.reason if num_blocks else "",
    )


def of_async_tensor_parallel(async_tp: AsyncTensorParallel) -> Effect:
    """Collectives that were fused with a matmul, of all that could be, in both directions and in each of them;
    ``async_tp: 0 fused (needs CUDA)`` on a CPU.
    """
    parts = async_tp.count()
    fused, candidates = map(sum, zip(*parts.values(), strict=True))
    return Effect(
        name="async_tp",
        flag="--parallelism.enable_async_tensor_parallel",
        count=fused,
        total=candidates or None,
        what="fused",
        reason=async_tp.reason(),
        parts={} if async_tp.missing else parts,
    )


def of_cuda_only(config: ProfilerConfig, device_type: str) -> list[Effect]:
    """``memory_snapshot: 0 written (needs CUDA)``: settings that were asked for but have no effect on a CPU."""
    rows = (("memory_snapshot", config.memory_snapshot, "written"), ("nvtx", config.nvtx, "ranges"))
    found = [(name, what) for name, is_on, what in rows if is_on and device_type == "cpu"]
    return [
        Effect(name=name, flag=f"--profiler.{name}", count=0, what=what, reason="needs CUDA") for name, what in found
    ]


DEFAULT_SAVE_OPS = ActivationCheckpointConfig().save_ops

_WIDE_ATTENTION = (
    "float32 attention on a GPU is slow: neither cuDNN nor FlashAttention supports it, and other kernels copy the keys "
    "and values for each query head; unless you need float32, use --training.mixed_precision_param bfloat16"
)
_OTHER_MASK = (
    "document masks so far: %s: one of the first %d steps since the start has a row with more than one document in 64 "
    "tokens, for which auto does not use varlen; --kernels.attention varlen does"
)

# forward and backward of a feed-forward of dim 4096, pytorch/ao#685: 43.2 ms in float16, 49.3 ms in float8, 26.2 ms in
# float8 compiled
_UNCOMPILED = (
    "low precision without --compile.enable is slower than high precision: each scale and cast is a kernel of its own; "
    "on an L20 1.14 times the time of float16 and 1.6 times its memory, compiled 0.61 times the time (pytorch/ao#685)"
)


class EffectWatch:
    """Effect counts of one run. Create it before anything is compiled.

    Args:
        job: the run, which says which optimisations are on.
        strict: whether an optimisation without effect ends the run.
    """

    def __init__(self, job: Job, *, strict: bool) -> None:
        self._config = job.config
        self._layout = job.mesh.layout
        self._ranks = job.ranks
        self._strict = strict
        self._job = job
        self._report = CompileReport(job.config.compile) if job.config.compile.enable else None
        is_async = job.config.parallelism.enable_async_tensor_parallel
        tp = job.mesh.tp
        self._async = enable_async_tensor_parallel(tp, job.ranks.device.type) if is_async and tp is not None else None
        self._blocks = 0
        self._checkpointed: list[CheckpointedBlocks] = []
        self._has_masks = has_mask(job.config, job.facts) and job.ranks.device.type == "cuda"
        self._masks: set[str] = set()

    def built(self, built: Built) -> None:
        """Log the effects that are known before the first step.

        Raises:
            EffectError: strict, and an optimisation has no effect.
        """
        self._blocks = sum(applied.compiled for applied in built.applied)
        self._checkpointed = [applied.checkpointed for applied in built.applied]
        effects = of_cuda_only(self._config.profiler, self._ranks.device.type)
        if built.precision:
            for line in built.precision.lines():
                log.info("%s", line)
            effects += of_low_precision(built.precision, built.converted, self._layout.fsdp)
            if not self._report and self._ranks.rank == 0:
                log.warning("%s", _UNCOMPILED)
        is_wide = self._config.training.mixed_precision_param == "float32"
        if is_wide and self._ranks.device.type == "cuda" and self._ranks.rank == 0:
            log.warning("%s", _WIDE_ATTENTION)
        if self._config.lora.is_on:
            effects.append(of_lora(self._job, built))
            for line in lines_of_base(self._job) if self._config.lora.base != "keep" else ():
                log.info("%s", line)
        if self._config.activation_checkpoint.mode != "none":
            effects.append(of_activation_checkpoint(self._checkpointed))
        if self._async and self._async.missing:
            effects.append(of_async_tensor_parallel(self._async))
        self._check(effects)
        if self._report:
            self._report.start()

    def step(self, number: int) -> None:
        """Log effects that a step shows. Call after each step, with the number of steps that this process has done.

        Raises:
            EffectError: strict, and after the first step an optimisation had no effect.
        """
        if self._report:
            self._report.step(number)
        if number > 1:
            if self._has_masks and masks_made.keys() - self._masks:  # each rank has documents of its own
                log.warning(_OTHER_MASK, "; ".join(f"{name} {count}" for name, count in masks_made.items()), number)
            self._masks |= masks_made.keys()
            return
        self._masks = {*masks_made}
        effects: list[Effect] = []
        if self._has_masks:
            check(of_document_masks(self._ranks), self._strict, rank=self._ranks.rank)
        if self._config.activation_checkpoint.save_ops != DEFAULT_SAVE_OPS:
            kept = over_ranks(of_save_ops(self._checkpointed), self._ranks)
            check(kept, self._strict, rank=self._ranks.rank)
        if self._report:
            for line in self._report.lines():
                if self._report.graphs:  # without a graph, the effect's line says it
                    log.info("%s", line)
            effects.append(of_compile(self._blocks, self._report))
        if self._async and not self._async.missing:
            effects.append(of_async_tensor_parallel(self._async))
        self._check(effects)

    def _check(self, effects: list[Effect]) -> None:
        if effects:
            check(over_stages(effects, self._ranks, self._layout.pp), self._strict, rank=self._ranks.rank)
