"""Keeps the cache folder of compiled kernels intact when a process is killed. Imports inductor.

Inductor lets the C++ compiler write directly to the file that the next run looks for. If both are killed, an incomplete
file stays, and every later run fails to load it. A signal that only asks the run to stop must not reach the compiler,
even if it is sent to the whole process group: the run finishes its step and saves.
"""

import contextlib
import fcntl
import functools
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch._inductor import codecache, cpp_builder
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.cpu_vec_isa import VecISA

from crius.run_file import open_log
from crius.signals import QUESTIONS, STOP_SIGNALS
from crius.untrusted import open_named

PARTIAL = ".crius-partial"
"""Suffix of a file that a compiler is still writing."""
PROBE = "_probe_load" if hasattr(VecISA, "_probe_load") else "check_build"
"""Method of ``VecISA`` that starts a process to test the CPU's instructions; torch 2.11 has it inside ``check_build``.
"""
_LEFT_SECONDS = 86_400
"""Age from which a partial file is considered abandoned by its writer."""
_ELF = b"\x7fELF\x02\x01"
"""First bytes of a 64-bit little-endian library or object, the only kind that inductor compiles."""


def keep_whole(folder: Path) -> None:
    """Remove files of ``folder`` that a killed compilation left incomplete, and write new files atomically from now on.

    From now on, stop signals and question signals do not reach compilers or the probe of the CPU's instructions.
    Precompiled headers, which inductor stores below /tmp for all programs of a user, are stored in ``folder`` too.
    """
    _remove_damage(folder)
    codecache._HEADER_DIR = str(folder / "precompiled_headers")
    codecache._HEADER_LOCK_DIR = str(folder / "precompiled_headers" / "locks")
    if not hasattr(CppBuilder.build, "__wrapped__"):
        setattr(CppBuilder, "build", _renamed_when_done(CppBuilder.build))  # noqa: B010  mypy takes no assignment
        cpp_builder.run_compile_cmd = _undisturbed(cpp_builder.run_compile_cmd)
        setattr(VecISA, PROBE, _undisturbed(getattr(VecISA, PROBE)))


def _renamed_when_done(build: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(build)
    def build_whole(builder: Any) -> None:
        target = builder.get_target_file_path()
        output = builder._output
        partial = f"{target}.{os.getpid()}-{threading.get_ident()}{PARTIAL}"
        builder._output = output.replace(target, partial)
        try:
            build(builder)
            os.replace(partial, target)
        finally:
            builder._output = output

    return build_whole


def _undisturbed(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, whose child processes do not get signals that stop or question a run.

    A child process inherits the blocked signals of the thread that starts it. So another thread starts it, and the
    caller's thread still receives signals while it waits.
    """

    @functools.wraps(call)
    def in_a_thread(*args: Any, **kwargs: Any) -> Any:
        block = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, (*STOP_SIGNALS, *QUESTIONS))
        with ThreadPoolExecutor(1, initializer=block) as thread:
            return thread.submit(call, *args, **kwargs).result()

    return in_a_thread


def _remove_damage(folder: Path) -> None:
    """Remove empty files, truncated libraries and objects, and abandoned partial files."""
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names if not name.endswith(".lock")):
            with contextlib.suppress(FileNotFoundError):  # another process of this run removed it first
                if path.name.endswith((PARTIAL, ".tmp")):  # inductor writes sources to a .tmp file, empty at first
                    if time.time() - path.stat().st_mtime > _LEFT_SECONDS:
                        path.unlink()
                elif is_damaged(path) and _is_idle(folder, path):
                    path.unlink()


def is_damaged(path: Path) -> bool:
    """Whether a file of the cache is empty, or is a truncated library or object.

    A linker writes the section table last, at the end of the file.
    """
    size = path.stat().st_size
    if path.suffix not in (".so", ".o") or not size:
        return not size
    with open_named(path) as file:
        head = file.read(64)
    if not head.startswith(_ELF):
        return sys.platform == "linux" and not head.startswith(_ELF[:4])  # other file formats are not checked
    if len(head) < 64:
        return True
    (table,) = struct.unpack_from("<Q", head, 40)
    entry_size, num_entries = struct.unpack_from("<HH", head, 58)
    return table + entry_size * num_entries > size


def _is_idle(folder: Path, path: Path) -> bool:
    """Whether no process holds inductor's lock for this kernel: another program may be writing it now."""
    lock = folder / "locks" / f"{path.name.partition('.')[0]}.lock"
    if not lock.exists():
        return True
    with open_log(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
