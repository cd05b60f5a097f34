"""``crius train --dry_run``: the real build, layout and step of one rank of many, on fake tensors in this process."""

import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from crius.config.layout import Layout
from crius.config.low_precision import is_enabled, kind, summary
from crius.config.pipeline import describe_stages
from crius.config.resolve import caps_scores
from crius.config.run import RunConfig
from crius.config.training import CompileConfig
from crius.errors import ConfigError, LayoutError
from crius.kernels.choice import applied
from crius.models.decoder import check_decoder
from crius.models.description import ModelDescription
from crius.parallel.mesh import Mesh, build_mesh
from crius.parallel.runtime import fake_world
from crius.tools.dry_run.extrapolate import FEW, Extrapolation
from crius.tools.dry_run.measure import DryJob, measure_whole
from crius.tools.dry_run.memory import Values, kinds_of
from crius.tools.dry_run.stages import pipeline, stage_report
from crius.tools.dry_run.table import DryRunReport, RankReport, StageReport
from crius.train.build import LowPrecision, on_meta, planned
from crius.train.inputs import describe_model, run_modules
from crius.train.setup import run_kernels
from crius.untrusted import parse_json


def dry_run(
    config: RunConfig,
    num_ranks: int,
    rank: int,
    started: float,
    *,
    extrapolate: bool = True,
    imbalance: float = 1.0,
) -> DryRunReport:
    """Cost of one step of ``config`` on ``rank`` of ``num_ranks``, and under pipeline parallelism also of each stage.

    Nothing is allocated, no other process is started and no data is opened.

    Args:
        config: the run, resolved, with the decisions that depend on memory; its rules have been checked.
        num_ranks: ranks of the layout.
        rank: rank to simulate, from 0.
        started: ``time.monotonic()`` at the start of the command.
        extrapolate: extrapolate from a few blocks and microbatches to many, which gives the same numbers sooner.
        imbalance: rows for the experts of the rank, divided by the mean of the ranks that share them.

    Raises:
        LayoutError: there is no such rank, or no such imbalance.
        ConfigError: a setting cannot run on fake tensors.
    """
    if not 0 <= rank < num_ranks:
        raise LayoutError(
            f"there is no rank {rank} among {num_ranks}.", where="--dry_run_rank", fix=f"use 0 to {num_ranks - 1}"
        )
    config, left_out = _eager(config)
    layout = Layout.of(config.parallelism, num_ranks)
    left_out += _load(layout, imbalance)
    device = torch.device("cpu" if config.training.device == "cpu" else "cuda")
    with fake_world(rank, num_ranks) as world, _quiet(), applied(run_kernels(config, device)):
        facts = describe_model(config)
        mesh = build_mesh(layout, world.device.type, has_experts=facts.num_experts > 0)
        check_decoder(on_meta(config, facts), facts)
        precision, lines = _precision(config, facts)
        if facts.adapted:
            lines.append(f"lora: parameters counts the {facts.num_trained:,} trained ones, params GiB counts all")
        job = DryJob(config, facts, mesh, world, precision, imbalance)
        groups = _axes(mesh)
        if layout.pp > 1:
            stages, ranks, extrapolation = pipeline(job, groups, extrapolate=extrapolate)
        else:
            stages, ranks, extrapolation = _whole(job, groups, extrapolate=extrapolate)
    tokens = job.sizes.total * config.training.seq_len
    return DryRunReport(
        model=f"{config.model.name}/{config.model.flavor}",
        layout=layout.axes,
        num_ranks=num_ranks,
        rank=rank,
        num_microbatches=job.sizes.accumulation,
        microbatch=f"{job.sizes.local} x {config.training.seq_len}",
        stages=stages,
        ranks=ranks,
        model_flops=job.facts.flops_per_token(config.training.seq_len) * tokens / num_ranks,
        notes=[*_measured(extrapolation, job), *lines, *left_out],
        seconds=time.monotonic() - started,
    )


