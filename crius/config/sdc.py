"""``[sdc]``: silent data corruption, a device that computes wrong numbers without an error."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SdcConfig:
    """Checks that repeat work and compare bits. Off by default: they cost time, which the log says."""

    recompute_interval: int = 0
    """Every so many steps each rank computes its first microbatch twice and compares loss and gradients. 0: never."""

    replica_interval: int = 0
    """Every so many steps the replicas of a weight compare its hash. 0: never."""
