"""Files that all checkpoints of a folder share: the tokenizer of the run, kept once per content. Torch-free.

They are in a folder next to the checkpoints, whose name has the hash of their hashes. Each manifest names them.
"""

import json
from collections.abc import Mapping

from crius.checkpoint.disk import Disk
from crius.checkpoint.files import check_written
from crius.checkpoint.folder import Damage, damages_of_file
from crius.checkpoint.manifest import FileEntry, digest_of


def kept_folder(entries: Mapping[str, FileEntry]) -> str:
    """Name of the folder that has the files of ``entries``."""
    return f"tokenizer-{digest_of(json.dumps(sorted(entries.items())).encode())}"


def keep(disk: Disk, files: Mapping[str, bytes]) -> dict[str, FileEntry]:
    """Write files, unless they are there already. A damaged copy is replaced.

    Args:
        disk: folder of checkpoints.
        files: contents by name.

    Returns:
        Size and hash of each file, for a manifest.

    Raises:
        CheckpointError: a file cannot be written, or is read back with other bytes.
    """
    entries = {name: FileEntry(len(data), digest_of(data)) for name, data in files.items()}
    if not kept_damages(disk, entries):
        return entries
    folder = kept_folder(entries)
    if folder in disk.folders():  # left by a killed save, or damaged
        disk.remove(folder)
    disk.prepare(folder)
    for name, data in files.items():
        with disk.create(f"{folder}/{name}") as sink:
            sink.write(data)
        check_written(disk, folder, name, entries[name])
    disk.sync(folder)
    return entries


def kept_damages(disk: Disk, entries: Mapping[str, FileEntry]) -> list[Damage]:
    """Kept files that are missing or differ from what was written.

    Args:
        disk: folder of checkpoints.
        entries: files in a manifest.
    """
    folder = kept_folder(entries)
    found = (damages_of_file(disk, f"{folder}/{name}", entry, []) for name, entry in entries.items())
    return [damage for of_file in found for damage in of_file]
