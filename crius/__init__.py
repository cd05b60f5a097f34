"""Crius: a PyTorch-native platform for training large language models.

The Python interface is ``crius.run``, ``crius.load_run`` and ``crius.load_model``: see ``crius.api``. Importing this
package imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from crius import errors

if TYPE_CHECKING:
    from crius.api import Run, load_model, load_run, run

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "errors", "load_model", "load_run", "run"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """A name of ``crius.api``, imported at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("crius.api"), name)
