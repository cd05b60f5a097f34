"""The sinks of a run."""

from pathlib import Path

from crius.config.metrics import MetricsConfig
from crius.metrics.sinks.base import Sink
from crius.metrics.sinks.console import ConsoleSink
from crius.metrics.sinks.jsonl import JsonlSink


def build_sinks(config: MetricsConfig, run_dir: Path, steps: int, total_memory_gib: float | None) -> list[Sink]:
    """The sinks of rank 0: metrics.jsonl and the console always, TensorBoard where it is asked for."""
    sinks: list[Sink] = [JsonlSink(run_dir), ConsoleSink(steps, total_memory_gib, config.enable_progress_bar)]
    if config.enable_tensorboard:
        from crius.metrics.sinks.tensorboard import TensorBoardSink  # noqa: PLC0415  needs an optional package

        sinks.append(TensorBoardSink(run_dir))
    return sinks
