"""Files that a pattern names: ``glob`` without its endless walk where a link leads to a folder above itself."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path


def matches(pattern: Path) -> list[Path]:
    """Files and folders that fit ``pattern``, in which ``**`` is any number of folders.

    Links are followed. With a ``**``, a file counts once for each name that it has in a folder, however many links to
    folders lead there; the shortest path is taken. A file that has several names itself, by links that someone made to
    it, hard or symbolic, counts under each.
    """
    if "**" not in pattern.parts:
        return [Path(name) for name in glob.glob(str(pattern))]
    found: dict[tuple[int, int, str], Path] = {}
    for path in sorted(_walked(pattern), key=lambda path: (len(path.parts), path)):
        status = path.parent.stat()
        found.setdefault((status.st_dev, status.st_ino, path.name), path)
    return list(found.values())


def _walked(pattern: Path) -> list[Path]:
    """The same, with what links to folders lead to more than once; a folder is looked into once for each ``**``."""
    parts = pattern.parts
    if "**" not in parts:
        return [Path(name) for name in glob.glob(str(pattern))]
    place = parts.index("**")
    top, rest = Path(*parts[:place]), Path(*parts[place + 1 :])
    found: dict[Path, None] = {}
    for base in glob.glob(str(top)) if place else ["."]:
        for folder in _folders(base):
            below = Path(glob.escape(folder)) / (rest if rest.parts else "*")
            found |= dict.fromkeys([*([] if rest.parts else [Path(folder)]), *_walked(below)])
    return list(found)


def is_utf8(name: str) -> bool:
    """Whether the name of a file can be written: Python reads bytes that are not UTF-8 as lone surrogates."""
    return name.encode("utf-8", "replace").decode() == name


def _folders(top: str) -> Iterator[str]:
    """``top`` and all folders below it but hidden ones, each once."""
    seen: set[tuple[int, int]] = set()
    waiting = [top]
    while waiting:
        links = []
        for start in waiting:
            for folder, names, _ in os.walk(start):
                status = os.stat(folder)
                if (status.st_dev, status.st_ino) in seen:
                    names.clear()
                    continue
                seen.add((status.st_dev, status.st_ino))
                names[:] = sorted(name for name in names if not name.startswith("."))
                links += [path for name in names if os.path.islink(path := os.path.join(folder, name))]
                yield folder
        waiting = links
