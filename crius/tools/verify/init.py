"""``crius verify init``: the weights start from the same bits under every layout."""

from pathlib import Path
from typing import Any

from crius.config.facts import Facts
from crius.config.layout import Layout
from crius.config.run import RunConfig
from crius.tools.verify import matrix, worker
from crius.tools.verify.matrix import LayoutCase
from crius.tools.verify.options import OnLayouts
from crius.tools.verify.parameters import Shards, one_hash
from crius.tools.verify.run import LayoutRow, LayoutTable, row_of
from crius.tools.verify.worker import WorkerTask


def init(facts: Facts, folder: Path, options: OnLayouts, *, as_json: bool = False) -> int:
    """Draw the weights under each layout, and print a hash of their bits.

    The other layouts are compared with the first. The hash is over all parameters, in float32 as they are trained.

    Args:
        facts: facts about the run on this machine.
        folder: folder of the logs, with one folder per layout.
        options: without layouts, those of ``matrix.INIT`` or ``EXPERTS_INIT``.
        as_json: print JSON instead of a table.

    Returns:
        0 for one hash; 1 for several, or if a layout fails; 2 if one of ``layouts`` is refused.

    Raises:
        CriusError: the run is refused on one device too, or a layout cannot be read.
        SystemExit: a signal ended it; 130 or 143.
    """
    wanted = matrix.chosen(options, matrix.EXPERTS_INIT if facts.has_experts else matrix.INIT)
    config = matrix.fixed(facts.config, wanted, 1)
    matrix.case(facts, config, Layout()).check()
    table = LayoutTable(["hash"], [str(layout) for layout in wanted], as_json)
    expected: dict[str, str] = {}
    for layout in wanted:
        row, found = _row(matrix.case(facts, config, layout), expected, folder, options.timeout)
        expected = expected or found
        table.add(row)
    hashes = {row.values["hash"] for row in table.rows if row.values}
    is_one = len(hashes) == 1 and table.exit_code(False) == 0
    counts = table.counts()
    verdict = f"one hash over {counts['ok']} layouts" if is_one else f"{len(hashes)} hashes, {counts['FAIL']} failed"
    refused = f", {counts['refused']} refused" if counts["refused"] else ""
    table.close(["", f"{verdict}{refused}"], verb="init", one_hash=is_one, counts=counts)
    return table.exit_code(bool(options.layouts))


def _row(case: LayoutCase, expected: dict[str, str], folder: Path, timeout: int) -> tuple[LayoutRow, dict[str, str]]:
    """The row of one layout, and its checksums by parameter."""

    def task_of(config: RunConfig) -> WorkerTask:
        return WorkerTask(config, folder / str(case.layout), timeout, Shards(folder, is_whole=True))

    def judge(result: dict[str, Any]) -> tuple[dict[str, str], str, bool]:
        sums = result["checksums"]
        wrong = [parameter for parameter, value in sums.items() if not value]
        other = [parameter for parameter in expected if sums.get(parameter) != expected[parameter]]
        note = ""
        if wrong:
            note = f"{len(wrong)} of {len(sums)} differ between ranks with the same part, first {wrong[0]}"
        elif other:
            note = f"{len(other)} of {len(sums)} parameters differ, first {other[0]}"
        return {"hash": one_hash(sums)}, note, bool(note)

    row, result = row_of(str(case.layout), case, worker.start, task_of, judge)
    sums: dict[str, str] = result["checksums"] if result else {}
    return row, sums if all(sums.values()) else {}
