"""The interface of a sink."""

from typing import Any, Protocol

from crius.metrics.record import Record


class Sink(Protocol):
    """Takes every record of a run, on rank 0."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Flush and release what is open."""


class PlanSink(Sink, Protocol):
    """A sink that holds the records of a run against its plan."""

    def line(self) -> str:
        """How the plan did, for the log; empty where there is nothing to say."""

    def as_dict(self) -> dict[str, Any] | None:
        """The same for ``summary.json``."""
