"""What a checkpoint holds beside tensors: ``state.json``. No torch."""

import json
from typing import Any

from crius.checkpoint.digest import digest_of
from crius.checkpoint.disk import Disk
from crius.checkpoint.manifest import Manifest
from crius.errors import CheckpointError


def read_state(disk: Disk, folder: str, manifest: Manifest) -> dict[str, Any]:
    """The state of a checkpoint.

    Raises:
        CheckpointError: it is missing, or is not what was written.
    """
    name = manifest.state_file
    data = disk.read(f"{folder}/{name}") if name else b""
    if not name or digest_of(data) != manifest.files[name].digest:
        raise CheckpointError(
            f"the state of {disk.where}/{folder} is {'not what was written' if name else 'missing'}.",
            fix="resume from another step: --checkpoint.load_step N",
        )
    found = json.loads(data)
    if not isinstance(found, dict):
        raise CheckpointError(f"{name} of {disk.where}/{folder} is no JSON object.")
    return found
