"""The module where all parts meet: a ``RunConfig`` and a place among the ranks become a trained model."""

import contextlib
import dataclasses
import functools
import logging
import os
import platform
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.tensor.parallel import loss_parallel

import crius
from crius.config.layout import Layout
from crius.config.run import RunConfig, replace_fields
from crius.config.toml_file import shown, to_toml
from crius.data.corpus import Corpus
from crius.data.loader import Batch, BatchLoader, validation_batches
from crius.data.mixture import MixedSource
from crius.data.rows import BAD_ROWS
from crius.data.sample_log import Attempt, SampleLog, log_mixture, next_attempt, source_digest
from crius.data.show import preview
from crius.errors import LayoutError
from crius.host import raise_open_files, usable_cores
from crius.kernels import choice as kernels
from crius.kernels.cpu.heap import keep_freed_memory
from crius.launch.environment import Placement, hosts_of_ranks, sees_own_gpu
from crius.launch.stop import PREEMPTED, catch_stop_signals
from crius.metrics.device import machine_of, peak_tflops, total_memory_gib
from crius.metrics.ledger import TimeLedger
from crius.metrics.loads import ExpertLoads
from crius.metrics.record import PlanSink, Sink, ValidationMetrics
from crius.metrics.sinks import build_sinks
from crius.models import registry
from crius.models.description import ModelDescription
from crius.new_folder import collect
from crius.optim.build import WarmupStableDecay, build_optimizer
from crius.parallel.compile import prepare_compile
from crius.parallel.context import ContextShard
from crius.parallel.mesh import build_mesh
from crius.parallel.runtime import World, let_segments_grow, pick_device, world
from crius.run_file import write_run_file
from crius.shards import named_parameters
from crius.train.build import Built, Job, build_gradients, build_model, build_runner, keep_scales, run_optimizer
from crius.train.checkpoints import Checkpoints, Parts
from crius.train.effects import EffectWatch
from crius.train.guard import UpdateGuard
from crius.train.inputs import describe_model, describe_rows, end_sample, open_run_data
from crius.train.loop import Loop, Preempted, Validation
from crius.train.pretrained import load_initial
from crius.train.reports import Meter, MixtureReport, Recovery, StepReports, is_complete, write_summary
from crius.train.saving import log_save_plan
from crius.train.sdc import build_copies, build_sdc
from crius.train.setup import (
    COMPILATIONS,
    HEADLINE,
    MARKED,
    decide,
    most_documents,
    note_start,
    profiler,
    record_memory,
    run_kernels,
    start_logging,
)
from crius.train.state import AfterUpdate, TrainState
from crius.train.tools import Tools, explained
from crius.units import counted
from crius.waiting import waiting

log = logging.getLogger("crius.train")


def run(
    config: RunConfig,
    run_dir: Path,
    started: float,
    placement: Placement,
    *,
    strict: bool = False,
    notes: Sequence[str] | None = None,
    tools: Tools = Tools(),  # noqa: B008
) -> None:
    """Train ``config`` as one of the ranks of ``placement``.

    Args:
        config: the run, resolved; its rules have been checked.
        started: ``time.monotonic()`` at the start of the command on this machine.
        strict: whether an optimisation that is on and has no effect ends the run.
        notes: see ``start_logging``.
        tools: functions of the command line around the run.

    Raises:
        CriusError: an error that the user can correct, see ``crius.errors``.
    """
    is_own_file = placement.launcher == "local" and placement.rank > 0
    start_logging(placement.rank, run_dir, is_own_file, notes)
    stop = catch_stop_signals(has_launcher=placement.launcher == "local", scratch=placement.scratch)
    ledger = TimeLedger(started, lambda: COMPILATIONS.seconds)
    recovery = Recovery(placement, ledger)
    with explained(run_dir, placement.rank, tools.explain) as story, contextlib.ExitStack() as stack:
        stack.enter_context(tools.around(config, placement))
        with ledger.phase("initialise"):
            device = set_up_torch(config, placement)
            layout = Layout.of(config.parallelism, placement.world_size)
            facts = describe_model(config)
            machine = machine_of(device, placement.world_size, placement.local_world_size)
            story.begin(device, machine, config, facts)
            most = config.training.steps if config.data.mix else 0
            with stop.ending(), waiting("reading the data"):
                config, corpus = open_run_data(config, layout.batch, run_dir)  # before the ranks meet, so none waits
            with stop.ending_soon(), waiting("waiting for the other ranks"):
                ranks = stack.enter_context(_meet(config, placement, device))
                mesh = build_mesh(one_layout(layout, ranks), device.type, has_experts=facts.num_experts > 0)
            job = Job(config, facts, mesh, ranks)  # a run that resumes from this one decides again
            _log_run(job, run_dir, corpus)
            story.config = decided = decide(config, facts, machine, ranks, tools.fit)
            _log_batch(dataclasses.replace(job, config=decided))
        checkpoints = _checkpoints(job, run_dir, placement, ledger) if config.checkpoint.is_enabled else None
        with ledger.phase("initialise"), waiting("building the model"):
            whole = dataclasses.replace(job, config=decided, is_loaded=bool(checkpoints and checkpoints.found))
            loop = assemble(whole, corpus, run_dir, ledger, stack, strict=strict)
        with ledger.phase("load"), waiting("loading the weights"):
            loop = _loaded(job, loop, checkpoints, corpus, run_dir, recovery, stack, most)
        loop = tools.texts(loop, corpus, run_dir)
        _log_headlines(loop, facts, corpus, run_dir)
        with ledger.phase("initialise"):
            watch = tools.watch(decided, facts, machine, ledger, run_dir) if tools.watch and ranks.rank == 0 else None
            loop.reports.sinks += [*_sinks(job, run_dir, corpus, stack, loop), *([watch] if watch else [])]
        recovery.ready()
        _run(tools.prepare(dataclasses.replace(loop, stop=stop)), run_dir, placement, watch)


