"""Tables as plain lines."""

import unicodedata
from collections.abc import Collection, Sequence

from crius.redact import printable


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] | None = ()) -> list[str]:
    """Rows with aligned columns on a terminal. Characters that act on a terminal are escaped, such as line ends.

    Args:
        rows: at least one row, all of the same length; a header is a row too.
        left: columns that are aligned to the left, None for all columns; the others to the right.
    """
    table = [[printable(cell).replace("\n", "\\n").replace("\t", "\\t") for cell in row] for row in rows]
    widths = [max(map(_width, column)) for column in zip(*table, strict=True)]

    def padded(cell: str, column: int) -> str:
        length = len(cell) + widths[column] - _width(cell)  # in characters: some take two columns, some none
        return cell.ljust(length) if left is None or column in left else cell.rjust(length)

    return ["  ".join(padded(cell, column) for column, cell in enumerate(row)).rstrip() for row in table]


def _width(text: str) -> int:
    """Columns that ``text`` takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else not unicodedata.combining(char) for char in text)
