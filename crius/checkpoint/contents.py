"""One hash of a checkpoint's tensors, independent of the layout that saved it. No torch."""

import json

import numpy as np
import numpy.typing as npt

from crius.checkpoint.disk import Disk
from crius.checkpoint.manifest import Hasher, Manifest, TensorEntry
from crius.checkpoint.pieces import as_array, stored

OF_LAYOUT = ("rng.", "_scale.")
"""Parts of names of tensors that belong to ranks, not to the model."""


def contents_hash(disk: Disk, folder: str, manifest: Manifest, prefix: str = "") -> str:
    """128-bit xxh3 over the names, dtypes, shapes and numbers of all tensors, each assembled to a whole.

    Weights and optimizer state are included. Tensors of single ranks, such as random streams, are not. One tensor at a
    time is in memory.

    Args:
        disk: folder of checkpoints.
        folder: folder of the checkpoint.
        manifest: manifest of the checkpoint.
        prefix: only tensors whose names have this prefix, such as ``model.``.
    """
    hasher = Hasher()
    for name, entry in sorted(manifest.tensors.items()):
        if name.startswith(prefix) and not name.startswith(OF_LAYOUT[0]) and OF_LAYOUT[1] not in name:
            hasher.update(json.dumps([name, entry.dtype, entry.shape]).encode())
            hasher.update(whole_tensor(disk, folder, entry).data)
    return hasher.hexdigest()


def whole_tensor(disk: Disk, folder: str, entry: TensorEntry) -> npt.NDArray[np.uint8]:
    """The bytes of a whole tensor: uint8 ``(*shape, bytes of a number)``."""
    source = stored(disk, folder, {"a tensor": entry})["a tensor"]
    return as_array(source.read(), entry.shape, entry.dtype)
