"""The interface of a sink."""

from typing import Protocol

from crius.metrics.record import Record


class Sink(Protocol):
    """Takes every record of a run, on rank 0."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Flush and release what is open."""
