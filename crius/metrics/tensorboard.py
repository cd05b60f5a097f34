"""TensorBoard, with torchtitan's tag names, so that curves of both appear in one plot."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from crius.metrics.record import Record, scalars_of

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
            for tag, value in scalars_of(record, self._total).items():
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
