"""The one room where all parts meet: a ``RunConfig`` and a place among the ranks, to a trained model."""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import platform
import signal
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.tensor.parallel import loss_parallel

import crius
from crius.config.layout import Layout
from crius.config.run import RunConfig
from crius.config.toml_file import to_toml
from crius.data.corpus import Corpus
from crius.data.loader import Batch, BatchLoader, validation_batches
from crius.data.sample_log import Attempt, SampleLog, next_attempt
from crius.host import keep_freed_memory
from crius.kernels import choice as kernels
from crius.launch.environment import Placement, sees_own_gpu
from crius.launch.stop import PREEMPTED, catch_stop_signals
from crius.metrics.build import build_sinks
from crius.metrics.device import machine_of, peak_tflops, total_memory_gib
from crius.metrics.ledger import TimeLedger
from crius.metrics.record import PlanSink, Sink
from crius.models import registry
from crius.optim.build import build_optimizer
from crius.optim.lr_scheduler import WarmupStableDecay
from crius.parallel.compile import prepare_compile
from crius.parallel.context import ContextShard
from crius.parallel.mesh import Mesh, build_mesh
from crius.parallel.runtime import World, pick_device, world
from crius.run_file import write_run_file
from crius.shards import named_parameters
from crius.train.build import Built, Job, build_gradients, build_model, build_runner, keep_scales, run_optimizer
from crius.train.checkpoints import Checkpoints, Parts
from crius.train.effects import EffectWatch
from crius.train.guard import UpdateGuard
from crius.train.inputs import describe_model, describe_rows, open_run_corpus, with_boundaries
from crius.train.loop import Loop, Validation
from crius.train.progress import Preempted, Recovery, is_complete, one_layout, write_summary
from crius.train.reports import Meter, StepReports
from crius.train.saving import log_save_plan
from crius.train.sdc import build_copies, build_sdc
from crius.train.setup import decide, profiler, run_kernels, start_logging
from crius.train.state import AfterUpdate, TrainState
from crius.train.tools import Tools, explained

log = logging.getLogger("crius.train")


def run(
    config: RunConfig,
    run_dir: Path,
    started: float,
    placement: Placement,
    *,
    strict: bool = False,
    tools: Tools = Tools(),  # noqa: B008
) -> None:
    """Train ``config`` as one of the ranks of ``placement``.

    Args:
        config: the run; its rules have been checked.
        run_dir: folder of the run.
        started: ``time.monotonic()`` at the start of the command on this machine.
        placement: this process among the ranks.
        strict: an optimisation that is on and does nothing ends the run.
        tools: what stands around the run.

    Raises:
        CriusError: whatever the user can mend, see ``crius.errors``.
    """
    config = with_boundaries(config, run_dir)
    start_logging(placement.rank, run_dir, is_own_file=placement.launcher == "local" and placement.rank > 0)
    # before anything slow, so that a signal during the start is not lost
    stop = catch_stop_signals(has_launcher=placement.launcher == "local", scratch=placement.scratch)
    ledger = TimeLedger(started)
    recovery = Recovery(placement, ledger)
    with explained(run_dir, placement.rank, tools.explain) as story, contextlib.ExitStack() as stack:
        stack.enter_context(tools.around(config, placement))
        with ledger.phase("initialise"):
            device = set_up_torch(config, placement)
            layout = Layout.of(config.parallelism, placement.world_size)
            facts = describe_model(config)
            machine = machine_of(device, placement.world_size, placement.local_world_size)
            story.begin(device, machine, config, facts)
            corpus = open_run_corpus(config, layout.batch)  # before the ranks meet, so that none waits in a collective
            ranks = stack.enter_context(_world(config, placement, device))
            mesh = build_mesh(one_layout(layout, ranks), device.type)
            _log_run(Job(config, facts, mesh, ranks), run_dir, corpus)
            sinks: list[Sink] = []
            story.config = decided = decide(config, facts, ranks, tools.recomputation)
            loop = assemble(Job(decided, facts, mesh, ranks), corpus, run_dir, ledger, sinks, stack, strict=strict)
            config = dataclasses.replace(decided, activation_checkpoint=config.activation_checkpoint)  # auto: anew
        step = 0
        if config.checkpoint.is_enabled:
            with ledger.phase("load"):
                kept = Parts(loop.state, loop.guard, loop.loader, corpus.train.identity, ledger)
                checkpoints = Checkpoints(config, run_dir, mesh, ranks, placement, kept)
                loop, step = _resume(loop, checkpoints, recovery, Job(config, facts, mesh, ranks))
                samples = stack.enter_context(contextlib.closing(_sample_log(run_dir, corpus, loop, mesh, ranks)))
                loop = dataclasses.replace(loop, samples=samples)
        with ledger.phase("initialise"):
            watch = tools.watch(decided, facts, machine, ledger, run_dir) if tools.watch and ranks.rank == 0 else None
            sinks += [*_sinks(config, run_dir, ranks, stack, step), *([watch] if watch else [])]
        recovery.ready()
        _run(tools.prepare(dataclasses.replace(loop, stop=stop)), run_dir, placement, watch)


