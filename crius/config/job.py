"""``[job]``: the name and the folder of a run."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """Where a run writes."""

    name: str = ""
    """Name of the run. Empty: the recipe, or the model where that is another, and the time."""

    run_dir: str = ""
    """Folder of the run. Empty: runs/<name>. A metrics.jsonl that is already there is kept under another name."""
