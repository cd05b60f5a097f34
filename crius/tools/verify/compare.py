"""``crius verify parity`` and ``compile``: compares each layout with its reference, one row per layout."""

import functools
import math
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crius.config.facts import Facts
from crius.config.layout import Layout
from crius.config.low_precision import is_enabled
from crius.config.run import RunConfig, replace_fields
from crius.tools.verify import matrix, worker
from crius.tools.verify.matrix import LayoutCase
from crius.tools.verify.options import Trained
from crius.tools.verify.parameters import Shards
from crius.tools.verify.run import LayoutTable, row_of
from crius.tools.verify.worker import WorkerTask
from crius.train.inputs import describe_known_model

NEED_COMPILE = ("async_tp", "memory_budget")
"""Options that have no effect on an eager run."""

COMPARED_STEPS = 3
"""Number of steps whose loss and gradient norm are compared; later, differences of the parameters grow by
themselves."""

NUDGE = 1e-4
ROOM = 5
"""In low precision a layout may differ from its reference by so many times as much as the reference does from itself
once its low-precision products change by ``NUDGE``, if that exceeds the tolerance. A norm behind a layer, for example,
makes roundings of 8 bits large."""


@dataclass(frozen=True)
class Tolerance:
    """The largest relative difference that a column may show, and why it is not zero."""

    bound: float
    reason: str


_FLOAT32 = {
    "loss": Tolerance(1e-5, "float32 sums in another order, up to 2**-24 = 6e-8 each"),
    "grad_norm": Tolerance(1e-5, "as the loss, through all layers and back"),
    "parameters": Tolerance(1e-5, "the last bits of the gradients"),
    "update": Tolerance(1e-3, "AdamW makes a whole step of a gradient near 0, whose sign is in its last bits"),
}
_BFLOAT16 = {
    "loss": Tolerance(1e-3, "bfloat16 rounds by up to 2**-9 = 2e-3, the mean over tokens by less"),
    "grad_norm": Tolerance(1e-2, "bfloat16 roundings through all layers and back"),
    "parameters": Tolerance(1e-3, "bfloat16 roundings of the gradients"),
    "update": Tolerance(0.5, "AdamW makes a whole step of a gradient whose sign is lost in bfloat16"),
}
# measured over layouts of the debug model: at most 8e-5, 1e-3, 5e-4 and 0.2
_TENSORWISE = {
    "loss": Tolerance(5e-4, "one scale per matmul of a rank: other ranks and microbatches give other roundings"),
    "grad_norm": Tolerance(1e-2, "those roundings, of up to 2**-4 of a number, through all layers and back"),
    "parameters": Tolerance(3e-3, "those roundings, in the gradients"),
    "update": Tolerance(0.5, "AdamW makes a whole step of a gradient whose sign is lost in float8"),
}
# measured over layouts of the debug model: at most 9e-7, 6e-6, 1e-5 and 4e-2
_ROWWISE = {
    "loss": Tolerance(1e-5, "rows keep their scales; a few numbers round to the neighbour"),
    "grad_norm": Tolerance(1e-4, "numbers that round to the neighbour, through all layers and back"),
    "parameters": Tolerance(1e-4, "numbers that round to the neighbour, in the gradients"),
    "update": Tolerance(0.2, "AdamW makes a whole step of a gradient near 0, whose sign is in its last bits"),
}
# measured: at most 2e-5, 2e-4, 1e-5 and 4e-2
_BLOCKS = {
    "loss": Tolerance(1e-4, "a layer without whole blocks on each rank stays in high precision on that layout"),
    "grad_norm": Tolerance(2e-3, "as the loss, through all layers and back"),
    "parameters": Tolerance(3e-4, "as the loss, in the gradients"),
    "update": Tolerance(0.3, "AdamW makes a whole step of a gradient near 0, whose sign is in its last bits"),
}
_REROUTED = "a choice between experts whose scores differ by less than such a rounding"
_MOST_REROUTED = {"float32": Tolerance(1e-3, _REROUTED), "bfloat16": Tolerance(2e-2, _REROUTED)}
_BUFFERS = Tolerance(0.0, "whole numbers of tokens move them; not required if tokens are rerouted")
_ALL = {"float32": _FLOAT32, "bfloat16": _BFLOAT16, "float8 tensorwise": _TENSORWISE, "mxfp8": _BLOCKS}


