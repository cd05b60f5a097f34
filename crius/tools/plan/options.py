"""Options of ``crius plan``."""

import importlib
from dataclasses import dataclass
from typing import Annotated, Literal

from crius.config.arguments import Option

DEFAULT_GPU = "h100"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a plan is for."""

    gpus: int | None = None
    """Number of GPUs. Not given: those of --nodes, or 8."""

    gpu: Annotated[str, Option(known=lambda: importlib.import_module("crius.tools.plan.hardware").KNOWN)] = DEFAULT_GPU
    """A known GPU, or a TOML file: docs/planner.md lists them."""

    nodes: int | None = None
    """Number of whole nodes, instead of --gpus."""

    precision: Literal["", "float32", "bfloat16", "float8"] = ""
    """Precision of the matmuls. Empty: as in the other flags, bfloat16 on a GPU."""

    explain: bool = False
    """Explain each choice, with all numbers."""
