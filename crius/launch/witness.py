"""Reports of a process that hangs: its Python stacks and the collectives it waits in.

Two signals ask for them. ``faulthandler``'s C handler answers ``STACKS`` with the stack of the main thread, in whatever
call that thread is blocked. It does not dump all threads, because it would walk the frames of running threads and
crash. ``FLIGHT`` wakes a thread that waits for nothing else; if it gets the interpreter's lock, it writes the stacks of
all threads and torch's flight recorder.

A person may send ``STACKS`` too: an answer of a rank that nobody asked is a question to all ranks.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crius.launch.report import write_json
from crius.run_file import open_log
from crius.signals import FLIGHT, STACKS
from crius.untrusted import HUGE, parse_json, read_named

_FLIGHT_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of NCCL's groups, of Gloo's
_RECORDS = "2000"  # collectives that the flight recorder keeps
_POLL_SECONDS = 0.02


def stack_path(folder: Path, rank: int) -> Path:
    """Path for the stack of the main thread of ``rank``."""
    return folder / f"rank-{rank}.stack"


def threads_path(folder: Path, rank: int) -> Path:
    """Path for the stacks of all threads of ``rank``."""
    return folder / f"rank-{rank}.threads"


def flight_path(folder: Path, rank: int) -> Path:
    """Path for the dump of the flight recorder of ``rank``, which is written after its threads."""
    return folder / f"rank-{rank}.flight.json"


def record_stack(folder: Path, rank: int) -> None:
    """Answer ``STACKS`` from now on, and make torch record its collectives, which it decides at the first group."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDS)
    file = open_log(stack_path(folder, rank))
    faulthandler.register(STACKS, file=file, all_threads=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (STACKS,))


def testify(folder: Path, rank: int) -> None:
    """Answer ``QUESTIONS`` from now on. Call it in the main thread of a process that has no other threads yet."""
    record_stack(folder, rank)
    if FLIGHT is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (FLIGHT,))  # in this thread and threads that it starts
        threading.Thread(target=_answer, args=(FLIGHT, folder, rank), name="crius-flight", daemon=True).start()


def _answer(number: int, folder: Path, rank: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, (STACKS,))  # for the main thread only, even if it is sent to all
    while True:
        signal.sigwait((number,))
        write_flight(folder, rank)


def write_flight(folder: Path, rank: int) -> None:
    """Write the stacks of all threads of this process, and its flight recorders. Failures are ignored."""
    with contextlib.suppress(Exception):
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames().items()
        stacks = [f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames]
        threads_path(folder, rank).write_text("\n".join(stacks), encoding="utf-8")
    with contextlib.suppress(Exception):
        write_json(flight_path(folder, rank), _flight_records())


def _flight_records() -> list[Any]:
    """Dumps of the recorders of this process; empty without torch."""
    torch = sys.modules.get("torch")
    c10d = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    dumps = (getattr(c10d, name, None) for name in _FLIGHT_DUMPS)
    return [parse_json(dump()) for dump in dumps if dump is not None]


def ask(pids: Mapping[int, int], numbers: Iterable[int]) -> None:
    """Send each signal to each process; ``STACKS`` only to their main threads."""
    # a signal to a stopped process goes to the thread that wakes first, which may not be a Python thread
    to_thread = getattr(ctypes.CDLL(None), "tgkill", None)  # on Linux with glibc 2.30 or newer
    for pid in pids.values():
        for number in numbers:
            if number == STACKS and to_thread is not None:
                to_thread(pid, pid, int(number))
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


@contextlib.contextmanager
def caught_questions() -> Iterator[list[int]]:
    """Collect the ``STACKS`` signals to this process, which is not a rank, in the list."""
    asked: list[int] = []
    before = signal.signal(STACKS, lambda number, frame: asked.append(number))
    try:
        yield asked
    finally:
        signal.signal(STACKS, before or signal.SIG_DFL)


def is_asked(folder: Path, ranks: Collection[int]) -> bool:
    """Whether somebody sent ``STACKS`` to one of ``ranks``; its answer is then removed."""
    found = any(read(stack_path(folder, rank)) for rank in ranks)
    if found:
        forget(folder, ranks)
    return found


def forget(folder: Path, ranks: Iterable[int]) -> None:
    """Remove the answers of ``ranks``, so that new answers can be told from old ones."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            os.truncate(stack_path(folder, rank), 0)
        for path in (threads_path(folder, rank), flight_path(folder, rank)):
            path.unlink(missing_ok=True)


def wait_for_answers(ranks: Iterable[int], folder: Path, seconds: float) -> None:
    """Wait until ``ranks`` have written their answers, at most ``seconds``."""
    deadline = time.monotonic() + seconds
    sizes = {rank: 0 for rank in ranks}
    while sizes and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        before = sizes
        sizes = {rank: len(read(stack_path(folder, rank))) for rank in sizes}
        for rank, size in list(sizes.items()):
            is_written = 0 < size == before[rank]  # it has not grown since the last check
            if is_written and (FLIGHT is None or flight_path(folder, rank).exists()):
                del sizes[rank]


def read(path: Path) -> str:
    """Text of an answer; empty if there is none."""
    try:
        return read_named(path).decode(errors="replace")
    except OSError:
        return ""


def process_state(pid: int) -> str:
    """The kernel's letter for the state of a process, such as R, S, D, T (stopped) or t (traced); empty off Linux."""
    return _stat(pid, 0)


def process_start(pid: int) -> str:
    """When a process began, in the kernel's ticks since boot; empty off Linux."""
    return _stat(pid, 19)


def _stat(pid: int, column: int) -> str:
    """A column of ``/proc/PID/stat``, counted from the state, which follows the name in parentheses."""
    try:
        text = read_named(f"/proc/{pid}/stat").decode(errors="replace")
        return text.rpartition(")")[2].split()[column]
    except (OSError, IndexError):
        return ""


@dataclass(frozen=True)
class Collective:
    """A collective that a rank has entered and not left.

    Attributes:
        name: name such as ``gloo:all_reduce``.
        group: description of its process group.
        seq: number of the collective in that group, from 1.
        sizes: shapes of its inputs.
    """

    name: str
    group: str
    seq: int
    sizes: list[list[int]]

    def __str__(self) -> str:
        return f"{self.name} {self.sizes} seq {self.seq} of {self.group}"


def pending_collective(path: Path) -> Collective | None:
    """The oldest unfinished collective of a dump; None if there is none, or no dump."""
    try:
        records = parse_json(read_named(path, HUGE))
        entries = [entry for record in records for entry in record.get("entries", ())]
        waiting = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
        first = min(waiting, key=lambda entry: int(entry["time_created_ns"]), default=None)
        return None if first is None else _collective(first)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _collective(entry: Mapping[str, Any]) -> Collective:
    seq = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    return Collective(entry["profiling_name"], str(entry["process_group"][-1]), int(seq), entry["input_sizes"])
