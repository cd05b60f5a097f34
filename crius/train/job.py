"""The one room where all parts meet: a ``RunConfig`` and a place among the ranks, to a trained model."""

import contextlib
import functools
import json
import logging
import os
import platform
import time
from pathlib import Path

import torch
from torch import nn

import crius
from crius.config.batch import BatchSizes, batch_sizes
from crius.config.export import to_toml
from crius.config.run import RunConfig
from crius.data.corpus import Corpus
from crius.data.loader import BatchLoader, validation_batches
from crius.launch.environment import Placement
from crius.metrics.build import build_sinks
from crius.metrics.device import peak_tflops, total_memory_gib
from crius.metrics.ledger import TimeLedger
from crius.metrics.record import ValidationMetrics
from crius.metrics.sinks.base import Sink
from crius.models import registry
from crius.models.spec import ModelFacts
from crius.optim.build import build_optimizer
from crius.optim.lr_scheduler import WarmupStableDecay
from crius.parallel.apply import materialize, parallelize
from crius.parallel.dims import ParallelDims
from crius.parallel.fsdp import GradientSync
from crius.parallel.gradients import Gradients
from crius.parallel.mesh import Mesh, build_mesh
from crius.parallel.runtime import World, pick_device, world
from crius.train.guard import UpdateGuard
from crius.train.inputs import model_facts, open_run_corpus
from crius.train.logs import start_logging
from crius.train.loop import Loop, Meter, Validation
from crius.train.profiler import profiler
from crius.train.state import TrainState
from crius.train.step import accumulate

log = logging.getLogger("crius.train")


def run(config: RunConfig, run_dir: Path, started: float, placement: Placement) -> None:
    """Train ``config`` as one of the ranks of ``placement``.

    Args:
        config: the run; its rules have been checked.
        run_dir: folder of the run.
        started: ``time.monotonic()`` at the start of the command on this machine.
        placement: this process among the ranks.

    Raises:
        CriusError: whatever the user can mend, see ``crius.errors``.
    """
    start_logging(placement.rank, run_dir, is_own_file=placement.launcher == "local" and placement.rank > 0)
    ledger = TimeLedger(started)
    with contextlib.ExitStack() as stack:
        with ledger.phase("setup"):
            device = _set_up_torch(config, placement)
            dims = ParallelDims.build(config.parallelism, placement.world_size)
            sizes = batch_sizes(config.training, dims.batch)
            facts = model_facts(config)
            corpus = open_run_corpus(config, dims.batch)  # before the ranks meet, so that none waits in a collective
            ranks = stack.enter_context(
                world(
                    placement.rank,
                    placement.world_size,
                    device,
                    placement.rendezvous,
                    config.comm.timeout_seconds,
                )
            )
            mesh = build_mesh(dims, device.type)
            _log_run(config, run_dir, facts, sizes, mesh, device, corpus)
            sinks = _sinks(config, run_dir, ranks, stack)
            loop = assemble(config, facts, sizes, corpus, mesh, ranks, run_dir, ledger, sinks, stack)
        validation = loop.run()
        _finish(config, run_dir, ranks, ledger, loop.state, validation)


def build_model(config: RunConfig, facts: ModelFacts, mesh: Mesh, ranks: World) -> nn.Module:
    """The model, laid out on ``mesh``, its shards drawn from ``debug.seed``."""
    spec = registry.SPECS[config.model.name]
    with torch.device("meta"):
        model = registry.build(spec, facts)
    parallelize(model, spec.plan(facts), mesh, config.parallelism, config.training)
    begin = time.monotonic()
    materialize(model, model.init_rules(), ranks, config.training, config.debug.seed)  # type: ignore[operator]
    log.info("init: weights drawn from seed %d in %.1f s", config.debug.seed, time.monotonic() - begin)
    return model