def _resume(loop: Loop, checkpoints: Checkpoints, recovery: Recovery, job: Job) -> tuple[Loop, int]:
    """``loop`` with checkpoints, from the newest of which it goes on, and the step that it was saved after."""
    resumed = checkpoints.resume()
    recovery.resumed(resumed.step, resumed.seconds)
    keep_scales(job, loop.state.parts)  # of the weights that were loaded
    follow = functools.partial(_in_turn, loop.after_step, recovery.step)
    return dataclasses.replace(loop, checkpoints=checkpoints, after_step=follow), resumed.step


def _world(config: RunConfig, placement: Placement, device: torch.device) -> contextlib.AbstractContextManager[World]:
    seconds = config.comm.timeout_seconds
    return world(placement.rank, placement.world_size, device, placement.rendezvous, seconds)


def _run(loop: Loop, run_dir: Path, placement: Placement, watch: PlanSink | None) -> None:
    """Train and write the summary; leave with an exit code of its own where the run was asked to stop."""
    step, steps = loop.state.step, loop.config.training.steps
    was_complete = loop.world.gather_json(is_complete(run_dir, step, steps))[0]
    if step >= steps:
        rest = "" if was_complete or not loop.config.validation.interval else "; the last validation is made up for"
        log.info("nothing to train: %d of %d steps are done%s", step, steps, rest)
    validation, stopped = None, None
    try:
        validation = dataclasses.replace(loop, is_complete=was_complete).run()
    except Preempted as end:
        stopped = end
        where = loop.checkpoints.folder.disk.where if loop.checkpoints else ""
        fate = f"all of them saved in {where}" if where else "all of them lost: checkpoint.enable is off"
        fate += "; the last validation is not done" if end.step == steps else ""
        log.info("stopped by %s after %d of %d steps, %s", signal.Signals(end.signal).name, end.step, steps, fate)
    if loop.world.rank == 0 and not was_complete:
        write_summary(run_dir, loop.ledger, loop.state, validation, watch, stopped)
    if stopped:
        # a script may start again what exits with 75, but not what a person stopped
        is_ctrl_c = stopped.signal == signal.SIGINT and placement.launcher != "local"
        raise SystemExit(PREEMPTED if loop.checkpoints and not is_ctrl_c else 128 + stopped.signal)


def assemble(
    job: Job,
    corpus: Corpus,
    run_dir: Path,
    ledger: TimeLedger,
    sinks: list[Sink],
    stack: contextlib.ExitStack,
    *,
    strict: bool = False,
) -> Loop:
    """Model, optimizer, data and reports, joined into the loop. What the machine decides of ``job`` is decided."""
    config, facts, mesh, ranks, training = job.config, job.facts, job.mesh, job.ranks, job.config.training
    if mesh.tp:
        stack.enter_context(loss_parallel())
    watch = EffectWatch(job, strict=strict)
    built = build_model(job)
    parameters = named_parameters(built.parts)
    optimizer = build_optimizer(parameters, facts.plan, run_optimizer(config), seed=config.debug.seed)
    watch.built(built)
    shard = ContextShard(mesh.cp, config.parallelism.context_parallel_method)
    runner = build_runner(job, built)
    loader = BatchLoader(
        corpus.train,
        global_batch_size=job.sizes.total,
        rank=mesh.batch_rank,
        num_ranks=mesh.layout.batch,
        prefetch=config.data.prefetch,
        pin_memory=ranks.device.type == "cuda",
    )
    stack.callback(loader.close)
    state = TrainState(built.parts, optimizer, WarmupStableDecay(config.lr_scheduler, training.steps))
    gradients = build_gradients(job, parameters)
    if mesh.pp is None:  # a bad gradient of a later stage would be seen on the rank of the first one
        gradients.watch(built.parts[0])
    after = build_copies(job, parameters), AfterUpdate(built.parts, facts.buffers, ranks)
    sdc = build_sdc(job, built, runner)
    guard = UpdateGuard(config.stability, state, parameters, gradients, built.names, ranks, run_dir, *after)
    peak = config.metrics.peak_tflops or peak_tflops(ranks.device)
    meter = Meter(facts.flops_per_token((training.seq_len + 1) / 2), peak, ranks)
    return Loop(
        config=config,
        layout=mesh.layout,
        state=state,
        loader=loader,
        place=functools.partial(_place, config, ranks.device, shard),
        runner=runner,
        sdc=sdc,
        gradients=gradients,
        guard=guard,
        validation=_validation(job, corpus),
        world=ranks,
        ledger=ledger,
        reports=StepReports(meter, ledger, guard, sinks),
        after_step=functools.partial(_after_step, job, built, watch, ledger),
        profiler=functools.partial(profiler, config.profiler, run_dir, ranks.rank),
    )