def _eager(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """``config`` without the features that fake tensors cannot show, and a line about each."""
    if config.activation_checkpoint.mode == "memory_budget":
        raise ConfigError(
            "a dry run cannot show activation_checkpoint.mode memory_budget.",
            where="--activation_checkpoint.mode",
            why="torch.compile chooses the ops to recompute, but fake tensors are not compiled",
            fix="--activation_checkpoint.mode selective, or leave out --dry_run",
        )
    lines = []
    if config.parallelism.pipeline_parallel_degree > 1 and (about_stages := describe_stages(config.parallelism)):
        lines.append(about_stages)
    if config.compile.enable:
        lines.append("compile is left out: memory and operators are those of eager mode")
    if config.parallelism.enable_async_tensor_parallel:
        lines.append("async tensor parallelism is left out: the collectives include the ones that it would fuse")
    if config.training.enable_cpu_offload:
        lines.append("cpu offload: memory of the host and of the device are counted together")
    caps = caps_scores(describe_model(config)) and config.training.device != "cpu"
    if config.kernels.attention == "flex" or caps:
        lines.append("flex is left out: memory is that of kernels.attention auto")
        config = replace(config, kernels=replace(config.kernels, attention="auto"))
    if caps:  # by flex, which keeps as much
        words = json.dumps({**parse_json(config.model.words or "{}"), "attention_softcap": 0.0})
        config = replace(config, model=replace(config.model, words=words))
    parallelism = replace(config.parallelism, enable_async_tensor_parallel=False)
    return replace(config, compile=CompileConfig(), parallelism=parallelism), lines


def _precision(config: RunConfig, facts: ModelDescription) -> tuple[LowPrecision | None, list[str]]:
    """Conversions on a device that has the matmuls, and a line about them."""
    dense = config.quantize.dense
    if not is_enabled(dense):
        return None, []
    name = kind(dense)
    if name == "mxfp8":  # torchao's casts are CUDA kernels, which do not support fake tensors of the host
        found = planned(config, facts, accelerated=True, emulated="fake tensors")
        return found, [f"mxfp8: {summary(found.choices)}; emulated, which keeps more temporaries than the real matmuls"]
    asked = dense.float8.emulate
    found = planned(config, facts, accelerated=True, emulated="as asked" if asked else "")
    where = "emulated, as asked" if asked else "as on a device that has float8 matmuls"
    return found, ["; ".join(filter(None, (f"float8: {summary(found.choices)}", where, found.advice)))]


def _load(layout: Layout, imbalance: float) -> list[str]:
    """Lines about the load of experts that several ranks share."""
    if layout.ep == 1 and imbalance != 1:
        raise LayoutError(
            f"--dry_run_imbalance {imbalance:g} has no effect: no experts are shared between ranks.",
            where="--dry_run_imbalance",
            fix="leave it out; it is for --parallelism.expert_parallel_degree above 1",
        )
    if not 1 <= imbalance <= layout.ep:
        raise LayoutError(
            f"--dry_run_imbalance {imbalance:g} is not between 1 and {layout.ep}, the ranks that share the experts.",
            where="--dry_run_imbalance",
            why="a rank gets at least its even share of all tokens, and at most all of them",
            fix=f"--dry_run_imbalance {layout.ep}",
        )
    if layout.ep == 1:
        return []
    return [f"experts: this rank gets {imbalance:g} times the mean of the {layout.ep} ranks that share them"]


def _axes(mesh: Mesh) -> dict[str, str]:
    """Name of each process group of this rank to its axis; ``fsdp=cp`` if one group serves as both."""
    views = (mesh.fsdp, mesh.tp, mesh.cp, mesh.pp, mesh.experts, mesh.ep)
    found: dict[str, str] = {}
    for view in filter(None, views):
        for index, axis in enumerate(view.mesh_dim_names or ()):
            name = str(view.get_group(index).group_name)
            found[name] = f"{found[name]}={axis}" if name in found else axis
    world = dist.group.WORLD
    assert world is not None
    return {str(world.group_name): "world"} | found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the log lines of the build, which runs several times and partly with other sizes."""
    logger = logging.getLogger("crius")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _measured(extrapolation: Extrapolation, job: DryJob) -> list[str]:
    lines = []
    if extrapolation.blocks:
        sizes = ", ".join(map(str, sorted(extrapolation.blocks)))
        lines.append(f"measured on {FEW[0]} and {FEW[1]} blocks, extrapolated to {sizes}")
    count = job.sizes.accumulation
    if job.mesh.layout.pp > 1:
        lines.append(
            f"three microbatches were run on each distinct stage; the third stands for all later ones of {count}"
        )
    elif extrapolation.microbatches:
        lines.append(f"measured on {FEW[0]} and {FEW[1]} microbatches, extrapolated to {count}")
    return lines


def _whole(
    job: DryJob, groups: dict[str, str], *, extrapolate: bool
) -> tuple[list[StageReport], list[RankReport], Extrapolation]:
    """The model of every rank without a pipeline."""
    names = [module.name for module in run_modules(job.config, job.facts)]

    def measure(names: Sequence[str], num_microbatches: int) -> Values:
        return measure_whole(job, names, num_microbatches, groups)

    extrapolation = Extrapolation(measure, job.config, job.facts, full=not extrapolate)
    values = extrapolation.of(names, job.sizes.accumulation)
    places = dict.fromkeys(key[:-1] for key in values if key[0] == "peak")
    place = max(places, key=lambda key: kinds_of(values, *key).total())
    peak = RankReport(0, [0], kinds_of(values, *place), _moment(*place[1:]))
    return [stage_report(0, 0, names, values, Counter())], [peak], extrapolation


def _moment(phase: str, microbatch: str, block: str) -> str:
    """A place of a measurement in words."""
    known = {"head": "before the first block", "tail": "after the last block", "0": "first block", "-1": "last block"}
    where = known.get(block, f"block {block}")
    return f"{phase}, {where}" if phase in ("forward", "backward") else phase
