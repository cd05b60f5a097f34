"""The watchdog where another launcher started the ranks: a thread of each of them watches all those of its host."""

import contextlib
import hashlib
import os
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from crius.config.operation import WatchdogConfig
from crius.launch.environment import Placement
from crius.launch.report import report_of, report_to_torchrun, say, write_report
from crius.launch.status import mirror_path, read_mirror, status
from crius.launch.watchdog import Watch
from crius.launch.witness import STACKS, process_start, process_state, record_stack, write_flight
from crius.launch.worker import leave

_POLL_SECONDS = 0.2
_FOUND = "hang"  # its maker is the one that reports


@contextlib.contextmanager
def sentry(config: WatchdogConfig, placement: Placement, run_dir: Path) -> Iterator[None]:
    """Watch the ranks of this host while the context is open; whoever sees a hang first reports it and ends them all.

    The ranks meet in a private folder of this host. Where that cannot be had, a warning says that nobody watches.
    """
    try:
        folder = _private_folder(run_dir)
        pid_file = folder / f"rank-{placement.rank}.pid"
        record_stack(folder, placement.rank)
        status.mirror_to(mirror_path(folder, placement.rank))
        pid_file.write_text(str(os.getpid()))
    except OSError as error:
        sys.stderr.write(f"warning: rank {placement.rank} is not watched: {error}\n")
        yield
        return
    ended = threading.Event()
    args = (config, placement, run_dir, folder, ended)
    threading.Thread(target=_watch, args=args, name="crius-sentry", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        for path in folder.glob(f"rank-{placement.rank}.*"):
            path.unlink(missing_ok=True)
        if all(process_state(other) == "Z" for other in _pids(folder).values()):  # who was killed leaves its files
            _remove(folder)


def _private_folder(run_dir: Path) -> Path:
    """A folder that the ranks of this host and this start have in common, and nobody else.

    They have one parent: torchrun's agent, or Slurm's step daemon. Its start time tells it from an earlier process of
    the same number, and the counter one restart from the next.

    Raises:
        PermissionError: somebody else made it.
    """
    parent = os.getppid()
    start = (str(run_dir.absolute()), parent, process_start(parent), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    name = hashlib.sha256(repr(start).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"crius-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not ours alone")
    return folder


def _watch(config: WatchdogConfig, placement: Placement, run_dir: Path, folder: Path, ended: threading.Event) -> None:
    watch = Watch(config, time.monotonic())
    while not ended.wait(_POLL_SECONDS):
        if (folder / _FOUND).exists():
            write_flight(folder, placement.rank)
            return
        pids = _pids(folder)
        beats = {rank: read_mirror(mirror_path(folder, rank)) for rank in pids}
        if watch.is_late(beats, time.monotonic()) and _is_first(folder):
            write_flight(folder, placement.rank)
            hang = watch.examine(pids, folder, beats, (STACKS,), wakes=False)  # this process would go on too
            say(hang.publish(run_dir / "incidents"))
            report = report_of(hang.error, placement.rank)
            report_to_torchrun(report, os.environ)
            write_report(report, run_dir / "logs")
            _end(pids, folder)
            leave(hang.error.exit_code)


def _is_first(folder: Path) -> bool:
    try:
        (folder / _FOUND).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _pids(folder: Path) -> dict[int, int]:
    """Process ids of the live ranks of this host."""
    found = {}
    for path in folder.glob("rank-*.pid"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(path.read_text())
            os.kill(pid, 0)
            found[int(path.stem.removeprefix("rank-"))] = pid
    return found


def _end(pids: dict[int, int], folder: Path) -> None:
    for pid in pids.values():
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    _remove(folder)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another rank does the same
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()
