"""``crius train``, and its dry run."""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from crius.cli.app import (
    COMMAND,
    SOURCES,
    STARTED,
    ConfigFiles,
    DryRun,
    DryRunImbalance,
    DryRunRank,
    Json,
    Layout,
    NumProcesses,
    Recipe,
    Strict,
    app,
    check_save_ops,
    emit_result,
    facts_of,
    fitted,
    need_torch,
    place_of,
    run_dir,
    silence_stdout,
)
from crius.config import rules
from crius.config.facts import Facts
from crius.config.run import RunConfig, replace_fields
from crius.errors import ConfigError, EnvironmentError, OutOfMemoryError
from crius.host import Machine
from crius.launch.environment import FAULTS, Placement
from crius.launch.lock import RunLock
from crius.units import GIB
from crius.waiting import waiting

if TYPE_CHECKING:
    from crius.models.description import ModelDescription
    from crius.train.tools import Story, Tools


@app.verb
def train(
    run: RunConfig = RunConfig(),  # noqa: B008
    *,
    recipe: Recipe = "",
    config: ConfigFiles = (),
    layout: Layout = "",
    nproc: NumProcesses = 0,
    strict: Strict = False,
    verbose: Annotated[bool, "On a terminal, print the whole start; without it five lines."] = False,
    dry_run: DryRun = False,
    dry_run_rank: DryRunRank = 0,
    dry_run_imbalance: DryRunImbalance = 1.0,
    as_json: Json = False,
) -> int:
    """Train a model.

    Without any flag: a small Llama 3 on the source of Python's standard library, on this machine's CPU or GPUs.
    Settings come from defaults, then the recipe, then --config files, then flags. If the parallel degrees need several
    processes, they are started here; under torchrun or Slurm this process joins theirs. --lr, --steps, --batch (the
    global one) and --seq_len are short for their dotted names.
    """
    from crius.launch.environment import joined_placement

    _check_options(nproc, strict, dry_run, (dry_run_rank, dry_run_imbalance), as_json)
    if dry_run:
        return _dry_run(run, nproc, dry_run_rank, dry_run_imbalance, as_json)
    placement = joined_placement(os.environ)
    if placement and nproc and nproc != placement.world_size:
        raise ConfigError(
            f"--nproc is {nproc}, but {placement.launcher} started {placement.world_size} ranks.",
            where="command line",
            fix="leave out --nproc",
        )
    if sys.stdout.isatty() and not verbose:
        SOURCES.notes = []
    with waiting("looking at the run"):
        facts, folder = prepared(run, nproc, placement)
    run = facts.config

    with contextlib.ExitStack() as stack:
        with waiting("reading the data"):
            locks = own(facts, folder, placement, stack)
        code = _start(run, folder, placement, facts.num_ranks, strict, locks)
    return _end(facts, folder, placement, code)


def prepared(run: RunConfig, nproc: int, placement: Placement | None) -> tuple[Facts, Path]:
    """Facts about a run that passed the rules, and its folder, which is created.

    Raises:
        CriusError: the run is not possible, or its folder cannot be written.
    """
    facts = facts_of(run, nproc, placement)
    rules.check(facts)
    need_torch()
    check_save_ops(facts.config)
    folder = run_dir(facts.config, placement)
    from crius.train.inputs import saved_settings

    saved = saved_settings(facts.config, folder)
    numbered = _with_counts(run, facts, saved or {}, placement.rank if placement else 0)
    if saved is not None or numbered is not run:  # dtype and document boundaries come from the checkpoint
        facts = facts_of(numbered, nproc, placement, saved=saved, run_dir=folder)
        rules.check(facts)
    return _with_epochs(facts, folder), folder