def _loaded(
    job: Job,
    loop: Loop,
    checkpoints: Checkpoints | None,
    corpus: Corpus,
    run_dir: Path,
    recovery: Recovery,
    stack: contextlib.ExitStack,
    most: int,
) -> Loop:
    """``loop`` with the weights that it starts from: of a checkpoint, of another model, or as they were drawn."""
    if checkpoints is None:
        load_initial(job.config, job.ranks, loop.state)
    else:
        parts = Parts(loop.state, loop.guard, loop.loader, corpus.train.identity, loop.ledger, corpus.tokenizer)
        recovery.resumed(checkpoints.resume(parts), loop.state.step)
        loop.after_step.append(lambda step, done: recovery.step(step))
        samples = stack.enter_context(contextlib.closing(_sample_log(job, run_dir, corpus, loop)))
        loop = dataclasses.replace(_to_the_end(loop, checkpoints, most), checkpoints=checkpoints, samples=samples)
    keep_scales(job, loop.state.parts)  # of the loaded weights
    return loop


def _meet(config: RunConfig, place: Placement, device: torch.device) -> contextlib.AbstractContextManager[World]:
    seconds = config.comm.timeout_seconds
    hosts = hosts_of_ranks(place, os.environ)
    return world(place.rank, place.world_size, device, place.rendezvous, seconds, hosts, speaks=place.local_rank == 0)


def _checkpoints(job: Job, run_dir: Path, placement: Placement, ledger: TimeLedger) -> Checkpoints:
    """The checkpoints of the run, and the checkpoint to resume from, known before the weights are created."""
    with ledger.phase("load"):
        checkpoints = Checkpoints(job, run_dir, placement)
        checkpoints.find()
    return checkpoints


def one_layout(layout: Layout, ranks: World) -> Layout:
    """``layout``, the same on all ranks: ranks whose flags or whose ``parallelism.auto`` differ would hang.

    Raises:
        LayoutError: the layouts of the ranks differ.
    """
    found: list[str] = ranks.gather_json(str(layout))
    if len(set(found)) > 1:
        first = "; ".join(f"{text} on {found.count(text)}, first rank {found.index(text)}" for text in sorted({*found}))
        raise LayoutError(
            f"the layout differs between ranks: {first}.",
            where="[parallelism]",
            why="each host reads its own flags and files; parallelism.auto looks at its own GPUs",
            fix="give all hosts the same degrees: crius config show prints the degrees that parallelism.auto finds",
        )
    return layout


