"""Measurements on this machine: which low-precision format is worthwhile, and what the planner is calibrated by."""

import importlib.abc
import sys
from typing import Any

MOVED = ("checkpoint", "contestant", "data", "optimizer", "startup", "train", "train_job", "turns")
"""Modules that measure Crius itself; they have these names in ``benchmarks``, a folder of a checkout."""


class _Moved(importlib.abc.MetaPathFinder):
    """Answers an import of a module of ``MOVED`` with its new name."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        package, _, name = fullname.rpartition(".")
        if package == __name__ and name in MOVED:
            text = f"{fullname} has moved: it is benchmarks.{name}, in a checkout of Crius."
            raise ModuleNotFoundError(text)


sys.meta_path.append(_Moved())
