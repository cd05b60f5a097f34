"""Checkpoints that a run will save, their place, and whether its disk has room; and the newest one that it has saved,
which must not vanish unnoticed. All is checked before step 1. No torch.
"""

import contextlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import FEWEST, CheckpointFolder, read_manifest
from crius.checkpoint.manifest import Manifest
from crius.checkpoint.names import parse_folder, step_name
from crius.config.resolve import ITEMSIZE
from crius.config.run import RunConfig
from crius.config.toml_file import settings_of_run
from crius.errors import CheckpointError, ConfigError, EnvironmentError
from crius.models.description import ModelDescription
from crius.run_file import write_run_file
from crius.strict_json import load_object
from crius.train.inputs import checkpoint_folder, describe_model
from crius.untrusted import HUGE, SMALL, read_below, records_below

log = logging.getLogger("crius.checkpoint")

NEWEST = "newest_checkpoint.json"
"""File of a run folder that names the checkpoint that the run saved last, or resumed from. Rank 0 writes it after each
commit. A kill between the two leaves a checkpoint that is newer than the file."""

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


class Newest(NamedTuple):
    """The newest checkpoint of a run. The defaults stand for a file that cannot be read: the run saved something.

    Attributes:
        run_id: id of the run in the manifest.
        step: step of the checkpoint; -1: there is none.
        digest: hash of the manifest; empty: not known.
        folder: folder of checkpoints that it was saved in, for messages.
        load_step: ``checkpoint.load_step`` of the run that saved it: it has returned to that step.
    """

    run_id: str = ""
    step: int = 0
    digest: str = ""
    folder: str = "an unknown folder"
    load_step: int = -1


def remember(run_dir: Path, folder: CheckpointFolder, manifest: Manifest | None) -> None:
    """Record the newest checkpoint of a run; None: it has none. If the file cannot be written, a warning says so."""
    newest = Newest(step=-1, digest="none", folder=folder.disk.where)
    if manifest:
        load_step = manifest.config.get("checkpoint.load_step", -1)
        newest = Newest(manifest.run_id, manifest.step, manifest.digest, newest.folder, load_step)
    write_run_file(run_dir / NEWEST, json.dumps(newest._asdict()) + "\n", log.warning, is_durable=True)


def check_newest(run_dir: Path, folder: CheckpointFolder, load_step: int, *, accepts: bool) -> str:
    """Look for the newest checkpoint of a run. A damaged one counts, because the load names its damage.

    Args:
        run_dir: folder of the run.
        folder: folder of its checkpoints.
        load_step: step that was asked for, which may be an older one, once; -1: the newest.
        accepts: take what is there, whatever is missing.

    Returns:
        A line for the log if the newest checkpoint is not taken or not known; else an empty text.

    Raises:
        ConfigError: the checkpoint is missing, or another one is in its place.
    """
    path = run_dir / NEWEST
    newest = _recall(path)
    steps = folder.steps()
    last = max(steps, default=-1)
    is_asked = load_step in steps
    start = load_step if is_asked else last
    taken = f"the run continues from step {start}" if steps else "the run begins again"
    if steps and not newest.digest:
        return f"{path} is missing or damaged: {taken}, and does not know of later ones"
    problem = _problem(folder, newest, last) if newest.step >= 0 else ""
    if not problem or (is_asked and load_step != newest.load_step):
        return ""
    # a killed save may have been replacing a checkpoint, which is put back when the run starts
    kept = [*folder.asides(), *(name for name in folder.disk.folders() if ".replaced-" in name)]
    parsed = {name: parse_folder(name.partition("/")[0]) for name in kept}
    same = [name for name, found in parsed.items() if found and found.step == newest.step > last]
    excuses = [f"{name} was set aside" for name in same if _fits(folder, name, newest)]
    if accepts:
        excuses = ["--checkpoint.restart allows it"]
    if excuses:
        return f"{problem}: {taken}, because {excuses[-1]}"
    raise ConfigError(
        f"{problem}.",
        where=str(path),
        why=f"the run saved it in {newest.folder}, and would now repeat its steps in silence",
        fix=f"bring it back (is its disk mounted?), or --checkpoint.restart: {taken}",
    )


def check_newest_of(config: RunConfig, run_dir: Path) -> None:
    """``check_newest`` before anything is started."""
    if config.checkpoint.is_enabled:
        folder = CheckpointFolder(open_disk(checkpoint_folder(config, run_dir)))
        check_newest(run_dir, folder, config.checkpoint.load_step, accepts=config.checkpoint.restart)


def _recall(path: Path) -> Newest:
    """The content of the file; if it is missing or damaged, the last step that the run may have saved."""
    least = 0  # a damaged file says that there was a save
    try:
        found = Newest(**load_object(read_below(path.parent, path.name, SMALL)))
        if found.digest and [type(value) for value in found] == [str, int, str, str, int]:
            return found
    except FileNotFoundError:
        least = -1
    except (OSError, ValueError, TypeError):
        pass
    return Newest(step=_done(path.parent) or least)


def _done(run_dir: Path) -> int:
    """The last step in ``metrics.jsonl``; 0 if there is none, or if the run saved nothing, as its ``run.toml`` says."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if settings_of_run(run_dir)["checkpoint"]["enable"] is False:
            return 0
    steps = [record.get("step") for record in records_below(run_dir, "metrics.jsonl", HUGE) if record]
    return max((step for step in steps if type(step) is int), default=0)


def _problem(folder: CheckpointFolder, newest: Newest, last: int) -> str:
    """What is in the place of the newest checkpoint; empty if it is there. ``last``: newest step there, or -1."""
    where = folder.disk.where
    about = "" if newest.digest else "about "
    missing = f"the newest checkpoint of the run, {about}step {newest.step}, is missing"
    if last < newest.step:
        return f"{missing}: {where} has {'no checkpoint' if last < 0 else f'step {last} at most'}"
    if _fits(folder, step_name(last), newest):
        return ""
    return f"{missing}: step {last} in {where} is of another run, or was saved again"


def _fits(folder: CheckpointFolder, name: str, newest: Newest) -> bool:
    """Whether a checkpoint is the newest one or a later one of the run, or cannot be told, because it is damaged."""
    try:
        manifest = read_manifest(folder.disk, name)
    except CheckpointError:
        return True
    is_later = manifest.step > newest.step
    return manifest.run_id == newest.run_id and (is_later or manifest.digest == newest.digest)