def assemble(
    config: RunConfig,
    facts: ModelFacts,
    sizes: BatchSizes,
    corpus: Corpus,
    mesh: Mesh,
    ranks: World,
    run_dir: Path,
    ledger: TimeLedger,
    sinks: list[Sink],
    stack: contextlib.ExitStack,
) -> Loop:
    """Model, optimizer, data and reports, joined into the loop."""
    training = config.training
    model = build_model(config, facts, mesh, ranks)
    plan = registry.SPECS[config.model.name].plan(facts)
    optimizer = build_optimizer(model, plan, config.optimizer)
    sync = GradientSync(model, config.parallelism, training)
    if sizes.accumulation > 1:
        log.info("gradient_sync %s: %s", training.gradient_sync, sync.describe(mesh.dims, sizes.accumulation))
    loader = BatchLoader(
        corpus.train,
        global_batch_size=sizes.total,
        rank=mesh.batch_rank,
        num_ranks=mesh.dims.batch,
        prefetch=config.data.prefetch,
        pin_memory=ranks.device.type == "cuda",
    )
    stack.callback(loader.close)
    peak = config.metrics.peak_tflops or peak_tflops(ranks.device)
    return Loop(
        config=config,
        state=TrainState(model, optimizer, WarmupStableDecay(config.lr_scheduler, training.steps)),
        loader=loader,
        forward_backward=accumulate(model, sync, sizes.local),
        gradients=Gradients(list(model.parameters()), ranks.size, ranks.device),
        guard=UpdateGuard(model, optimizer, ranks, run_dir),
        validation=_validation(config, corpus, sizes, mesh, ranks),
        world=ranks,
        meter=Meter(facts.flops_per_token((training.seq_len + 1) / 2), peak, ranks),
        ledger=ledger,
        sinks=sinks,
        profiler=functools.partial(profiler, config.profiler, run_dir, ranks.rank),
    )


def _set_up_torch(config: RunConfig, placement: Placement) -> torch.device:
    """Threads, determinism and the device of this process."""
    if "OMP_NUM_THREADS" in os.environ or placement.local_world_size > 1:
        cores = max(1, (os.cpu_count() or 1) // placement.local_world_size)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", cores)))
    if config.debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return pick_device(config.training.device, placement.local_rank)


def _validation(config: RunConfig, corpus: Corpus, sizes: BatchSizes, mesh: Mesh, ranks: World) -> Validation | None:
    source = corpus.validation
    if source is None:
        return None
    return Validation(
        batches=lambda: validation_batches(
            source,
            num_samples=config.validation.num_samples,
            batch_size=sizes.local,
            rank=mesh.batch_rank,
            num_ranks=mesh.dims.batch,
        ),
        token_bytes=torch.from_numpy(corpus.token_bytes).to(ranks.device),
    )


def _sinks(config: RunConfig, run_dir: Path, ranks: World, stack: contextlib.ExitStack) -> list[Sink]:
    if ranks.rank != 0:
        return []
    (run_dir / "run.toml").write_text(to_toml(config), encoding="utf-8")
    sinks = build_sinks(config.metrics, run_dir, config.training.steps, total_memory_gib(ranks.device))
    for sink in sinks:
        stack.callback(sink.close)
    return sinks


def _log_run(
    config: RunConfig,
    run_dir: Path,
    facts: ModelFacts,
    sizes: BatchSizes,
    mesh: Mesh,
    device: torch.device,
    corpus: Corpus,
) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    log.info(
        "crius %s, torch %s, %s (%s%s), run %s",
        crius.__version__,
        torch.__version__,
        device.type,
        name,
        threads,
        run_dir,
    )
    log.info("mesh: %s = %d ranks", mesh.dims, mesh.dims.num_ranks)
    log.info(
        "model: %s/%s, %s parameters, %s in matmuls",
        config.model.name,
        config.model.flavor,
        f"{facts.num_parameters():,}",
        f"{facts.matmul_parameters():,}",
    )
    for line in corpus.description:
        log.info("data: %s", line)
    log.info(
        "batch: %d sequences of %d tokens a step = %d a microbatch x %d data-parallel ranks x %d microbatches",
        sizes.total,
        config.training.seq_len,
        sizes.local,
        mesh.dims.batch,
        sizes.accumulation,
    )


def _finish(
    config: RunConfig,
    run_dir: Path,
    ranks: World,
    ledger: TimeLedger,
    state: TrainState,
    validation: ValidationMetrics | None,
) -> None:
    """Say where the time went; rank 0 writes ``summary.json``."""
    if ranks.rank != 0:
        return
    wall = ledger.wall()
    log.info("time: %s", ledger.summary())
    summary = {
        "steps": state.step,
        "tokens": state.tokens,
        "val_loss": validation.val_loss if validation else None,
        "val_bits_per_byte": validation.val_bits_per_byte if validation else None,
        "wall_seconds": wall,
        "seconds": ledger.seconds,
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if validation:
        log.info("final validation: loss %.4f, %.4f bits per byte", validation.val_loss, validation.val_bits_per_byte)