def _with_counts(run: RunConfig, facts: Facts, saved: Mapping[str, Any], rank: int = 0) -> RunConfig:
    """``run`` with numbers for what is ``auto``, which rank 0 prints. ``saved`` see ``counted``."""
    if not SOURCES.counted:
        return run
    from crius.tools.tune.counted import counted

    values, line = counted(facts.config, SOURCES.counted, facts.data_parallel_ranks, saved)
    SOURCES.counted.clear()
    COMMAND.extend(word for name, number in values.items() for word in (f"--{name}", str(number)))  # for the next one
    if rank == 0:
        sys.stderr.write(f"{line}\n")
    return replace_fields(run, values)


def _with_epochs(facts: Facts, folder: Path) -> Facts:
    """``facts`` with the steps of the run; under ``training.epochs`` the corpus must be opened to know them."""
    if facts.config.training.epochs < 1:
        return facts
    from crius.train.inputs import open_run_data

    return dataclasses.replace(facts, config=open_run_data(facts.config, facts.data_parallel_ranks, folder)[0])


def run_tools(config: RunConfig, folder: Path) -> "Tools":
    """Functions around a run in a folder: the planner, rehearsals, and faults that the environment asks for."""
    from crius.tools.plan.watch import watch_plan
    from crius.train.tools import Tools

    tools = Tools(fit=_fit, watch=watch_plan, explain=_explain)
    if config.samples.every:
        from crius.tools.generate.while_training import with_texts

        tools = dataclasses.replace(tools, texts=with_texts)
    if config.checkpoint.rehearse and config.checkpoint.is_enabled:
        from crius.tools.verify.rehearse import Rehearsals

        rehearsals = Rehearsals(folder)
        tools = tools.joined(rehearsals.around, rehearsals.prepare)
    if FAULTS in os.environ:
        from crius.tools.faults.planted import PlantedFaults

        planted = PlantedFaults()
        tools = tools.joined(planted.around, planted.prepare)
    return tools


def _fit(config: RunConfig, facts: "ModelDescription", machine: Machine, budget: float) -> tuple[dict[str, Any], str]:
    from crius.tools.plan.fit import fit

    return fit(config, facts, machine, budget)


def _explain(story: "Story", what: str, said: str) -> OutOfMemoryError:
    from crius.tools.plan.out_of_memory import explain

    return explain(story, what, said)


def own(facts: Facts, folder: Path, placement: Placement | None, stack: contextlib.ExitStack) -> list[RunLock]:
    """Lock the folders of a run while ``stack`` is open, and check its checkpoints and its data before it starts.

    Only rank 0 does so under a launcher, and it leaves the data to the ranks.
    """
    from crius.launch.lock import remove_unused, run_lock
    from crius.train.inputs import check_resume, open_run_corpus, own_checkpoint_folder
    from crius.train.saving import check_newest_of, check_space

    run = facts.config
    if placement and placement.rank:
        return []
    locks = [stack.enter_context(run_lock(folder, "train"))]  # before any file of a run in the folder is touched
    stack.callback(remove_unused, folder)
    checkpoints = own_checkpoint_folder(run, folder)
    if checkpoints and not checkpoints.resolve().is_relative_to(folder.resolve()):
        locks.append(stack.enter_context(run_lock(checkpoints, "train")))  # another run may have the same one
    check_newest_of(run, folder)
    check_resume(run, folder)
    check_space(run, folder)
    if placement is None and run.data.source != "huggingface":  # a stream's threads cannot be forked
        # bad data is one message here, not one of each worker
        open_run_corpus(run, facts.data_parallel_ranks, folder)
    return locks


