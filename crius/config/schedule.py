"""The order in which a pipeline computes: actions, their inputs, and schedule files. No torch."""

import functools
import re
from pathlib import Path
from typing import NamedTuple

from crius.config.parallelism import ParallelismConfig
from crius.errors import LayoutError
from crius.untrusted import text_named

PREFIX = "parallelism.pipeline_parallel_"


class Action(NamedTuple):
    """One action of one rank: F forward, B backward, I gradients of the inputs only, W gradients of the weights
    only."""

    stage: int
    kind: str
    microbatch: int


Order = list[list[Action]]
"""Actions of each rank, in order; one row per rank."""


_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAP = re.compile(r"\(([^)]*)\)OVERLAP_F_B")


@functools.lru_cache(maxsize=8)
def _parse(text: str) -> Order:
    """Rows of a schedule file.

    Raises:
        ValueError: a cell is not an action.
    """
    order = []
    for number, line in enumerate(filter(str.strip, text.splitlines()), start=1):
        row = []
        for cell in re.sub(_OVERLAP, lambda found: found[1].replace(";", ","), line).replace('"', "").split(","):
            found = _ACTION.fullmatch(cell.strip())
            if found:
                row.append(Action(int(found[1]), found[2], int(found[3])))
            elif cell.strip():
                raise ValueError(f"row {number} has {cell.strip()!r}instead of <stage>F|B|I|W<microbatch>")
        order.append(row)
    return order


def read_schedule(parallelism: ParallelismConfig) -> Order:
    """The actions of ``pipeline_parallel_schedule_csv``, checked: these ranks can run them to the end.

    Raises:
        LayoutError: the file cannot be read, or is not a schedule for these ranks.
    """
    path = parallelism.pipeline_parallel_schedule_csv
    degree = parallelism.pipeline_parallel_degree
    where = f"--{PREFIX}schedule_csv {path}"
    try:
        text = text_named(Path(path).expanduser())
        order = _parse(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        fix = f"give the path of a readable CSV file, or leave it out for --{PREFIX}schedule 1f1b"
        raise LayoutError(f"schedule file {path} cannot be read.", where=where, why=f"{reason}", fix=fix) from error
    except ValueError as error:
        fix = "write computations only, as torch's schedule._dump_csv(path, format='compute_only') does"
        raise LayoutError(f"schedule file {path}: {error}.", where=where, fix=fix) from error
    problem = _problem(text, degree)
    if problem:
        fits = len(order) > 1 and not _problem(text, len(order))
        fix = f"--{PREFIX}degree {len(order)}" if fits else "correct the file"
        raise LayoutError(f"schedule file {path} {problem}.", where=where, why="each rank runs one row", fix=fix)
    return order


@functools.lru_cache(maxsize=8)
def _problem(text: str, degree: int) -> str:
    """Why the rows of ``text`` are not a schedule for ``degree`` ranks; empty if they are."""
    order = _parse(text)
    if len(order) != degree:
        return f"has {len(order)} rows of actions, but pipeline_parallel_degree is {degree}"
    stages = [{action.stage for action in row} for row in order]
    total = sum(map(len, stages))
    if set().union(*stages) != set(range(total)) or len({len(held) for held in stages}) != 1 or not total:
        shown = ", ".join(str(sorted(held)) for held in stages)
        return f"gives its ranks the stages {shown}: each rank needs the same number, and each stage one rank"
    count = 1 + max(action.microbatch for row in order for action in row)
    for stage in range(total):
        actions = [action for row in order for action in row if action.stage == stage]
        done = {kind: sorted(a.microbatch for a in actions if a.kind == kind) for kind in "FBIW"}
        if done["F"] != list(range(count)) or sorted(done["B"] + done["I"]) != done["F"] or done["I"] != done["W"]:
            return f"does not run stage {stage} forward and backward once for each of {count} microbatches"
    forwards = [a.microbatch for row in order for a in row if a.kind == "F" and a.stage == total - 1]
    if forwards != list(range(count)):
        return "runs the last stage's microbatches out of order: torch pairs them with their losses by order"
    if len(run_order(order)) < sum(map(len, order)):
        return "waits for itself: an action comes before an action that it needs"
    return ""


def run_order(order: Order) -> list[tuple[int, Action]]:
    """All actions with their rank, each after the actions it needs; the list ends early if all ranks wait."""
    last = max(action.stage for row in order for action in row)
    done: set[Action] = set()
    found: list[tuple[int, Action]] = []
    following = [0] * len(order)
    went_on = True
    while went_on:
        went_on = False
        for rank, row in enumerate(order):
            while following[rank] < len(row) and needs(row[following[rank]], last) <= done:
                action = row[following[rank]]
                found.append((rank, action))
                # a neighbour waits for the gradient of the input only, so B counts as I
                done.add(action._replace(kind="I") if action.kind == "B" else action)
                following[rank] += 1
                went_on = True
    return found


def needs(action: Action, last_stage: int) -> set[Action]:
    """Actions that must be done before ``action``; a backward of either kind is written as I."""
    stage, kind, microbatch = action
    if kind == "F":
        return {Action(stage - 1, "F", microbatch)} if stage else set()
    if kind == "W":
        return {Action(stage, "I", microbatch)}
    gradient = {Action(stage + 1, "I", microbatch)} if stage < last_stage else set()
    return {Action(stage, "F", microbatch)} | gradient
