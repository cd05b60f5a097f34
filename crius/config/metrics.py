"""``[metrics]``."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What a run reports; metrics.jsonl is always written."""

    log_interval: int = 10
    """Steps between reports. The first and the last step always report."""

    enable_tensorboard: bool = False
    """Write TensorBoard event files with torchtitan's tag names (needs ``pip install crius[tensorboard]``)."""

    sinks: tuple[str, ...] = ()
    """Sinks of installed packages that take every record too (repeat the flag for more): docs/plugins.md."""

    peak_tflops: float = 0.0
    """Dense bf16 peak of one device in TFLOP/s, for MFU. 0: the published peak of known
    devices; others print n/a."""

    enable_progress_bar: bool = True
    """Show a bar with the remaining time on a terminal. Pipes and files always get plain lines."""
