"""The streams of random numbers of a process: torch's, of the host and of its GPU, numpy's and Python's."""

import random
import zlib

import numpy as np
import torch
from torch import Tensor

_PYTHON_VERSION = 3  # of random.getstate()


def seed_streams(device: torch.device, *words: int | str) -> None:
    """Start all streams from ``words``: a seed, a rank and what else tells this stream from others."""
    seed = zlib.crc32(repr(words).encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def streams(device: torch.device) -> dict[str, Tensor]:
    """The state of each stream by name, as a tensor on the host."""
    version, words, gauss = random.getstate()
    assert version == _PYTHON_VERSION
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor([*words, gauss is not None], dtype=torch.int64),
        "python_gauss": torch.tensor(gauss or 0.0, dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore_streams(found: dict[str, Tensor], device: torch.device) -> None:
    """Put back what ``streams`` gave."""
    torch.set_rng_state(found["cpu"])
    *words, has_gauss = found["python"].tolist()
    random.setstate((_PYTHON_VERSION, tuple(words), found["python_gauss"].item() if has_gauss else None))
    *keys, position, has_cached = found["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_cached, found["numpy_gauss"].item()))
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)
