"""TensorBoard, with torchtitan's tag names, so that curves of both appear in one plot."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from crius.metrics.record import Record, StepMetrics

log = logging.getLogger("crius.metrics")


class TensorBoardSink:
    """Writes event files to ``tb/`` in the run folder. Importing this module needs the package tensorboard.

    Args:
        run_dir: folder of the run.
        total_memory_gib: memory of the device; None if it is not known.
        resumed_step: steps that the run did before; later steps are repeated. 0: a new run.
    """

    def __init__(self, run_dir: Path, total_memory_gib: float | None, resumed_step: int = 0) -> None:
        self._total = total_memory_gib
        purge = resumed_step + 1 if resumed_step else None  # removes records of repeated steps
        self._writer: SummaryWriter | None = None
        with self._warned():
            self._writer = SummaryWriter(str(run_dir / "tb"), purge_step=purge)

    def write(self, record: Record) -> None:
        """Write the scalars of one record."""
        with self._warned():
            for tag, value in _scalars(record, self._total).items():
                if self._writer:
                    self._writer.add_scalar(tag, value, record.step)

    def close(self) -> None:
        """Flush and close."""
        with self._warned():
            if self._writer:
                self._writer.close()

    @contextlib.contextmanager
    def _warned(self) -> Iterator[None]:
        """A failing disk ends the curves but not the run; the writer's thread does not survive it."""
        try:
            yield
        except OSError as error:
            self._writer = None
            log.warning("the files of TensorBoard cannot be written (%s): its curves end here", error.strerror)


def _scalars(record: Record, total_gib: float | None) -> dict[str, float]:
    if not isinstance(record, StepMetrics):
        return {
            "validation_metrics/loss": record.val_loss,
            "validation_metrics/perplexity": record.val_perplexity,
            "validation_metrics/bits_per_byte": record.val_bits_per_byte,
        }
    scalars = {
        "loss_metrics/global_avg_loss": record.loss,
        "grad_norm": record.grad_norm,
        "lr": record.lr,
        "n_tokens_seen": record.tokens,
        "throughput(tps)": record.tokens_per_second_per_rank,
        "tflops": record.tflops,
        "time_metrics/end_to_end(s)": record.step_seconds,
        "time_metrics/data_loading(s)": record.data_seconds,
        "time_metrics/data_loading(%)": 100 * record.data_seconds / record.step_seconds if record.step_seconds else 0.0,
        "memory/max_active(GiB)": record.max_active_gib,
        "memory/max_reserved(GiB)": record.max_reserved_gib,
        "memory/num_alloc_retries": record.num_alloc_retries,
        "memory/num_ooms": record.num_ooms,
        "goodput": record.goodput,
    }
    if record.max_loss is not None:
        scalars["loss_metrics/global_max_loss"] = record.max_loss
    if total_gib:
        scalars["memory/max_active(%)"] = 100 * record.max_active_gib / total_gib
        scalars["memory/max_reserved(%)"] = 100 * record.max_reserved_gib / total_gib
    if record.mfu is not None:
        scalars["mfu(%)"] = 100 * record.mfu
    loads = ("load_max_over_mean", "load_entropy", "dead_experts", "aux_loss")
    scalars |= {f"experts/{name}": value for name in loads if (value := getattr(record, name)) is not None}
    lost = {"skipped_steps": record.skipped_steps, "rolled_back_steps": record.rolled_back_steps}
    return scalars | {f"stability/{name}": float(count) for name, count in lost.items() if count}