def parity(facts: Facts, folder: Path, options: Trained, *, as_json: bool = False) -> int:
    """Train each layout and one device on the same uneven batches, and print their differences.

    Layouts that change the computation, such as ``+document``, have a reference of their own.

    Args:
        facts: facts about the run on this machine.
        folder: folder of the logs, with one folder per layout.
        options: without layouts, those of ``matrix.PARITY`` or ``EXPERTS``.
        as_json: print JSON instead of a table.

    Returns:
        The exit code, see ``compare_all``.

    Raises:
        CriusError: the run is refused on one device too, a layout cannot be read, or the data is bad.
    """
    wanted = matrix.chosen(options, matrix.EXPERTS if facts.has_experts else matrix.PARITY)
    config = checked(facts, wanted, options.steps)
    groups = []
    for reference in dict.fromkeys(map(matrix.reference_of, wanted)):
        own = [layout for layout in wanted if layout != reference and matrix.reference_of(layout) == reference]
        groups.append([matrix.case(facts, config, layout) for layout in (reference, *own)])
    return compare_all("parity", groups, config, folder, options.timeout, as_json, is_asked=bool(options.layouts))


def compile(facts: Facts, folder: Path, options: Trained, *, as_json: bool = False) -> int:
    """Train each layout eager and compiled on the same uneven batches, and print their differences.

    A layout that was asked to compile but runs eager fails.

    Args:
        facts: facts about the run on this machine.
        folder: folder of the logs, with one folder per layout.
        options: layouts without ``+compile``; none: ``matrix.COMPILE``.
        as_json: print JSON instead of a table.

    Returns:
        The exit code, see ``compare_all``.

    Raises:
        CriusError: the run is refused on one device too, a layout cannot be read, or the data is bad.
    """
    asked = matrix.chosen(options, matrix.COMPILE)
    wanted = list(dict.fromkeys(_without(layout, ["compile"]) for layout in asked))
    config = checked(facts, wanted, options.steps)
    switches = ("compile.enable", "compile.loss", "parallelism.enable_async_tensor_parallel")
    changes: dict[str, Any] = dict.fromkeys(switches, False)
    if config.activation_checkpoint.mode == "memory_budget":
        changes["activation_checkpoint.mode"] = "none"
    eager = replace_fields(config, changes)
    groups = []
    for layout in wanted:
        compiled = matrix.case(facts, config, replace(layout, options=(*layout.options, "compile")))
        groups.append([matrix.case(facts, eager, _without(layout, NEED_COMPILE)), compiled])
    return compare_all("compile", groups, config, folder, options.timeout, as_json, is_asked=bool(options.layouts))


def _without(layout: Layout, options: Sequence[str]) -> Layout:
    return replace(layout, options=tuple(option for option in layout.options if option not in options))


def checked(facts: Facts, layouts: Sequence[Layout], steps: int) -> RunConfig:
    """The run of a verb, after a check that one device could train it on the available data.

    Raises:
        CriusError: it could not.
    """
    config = matrix.fixed(facts.config, layouts, steps)
    matrix.case(facts, config, Layout()).check(with_data=True)
    return config


def compare_all(
    verb: str,
    groups: Sequence[Sequence[LayoutCase]],
    config: RunConfig,
    folder: Path,
    timeout: int,
    as_json: bool,
    is_asked: bool,
) -> int:
    """Run all groups and print the table.

    Args:
        verb: name of the verb, for the JSON.
        groups: layouts; each group is compared with its first one.
        config: from ``checked``.
        folder: folder of the logs.
        timeout: seconds that a layout may take.
        as_json: print JSON instead of a table.
        is_asked: whether the layouts were named: then a refused layout is an error.

    Returns:
        0; 1 if a layout differs by more than the tolerance, or fails; 2 if a named layout is refused.

    Raises:
        SystemExit: a signal ended it; 130 or 143.
    """
    cases = [case for group in groups for case in group]
    names = [_name(case.layout, nudge) for group in groups for case, nudge in _runs(group)]
    table = LayoutTable([*tolerances(config)], names, as_json)
    with tempfile.TemporaryDirectory(prefix="crius-verify-") as scratch:
        for group in groups:
            shards = Shards(Path(scratch) / str(group[0].layout), is_whole=verb == "parity")
            _run_group(group, shards, folder, timeout, table)
    kinds = {precision(case.config): tolerances(case.config) for case in cases if case.config}
    _conclude(table, verb, kinds or {precision(config): tolerances(config)})
    return table.exit_code(is_asked)


