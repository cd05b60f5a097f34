"""``crius verify compile``: compiled against eager, layout by layout."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from crius.config.facts import Facts
from crius.config.layout import Layout
from crius.config.run import replace_fields
from crius.tools.verify import matrix
from crius.tools.verify.compare import LayoutGroup, checked, compare_all

NEED_COMPILE = ("async_tp", "memory_budget")
"""Options that mean nothing to an eager run."""


def compile(
    facts: Facts,
    folder: Path,
    *,
    layouts: str = "",
    nproc: int = 8,
    steps: int = 3,
    timeout: int = 300,
    as_json: bool = False,
) -> int:
    """Train each layout eager and compiled on the same uneven batches, and print how far the two are apart.

    A layout that was asked to compile and runs eager fails.

    Args:
        facts: of the run, on this machine.
        folder: of the logs, one folder a layout below it.
        layouts: which ones, joined by commas, without ``+compile``; empty: ``matrix.COMPILE``.
        nproc: most ranks of a layout where ``layouts`` is empty.
        steps: of training, at least 1; the first three are compared, and the parameters after the last.
        timeout: seconds that a layout may take.
        as_json: print JSON instead of a table.

    Returns:
        The exit code, see ``compare_all``.

    Raises:
        CriusError: the run is refused on one device too, a layout cannot be read, or the data is bad.
    """
    matrix.check_timeout(timeout)
    asked = matrix.chosen(layouts, matrix.COMPILE, nproc)
    wanted = list(dict.fromkeys(_without(layout, ["compile"]) for layout in asked))
    config = checked(facts, wanted, steps)
    switches = ("compile.enable", "compile.loss", "parallelism.enable_async_tensor_parallel")
    changes: dict[str, Any] = dict.fromkeys(switches, False)
    if config.activation_checkpoint.mode == "memory_budget":
        changes["activation_checkpoint.mode"] = "none"
    eager = replace_fields(config, changes)
    groups = []
    for layout in wanted:
        compiled = matrix.case(facts, config, replace(layout, options=(*layout.options, "compile")))
        groups.append(
            LayoutGroup(matrix.case(facts, eager, _without(layout, NEED_COMPILE)), (compiled,), is_whole=False)
        )
    return compare_all("compile", groups, config, folder, timeout, as_json, is_asked=bool(layouts))


def _without(layout: Layout, options: Sequence[str]) -> Layout:
    return replace(layout, options=tuple(option for option in layout.options if option not in options))
