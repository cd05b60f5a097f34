"""Units of memory in bytes, by their binary names, and numbers of things in words."""

KIB = 2**10
MIB = 2**20
GIB = 2**30


def counted(number: int, thing: str) -> str:
    """A number of things, such as ``1 rank`` and ``2 ranks``, for nouns that take an s."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
