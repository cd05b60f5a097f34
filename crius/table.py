"""Tables as plain lines."""

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] | None = ()) -> list[str]:
    """Rows with aligned columns.

    Args:
        rows: at least one row, all of the same length; a header is a row too.
        left: columns that are aligned to the left, None for all columns; the others to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if left is None or column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
