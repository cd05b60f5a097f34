"""The sinks of a run."""

from pathlib import Path

from crius.config.metrics import MetricsConfig
from crius.metrics.sinks.base import Sink
from crius.metrics.sinks.console import ConsoleSink
from crius.metrics.sinks.jsonl import JsonlSink


def build_sinks(
    config: MetricsConfig, run_dir: Path, steps: int, total_memory_gib: float | None, resumed_step: int = 0
) -> list[Sink]:
    """The sinks of rank 0: metrics.jsonl and the console always, TensorBoard where it is asked for.

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
    return sinks