def _start(
    run: RunConfig,
    folder: Path,
    placement: Placement | None,
    num_ranks: int,
    strict: bool,
    locks: list[RunLock],
) -> int:
    """Train in workers of this host, or in this process; returns the exit code.

    Only workers can be restarted, so a supervised run has workers even if one is enough.
    """
    with waiting("importing torch"):
        from crius.cli.report import LiveReport
        from crius.launch.crew import Supervision
        from crius.launch.environment import single_placement
        from crius.launch.local import run_single, run_workers
        from crius.launch.lock import keep_all, kept
        from crius.launch.stop import ignore_stop_signals
        from crius.train import job

    tools = run_tools(run, folder)
    target = functools.partial(job.run, run, folder, STARTED, strict=strict, notes=SOURCES.notes, tools=tools)
    live = LiveReport(folder, is_on=run.metrics.enable_report and not (placement and placement.rank))

    def poll(attempt: int, pids: Mapping[int, int]) -> None:
        keep_all(locks)
        live.poll()

    if placement is None and (num_ranks > 1 or run.checkpoint.is_supervised):
        # without checkpoints on the way a restart would begin again at step 1, which a person must decide
        launch = run.launch if run.checkpoint.is_supervised else dataclasses.replace(run.launch, max_restarts=0)
        supervision = Supervision(launch=launch, watchdog=run.watchdog, on_poll=poll)
        code = run_workers(target, num_ranks, folder, supervision=supervision)
    else:
        with kept(locks, live.poll):
            code = run_single(target, placement or single_placement(), folder, run.watchdog)
    ignore_stop_signals()  # the exit code is known
    live.close()
    return code


def _end(facts: Facts, folder: Path, placement: Placement | None, code: int) -> int:
    """Print what the run left and what to do next; returns the exit code."""
    from crius.cli.next_steps import say_next
    from crius.cli.report import write_last_report
    from crius.launch.report import leave

    if placement is None or placement.rank == 0:
        with waiting("writing the report"):
            write_last_report(facts.config, folder)
        try:
            say_next(facts, folder, placement, code)
        except (BrokenPipeError, EnvironmentError):  # nobody reads it; the run has ended all the same
            silence_stdout()
    if code and placement:
        leave(code)  # a normal exit would wait for peers that may be gone
    return code


def _check_options(nproc: int, strict: bool, dry_run: bool, shown: tuple[int, float], as_json: bool) -> None:
    if nproc < 0:
        raise ConfigError(f"--nproc {nproc} is negative.", fix="give the number of processes, e.g. --nproc 4")
    rank, imbalance = shown
    given: dict[str, object] = {"--strict": strict and dry_run, "--dry_run_rank": rank and not dry_run}
    given["--dry_run_imbalance"] = imbalance != 1 and not dry_run
    for name in (name for name, is_vain in (given | {"--json": as_json and not dry_run}).items() if is_vain):
        other = "with --dry_run, which trains nothing" if dry_run else "without --dry_run"
        raise ConfigError(f"{name} has no effect {other}.", where="command line", fix=f"leave out {name}")


def _dry_run(run: RunConfig, nproc: int, rank: int, imbalance: float, as_json: bool) -> int:
    """Build, lay out and step the model on tensors without memory, and print the memory and the work of a rank."""
    facts = facts_of(run, nproc, None, is_dry=True)
    rules.check(facts)
    if SOURCES.counted:
        facts = facts_of(_with_counts(run, facts, {}), nproc, None, is_dry=True)
        rules.check(facts)
    machine, hardware = place_of(facts)
    run, why = fitted(facts, machine, hardware)
    need_torch()
    check_save_ops(run)
    from crius.tools.dry_run.run import dry_run

    report = dry_run(run, facts.num_ranks, rank, STARTED, imbalance=imbalance)
    notes = [*report.notes, *([why] if why else [])]
    if machine.on_gpu:
        peak = max(one.peak.total() for one in report.ranks)
        whole = hardware.memory_bytes
        eager = ", without the savings of compiled blocks" if run.compile.enable else ""
        notes.append(f"{peak / whole:.0%} of the {whole / GIB:.0f} GiB of one {hardware.name} at the peak{eager}")
    report = dataclasses.replace(report, notes=notes)
    emit_result(report.as_dict(), report.lines(), as_json=as_json)
    return 0
