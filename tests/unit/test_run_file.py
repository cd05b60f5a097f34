"""Files of a run folder cost a warning where the disk fails, and never the run."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest
from test_metrics import STEP

from crius import run_file
from crius.metrics.sinks import JsonlSink
from crius.run_file import RunFile, write_run_file, write_whole
from crius.train.setup import start_logging


@pytest.fixture
def full_disk(monkeypatch):
    """A switch: while it is on, writes to files below ``tmp_path`` take 3 bytes and then fail as a full disk does."""
    real, is_full = os.write, []

    def write(file, data):
        if not is_full or "/pytest-" not in os.readlink(f"/proc/self/fd/{file}"):
            return real(file, data)
        if is_full.pop() == "half":
            is_full.append("full")
            return real(file, bytes(data)[:3])
        is_full.append("full")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_file.os, "write", write)
    return is_full


def test_a_full_disk_costs_lines_and_one_warning(tmp_path, full_disk):
    warnings = []
    file = RunFile(tmp_path / "deep/a", warnings.append, "lines are lost")
    file.append("one\n")
    full_disk.append("half")
    for line in ("two\n", "three\n"):
        file.append(line)
    full_disk.clear()
    file.append("four\n")
    file.close()
    assert (tmp_path / "deep/a").read_text() == "one\nfour\n"
    assert warnings == [f"{tmp_path}/deep/a cannot be written (3 of 4 bytes written): lines are lost"]


def test_a_line_that_a_kill_cut_off_is_ended_before_the_next_one(tmp_path):
    (tmp_path / "a").write_text("one\ntw")
    RunFile(tmp_path / "a", pytest.fail, "").append("three\n")
    assert (tmp_path / "a").read_text() == "one\ntw\nthree\n"


def test_a_removed_file_is_begun_again_with_its_head(tmp_path):
    warnings = []
    file = RunFile(tmp_path / "run/a", warnings.append, "lines are lost", head="head\n")
    file.append("one\n")
    for line in ("two\n", "three\n"):
        shutil.rmtree(tmp_path / "run")
        file.append(line)
        assert (tmp_path / "run/a").read_text() == f"head\n{line}"
    assert warnings == [f"{tmp_path}/run/a was removed or replaced, and is started again: lines are lost"]


def test_a_file_that_cannot_be_opened_is_tried_again(tmp_path):
    (tmp_path / "run").touch()
    warnings = []
    file = RunFile(tmp_path / "run/a", warnings.append, "lines are lost")
    file.append("one\n")
    (tmp_path / "run").unlink()
    file.append("two\n")
    assert (tmp_path / "run/a").read_text() == "two\n"
    assert len(warnings) == 1


def test_a_whole_file_that_cannot_be_written_is_a_warning_and_leaves_the_old_one(tmp_path, monkeypatch):
    write_run_file(tmp_path / "deep/a", "old", pytest.fail)
    warnings = []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *names: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no room")))
        write_run_file(tmp_path / "deep/a", "new", warnings.append)
    assert warnings == [f"{tmp_path}/deep/a cannot be written (no room)"]
    assert {path.name: path.read_text() for path in (tmp_path / "deep").iterdir()} == {"a": "old"}


def test_metrics_go_on_after_a_full_disk_and_a_removed_folder(tmp_path, full_disk, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("crius"), "propagate", True)
    sink = JsonlSink(tmp_path / "run")
    full_disk.append("full")
    sink.write(STEP)
    full_disk.clear()
    shutil.rmtree(tmp_path / "run")
    sink.write(STEP)
    sink.close()
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text())["step"] == STEP.step
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_tensorboard_whose_disk_fails_ends_its_curves_and_not_the_run(tmp_path, caplog, monkeypatch):
    tensorboard = pytest.importorskip("crius.metrics.tensorboard")
    monkeypatch.setattr(logging.getLogger("crius"), "propagate", True)
    sink = tensorboard.TensorBoardSink(tmp_path, None)

    def fail(*args):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(sink._writer, "add_scalar", fail)
    sink.write(STEP)
    sink.write(STEP)
    sink.close()
    assert [record.message for record in caplog.records] == [
        "the files of TensorBoard cannot be written (no room): its curves end here"
    ]


@contextlib.contextmanager
def log_of(run_dir):
    logger = logging.getLogger("crius")
    before = (logger.handlers[:], logger.level, logger.propagate)
    logger.handlers.clear()
    start_logging(0, run_dir, is_own_file=False)
    yield logger
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = before


def test_logging_goes_on_without_the_terminal(tmp_path, monkeypatch):
    class Closed:
        def isatty(self):
            return True

        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    with log_of(tmp_path) as logger:
        monkeypatch.setattr(sys, "stdout", Closed())
        logger.info("one")
        logger.info("two")
    lines = (tmp_path / "logs/rank-0.log").read_text().splitlines()
    assert lines == [
        "standard output cannot be written (Input/output error): its lines are lost",
        "one",
        "two",
    ]


def test_logging_goes_on_without_its_file(tmp_path, full_disk, capsys):
    with log_of(tmp_path) as logger:
        full_disk.append("full")
        logger.info("one")
        logger.info("two")
    shown = capsys.readouterr()
    assert shown.out == "one\ntwo\n"
    assert shown.err == (
        f"warning: {tmp_path}/logs/rank-0.log cannot be written (No space left on device): its lines are lost, and "
        "the run continues\n"
    )


def test_the_next_writer_of_a_file_removes_what_killed_ones_left_and_nothing_that_is_being_written(tmp_path):
    for name in ("a.partial-killed", "a.partial-written", "b.partial-killed"):
        (tmp_path / name).write_text("ha")
    with (tmp_path / "a.partial-written").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_whole(tmp_path / "a", "half")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.partial-written", "b.partial-killed"]
    assert (tmp_path / "a").read_text() == "half"


def test_a_durable_file_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_writer_returns(
    tmp_path, monkeypatch
):
    done = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: done.append([os.readlink(f"/proc/self/fd/{file}"), sync(file)][0]))
    write_whole(tmp_path / "a", "text", is_durable=True)
    assert [path.partition(".partial-")[0] for path in done] == [str(tmp_path / "a"), str(tmp_path)]
    assert ".partial-" in done[0]
