"""``crius verify parity``: every layout against one device."""

from pathlib import Path

from crius.config.facts import Facts
from crius.tools.verify import matrix
from crius.tools.verify.compare import LayoutGroup, checked, compare_all


def parity(
    facts: Facts,
    folder: Path,
    *,
    layouts: str = "",
    nproc: int = 8,
    steps: int = 3,
    timeout: int = 300,
    as_json: bool = False,
) -> int:
    """Train each layout and one device on the same uneven batches, and print how far they are apart.

    Layouts that change what is computed, such as ``+document``, have a reference of their own.

    Args:
        facts: of the run, on this machine.
        folder: of the logs, one folder a layout below it.
        layouts: which ones, joined by commas; empty: ``matrix.PARITY``.
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
    wanted = matrix.chosen(layouts, matrix.PARITY, nproc)
    config = checked(facts, wanted, steps)
    groups = []
    for reference in dict.fromkeys(map(matrix.reference_of, wanted)):
        own = [layout for layout in wanted if layout != reference and matrix.reference_of(layout) == reference]
        cases = tuple(matrix.case(facts, config, layout) for layout in own)
        groups.append(LayoutGroup(matrix.case(facts, config, reference), cases, is_whole=True))
    return compare_all("parity", groups, config, folder, timeout, as_json, is_asked=bool(layouts))
