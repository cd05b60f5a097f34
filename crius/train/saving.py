"""What a run saves, where, and whether its disk has room for it: looked at before step 1. No torch."""

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
    """What a run saves.

    Attributes:
        where: folder or URL of the checkpoints.
        when: the steps that are saved, in words.
        num_bytes: size of one checkpoint, about.
        most: checkpoints that lie there at the same time, at most.
        present: checkpoints that lie there now.
        free_bytes: what the disk can still take; None where that is not known.
        is_saved: the last step lies there already: nothing is left to train, and nothing to save.
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
        """Bytes that the disk lacks for all that will lie there; 0 where it has room, or does not say."""
        needed = self.num_bytes * max(1, self.most - self.present)
        return 0 if self.free_bytes is None or self.is_saved else max(0, needed - self.free_bytes)

    def line(self) -> str:
        """The plan in one line, for the log."""
        count = "" if self.most == 1 else f" each, up to {self.most} of them"
        free = "" if self.free_bytes is None else f"; {size(self.free_bytes)} free"
        short = f", {size(self.missing_bytes)} too little: later saves will fail" if self.missing_bytes else ""
        return f"{self.when}, go to {self.where}, about {size(self.num_bytes)}{count}{free}{short}"


def save_plan(config: RunConfig, run_dir: Path) -> SavePlan | None:
    """What ``config`` saves in its run folder; None where it saves nothing."""
    checkpoint, steps = config.checkpoint, config.training.steps
    if not checkpoint.is_enabled:
        return None
    folder = CheckpointFolder(open_disk(checkpoint_folder(config, run_dir)))
    saves = steps // checkpoint.interval if checkpoint.interval else steps if checkpoint.interval_minutes else 0
    kept = max(checkpoint.keep_last, FEWEST) + 1  # a new one is whole before an old one goes
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
    """Say what will be saved and where, or that nothing will be."""
    plan = save_plan(config, run_dir)
    if plan is None:
        log.info("checkpoints: nothing will be saved, for checkpoint.enable is off")
    else:
        log.log(logging.WARNING if plan.missing_bytes else logging.INFO, "checkpoints: %s", plan.line())


def check_space(config: RunConfig, run_dir: Path) -> None:
    """Refuse a run whose disk has no room for one checkpoint.

    Raises:
        EnvironmentError: with the sizes.
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
    """Bytes of a checkpoint, about: what is trained and the moments of the optimizer; the rest is small."""
    moment = 2 if config.optimizer.state_dtype == "bfloat16" else 4  # those in 8 bits are saved as float32
    total = facts.num_trained
    moments = 2 * total
    if config.optimizer.name == "muon":  # it has one for the matrices of the layers
        moments -= facts.matmul_parameters - facts.vocab_size * facts.dim
    return total * ITEMSIZE[config.training.dtype] + moments * moment


def size(num_bytes: float) -> str:
    """``19.9 MiB``: bytes in the largest unit that leaves at least 1."""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.1f} {_UNITS[unit]}"
