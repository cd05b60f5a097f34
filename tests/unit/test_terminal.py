"""What a run shows on a terminal: five lines for its start, no line wider than it, and a name for what takes long."""

import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl

import pytest
from harness import ROOT

from crius import cli
from crius.cli.app import SOURCES
from crius.waiting import waiting

TINY = ["--training.steps", "3", "--training.seq_len", "32", "--model.num_layers", "1", "--validation.num_samples", "8"]


def on_terminal(columns, folder, *words, code=0):
    """What ``crius`` with ``words`` shows on a terminal of that width: its lines, and whether each was ever wider."""
    ours, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environ |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "crius", *words]
    child = subprocess.Popen(command, cwd=folder, stdin=its, stdout=its, stderr=its, env=environ)
    os.close(its)
    shown = b""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and select.select([ours], [], [], 120)[0]:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the terminal has no other end any more
            break
    os.close(ours)
    assert child.wait(10) == code, shown
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.mark.parametrize("columns", [pytest.param(100, marks=pytest.mark.full), 60])
def test_the_start_is_five_lines_and_no_line_is_wider(columns, tmp_path):
    lines = on_terminal(columns, tmp_path, "train", *TINY, "--job.run_dir", "r")
    assert max(map(len, lines)) <= columns
    start = [line for line in lines[: next(i for i, line in enumerate(lines) if line.startswith("step "))]]
    start = [line for line in start if not re.search(r", \d+ s *$", line)]  # what took long
    assert [line.split()[0] for line in start] == ["model", "data", "layout", "batch", "where"]
    log = (tmp_path / "r/logs/rank-0.log").read_text()
    assert "kernels: linear" in log and "optimizer: adamw" in log and "\nwhere " not in log
    command = " ".join(lines[[i for i, line in enumerate(lines) if "twice as long" in line][0] + 1 :]).split(" \\ ")
    assert len(command) >= 1 and "--training.steps 6" in " ".join(" ".join(command).split())


@pytest.mark.full
def test_verbose_prints_the_whole_start(tmp_path):
    lines = on_terminal(100, tmp_path, "train", *TINY, "--job.run_dir", "r", "--verbose")
    assert any(line.startswith("kernels: linear") for line in lines)
    assert not any(line.startswith("where ") for line in lines)


def test_what_takes_long_is_named_with_its_seconds_and_leaves_nothing(monkeypatch):
    ours, its = pty.openpty()
    with os.fdopen(its, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        began = time.monotonic()
        shown = ""
        with waiting("outer"), waiting("reading"):
            while "\x1b[K" not in shown:
                shown += os.read(ours, 4096).decode()
            passed = time.monotonic() - began
        with waiting("short"):
            pass
        terminal.flush()
        shown += os.read(ours, 4096).decode()
    os.close(ours)
    [number] = re.findall(r"^\rreading, (\d+) s\x1b\[K", shown)
    assert abs(int(number) - passed) <= 1 and passed >= 0.8
    assert shown.endswith("\r\x1b[K") and "short" not in shown and "outer" not in shown


def test_elsewhere_nothing_is_named(capsys):
    with waiting("reading"):
        time.sleep(1.2)
    assert capsys.readouterr().out == ""


def test_a_command_prints_its_decisions_although_one_before_kept_them_for_its_log(monkeypatch, capsys):
    monkeypatch.setattr(SOURCES, "notes", [])
    assert cli.main(["config", "show"]) == 0
    assert SOURCES.notes is None
    capsys.readouterr()
