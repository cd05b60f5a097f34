"""Where a run is. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a run is.

    Attributes:
        device: ``cuda`` or ``cpu``.
        name: of the GPU or the CPU.
        ranks: of the run.
        local_ranks: of them on a host.
        threads: of a rank on a CPU.
    """

    device: str
    name: str
    ranks: int
    local_ranks: int
    threads: int

    @property
    def on_gpu(self) -> bool:
        """Whether it is on GPUs."""
        return self.device == "cuda"
