"""The folder of compiled kernels stays whole, whatever is killed. Imports inductor: for runs that use it.

Inductor lets the C++ compiler write straight to the name under which the next run looks for the kernel. Where both are
killed, a part of the file stays there, and every later run fails to load it. A signal that only asks the run to stop
does not reach the compiler, also where it is sent to the whole process group: the run takes its step and saves.
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

from crius.signals import QUESTIONS, STOP_SIGNALS

PARTIAL = ".crius-partial"
"""End of the name of a file that a compiler is writing."""
PROBE = "_probe_load" if hasattr(VecISA, "_probe_load") else "check_build"
"""Method of ``VecISA`` that starts a process to try the CPU's instructions; torch 2.11 has it inside another one."""
_LEFT_SECONDS = 86_400
"""A partial file of this age has no writer any more."""
_ELF = b"\x7fELF\x02\x01"
"""Start of the libraries and objects of 64-bit little-endian machines, the ones that inductor compiles for."""


def keep_whole(folder: Path) -> None:
    """Remove files of ``folder`` that a killed compilation left incomplete, and let none become visible from now on.

    From now on no signal that stops or asks a run reaches a compiler, or the probe of the instructions that this CPU
    has. Precompiled headers, which inductor keeps below /tmp for all programs of a user, go into ``folder`` too.
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
        target, output = builder.get_target_file_path(), builder._output
        partial = f"{target}.{os.getpid()}-{threading.get_ident()}{PARTIAL}"
        builder._output = output.replace(target, partial)
        try:
            build(builder)
            os.replace(partial, target)
        finally:
            builder._output = output

    return build_whole


def _undisturbed(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, whose processes get no signal that stops or asks a run: they inherit what the thread blocks.

    What starts them is another thread than the caller's, which goes on to hear signals while it waits.
    """

    @functools.wraps(call)
    def in_a_thread(*args: Any, **kwargs: Any) -> Any:
        block = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, (*STOP_SIGNALS, *QUESTIONS))
        with ThreadPoolExecutor(1, initializer=block) as thread:
            return thread.submit(call, *args, **kwargs).result()

    return in_a_thread


def _remove_damage(folder: Path) -> None:
    """Remove empty files, libraries and objects that are cut short, and partial files that were left long ago."""
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names if not name.endswith(".lock")):
            with contextlib.suppress(FileNotFoundError):  # another process of this run was faster
                if path.name.endswith((PARTIAL, ".tmp")):  # inductor writes sources to a .tmp, which is empty at first
                    if time.time() - path.stat().st_mtime > _LEFT_SECONDS:
                        path.unlink()
                elif is_damaged(path) and _is_idle(folder, path):
                    path.unlink()


def is_damaged(path: Path) -> bool:
    """Whether a file of the cache is empty, or a library or an object that is cut short.

    The table of sections is what a linker writes last, at the end of the file.
    """
    size = path.stat().st_size
    if path.suffix not in (".so", ".o") or not size:
        return not size
    with path.open("rb") as file:
        head = file.read(64)
    if not head.startswith(_ELF):
        return sys.platform == "linux" and not head.startswith(_ELF[:4])  # other kinds are not judged
    if len(head) < 64:
        return True
    (table,) = struct.unpack_from("<Q", head, 40)
    entry_size, num_entries = struct.unpack_from("<HH", head, 58)
    return table + entry_size * num_entries > size


def _is_idle(folder: Path, path: Path) -> bool:
    """Whether no process holds inductor's lock for this kernel: one that is not Crius may be writing it now."""
    lock = folder / "locks" / f"{path.name.partition('.')[0]}.lock"
    if not lock.exists():
        return True
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
