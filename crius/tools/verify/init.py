"""``crius verify init``: the weights start from the same bits under every layout."""

from pathlib import Path

from crius.config.facts import Facts
from crius.config.layout import Layout
from crius.errors import ConfigError
from crius.tools.verify import matrix, worker
from crius.tools.verify.matrix import Case
from crius.tools.verify.parameters import Shards, one_hash
from crius.tools.verify.rows import LayoutRow, Table
from crius.tools.verify.run import Stopped, run
from crius.tools.verify.worker import Task


def init(
    facts: Facts,
    folder: Path,
    *,
    layouts: str = "",
    nproc: int = 8,
    timeout: int = 300,
    as_json: bool = False,
) -> int:
    """Draw the weights under each layout, and print a hash of their bits.

    The first layout is what the others are held against; the hash is of all parameters, in float32 as they are trained.

    Args:
        facts: of the run, on this machine.
        folder: of the logs, one folder a layout below it.
        layouts: which ones, joined by commas; empty: ``matrix.INIT``.
        nproc: most ranks of a layout where ``layouts`` is empty.
        timeout: seconds that a layout may take.
        as_json: print JSON instead of a table.

    Returns:
        0 for one hash; 1 for several, or where a layout fails; 2 where one of ``layouts`` is refused; 130 or 143 after
        a signal.

    Raises:
        CriusError: the run is refused on one device too, or a layout cannot be read.
    """
    matrix.check_timeout(timeout)
    wanted = matrix.chosen(layouts, matrix.INIT, nproc)
    config = matrix.fixed(facts.config, wanted, 1)
    alone = matrix.case(facts, config, Layout())
    if alone.config is None:
        raise ConfigError.together(alone.problems)
    table = Table(["hash"], [str(layout) for layout in wanted], as_json)
    expected: dict[str, str] = {}
    for layout in wanted:
        try:
            row, found = _row(matrix.case(facts, config, layout), expected, folder, timeout)
        except Stopped as stopped:
            return stopped.code
        expected = expected or found
        table.add(row)
    hashes = {row.values["hash"] for row in table.rows if row.values}
    is_one = len(hashes) == 1 and table.exit_code(False) == 0
    counts = {status: sum(row.status == status for row in table.rows) for status in ("ok", "FAIL", "refused")}
    verdict = f"one hash over {counts['ok']} layouts" if is_one else f"{len(hashes)} hashes, {counts['FAIL']} failed"
    refused = f", {counts['refused']} refused" if counts["refused"] else ""
    table.close(["", f"{verdict}{refused}"], verb="init", one_hash=is_one, counts=counts)
    return table.exit_code(bool(layouts))


def _row(case: Case, expected: dict[str, str], folder: Path, timeout: int) -> tuple[LayoutRow, dict[str, str]]:
    """The row of one layout, and its checksums by parameter."""
    name, ranks = str(case.layout), case.layout.num_ranks
    if case.config is None:
        return LayoutRow(layout=name, ranks=ranks, status="refused", note=case.refusal), {}
    task = Task(case.config, folder / name, timeout, Shards(folder, is_whole=True))
    outcome = run(worker.start, task, ranks)
    if outcome.result is None:
        return LayoutRow(layout=name, ranks=ranks, status="FAIL", seconds=outcome.seconds, note=outcome.note), {}
    found: dict[str, str] = outcome.result["checksums"]
    wrong = [parameter for parameter, value in found.items() if not value]
    other = [parameter for parameter in expected if found.get(parameter) != expected[parameter]]
    note = ""
    if wrong:
        note = f"{len(wrong)} of {len(found)} differ between ranks that hold the same part, first {wrong[0]}"
    elif other:
        note = f"{len(other)} of {len(found)} parameters differ, first {other[0]}"
    row = LayoutRow(
        layout=name,
        ranks=ranks,
        status="FAIL" if note else "ok",
        values={"hash": one_hash(found)},
        seconds=outcome.seconds,
        note=note,
    )
    return row, {} if wrong else found
