"""The lock of a cache entry: who waits says for whom, and ends when asked to."""

import fcntl
import multiprocessing
import os
import platform
import signal
import time

import pytest

from crius import cache_lock as lock
from crius.launch.stop import PREEMPTED, catch_stop_signals

FORK = multiprocessing.get_context("fork")


def hold(entry, held, seconds):
    with lock.locked(entry, "tokenises"):
        held.set()
        time.sleep(seconds)


@pytest.fixture
def said(monkeypatch, caplog):
    monkeypatch.setattr(lock, "_SAY_SECONDS", 0.2, raising=False)
    monkeypatch.setattr(lock._log, "propagate", False)
    lock._log.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records]
    lock._log.removeHandler(caplog.handler)


def test_a_wait_is_said_once_with_its_holder(tmp_path, said):
    entry = tmp_path / "entry"
    held = FORK.Event()
    holder = FORK.Process(target=hold, args=(entry, held, 0.7))
    holder.start()
    assert held.wait(10)
    with lock.locked(entry, "tokenises"):
        pass
    holder.join()
    who = f"process {holder.pid} on host {platform.node()}"
    assert said() == [f"cache: waiting for {who} that tokenises {entry}"]


def test_a_lock_of_an_older_version_has_no_holder_and_holds(tmp_path, said):
    entry = tmp_path / "entry"
    with (tmp_path / "entry.lock").open("w") as older:
        fcntl.flock(older, fcntl.LOCK_EX)
        process = FORK.Process(target=hold, args=(entry, FORK.Event(), 0))
        process.start()
        process.join(0.5)
        assert process.is_alive()
        fcntl.flock(older, fcntl.LOCK_UN)  # the child has a copy of the file
        process.join()
    assert process.exitcode == 0


def test_a_lock_file_is_private(tmp_path):
    before = os.umask(0)
    try:
        with lock.locked(tmp_path / "entry", "tokenises"):
            assert (tmp_path / "entry.lock").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def wait_as_a_run(entry, ready):
    stop = catch_stop_signals()
    with stop.ending():  # as while a run opens its data
        ready.set()
        with lock.locked(entry, "tokenises"):
            pass


def test_a_run_that_waits_for_the_cache_ends_by_sigterm(tmp_path):
    with (tmp_path / "entry.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ready = FORK.Event()
        process = FORK.Process(target=wait_as_a_run, args=(tmp_path / "entry", ready))
        process.start()
        assert ready.wait(10)
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGTERM)
        process.join(3)
        code = process.exitcode
        process.kill()
        process.join()
    assert code == PREEMPTED
