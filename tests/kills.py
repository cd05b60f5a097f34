"""Kills of a process before, and in the middle of, each thing that it does to the disk."""

import contextlib
import functools
import os
import signal

SYSCALLS = ("open", "write", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir")


def recorded(work, log):
    """Do ``work`` and note what it changes on the disk."""
    with contextlib.ExitStack() as stack:
        for name in SYSCALLS:
            stack.enter_context(patched(name, lambda name, args: log.append(name)))
        work()


@contextlib.contextmanager
def patched(name, before):
    real = getattr(os, name)

    @functools.wraps(real)
    def call(*args, **kwargs):
        if name != "open" or args[1] & os.O_CREAT:
            before(name, args)
        return real(*args, **kwargs)

    setattr(os, name, call)
    try:
        yield
    finally:
        setattr(os, name, real)


def killed_at(point, is_half, work):
    """Do ``work`` in a process that is killed before its call number ``point``, or in the middle of it."""
    child = os.fork()
    if child == 0:
        log = []

        def before(name, args):
            if len(log) == point:
                if is_half:
                    os.pwrite(args[0], bytes(args[1])[: len(args[1]) // 2], os.lseek(args[0], 0, os.SEEK_CUR))
                os.kill(os.getpid(), signal.SIGKILL)
            log.append(name)

        try:
            with contextlib.ExitStack() as stack:
                for name in SYSCALLS:
                    stack.enter_context(patched(name, before))
                work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def every_kill(tmp_path, prepare, work):
    """A folder for each moment at which ``work`` can be killed, after it was killed."""
    log = []
    prepare(tmp_path / "whole")
    recorded(lambda: work(tmp_path / "whole"), log)
    points = [(point, False) for point in range(len(log))]
    points += [(point, True) for point, name in enumerate(log) if name == "write"]
    for number, (point, is_half) in enumerate(points):
        folder = tmp_path / f"killed-{number}"
        prepare(folder)
        assert killed_at(point, is_half, lambda folder=folder: work(folder))
        yield folder
    assert len(log) > 6
