"""Speed of writing and reading checkpoints, the cost of hashes, and torch's DCP with the same tensors.

    python -m benchmarks.checkpoint [--folder FOLDER] [--gib GIB] [--repeat N]

Files are durable (fsync) in all rows. Loaded files are in the page cache, so the rate of a load is that of hashing and
copying, not of the disk. A training waits for the whole of a save, but of an asynchronous one only for the part below
its row.
"""

import contextlib
import io
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.command import end_with, parser_of, positive
from benchmarks.rows import Row, measure, report
from crius.checkpoint import files
from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import CheckpointFolder
from crius.checkpoint.load import find, load_tensors
from crius.checkpoint.manifest import Manifest
from crius.checkpoint.save import PieceOnDisk, Saver
from crius.config.operation import CheckpointConfig
from crius.errors import ConfigError
from crius.tools.bench.machine import BenchMachine
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


class _Saves:
    """A saver of its own folder, which saves all tensors when it is called."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], mode: str, *, verify: bool) -> None:
        self._folder = folder
        self._tensors = dict(tensors)
        config = CheckpointConfig(mode=mode, verify_on_save=verify)  # type: ignore[arg-type]
        place = PieceOnDisk(0, 1, 1, dist.HashStore(), lambda value: [value], "bench")
        self._saver = Saver(CheckpointFolder(open_disk(str(folder))), config, place, lambda: None)
        self._step = 0
        self._blocked = 0.0

    def __call__(self) -> None:
        self._step += 1
        self._blocked = self._saver.blocked_seconds
        shutil.rmtree(self._folder, ignore_errors=True)
        head = Manifest(
            step=self._step,
            run_id="bench",
            versions={},
            config={},
            layout="1",
            num_ranks=1,
            dataset="",
            files={},
            tensors={},
        )
        self._saver.save(self._step, self._tensors, {"train": {"step": self._step}}, head)
        self._saver.wait()
        assert not self._saver.failures, self._saver.last_error

    def waits(self) -> dict[str, float]:
        """Milliseconds that a training waited for the last save."""
        return {"training waits": 1e3 * (self._saver.blocked_seconds - self._blocked)}


def rows_of(folder: Path, tensors: Mapping[str, Tensor]) -> list[Row]:
    """All ways to save, then all ways to load what was saved."""
    gigabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    targets = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

    def row(name: str, work: Callable[[], object], **options: Any) -> Row:
        def counted() -> float:
            work()
            return gigabytes

        return Row(name, counted, **options)

    unhashed = _Saves(folder / "unhashed", tensors, "sync", verify=False)
    ahead = _Saves(folder / "async", tensors, "async", verify=True)

    def without_hash() -> None:
        with mock.patch.object(files, "Hasher", _NoHash):
            unhashed()

    return [
        row("save, torch DCP", lambda: _dcp(dcp.save, folder, tensors)),
        row("save, no hash", without_hash),
        row("save, hashed", _Saves(folder / "hashed", tensors, "sync", verify=False)),
        row("save, hashed and read again", _Saves(folder / "good", tensors, "sync", verify=True)),
        row("save async, hashed and read again", ahead, parts=ahead.waits),
        row("load, torch DCP", lambda: _dcp(dcp.load, folder, targets)),
        row("load, parts hashed", lambda: _load(folder / "good", targets, verify=False)),
        row("load, every byte verified first", lambda: _load(folder / "good", targets, verify=True)),
    ]


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


def _dcp(work: Callable[..., object], folder: Path, tensors: Mapping[str, Tensor]) -> None:
    if work is dcp.save:
        shutil.rmtree(folder / "dcp", ignore_errors=True)
    with _quiet():
        work(dict(tensors), checkpoint_id=folder / "dcp", no_dist=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="on the disk to measure")
    parser.add_argument("--gib", type=float, default=0.5, help="size of the saved state")
    parser.add_argument("--repeat", type=positive, default=5, help="rounds")
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(options.folder).free / GIB
    if not 0 < 4 * options.gib <= free:
        raise ConfigError(
            f"--gib {options.gib:g}: {options.folder} has {free:.1f} GiB free, and four times the size is needed.",
            where="--gib",
            fix=f"--gib {free / 5:.2f}, or another --folder",
        )
    generator = torch.Generator().manual_seed(1)
    count = max(1, round(options.gib * GIB / TENSOR_BYTES))
    tensors = {f"model.{number}": torch.randn(2048, 2048, generator=generator) for number in range(count)}
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.folder) as own:
        rows = rows_of(Path(own), tensors)
        measure(rows, options.repeat)
    about = f"{options.gib:g} GiB on {options.folder}"
    report(options, "checkpoint", rows, BenchMachine.of(torch.device("cpu")), "GB", about)
    return 0


if __name__ == "__main__":
    end_with(main)
