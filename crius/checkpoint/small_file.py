"""Files of a checkpoint that are written in one piece, and the look at a file that was just written. No torch."""

from collections.abc import Callable

from crius.checkpoint.digest import digest_of
from crius.checkpoint.disk import Disk
from crius.checkpoint.manifest import FileEntry
from crius.checkpoint.names import MANIFEST
from crius.checkpoint.verify import damages_of_file
from crius.errors import CheckpointError


def write_small(disk: Disk, folder: str, name: str, data: bytes, *, verify: bool) -> FileEntry:
    """Write a new file of a checkpoint that is being saved.

    Args:
        disk: folder of checkpoints.
        folder: that the save writes into.
        name: of the file.
        data: all of it.
        verify: read the file again. A manifest that is not what was written does not stay: where it is the commit, the
            checkpoint would count.

    Raises:
        CheckpointError: the disk does not take it, or does not give it back as it was written.
    """
    with disk.create(f"{folder}/{name}") as sink:
        sink.write(data)
    entry = FileEntry(len(data), digest_of(data))
    if verify:
        try:
            check_written(disk, folder, name, entry)
        except CheckpointError:
            if name == MANIFEST:
                disk.remove(folder)
            raise
    return entry


def check_written(
    disk: Disk, folder: str, name: str, entry: FileEntry, beat: Callable[[], None] = lambda: None
) -> None:
    """Read a file again that was just written.

    Args:
        disk, folder, name: the file.
        entry: what was written.
        beat: called after each block that was read.

    Raises:
        CheckpointError: it is not what was written.
    """
    if damage := damages_of_file(disk, folder, name, entry, beat):
        raise CheckpointError(
            f"{disk.where}/{folder}/{name} was not read back as it was written: {damage.what}.",
            why="memory, disk or the way to it changes bits",
            fix="check the machine: its log, its memory, its disk",
        )
