"""The checkpoints of a run: which are there, which may go, what killed saves left behind. No torch."""

from collections.abc import Iterable, Sequence

from crius.checkpoint.disk import Disk
from crius.checkpoint.names import is_set_aside, parse_folder, parse_step, step_name
from crius.checkpoint.verify import lacks, read_manifest
from crius.errors import CheckpointError

FEWEST = 2
"""Good checkpoints that always stay: one could turn out to be damaged."""


def expendable(good: Sequence[int], keep_last: int, keep_every: int, protect: Iterable[int] = ()) -> list[int]:
    """Which checkpoints may be removed.

    Args:
        good: steps of checkpoints that can be loaded.
        keep_last: newest ones to keep; fewer than 2 count as 2.
        keep_every: keep the steps that are multiples of this. 0: none.
        protect: steps to keep besides.

    Returns:
        Steps, ascending.
    """
    ordered = sorted(set(good))
    kept = {*ordered[-max(keep_last, FEWEST) :], *protect}
    if keep_every > 0:
        kept.update(step for step in ordered if step % keep_every == 0)
    return [step for step in ordered if step not in kept]


class CheckpointFolder:
    """The checkpoints on a disk.

    Attributes:
        disk: the folder of checkpoints.
    """

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are committed, ascending; whether they can be loaded is not looked at."""
        return self.disk.committed()

    def good(self) -> list[int]:
        """Steps of the checkpoints that can be loaded, ascending; see ``problem``."""
        return [step for step in self.steps() if not self.problem(step)]

    def leftovers(self) -> list[str]:
        """Folders of saves that were not finished or were replaced."""
        committed, found = self.steps(), []
        for name in self.disk.folders():
            parsed = parse_folder(name)
            if parsed and parsed.kind != "aside" and not (parsed.step in committed and not parsed.kind):
                found += [] if self._asides(name) else [name]
        return found

    def asides(self) -> list[str]:
        """Checkpoints that were set aside, as ``Disk.set_aside`` named them."""
        folders = [name for name in self.disk.folders() if (found := parse_folder(name)) and found.kind == "aside"]
        return folders + [kept for name in self.disk.folders() for kept in self._asides(name)]

    def problem(self, step: int) -> str:
        """Why a checkpoint cannot be loaded; empty where its manifest is whole and all files have their sizes."""
        return self._problem(step_name(step))

    def _problem(self, name: str) -> str:
        try:
            return lacks(self.disk, name, read_manifest(self.disk, name))
        except CheckpointError as error:
            return error.what

    def collect(self, attempt: str) -> list[str]:
        """Clear up after saves that were killed; the caller holds the run's lock, so that they are dead.

        A checkpoint that a save was about to replace is put back; half-written ones are removed. Of two checkpoints of
        a step a whole one stays, and one that is not whole is set aside.

        Args:
            attempt: of the caller, whose own saves are left alone.

        Returns:
            What was done, a line each.
        """
        done = []
        for name in self.disk.folders():
            parsed = parse_folder(name)
            if parsed and parsed.kind == "replaced":
                done += self._settle(name, parsed.step)
            elif parsed:
                done += [
                    f"removed {gone}, which a save that never ended left" for gone in self.disk.sweep(name, attempt)
                ]
        return done

    def _settle(self, replaced: str, step: int) -> list[str]:
        """Decide between the checkpoint of a step and one that was replaced by it; lines that say what was done."""
        done = []
        if step in self.steps():
            is_whole = not self._problem(replaced)
            if is_whole and not self.problem(step):
                self.disk.remove(replaced)
                return [f"removed {replaced}, which a save that never ended left"]
            name = step_name(step) if is_whole else replaced
            done = [f"{name} IS DAMAGED, it is kept as {self.disk.set_aside(name)}"]
            if not is_whole:
                return done
        self.disk.put_back(replaced)
        return [*done, f"put {replaced} back, which a save that never ended was to replace"]

    def prune(self, keep_last: int, keep_every: int, protect: Iterable[int] = ()) -> list[int]:
        """Remove checkpoints that are not to be kept; returns their steps.

        Damaged ones do not count, and stay: nothing is removed that nobody knows the use of.

        Args:
            keep_last, keep_every, protect: see ``expendable``.
        """
        gone = expendable(self.good(), keep_last, keep_every, protect)
        for step in gone:
            self.disk.remove(step_name(step))
        return gone

    def _asides(self, name: str) -> list[str]:
        if parse_step(name) is None:
            return []
        return [f"{name}/{file}" for file in self.disk.files(name) if is_set_aside(file)]
