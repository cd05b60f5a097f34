"""One hash of what a checkpoint says about the model, whatever layout wrote it. No torch."""

import json

import numpy as np
import numpy.typing as npt

from crius.checkpoint.disk import Disk
from crius.checkpoint.manifest import Hasher, Manifest, TensorEntry
from crius.checkpoint.pieces import as_array, stored

OF_LAYOUT = ("rng.", "_scale.")
"""Parts of names of tensors that belong to ranks and not to the model."""


def contents_hash(disk: Disk, folder: str, manifest: Manifest, prefix: str = "") -> str:
    """128-bit xxh3 over the names, dtypes, shapes and numbers of all tensors, each put together to a whole.

    Weights and optimizer state are in it; what belongs to single ranks, such as random streams, is not. One tensor at a
    time is in memory.

    Args:
        disk: folder of checkpoints.
        folder: of the checkpoint.
        manifest: of it.
        prefix: only tensors whose names start so, such as ``model.``.
    """
    hasher = Hasher()
    for name, entry in sorted(manifest.tensors.items()):
        if name.startswith(prefix) and not name.startswith(OF_LAYOUT[0]) and OF_LAYOUT[1] not in name:
            hasher.update(json.dumps([name, entry.dtype, entry.shape]).encode())
            hasher.update(whole_tensor(disk, folder, entry).data)
    return hasher.hexdigest()


def whole_tensor(disk: Disk, folder: str, entry: TensorEntry) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor, put together: uint8 ``(*shape, bytes of a number)``."""
    source = stored(disk, folder, {"a tensor": entry})["a tensor"]
    return as_array(source.read(), entry.shape, entry.dtype)
