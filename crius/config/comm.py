"""``[comm]``: communication."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """Timeouts of the process groups."""

    timeout_seconds: int = 300
    """A collective that is not finished after this many seconds fails. Also bounds the rendezvous."""
