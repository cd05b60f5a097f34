"""Folders that appear whole or not at all."""

import os
import signal

import pytest

from crius.new_folder import new_folder


def writer(out):
    """A process that has begun to write ``out`` and waits; its id."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            with new_folder(out) as partial:
                (partial / "half").write_text("a")
                os.write(tell, b"x")
                signal.pause()
        except SystemExit as end:
            code = end.code
        finally:
            os._exit(code)
    assert os.read(told, 1) == b"x"
    os.close(told)
    os.close(tell)
    return pid


def ended(pid, number):
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_writer_that_is_asked_to_end_leaves_nothing(number, tmp_path):
    assert ended(writer(tmp_path / "out"), number) == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_fails_leaves_no_folder_above_it(tmp_path):
    with pytest.raises(ValueError, match="bad"), new_folder(tmp_path / "a" / "b" / "out"):
        raise ValueError("bad")
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "a" / "b" / "out") as partial:
        (partial / "whole").write_text("a")
    assert [path.name for path in (tmp_path / "a" / "b" / "out").iterdir()] == ["whole"]


def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_that_is_being_written(tmp_path):
    assert ended(writer(tmp_path / "out"), signal.SIGKILL) == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    other = writer(tmp_path / "out")
    [written] = tmp_path.iterdir()
    assert written != left
    with new_folder(tmp_path / "out") as partial:
        (partial / "whole").write_text("a")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "out", written]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"]
    ended(other, signal.SIGKILL)


def test_all_files_are_on_the_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    with new_folder(tmp_path / "out") as partial:
        (partial / "folder").mkdir()
        (partial / "folder" / "file").write_text("a")
    assert {path.stat().st_ino for path in tmp_path.rglob("*")} <= {*synced[:-1]}


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="no"), new_folder(tmp_path / "out"):
        raise ValueError("no")
    assert list(tmp_path.iterdir()) == []
