"""Patterns over dotted names of modules and parameters, as flags take them."""

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def fits(pattern: str, name: str) -> bool:
    """Whether the parts of ``pattern`` are neighbouring parts of ``name``; ``*`` is anything within one part.

    ``wk``, ``attention.wk``, ``layers.0`` and ``layers.*.attention`` all fit ``layers.0.attention.wk``.
    """
    wanted, parts = pattern.split("."), name.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatchcase, parts[start:], wanted)) for start in starts)


def fits_any(patterns: Iterable[str], name: str) -> str:
    """The first of ``patterns`` that fits ``name``, or an empty string."""
    return next((pattern for pattern in patterns if fits(pattern, name)), "")


def nearest(pattern: str, names: Sequence[str]) -> str:
    """The pattern that was most likely meant by one that fits none of ``names``; empty where none is near."""
    runs: dict[str, None] = {}
    for name in names:
        parts = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name).split(".")
        runs |= {".".join(parts[i:j]): None for i in range(len(parts)) for j in range(len(parts), i, -1)}
    near = difflib.get_close_matches(pattern, [run for run in runs if run != "*"], n=1, cutoff=0.5)
    return near[0] if near else ""
