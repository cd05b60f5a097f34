"""Checkpoints that a run will save, their place, and whether its disk has room: checked before step 1. No torch."""

import logging
from dataclasses import dataclass
from pathlib import Path

from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import FEWEST, CheckpointFolder
from crius.config.resolve import ITEMSIZE
from crius.config.run import RunConfig
from crius.errors import EnvironmentError
from crius.models.description import ModelDescription
from crius.train.inputs import checkpoint_folder, describe_model

log = logging.getLogger("crius.checkpoint")

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """Checkpoints that a run will save.

    Attributes:
        where: folder or URL of the checkpoints.
        when: steps that are saved, in words.
        num_bytes: approximate size of one checkpoint.
        most: most checkpoints that exist at the same time.
        present: checkpoints that exist now.
        free_bytes: free bytes of the disk; None if that is not known.
        is_saved: whether the last step is already saved, so that nothing is left to train or save.
    """

    where: str
    when: str
    num_bytes: int
    most: int
    present: int
    free_bytes: int | None
    is_saved: bool

    @property
    def missing_bytes(self) -> int:
        """Bytes that the disk lacks for all checkpoints; 0 if it has room, or if its room is not known."""
        needed = self.num_bytes * max(1, self.most - self.present)
        return 0 if self.free_bytes is None or self.is_saved else max(0, needed - self.free_bytes)

    def line(self) -> str:
        """The plan in one line, for the log."""
        count = "" if self.most == 1 else f" each, up to {self.most} of them"
        free = "" if self.free_bytes is None else f"; {size(self.free_bytes)} free"
        short = f", {size(self.missing_bytes)} too little: later saves will fail" if self.missing_bytes else ""
        return f"{self.when}, go to {self.where}, about {size(self.num_bytes)}{count}{free}{short}"


def save_plan(config: RunConfig, run_dir: Path) -> SavePlan | None:
    """Checkpoints that ``config`` saves; None if it saves nothing."""
    checkpoint = config.checkpoint
    steps = config.training.steps
    if not checkpoint.is_enabled:
        return None
    folder = CheckpointFolder(open_disk(checkpoint_folder(config, run_dir)))
    if checkpoint.interval:
        saves = steps // checkpoint.interval
    else:
        saves = steps if checkpoint.interval_minutes else 0
    kept = max(checkpoint.keep_last, FEWEST) + 1  # an old one is removed after a new one is complete
    goes_back = checkpoint.load_step >= 0 and not checkpoint.load_path
    present = folder.steps()
    kept += steps // checkpoint.keep_every if checkpoint.keep_every else 0
    ways = [f"every {checkpoint.interval} steps"] if checkpoint.interval else []
    ways += [f"every {checkpoint.interval_minutes:g} minutes"] if checkpoint.interval_minutes else []
    return SavePlan(
        where=folder.disk.where,
        when=", ".join([*ways, "the last step, and the step of a Ctrl-C or SIGTERM"]),
        num_bytes=checkpoint_bytes(config, describe_model(config)),
        most=min(kept, saves + 1),
        present=len(present),
        free_bytes=folder.disk.free_bytes(),
        is_saved=bool(present) and present[-1] >= steps and not goes_back,
    )


def log_save_plan(config: RunConfig, run_dir: Path) -> None:
    """Log which checkpoints will be saved and where, or that none will be."""
    plan = save_plan(config, run_dir)
    if plan is None:
        log.info("checkpoints: nothing will be saved, because checkpoint.enable is off")
    else:
        log.log(logging.WARNING if plan.missing_bytes else logging.INFO, "checkpoints: %s", plan.line())


def check_space(config: RunConfig, run_dir: Path) -> None:
    """Refuse a run whose disk has no room for one checkpoint.

    Raises:
        EnvironmentError: the disk has no room; the message has the sizes.
    """
    plan = save_plan(config, run_dir)
    if plan is None or plan.free_bytes is None or plan.is_saved or plan.free_bytes >= plan.num_bytes:
        return
    raise EnvironmentError(
        f"a checkpoint of this run takes about {size(plan.num_bytes)}, {plan.where} has {size(plan.free_bytes)} free.",
        where="--checkpoint.folder",
        why="the model would be lost at the end of the run",
        fix="make room, --checkpoint.folder DIR on a larger disk, or --checkpoint.no_enable to save nothing",
    )


def checkpoint_bytes(config: RunConfig, facts: ModelDescription) -> int:
    """Approximate bytes of a checkpoint: the trained weights and the moments of the optimizer; the rest is small."""
    moment = 2 if config.optimizer.state_dtype == "bfloat16" else 4  # 8-bit moments are saved as float32
    total = facts.num_trained
    moments = 2 * total
    if config.optimizer.name == "muon":  # Muon has one moment for the matrices of the layers
        moments -= facts.matmul_parameters - facts.vocab_size * facts.dim
    return total * ITEMSIZE[config.training.dtype] + moments * moment


def size(num_bytes: float) -> str:
    """``19.9 MiB``: bytes in the largest unit that leaves at least 1."""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes = num_bytes / 1024
        unit = unit + 1
    return f"{num_bytes:.1f} {_UNITS[unit]}"