def _run_group(group: Sequence[LayoutCase], shards: Shards, folder: Path, timeout: int, table: LayoutTable) -> None:
    shards.folder.mkdir(parents=True)
    expected: dict[str, Any] | None = None
    own: Mapping[str, float] = {}
    for case, nudge in _runs(group):
        if nudge and not expected:
            continue
        is_reference = case is group[0]
        judged = functools.partial(judge, case, expected, own=own)
        row, result = row_of(
            _name(case.layout, nudge),
            case,
            worker.train,
            functools.partial(task_of, case.layout, folder, timeout, shards, not expected, nudge=nudge),
            functools.partial(judge_nudged, case, expected) if nudge and expected else judged,
            is_reference=is_reference,
            lacks_reference=not (is_reference or expected),
        )
        table.add(row)
        if nudge:
            own = row.values
        elif is_reference:
            expected = result


def _runs(group: Sequence[LayoutCase]) -> list[tuple[LayoutCase, float]]:
    """The runs of a group, each with its nudge: a reference in low precision has two."""
    reference, *others = group
    is_low = reference.config is not None and is_enabled(reference.config.quantize.dense)
    nudges = (0.0, NUDGE) if is_low else (0.0,)
    return [*((reference, nudge) for nudge in nudges), *((case, 0.0) for case in others)]


def _name(layout: Layout, nudge: float) -> str:
    return f"{layout} nudged" if nudge else str(layout)


def task_of(
    layout: Layout,
    folder: Path,
    timeout: int,
    shards: Shards,
    is_reference: bool,
    config: RunConfig,
    *,
    nudge: float = 0.0,
) -> WorkerTask:
    """The task of the ranks of a layout, for ``worker.train``.

    Args:
        layout: the layout.
        folder: folder of the logs, with one folder per layout.
        timeout: seconds that it may take.
        shards: parameters of the reference.
        is_reference: whether it is the reference itself.
        config: the run on this layout.
        nudge: see ``WorkerTask``.
    """
    # a row with compile must not run eager; async tensor parallelism may have no effect on a CPU
    strict = "compile" in layout.options and not config.parallelism.enable_async_tensor_parallel
    return WorkerTask(config, folder / _name(layout, nudge), timeout, shards, is_reference, strict, nudge)


def judge_nudged(
    case: LayoutCase, expected: dict[str, Any], result: dict[str, Any]
) -> tuple[dict[str, float], str, bool]:
    """See ``Judge``: how far the reference is from itself. That is a measure, and never wrong."""
    assert case.config is not None
    note = f"its low-precision products changed by {NUDGE:.0e}; {ROOM} times this is allowed too"
    return _values(tolerances(case.config), expected, result), note, False


def judge(
    case: LayoutCase, expected: dict[str, Any] | None, result: dict[str, Any], *, own: Mapping[str, float] | None = None
) -> tuple[dict[str, float], str, bool]:
    """See ``Judge``: compares the result of ``case`` with the reference's; the reference itself has none.

    ``own`` has the values of ``judge_nudged``.
    """
    assert case.config is not None
    bounds = tolerances(case.config)
    values = _values(bounds, expected or result, result)
    most = {column: max(tolerance.bound, ROOM * (own or {}).get(column, 0.0)) for column, tolerance in bounds.items()}
    if values.get("rerouted"):  # one expert has a token more, another a token less, so their gradients differ
        others = {column: _BFLOAT16[column].bound for column in ("parameters", "update")}
        most |= {column: max(bound, most[column]) for column, bound in others.items()} | {"buffers": math.inf}
    beyond = [column for column in bounds if values[column] > most[column]]
    notes = [f"{' and '.join(beyond)} beyond the tolerance"] if beyond else []
    if {"parameters", "update"} & set(beyond):
        notes.append(f"most in {result['worst']}")
    if result["missing"]:
        more = ", ..." if len(result["missing"]) > 3 else ""
        notes.append(f"not exactly once: {', '.join(result['missing'][:3])}{more}")
    if expected is None:
        notes.append(f"parameters move by {result['moved']:.1e}")
    return values, ", ".join(notes), bool(beyond or result["missing"])