def _run(loop: Loop, run_dir: Path, placement: Placement, watch: PlanSink | None) -> None:
    """Train and write the summary; exit with a code of its own if the run was asked to stop."""
    step = loop.state.step
    steps = loop.config.training.steps
    was_complete = loop.world.gather_json(is_complete(run_dir, step, steps))[0]
    if step >= steps:
        rest = "" if was_complete or not loop.config.validation.interval else "; the last validation is done now"
        log.info("nothing to train: %d of %d steps are done%s", step, steps, rest)
    validations = list[ValidationMetrics]()
    stopped = None
    try:
        validations = dataclasses.replace(loop, is_complete=was_complete).run()
    except Preempted as end:
        stopped = end.signal
        where = loop.checkpoints.folder.disk.where if loop.checkpoints else ""
        fate = f"all of them saved in {where}" if where else "all of them lost: checkpoint.enable is off"
        fate += "; the last validation is not done" if end.step == steps else ""
        log.info("stopped by %s after %d of %d steps, %s", signal.Signals(stopped).name, end.step, steps, fate)
    if loop.world.rank == 0 and not was_complete:
        write_summary(run_dir, loop.ledger, loop.state, validations, watch, stopped)
    if stopped:
        # a script may restart a run that exits with 75, but not a run that a person stopped
        is_ctrl_c = stopped == signal.SIGINT and placement.launcher != "local"
        raise SystemExit(PREEMPTED if loop.checkpoints and not is_ctrl_c else 128 + stopped)


def assemble(
    job: Job, corpus: Corpus, run_dir: Path, ledger: TimeLedger, stack: contextlib.ExitStack, *, strict: bool = False
) -> Loop:
    """Model, optimizer, data and reports, joined into the loop. The machine's part of ``job`` is already decided."""
    config = job.config
    mesh = job.mesh
    ranks = job.ranks
    if mesh.tp:
        stack.enter_context(loss_parallel())
    watch = EffectWatch(job, strict=strict)
    built = build_model(job)
    parameters = named_parameters(built.parts)
    optimizer = build_optimizer(parameters, job.facts.plan, run_optimizer(job), seed=config.debug.seed)
    watch.built(built)
    shard = ContextShard(mesh.cp, config.parallelism.context_parallel_method)
    runner = build_runner(job, built)
    loader = BatchLoader(
        corpus.train,
        global_batch_size=job.sizes.total,
        rank=mesh.batch_rank,
        num_ranks=mesh.layout.batch,
        prefetch=config.data.prefetch,
        end_sample=end_sample(config, corpus, job.sizes.total),
        pin_memory=ranks.device.type == "cuda",
        most_documents=most_documents(config),
    )
    stack.callback(loader.close)
    state = TrainState(built.parts, optimizer, WarmupStableDecay(config.lr_scheduler, config.training.steps))
    gradients = build_gradients(job, parameters)
    if mesh.pp is None:  # a bad gradient of a later stage would show on the rank of the first stage
        gradients.watch(built.parts[0])
    after_update = AfterUpdate(built.parts, job.facts.buffers, ranks)
    sdc = build_sdc(job, built, runner)
    copies = build_copies(job, parameters)
    guard = UpdateGuard(
        config.stability, state, parameters, gradients, built.names, ranks, run_dir, copies, after_update
    )
    peak = config.metrics.peak_tflops or peak_tflops(ranks.device)
    meter = Meter(job.facts.flops_per_token(config.training.seq_len), peak, ranks)
    is_mixed = isinstance(corpus.train, MixedSource)
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
        mixture=MixtureReport(loader, built.parts, ranks, mesh.layout) if is_mixed else None,
        ledger=ledger,
        reports=StepReports(meter, ledger, guard, _loads(job, after_update)),
        after_step=[functools.partial(_after_step, job, built, watch)],
        profiler=profiler(config.profiler, run_dir, ranks.rank, ranks.device.type),
    )


def _loads(job: Job, after_update: AfterUpdate) -> ExpertLoads | None:
    if not job.facts.num_experts:
        return None
    has_bias = getattr(job.facts.config, "router_bias", False)
    advice = job.config.moe.advice(has_bias) if job.ranks.rank == 0 else ""
    return ExpertLoads(job.facts, after_update.take_totals, job.ranks.device, advice=advice)


def _to_the_end(loop: Loop, checkpoints: Checkpoints, most: int) -> Loop:
    """A resumed loop, with as many steps as its epochs have left, at most ``most`` unless that is 0; the batch may have
    changed. Logs a jump of its learning rate."""
    steps = loop.state.step + loop.loader.steps_left
    steps = min(steps, most or steps)
    if loop.loader.end_sample and steps != loop.config.training.steps:
        batch = loop.loader.global_batch_size
        log.info("the run ends after step %d, with %d sequences per step from here", steps, batch)
        loop.state.schedule = WarmupStableDecay(loop.config.lr_scheduler, max(1, steps))
        loop = dataclasses.replace(loop, config=replace_fields(loop.config, {"training.steps": steps}))
    checkpoints.take_steps(loop.config)
    return loop


