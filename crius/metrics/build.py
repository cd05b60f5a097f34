"""The sinks of a run."""

import contextlib
import logging
from pathlib import Path

from crius import plugins
from crius.config.operation import MetricsConfig
from crius.metrics.record import Record, Sink
from crius.metrics.sinks.console import ConsoleSink
from crius.metrics.sinks.jsonl import JsonlSink

_log = logging.getLogger("crius.metrics")


class ForeignSink:
    """A sink of an installed package, which must not end a run: one that fails is warned of and let go.

    The entry point of the group ``crius.sinks`` is called with the folder of the run and the step that it resumes from,
    and gives a ``Sink``.

    Args:
        name: of the entry point.
        run_dir: folder of the run.
        resumed_step: see ``build_sinks``.
    """

    def __init__(self, name: str, run_dir: Path, resumed_step: int) -> None:
        self._name = name
        self._sink: Sink | None = None
        build = plugins.load(plugins.SINKS, name)
        try:
            self._sink = build(run_dir, resumed_step)  # type: ignore[misc]
        except (Exception, SystemExit) as error:  # of code that is not ours
            self._leave(error)

    def write(self, record: Record) -> None:
        """See ``Sink``."""
        try:
            if self._sink is not None:
                self._sink.write(record)
        except (Exception, SystemExit) as error:
            self._leave(error)

    def close(self) -> None:
        """See ``Sink``."""
        try:
            if self._sink is not None:
                self._sink.close()
        except (Exception, SystemExit) as error:
            self._leave(error)

    def _leave(self, error: BaseException) -> None:
        left, self._sink = self._sink, None
        with contextlib.suppress(Exception, SystemExit):
            if left is not None:
                left.close()
        _log.warning(
            "metrics.sinks %s failed and gets no more records: %s: %s", self._name, type(error).__name__, error
        )


def build_sinks(
    config: MetricsConfig, run_dir: Path, steps: int, total_memory_gib: float | None, resumed_step: int = 0
) -> list[Sink]:
    """The sinks of rank 0: metrics.jsonl and the console always, TensorBoard and those of packages where asked for.

    Args:
        config: the section.
        run_dir: folder of the run.
        steps: of the run.
        total_memory_gib: memory of the device, None where it is not known.
        resumed_step: steps that the run has done before; their records go on, later ones come again. 0: a new run.
    """
    sinks: list[Sink] = [
        JsonlSink(run_dir, resumed_step),
        ConsoleSink(steps, total_memory_gib, config.enable_progress_bar),
    ]
    if config.enable_tensorboard:
        from crius.metrics.sinks.tensorboard import TensorBoardSink  # noqa: PLC0415  needs an optional package

        sinks.append(TensorBoardSink(run_dir, total_memory_gib, resumed_step))
    return [*sinks, *(ForeignSink(name, run_dir, resumed_step) for name in dict.fromkeys(config.sinks))]
