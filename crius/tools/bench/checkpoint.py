"""``crius bench checkpoint``: speed of writing and reading checkpoints, and the cost of hashes."""

import contextlib
import dataclasses
import io
import math
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from crius.checkpoint import files
from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import CheckpointFolder
from crius.checkpoint.load import find, load_tensors
from crius.checkpoint.manifest import Manifest
from crius.checkpoint.save import Place, Saver
from crius.config.operation import CheckpointConfig
from crius.errors import ConfigError
from crius.table import aligned
from crius.tools.bench.machine import Machine
from crius.tools.bench.result import Samples, show
from crius.units import GIB

TENSOR_BYTES = 16 << 20
"""Bytes of a weight of 2048 x 2048 in float32."""


class _NoHash:
    """A ``Hasher`` that costs nothing."""

    def __init__(self, data: Any = b"") -> None:
        """Ignore the data."""

    def update(self, data: Any) -> None:
        """Ignore the data."""

    def hexdigest(self) -> str:
        """The same text for all data."""
        return "0" * 32


@dataclasses.dataclass
class CheckpointRow:
    """One way to save or load.

    Attributes:
        name: its name.
        work: does it once; returns the seconds that a training would have waited, or None if it waits the whole time.
        samples: times of the whole work.
        blocked: seconds that a training would have waited.
    """

    name: str
    work: Callable[[], float | None]
    samples: Samples = dataclasses.field(default_factory=Samples)
    blocked: list[float] = dataclasses.field(default_factory=list)


def checkpoint(folder: Path, *, gib: float = 0.5, repeat: int = 5, as_json: bool = False) -> int:
    """Save and load tensors of ``gib`` GiB in turns, and print GB/s: in one process, on the disk of ``folder``.

    torch's DCP saves and loads the same tensors on the same disk for comparison. Files are durable (fsync) in all rows.
    Loaded files are in the page cache, so the rate of a load is that of hashing and copying, not of the disk.

    Args:
        folder: created if needed; files go to a folder of their own in it, which is removed again.
        gib: size of the tensors.
        repeat: rounds through all rows.
        as_json: print JSON instead of a table.

    Returns:
        0.

    Raises:
        ConfigError: size or rounds are not positive, the folder cannot be created, or the disk lacks room for four
            times the size.
    """
    if not 0 < gib < math.inf or repeat < 1:
        raise ConfigError("--gib and --repeat must be positive.", where="command line", fix="--gib 0.5 --repeat 5")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own = tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=folder)
    except OSError as error:
        raise ConfigError(
            f"no folder can be made in {folder}: {error.strerror}.",
            where="--folder",
            fix="give a writable folder: --folder FOLDER",
        ) from None
    with own as name:
        rows = _measured(Path(name), folder, gib, repeat)
    _print(rows, gib, folder, as_json)
    return 0


def _measured(own: Path, folder: Path, gib: float, repeat: int) -> list[CheckpointRow]:
    free = shutil.disk_usage(folder).free
    if free < 4 * gib * GIB:
        raise ConfigError(
            f"{folder} has {free / GIB:.1f} GiB free, {4 * gib:.1f} GiB are needed.",
            where="--gib",
            fix=f"--gib {free / GIB / 5:.2f}, or another --folder",
        )
    rows = _rows(own, _tensors(gib))
    for _ in range(repeat):
        for row in rows:
            begin = time.perf_counter()
            blocked = row.work()
            row.samples.seconds.append(time.perf_counter() - begin)
            row.blocked.append(row.samples.seconds[-1] if blocked is None else blocked)
    return rows


def _tensors(gib: float) -> dict[str, Tensor]:
    count = max(1, round(gib * GIB / TENSOR_BYTES))
    generator = torch.Generator().manual_seed(1)
    return {f"model.{number}": torch.randn(2048, 2048, generator=generator) for number in range(count)}


def _rows(own: Path, tensors: dict[str, Tensor]) -> list[CheckpointRow]:
    targets = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    quick = {"verify_on_save": False}

    def crius(name: str, **changes: Any) -> Callable[[], float | None]:
        return _saves(own / name, tensors, CheckpointConfig(mode="sync", **changes))

    def unhashed() -> float | None:
        with mock.patch.object(files, "Hasher", _NoHash):
            return crius("unhashed", **quick)()

    return [
        CheckpointRow("save, torch DCP", lambda: _dcp_save(own / "dcp", tensors)),
        CheckpointRow("save, no hash", unhashed),
        CheckpointRow("save, hashed", crius("hashed", **quick)),
        CheckpointRow("save, hashed and read again", crius("good")),
        CheckpointRow(
            "save async, hashed and read again", _saves(own / "async", tensors, CheckpointConfig(mode="async"))
        ),
        CheckpointRow("load, torch DCP", lambda: _dcp_load(own / "dcp", targets)),
        CheckpointRow("load, parts hashed", lambda: _load(own / "good", targets, verify=False)),
        CheckpointRow("load, every byte verified first", lambda: _load(own / "good", targets, verify=True)),
    ]


def _saves(folder: Path, tensors: dict[str, Tensor], config: CheckpointConfig) -> Callable[[], float | None]:
    place = Place(0, 1, 1, dist.HashStore(), lambda value: [value], "bench")
    saver = Saver(CheckpointFolder(open_disk(str(folder))), config, place, lambda: None)
    steps = iter(range(1, 1 << 30))

    def save() -> float | None:
        step = next(steps)
        shutil.rmtree(folder, ignore_errors=True)
        head = Manifest(
            step=step, run_id="bench", versions={}, config={}, layout="1", num_ranks=1, dataset="", files={}, tensors={}
        )
        before = saver.blocked_seconds
        saver.save(step, tensors, {"train": {"step": step}}, head)
        blocked = saver.blocked_seconds - before
        saver.wait()
        assert not saver.failures, saver.last_error
        return blocked if config.mode == "async" else None

    return save


def _load(folder: Path, targets: dict[str, Tensor], *, verify: bool) -> None:
    place = CheckpointFolder(open_disk(str(folder)))
    found = find(place, -1, rank=0, size=1, gather=lambda value: [value], verify=verify)
    assert found is not None
    load_tensors(found.sources(targets), targets)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")  # about a single process
        yield


def _dcp_save(folder: Path, tensors: dict[str, Tensor]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with _quiet():
        dcp.save(dict(tensors), checkpoint_id=folder, no_dist=True)


def _dcp_load(folder: Path, targets: dict[str, Tensor]) -> None:
    with _quiet():
        dcp.load(dict(targets), checkpoint_id=folder, no_dist=True)


def _print(rows: list[CheckpointRow], gib: float, folder: Path, as_json: bool) -> None:
    machine = Machine.of(torch.device("cpu"))
    size = gib * GIB / 1e9
    table = [("", "seconds", "spread", "GB/s", "training waits")]
    results = []
    for row in rows:
        seconds = row.samples.median
        rate = size / row.samples.median
        waits = statistics.median_high(row.blocked)
        results.append({"name": row.name, "gb_per_second": rate, "blocked_seconds": waits, **row.samples.as_dict()})
        table.append((row.name, f"{seconds:.2f}", f"{row.samples.spread:.0%}", f"{rate:.2f}", f"{waits:.2f}"))
    head = f"{gib:g} GiB on {folder}; {machine}; medians of {len(rows[0].samples.seconds)}"
    record = {"machine": machine.as_dict(), "gib": gib, "argv": sys.argv[1:], "rows": results}
    show(as_json, record, [head, *aligned(table, left=(0,))])
