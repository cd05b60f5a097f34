"""The verbs that train: each layout beside its reference, a row a layout."""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crius.config.facts import Facts
from crius.config.layout import Layout
from crius.config.run import RunConfig
from crius.errors import ConfigError
from crius.tools.verify import matrix, worker
from crius.tools.verify.matrix import Case
from crius.tools.verify.parameters import Shards
from crius.tools.verify.rows import LayoutRow, Table
from crius.tools.verify.run import Outcome, Stopped, run
from crius.tools.verify.tolerance import COMPARED_STEPS, Tolerance, precision, tolerances
from crius.tools.verify.worker import Task
from crius.train.inputs import open_run_corpus


@dataclass(frozen=True)
class LayoutGroup:
    """Layouts that are compared with one reference.

    Attributes:
        reference: what they are compared with.
        others: the layouts.
        is_whole: the reference has whole parameters, for any layout to compare with.
    """

    reference: Case
    others: tuple[Case, ...]
    is_whole: bool


@dataclass(frozen=True)
class Bench:
    """What all rows of a verb share.

    Attributes:
        folder: of the logs, one folder a layout below it.
        scratch: of the parameters of the references.
        timeout: seconds that a layout may take.
    """

    folder: Path
    scratch: Path
    timeout: int


def checked(facts: Facts, layouts: Sequence[Layout], steps: int) -> RunConfig:
    """The run of a verb, once it is known that one device could train it on the data that there is.

    Raises:
        CriusError: it could not.
    """
    if steps < 1:
        raise ConfigError(f"--steps {steps} is not positive.", where="command line", fix="--steps 3")
    config = matrix.fixed(facts.config, layouts, steps)
    alone = matrix.case(facts, config, Layout())
    if alone.config is None:
        raise ConfigError.together(alone.problems)
    if config.data.source != "huggingface":  # a stream's threads cannot be forked
        open_run_corpus(alone.config, 1)
    return config


def compare_all(
    verb: str,
    groups: Sequence[LayoutGroup],
    config: RunConfig,
    folder: Path,
    timeout: int,
    as_json: bool,
    is_asked: bool,
) -> int:
    """Run all groups and print the table.

    Args:
        verb: for the JSON.
        groups: what is compared with what.
        config: from ``checked``.
        folder: of the logs.
        timeout: seconds that a layout may take.
        as_json: print JSON instead of a table.
        is_asked: the layouts were named: one that is refused is an error.

    Returns:
        0; 1 where a layout is further away than the tolerance, or fails; 2 where one that was named is refused; 130 or
        143 after a signal.
    """
    names = [str(case.layout) for case in _cases(groups)]
    table = Table([*tolerances(config)], names, as_json)
    with tempfile.TemporaryDirectory(prefix="crius-verify-") as scratch:
        bench = Bench(folder, Path(scratch), timeout)
        try:
            for group in groups:
                _run_group(group, bench, table)
        except Stopped as stopped:
            return stopped.code
    kinds = {precision(case.config): tolerances(case.config) for case in _cases(groups) if case.config}
    _conclude(table, verb, kinds or {precision(config): tolerances(config)})
    return table.exit_code(is_asked)


def _cases(groups: Sequence[LayoutGroup]) -> list[Case]:
    return [case for group in groups for case in (group.reference, *group.others)]


def _run_group(group: LayoutGroup, bench: Bench, table: Table) -> None:
    shards = Shards(bench.scratch / str(group.reference.layout), group.is_whole)
    shards.folder.mkdir(parents=True)
    expected: Outcome | None = None
    for case in (group.reference, *group.others):
        name, ranks, is_reference = str(case.layout), case.layout.num_ranks, case is group.reference
        if case.config is None:
            table.add(LayoutRow(layout=name, ranks=ranks, status="refused", note=case.refusal))
        elif not is_reference and (expected is None or expected.result is None):
            table.add(
                LayoutRow(layout=name, ranks=ranks, status="FAIL", note="there is no reference to compare it with")
            )
        else:
            outcome = run(worker.train, task_of(case, bench.folder, bench.timeout, shards, is_reference), ranks)
            expected = outcome if is_reference else expected
            table.add(judge(case, outcome, expected, is_reference))