def _values(bounds: Collection[str], want: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    """By column, how far a result is from the reference's."""
    values = {
        "loss": _apart(result["loss"], want["loss"]),
        "grad_norm": _apart(result["grad_norm"], want["grad_norm"]),
        "parameters": _number(result["whole"]),
        "update": _number(result["update"]),
    }
    if "rerouted" in bounds:
        values["rerouted"] = _rerouted(result["counts"], want["counts"])
    if "buffers" in bounds:
        values["buffers"] = _moved_apart(result["buffers"], want["buffers"])
    return values


def _apart(got: Sequence[Any], want: Sequence[Any]) -> float:
    """Largest relative difference over the compared steps; infinite if one is not a number."""
    pairs = list(zip(got, want, strict=True))[:COMPARED_STEPS]
    return max(_relative(a, b) for a, b in pairs)


def _relative(got: float, want: float) -> float:
    """Difference relative to ``want``; infinite if it is not a number, or if only ``want`` is 0."""
    if got == want:
        return 0.0
    return _number(abs(got - want) / abs(want)) if want else math.inf


def _rerouted(got: Sequence[Any], want: Sequence[Any]) -> float:
    """Share, at least, of choices that fell on another expert in the compared steps, by the counts of each expert."""
    pairs = [
        (a, b)
        for step in list(zip(got, want, strict=True))[:COMPARED_STEPS]
        for layers in zip(*step, strict=True)
        for a, b in zip(*layers, strict=True)
    ]
    return sum(abs(a - b) for a, b in pairs) / 2 / max(1, sum(b for _, b in pairs))


def _moved_apart(got: dict[str, Any], want: dict[str, Any]) -> float:
    """Largest difference of a buffer's numbers; infinite if the buffers are not the same."""
    if got.keys() != want.keys():
        return math.inf
    return max((abs(a - b) for name in got for a, b in zip(got[name], want[name], strict=True)), default=0.0)


def _number(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _conclude(table: LayoutTable, verb: str, kinds: dict[str, dict[str, Tolerance]]) -> None:
    """Print the meaning of the columns, the tolerances of each precision with their reasons, and a summary."""
    run_rows = [row for row in table.rows if row.values and row.status != "reference"]
    columns = next(iter(kinds.values()))
    largest = {column: max((row.values[column] for row in run_rows), default=0.0) for column in columns}
    counts = table.counts()
    looser = [f"{column} {_BFLOAT16[column].bound:g}" for column in ("parameters", "update")]
    experts = [
        "rerouted: the share of choices that fell on another expert, by the counts of the first three steps; if",
        f"there are any, the tolerances are {' and '.join(looser)}",
    ]
    legend = [
        "",
        "all relative to the reference: loss and gradient norm at their worst step (of the first three), before",
        "clipping; parameters after the last step, by the L2 norm of their difference; update the same for the worst",
        "parameter, relative to how far training moved it",
        *(experts if "rerouted" in columns else ()),
    ]
    for kind, bounds in kinds.items():
        legend.append(f"tolerances in {kind}:")
        legend += [f"  {column:<10}  at most {bound.bound:.0e}: {bound.reason}" for column, bound in bounds.items()]
    legend.append(
        f"{counts['ok']} ok, {counts['FAIL']} failed, {counts['refused']} refused; largest differences: "
        + ", ".join(f"{column} {value:.1e}" for column, value in largest.items())
    )
    bounds_json = {kind: {name: vars(bound) for name, bound in bounds.items()} for kind, bounds in kinds.items()}
    table.close(legend, verb=verb, tolerances=bounds_json, largest=largest, counts=counts)


def precision(config: RunConfig) -> str:
    """Precision of the matmuls of ``config``, such as ``bfloat16`` or ``float32 and float8 rowwise``."""
    dense = config.quantize.dense
    training = config.training
    dtypes = (training.mixed_precision_param, training.mixed_precision_reduce, training.dtype)
    name = "bfloat16" if "bfloat16" in dtypes else "float32"
    if dense.float8.enable:
        return f"{name} and float8 {dense.float8.recipe}"
    return f"{name} and mxfp8" if dense.mxfp8.enable else name


def tolerances(config: RunConfig) -> dict[str, Tolerance]:
    """Tolerances by column for the precision of ``config``: those of the coarsest rounding."""
    names = precision(config).split(" and ")
    model = describe_known_model(config)
    parts = [_ALL.get(part, _ROWWISE) for part in names]
    bounds = {column: max((part[column] for part in parts), key=lambda one: one.bound) for column in _FLOAT32}
    if model and model.num_experts:
        bounds["rerouted"] = _MOST_REROUTED["float32" if names == ["float32"] else "bfloat16"]
    if model and any(buffer.persistent for buffer in model.buffers):
        bounds["buffers"] = _BUFFERS
    return bounds