def _sample_log(job: Job, run_dir: Path, corpus: Corpus, loop: Loop) -> SampleLog:
    """The sample log of this data-parallel rank, on the first of the ranks with the same samples."""
    mesh = job.mesh
    ranks = job.ranks
    is_first = all(axis is None or axis.get_local_rank() == 0 for axis in (mesh.tp, mesh.cp, mesh.pp))
    start = Attempt(
        attempt=ranks.gather_json(next_attempt(run_dir) if ranks.rank == 0 else None)[0],
        after=loop.state.step,
        sample=loop.loader.state_dict()["next_sample"],
        ranks=mesh.layout.batch,
        batch=loop.loader.global_batch_size,
        epoch_samples=corpus.train.num_samples,
        source=source_digest(corpus.train.identity),
        end=loop.loader.end_sample,
    )
    if isinstance(corpus.train, MixedSource) and ranks.rank == 0:
        log_mixture(run_dir, start.attempt, corpus.train.plan, corpus.train.place(start.sample))
    return SampleLog(run_dir, mesh.batch_rank if is_first else None, start)


def _after_step(job: Job, built: Built, watch: EffectWatch, step: int, done: int) -> None:
    """Work after each step, whether its update was made or not."""
    keep_scales(job, built.parts)
    watch.step(done)


def _place(config: RunConfig, device: torch.device, shard: ContextShard, batch: Batch) -> Batch:
    """This rank's tokens of a batch of whole sequences, on the device."""
    placed = batch.to(device)
    if config.training.reproducible:
        placed = placed.grouped(config.training.virtual_shards)
    if config.model.attention_mask != "document":
        placed = placed.counted()
    return placed.map_tokens(shard.slice)