def task_of(case: Case, folder: Path, timeout: int, shards: Shards, is_reference: bool) -> Task:
    """What the ranks of ``case`` are given, for ``worker.train``.

    Args:
        case: a layout that the rules do not refuse.
        folder: of the logs, one folder a layout below it.
        timeout: seconds that it may take.
        shards: parameters of the reference.
        is_reference: it is the reference itself.
    """
    assert case.config is not None
    # a row that says compile must not run eager; async tensor parallelism may well do nothing, on a CPU
    is_async = case.config.parallelism.enable_async_tensor_parallel
    strict = "compile" in case.layout.options and not is_async
    return Task(case.config, folder / str(case.layout), timeout, shards, is_reference, strict)


def judge(case: Case, outcome: Outcome, expected: Outcome | None, is_reference: bool) -> LayoutRow:
    """The row of ``case``, which ended as ``outcome``, held against its reference, which ended as ``expected``."""
    assert case.config is not None
    name, ranks, bounds = str(case.layout), case.layout.num_ranks, tolerances(case.config)
    if outcome.result is None or expected is None or expected.result is None:
        return LayoutRow(layout=name, ranks=ranks, status="FAIL", seconds=outcome.seconds, note=outcome.note)
    got, want = outcome.result, expected.result
    values = {
        "loss": _apart(got["loss"], want["loss"]),
        "grad_norm": _apart(got["grad_norm"], want["grad_norm"]),
        "parameters": _number(got["whole"]),
        "update": _number(got["update"]),
    }
    beyond = [column for column, tolerance in bounds.items() if values[column] > tolerance.bound]
    notes = [f"{' and '.join(beyond)} beyond the tolerance"] if beyond else []
    if {"parameters", "update"} & set(beyond):
        notes.append(f"most in {got['worst']}")
    if got["missing"]:
        notes.append(f"not held once: {', '.join(got['missing'][:3])}" + ", ..." * (len(got["missing"]) > 3))
    if is_reference:
        notes.append(f"parameters move by {got['moved']:.1e}")
    status: Any = "FAIL" if beyond or got["missing"] else "reference" if is_reference else "ok"
    return LayoutRow(
        layout=name, ranks=ranks, status=status, values=values, seconds=outcome.seconds, note=", ".join(notes)
    )


def _apart(got: Sequence[Any], want: Sequence[Any]) -> float:
    """Largest relative difference over the compared steps; infinite where one is no number."""
    pairs = list(zip(got, want, strict=True))[:COMPARED_STEPS]
    return max(0.0 if a == b else _number(abs(a - b) / abs(b)) if b else math.inf for a, b in pairs)


def _number(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _conclude(table: Table, verb: str, kinds: dict[str, dict[str, Tolerance]]) -> None:
    """Print what was measured, the tolerances of each precision with their reasons, and the sum of all rows."""
    run_rows = [row for row in table.rows if row.values and row.status != "reference"]
    columns = next(iter(kinds.values()))
    largest = {column: max((row.values[column] for row in run_rows), default=0.0) for column in columns}
    statuses = ("ok", "FAIL", "refused")
    counts = {status: sum(row.status == status for row in table.rows) for status in statuses}
    legend = [
        "",
        "all relative to the reference: loss and gradient norm at their worst step (of the first three), before",
        "clipping; parameters after the last step, by the L2 norm of their difference; update the same for the worst",
        "parameter, relative to how far training moved it",
    ]
    for kind, bounds in kinds.items():
        legend.append(f"tolerances in {kind}:")
        legend += [f"  {column:<10}  at most {bound.bound:.0e}: {bound.reason}" for column, bound in bounds.items()]
    legend.append(
        f"{counts['ok']} ok, {counts['FAIL']} failed, {counts['refused']} refused; largest differences: "
        + ", ".join(f"{column} {value:.1e}" for column, value in largest.items())
    )
    tolerances_json = {
        kind: {name: {"bound": bound.bound, "reason": bound.reason} for name, bound in bounds.items()}
        for kind, bounds in kinds.items()
    }
    table.close(legend, verb=verb, tolerances=tolerances_json, largest=largest, counts=counts)
