"""One run a folder: the lock names its owner, and goes with it."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time

import pytest
from harness import crius

from crius.errors import ConfigError, EnvironmentError
from crius.launch import lock

FORK = multiprocessing.get_context("fork")


def hold(folder, children=0):
    with lock.run_lock(folder, "train"):
        for _ in range(children):
            FORK.Process(target=time.sleep, args=(5,)).start()
        (folder / "held").write_text("yes")
        time.sleep(30)


@pytest.fixture
def holder(tmp_path):
    """A process that has the folder, and two children that it forked while it had it."""
    process = FORK.Process(target=hold, args=(tmp_path, 2))
    process.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    yield process
    process.kill()
    process.join()


def test_a_second_run_is_refused_with_the_first_ones_name(tmp_path, holder):
    with pytest.raises(ConfigError) as caught, lock.run_lock(tmp_path, "train"):
        pass
    assert f"crius train, process {holder.pid} on this host, since 20" in caught.value.what
    assert f"(kill {holder.pid} there)" in caught.value.fix
    assert holder.is_alive()


def test_crius_train_touches_nothing_of_a_run_that_is_there(tmp_path, holder):
    (tmp_path / "metrics.jsonl").write_text("mine")
    done = crius("train", "--job.run_dir", str(tmp_path))
    assert done.returncode == 2
    assert f"ConfigError: another run writes to {tmp_path}: crius train, process {holder.pid} on" in done.stderr
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["held", "logs", "metrics.jsonl", "run.lock"]
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"


def test_the_lock_goes_with_a_killed_owner_though_its_children_live(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with lock.run_lock(tmp_path, "train"):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_a_folder_that_was_left_is_free(tmp_path):
    for _ in range(2):
        with lock.run_lock(tmp_path, "train"), pytest.raises(ConfigError), lock.run_lock(tmp_path, "train"):
            pass
    assert (tmp_path / "run.lock").read_text() == ""


def test_the_folder_of_a_refused_run_is_removed_and_that_of_another_run_is_not(tmp_path):
    for name in ("refused", "begun"):
        (tmp_path / name / "logs").mkdir(parents=True)
        with lock.run_lock(tmp_path / name, "train"):
            if name == "begun":
                (tmp_path / name / "logs" / "rank-0.log").touch()
            lock.remove_unused(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["begun"] and (tmp_path / "begun" / "run.lock").exists()


def test_an_owner_on_another_host_is_named(tmp_path, monkeypatch):
    with lock.run_lock(tmp_path, "train"):
        monkeypatch.setattr(lock.platform, "node", lambda: "elsewhere")
        with pytest.raises(ConfigError, match=rf"on host {os.uname().nodename}, since"):
            lock.run_lock(tmp_path, "train").__enter__()


def test_a_lock_without_words_still_holds(tmp_path):
    with lock.run_lock(tmp_path, "train"):
        (tmp_path / "run.lock").write_text("[not json")
        with pytest.raises(ConfigError, match="an unknown process"):
            lock.run_lock(tmp_path, "train").__enter__()


def test_a_symbolic_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("weights")
    (tmp_path / "run.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(EnvironmentError, match="symbolic link"):
        lock.run_lock(tmp_path, "train").__enter__()
    assert (tmp_path / "precious").read_text() == "weights"


def test_a_pipe_is_no_lock(tmp_path):
    os.mkfifo(tmp_path / "run.lock")
    with pytest.raises(EnvironmentError, match="not a regular file"):
        lock.run_lock(tmp_path, "train").__enter__()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def refuse(file, operation):
        raise OSError(lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with lock.run_lock(tmp_path, "train"):
        assert "has no locks" in capsys.readouterr().err


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.0)


def test_a_removed_folder_is_taken_again(tmp_path, often, capsys):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with lock.run_lock(run_dir, "train") as held:
        shutil.rmtree(run_dir)
        for _ in range(3):
            held.keep()
        with pytest.raises(ConfigError, match=f"crius train, process {os.getpid()} on"):
            lock.run_lock(run_dir, "train").__enter__()
    assert capsys.readouterr().err == (
        f"\nwarning: the run folder {run_dir} was removed, or renamed, while this run writes to it: "
        "it is created again, but its files are lost\n"
    )
    with lock.run_lock(run_dir, "train"):
        pass


def test_a_removed_folder_that_another_run_took_and_keeps_is_lost(tmp_path, often, holder):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with lock.run_lock(run_dir, "train") as held:
        os.unlink(run_dir / "run.lock")
        os.link(tmp_path / "run.lock", run_dir / "run.lock")  # the other process has that file
        for _ in range(lock._MAX_TAKEN - 1):
            held.keep()  # it may be refused for another reason
        with pytest.raises(ConfigError, match=f"crius train, process {holder.pid} on"):
            held.keep()


def test_a_lock_is_kept_from_a_thread_where_nobody_else_looks(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.01)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    polled = threading.Event()
    with lock.run_lock(run_dir, "train") as held, lock.kept([held], polled.set):
        shutil.rmtree(run_dir)
        while not (run_dir / "run.lock").exists():
            time.sleep(0.01)
    assert polled.is_set()


def test_a_full_disk_does_not_keep_a_run_from_its_folder(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(lock.os, "pwrite", fail)
        with lock.run_lock(tmp_path, "train"), pytest.raises(ConfigError, match="an unknown process"):
            lock.run_lock(tmp_path, "train").__enter__()
