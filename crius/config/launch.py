"""``[launch]``: the processes that Crius starts itself."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """What the launcher does about failures and signals. Under torchrun or Slurm it is they who start processes."""

    max_restarts: int = 3
    """Restarts of all workers from the newest checkpoint after one of them failed. None without checkpoints, nor after
    an error that would come again, such as a wrong setting."""

    max_failures_at_step: int = 2
    """Give up after so many failures in a row without a new step between them."""

    grace_seconds: float = 60.0
    """Time to save and end after SIGTERM, SIGUSR1 or Ctrl-C; then the workers are killed. A second signal kills them
    at once."""
