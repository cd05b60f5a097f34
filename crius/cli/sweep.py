"""``crius sweep``: one run per combination of values, in turn. Each run is a separate ``crius train``."""

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from typing import Annotated

from crius.cli.app import Json, app, emit, facts_of, parsed, train_verb
from crius.cli.report import report_or_warn
from crius.config import rules
from crius.config.command_line import last_of_each
from crius.config.run import RunConfig
from crius.errors import ConfigError, CriusError
from crius.launch.stop import PREEMPTED, caught_signals
from crius.tools.report.page import REPORT
from crius.tools.report.runs import is_run, rank
from crius.tools.report.sweep import Trial, note_trials, plan_trials, train_all


@app.verb(train=train_verb)
def sweep(
    *flags: Annotated[str, "Flags of crius train. A comma separates the values of a flag."],
    as_json: Json = False,
) -> int:
    """Train each combination of values in turn, as --optimizer.lr 1e-3,3e-3 --layout fsdp2,tp2, and compare them.

    Takes the flags of train. --job.run_dir is the folder of the sweep; each run has a folder in it. The same command
    again skips the finished runs and continues the others. The output of each run is in the folder logs of the sweep.
    Exit code 1 if a run failed.
    """
    folder, trials = plan_trials(last_of_each(flags, train_verb().arguments()))
    _check(trials)
    note_trials(folder, trials)
    with caught_signals() as stops:
        rows = train_all(trials, stops, is_quiet=as_json)
    ranking = rank(rows)
    report = folder / REPORT
    report_or_warn([trial.folder for trial in trials if is_run(trial.folder)], report)
    if as_json:
        runs = [{"settings": dict(trials[number].values), **rows[number].as_dict()} for number in ranking.order]
        best = None if ranking.best is None else rows[ranking.best].name
        found = {"folder": str(folder), "runs": runs, "best": best, "not_compared": ranking.why}
        emit(json.dumps(found, indent=2))
    else:
        emit("\n".join([*ranking.note, *([f"report: {report}"] if report.exists() else [])]))
    if stops:
        by = stops[0].signal
        sys.stderr.write(f"stopped by {by.name}; the same command continues the sweep\n")
        return 128 + by if by.name == "SIGINT" else PREEMPTED
    return 0 if all(row.state.word == "finished" for row in rows) else 1


def _check(trials: Sequence[Trial]) -> None:
    """Check each run by the rules before the first run starts.

    Raises:
        ConfigError: the rules refuse a run; the message names the run and the problem.
    """
    found: dict[str, tuple[CriusError, list[str]]] = {}
    for trial in trials:
        try:
            _check_one(trial.words)
        except CriusError as error:
            found.setdefault(str(error), (error, []))[1].append(trial.label)
    problems = [
        error
        if len(labels) == len(trials)
        else ConfigError(f"{'; '.join(labels)}: {error.what}", where=error.where, why=error.why, fix=error.fix)
        for error, labels in found.values()
    ]
    if problems:
        raise ConfigError.together(problems)


def _check_one(words: Sequence[str]) -> None:
    given = parsed(["train", *words]).values
    if given.get("dry_run") or given.get("as_json"):
        raise ConfigError("a sweep trains.", where="command line", fix="leave out --dry_run, --help and the like")
    with contextlib.redirect_stderr(io.StringIO()):  # the run itself prints its decisions
        facts = facts_of(given.get("run", RunConfig()), given.get("nproc", 0), None)
    rules.check(facts)