def set_up_torch(config: RunConfig, placement: Placement) -> torch.device:
    """Limits, threads, determinism, compiler, kernels and the device of this process."""
    raise_open_files()
    threads = torch.get_num_threads()
    if config.training.reproducible:
        threads = 1  # the last bits of sums depend on the number of threads
    elif "OMP_NUM_THREADS" in os.environ or placement.local_world_size > 1:
        cores = max(1, usable_cores() // placement.local_world_size)
        threads = int(os.environ.get("OMP_NUM_THREADS", cores))
    if threads != torch.get_num_threads():  # setting it, even to the same number, makes attention 1/4 slower
        torch.set_num_threads(threads)
    if config.debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if config.training.device != "cpu" and not config.parallelism.enable_async_tensor_parallel:
        let_segments_grow(os.environ)  # symmetric memory was never tested with it
    own_gpu = sees_own_gpu(placement, os.environ)
    device = pick_device(config.training.device, placement.local_rank, sees_own_gpu=own_gpu)
    record_memory(config.profiler, device)
    torch.autograd.set_detect_anomaly(config.debug.detect_anomaly)
    COMPILATIONS.watch()
    if config.compile.enable:
        for_cpu = device.type == "cpu"
        prepare_compile(config.compile, local_ranks=placement.local_world_size, for_cpu=for_cpu)
    if device.type == "cpu":
        keep_freed_memory()
    kernels.apply(run_kernels(config, device))
    kernels.activate_flash()
    return device


def _validation(job: Job, corpus: Corpus) -> Validation | None:
    sizes = job.sizes
    mesh = job.mesh
    if not corpus.held_out or not job.config.validation.interval:
        return None
    return Validation(
        sets=tuple(corpus.held_out),
        batches=lambda name: validation_batches(
            corpus.held_out[name],
            num_samples=job.config.validation.num_samples,
            batch_size=sizes.local * (sizes.accumulation if mesh.pp else 1),  # a pipeline needs all its microbatches
            rank=mesh.batch_rank,
            num_ranks=mesh.layout.batch,
            most_documents=most_documents(job.config),
        ),
        token_bytes=torch.from_numpy(corpus.token_bytes),
    )


def _sinks(job: Job, run_dir: Path, corpus: Corpus, stack: contextlib.ExitStack, loop: Loop) -> list[Sink]:
    if job.ranks.rank != 0:
        return []
    has_more = loop.state.step < loop.config.training.steps
    if has_more or not (run_dir / "run.toml").exists():  # it says what was trained
        # a comment lists the modules of --import: a configuration cannot name them, because it runs no code
        imports = "".join(f"# --import {name}\n" for name in registry.IMPORTED)
        config = replace_fields(job.config, {"checkpoint.restart": False})  # asked for once
        write_run_file(run_dir / "run.toml", imports + to_toml(config), log.warning)
    if has_more:
        note_start(job, run_dir, corpus, loop.state.step)
    memory_gib = total_memory_gib(job.ranks.device)
    settings = shown(job.config)
    steps = loop.config.training.steps
    sinks = build_sinks(job.config.metrics, run_dir, steps, memory_gib, loop.state.step, settings)
    for sink in sinks:
        stack.callback(sink.close)
    return sinks


def _log_run(job: Job, run_dir: Path, corpus: Corpus) -> None:
    config = job.config
    facts = job.facts
    layout = job.mesh.layout
    device = job.ranks.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    threads = f", {counted(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    model = config.model
    active = f"{facts.num_active_parameters:,} of them active per token, " if facts.is_routed else ""
    lines = [
        f"crius {crius.__version__}, torch {torch.__version__}, {device.type} ({name}{threads}), run {run_dir}",
        f"kernels: {kernels.current()}",
        f"mesh: {layout.axes} = {counted(layout.num_ranks, 'rank')}",
        f"model: {model.name}/{model.flavor}, {facts.num_parameters:,} parameters, "
        f"{active}{facts.matmul_parameters:,} in matmuls",
        f"model: {describe_rows(config, facts.vocab_size, corpus.tokenizer.vocab_size)}",
        *(f"data: {line}" for line in corpus.description),
        *(f"data: {line[2:]}" for line in corpus.bad_rows.splitlines() if line.startswith("# ")),
    ]
    for line in lines:
        log.info("%s", line)
    if job.ranks.rank == 0:
        collect(run_dir)
        log_save_plan(config, run_dir)
        if corpus.bad_rows:
            listing = run_dir / "data" / BAD_ROWS
            listing.parent.mkdir(exist_ok=True)
            listing.write_text(corpus.bad_rows, encoding="utf-8")
        for line in preview(corpus.train, corpus.tokenizer) if config.data.format == "chat" else ():
            log.info("%s", line, extra={MARKED: True})


def _log_headlines(loop: Loop, facts: ModelDescription, corpus: Corpus, run_dir: Path) -> None:
    """What a run is, in five lines, each with its name in front: the start as a terminal shows it."""
    config = loop.config
    training = config.training
    model = config.model
    origin = f" from {config.checkpoint.init_from}" if config.checkpoint.init_from else ""
    trained = f", LoRA of rank {config.lora.rank}" if config.lora.is_on else ""
    number = facts.num_parameters
    size = f"{number / 1e6:,.1f} M" if number >= 1e6 else f"{number:,}"
    lines = [f"model {model.name}/{model.flavor}{origin}, {size} parameters{trained}"]
    found = corpus.description[0].removeprefix("corpus: ")
    lines.append(f"data {found.rpartition(' (')[0] or found}")
    device = loop.world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    shards = f", {loop.layout}" if loop.layout.num_ranks > 1 else ""
    compiled = "compiled" if config.compile.enable else "eager"
    recompute = config.activation_checkpoint.mode
    dtype = training.mixed_precision_param
    sequences = loop.loader.global_batch_size
    tokens = f"{sequences:,} x {training.seq_len:,} tokens = {sequences * training.seq_len:,} a step"
    lines += [
        f"layout {loop.layout.num_ranks} x {name}{shards}, {compiled}, {dtype}, recompute {recompute}",
        f"batch {tokens}, {training.steps:,} steps",
        f"where {run_dir}: report.html, logs/rank-0.log, checkpoints",
    ]
    for line in lines:
        log.info("%s", line, extra={HEADLINE: True})


def _log_batch(job: Job) -> None:
    sizes = job.sizes
    log.info(
        "batch: %s of %d tokens per step = %d per microbatch x %s x %s",
        counted(sizes.total, "sequence"),
        job.config.training.seq_len,
        sizes.local,
        counted(job.mesh.layout.batch, "data-parallel rank"),
        "1 microbatch" if sizes.accumulation == 1 else f"{sizes.accumulation} microbatches",
    )