def _sample_log(run_dir: Path, corpus: Corpus, loop: Loop, mesh: Mesh, ranks: World) -> SampleLog:
    """The log of the samples of this data-parallel rank, on the first rank of those that have the same ones."""
    is_first = all(axis is None or axis.get_local_rank() == 0 for axis in (mesh.tp, mesh.cp, mesh.pp))
    start = Attempt(
        attempt=ranks.gather_json(next_attempt(run_dir) if ranks.rank == 0 else None)[0],
        after=loop.state.step,
        sample=loop.loader.state_dict()["next_sample"],
        ranks=mesh.layout.batch,
        batch=loop.loader.global_batch_size,
        epoch_samples=corpus.train.num_samples,
        source=hashlib.sha256(corpus.train.identity.encode()).hexdigest()[:16],
    )
    return SampleLog(run_dir, mesh.batch_rank if is_first else None, start)


def _in_turn(first: Callable[[int, int], None], then: Callable[[int], None], step: int, done: int) -> None:
    first(step, done)
    then(step)


def _after_step(job: Job, built: Built, watch: EffectWatch, ledger: TimeLedger, step: int, done: int) -> None:
    """What follows each step, whatever became of its update."""
    keep_scales(job, built.parts)
    watch.step(done)
    ledger.move("compute", "compile", watch.compile_seconds - ledger.seconds.get("compile", 0.0))


def _place(config: RunConfig, device: torch.device, shard: ContextShard, batch: Batch) -> Batch:
    """This rank's tokens of a batch of whole sequences, on the device."""
    placed = batch.to(device)
    if config.training.reproducible:
        placed = placed.grouped(config.training.virtual_shards)
    if config.model.attention_mask != "document":
        placed = placed.counted()
    return placed.map(shard.slice)


def set_up_torch(config: RunConfig, placement: Placement) -> torch.device:
    """Threads, determinism, compiler, kernels and the device of this process."""
    threads = torch.get_num_threads()
    if config.training.reproducible:
        threads = 1  # the last bits of sums depend on the number of threads
    elif "OMP_NUM_THREADS" in os.environ or placement.local_world_size > 1:
        cores = max(1, (os.cpu_count() or 1) // placement.local_world_size)
        threads = int(os.environ.get("OMP_NUM_THREADS", cores))
    if threads != torch.get_num_threads():  # a number that was set, even the same, costs attention a quarter
        torch.set_num_threads(threads)
    if config.debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    own_gpu = sees_own_gpu(placement, os.environ)
    device = pick_device(config.training.device, placement.local_rank, sees_own_gpu=own_gpu)
    if config.compile.enable:
        for_cpu = device.type == "cpu"
        prepare_compile(config.compile, local_ranks=placement.local_world_size, for_cpu=for_cpu)
    if device.type == "cpu":
        keep_freed_memory()
    kernels.apply(run_kernels(config, device))
    return device


def _validation(job: Job, corpus: Corpus) -> Validation | None:
    source, sizes, mesh = corpus.validation, job.sizes, job.mesh
    if source is None:
        return None
    return Validation(
        batches=lambda: validation_batches(
            source,
            num_samples=job.config.validation.num_samples,
            batch_size=sizes.local * (sizes.accumulation if mesh.pp else 1),  # a pipeline needs all its microbatches
            rank=mesh.batch_rank,
            num_ranks=mesh.layout.batch,
        ),
        token_bytes=torch.from_numpy(corpus.token_bytes),
    )


def _sinks(
    config: RunConfig, run_dir: Path, ranks: World, stack: contextlib.ExitStack, resumed_step: int
) -> list[Sink]:
    if ranks.rank != 0:
        return []
    write_run_file(run_dir / "run.toml", _imports() + to_toml(config), log.warning)
    sinks = build_sinks(config.metrics, run_dir, config.training.steps, total_memory_gib(ranks.device), resumed_step)
    for sink in sinks:
        stack.callback(sink.close)
    return sinks


def _imports() -> str:
    """A comment: which modules the command line named. A configuration cannot name one, for it runs no code."""
    return "".join(f"# --import {name}\n" for name in registry.IMPORTED)


def _log_run(job: Job, run_dir: Path, corpus: Corpus) -> None:
    config, facts, layout, device = job.config, job.facts, job.mesh.layout, job.ranks.device
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
    log.info("kernels: %s", kernels.current())
    log.info("mesh: %s = %d ranks", layout.axes, layout.num_ranks)
    log.info(
        "model: %s/%s, %s parameters, %s in matmuls",
        config.model.name,
        config.model.flavor,
        f"{facts.num_parameters:,}",
        f"{facts.matmul_parameters:,}",
    )
    log.info("model: %s", describe_rows(config, facts.vocab_size, corpus.tokenizer.vocab_size))
    for line in corpus.description:
        log.info("data: %s", line)
    if job.ranks.rank == 0:
        log_save_plan(config, run_dir)
    log.info(
        "batch: %d sequences of %d tokens a step = %d a microbatch x %d data-parallel ranks x %d microbatches",
        job.sizes.total,
        config.training.seq_len,
        job.sizes.local,
        layout.batch,
        job.sizes.accumulation,
    )
