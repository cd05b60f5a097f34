"""``[checkpoint]``."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming a run. A run whose folder has checkpoints goes on from the newest good one."""

    enable: bool | None = None
    """Unset: save the last step, and the step at which the run is asked to stop, and resume. on: also start again after
    failures, as an interval does. no_enable: save nothing and do not resume."""

    interval: int = 0
    """Steps between checkpoints. 0: none."""

    interval_minutes: float = 0.0
    """Minutes between checkpoints, beside or instead of the steps. 0: none."""

    folder: str = "checkpoints"
    """Folder of the checkpoints inside the run folder, an absolute path, or an fsspec URL such as s3://bucket/run."""

    load_step: int = -1
    """Step to resume from. -1: the newest good one. Later ones of the same folder are set aside, not overwritten."""

    load_path: str = ""
    """Folder of checkpoints to start from where this run has none of its own yet, such as another run's."""

    mode: Literal["async", "sync"] = "async"
    """async: the run goes on as soon as the state is copied to host memory, a thread writes it. sync: it waits."""

    keep_last: int = 3
    """Newest checkpoints to keep, at least 2."""

    keep_every: int = 0
    """Keep checkpoints whose step is a multiple of this for ever. 0: none."""

    verify_on_save: bool = True
    """Read each file again after it is written and compare its hash, before the checkpoint counts."""

    verify_on_load: bool = True
    """Read and hash every byte before anything is loaded."""

    max_failures: int = 3
    """Saves in a row that may fail before the run stops. Until then it goes on with a warning."""

    allow_changes: tuple[str, ...] = ()
    """Settings that may differ from the checkpoint's although a resume would refuse that, such as data.path."""

    @property
    def is_enabled(self) -> bool:
        """Whether the run saves and resumes."""
        return self.enable is not False

    @property
    def is_supervised(self) -> bool:
        """Whether the run starts again after failures: where that was asked for, or where it saves on the way."""
        return self.is_enabled and (bool(self.enable) or self.interval > 0 or self.interval_minutes > 0)
