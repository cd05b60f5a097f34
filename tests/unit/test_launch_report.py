"""Which rank is blamed, and what the last block looks like."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from crius.errors import ConfigError, LayoutError
from crius.launch import local
from crius.launch.environment import single_placement
from crius.launch.local import run_single
from crius.launch.report import (
    Blame,
    Failure,
    failure_of_exit,
    failure_of_report,
    read_report,
    render,
    report_of,
    root_cause,
    write_report,
)
from crius.launch.status import Heartbeat, Status, read_mirror, status


@pytest.fixture(autouse=True)
def _fresh_status(monkeypatch):
    monkeypatch.setattr(status, "step", None)
    monkeypatch.setattr(status, "phase", "start")


def raised(error, rank=0):
    try:
        raise error
    except type(error) as caught:
        return report_of(caught, rank)


def failure(rank, blame, monotonic, headline="ValueError: bad", step=5):
    return Failure(rank=rank, step=step, phase="data", headline=headline, blame=blame, monotonic=monotonic)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([(0, Blame.PEER_LOSS, 1.0), (2, Blame.ERROR, 2.0)], 2),
        ([(0, Blame.ERROR, 2.0), (2, Blame.ERROR, 1.0)], 2),
        ([(0, Blame.ERROR, 1.0), (2, Blame.SIGNAL, 2.0)], 2),
        ([(0, Blame.ABORT, 1.0), (2, Blame.ERROR, 2.0)], 2),
        ([(0, Blame.PEER_LOSS, 1.0), (2, Blame.ABORT, 2.0)], 2),
        ([(0, Blame.PEER_LOSS, 3.0), (2, Blame.PEER_LOSS, 2.0)], 2),
        ([(0, Blame.ENDED, 1.0), (2, Blame.PEER_LOSS, 2.0)], 2),
    ],
)
def test_the_root_cause_is_what_the_others_follow_from(failures, rank):
    assert root_cause([failure(*row) for row in failures]).rank == rank


@pytest.mark.parametrize(
    ("error", "blame"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:99"), Blame.PEER_LOSS),
        (RuntimeError("Connection reset by peer"), Blame.PEER_LOSS),
        (RuntimeError("NCCL communicator was aborted"), Blame.PEER_LOSS),
        (ConnectionResetError(104, "reset"), Blame.PEER_LOSS),
        (TimeoutError("30 s"), Blame.PEER_LOSS),
        (type("DistStoreError", (RuntimeError,), {})("wait timeout after 100 ms"), Blame.PEER_LOSS),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), Blame.ERROR),
        (ValueError("timeout must be positive"), Blame.ERROR),
        (FileNotFoundError(2, "No such file", "corpus.txt"), Blame.ERROR),
    ],
)
def test_an_error_that_a_lost_peer_causes_is_recognised(error, blame):
    assert failure_of_report(raised(error)).blame is blame


def test_a_report_survives_its_file(tmp_path):
    status.update(step=7, phase="forward")
    report = raised(ValueError("bad"), rank=3)
    write_report(report, tmp_path)
    assert read_report(tmp_path, 3) == report
    assert [path.name for path in tmp_path.iterdir()] == ["rank-3.error.json"]
    assert (report.step, report.phase, report.exception, report.exit_code) == (7, "forward", "ValueError", 1)
    assert read_report(tmp_path, 4) is None


def test_other_ranks_are_folded_into_one_line(tmp_path):
    (tmp_path / "rank-2.log").touch()
    failures = [
        failure(0, Blame.PEER_LOSS, 2.0, "RuntimeError: Connection closed by peer"),
        replace(failure(2, Blame.ERROR, 1.0), traceback=('  File "a.py", line 1, in step',)),
        failure(3, Blame.PEER_LOSS, 2.1, "RuntimeError: Connection reset by peer"),
        failure(1, Blame.ENDED, 5.0, "killed by SIGTERM", step=4),
        failure(4, Blame.ERROR, 3.0, "KeyError: 'x'"),
        failure(5, Blame.ERROR, 3.0),
    ]
    assert render(failures, tmp_path).splitlines() == [
        "FAILED rank 2 step 5: ValueError: bad",
        '  File "a.py", line 1, in step',
        "  phase  data",
        f"  log    {tmp_path}/rank-2.log",
        "also failed: rank 0, 3 (lost their peer), rank 1 (ended by the launcher at step 4, data), "
        "rank 4 (KeyError: 'x'), rank 5 (the same)",
    ]


def test_the_page_that_follows_a_message_is_cut(tmp_path):
    report = raised(RuntimeError("\n".join(f"frame {number}" for number in range(50))))
    text = render([failure_of_report(report)], tmp_path)
    assert "frame 11" in text
    assert "frame 12" not in text
    assert "... 38 more lines in the log" in text


def test_a_message_may_be_empty(tmp_path):
    assert render([failure_of_report(raised(AssertionError()))], tmp_path).startswith(
        "FAILED rank 0 before step 1: AssertionError\n"
    )


@pytest.mark.parametrize(
    ("code", "headline"),
    [
        (-9, "killed by SIGKILL (out of memory killer?)"),
        (-11, "killed by SIGSEGV"),
        (-200, "killed by signal 200"),
        (3, "exited with status 3 and left no report"),
    ],
)
def test_an_exit_without_a_report_is_described(code, headline):
    assert failure_of_exit(1, code, (5, "data"), 0.0).headline == headline


def test_a_status_is_mirrored(tmp_path):
    mine = Status()
    assert read_mirror(tmp_path / "s") == Heartbeat()
    mine.mirror_to(tmp_path / "s")
    assert read_mirror(tmp_path / "s") == Heartbeat(None, "start", mine.since)
    mine.update(step=123456, phase="forward")
    mine.update(phase="x" * 200)
    mine.update(step=7, phase="data")
    assert read_mirror(tmp_path / "s") == Heartbeat(7, "data", mine.since)
    mine.update(phase="save", waits_for=3)
    assert read_mirror(tmp_path / "s") == Heartbeat(7, "save", mine.since, waits_for=3)
    mine.update()
    assert read_mirror(tmp_path / "s").waits_for is None


def value_error(place):
    status.update(step=5, phase="data")
    raise ValueError("bad")


def config_error(place):
    raise LayoutError("degree 6 does not divide 8.", fix="use 4")


def leave_with(code):
    def target(place):
        raise SystemExit(code)

    return target


def ctrl_c(place):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("target", "code", "last"),
    [
        (lambda place: None, 0, None),
        (value_error, 1, "FAILED rank 0 step 5: ValueError: bad"),
        (config_error, 2, "LayoutError: degree 6 does not divide 8."),
        (leave_with(75), 75, None),
        (leave_with(None), 0, None),
        (leave_with("no"), 1, "FAILED rank 0 before step 1: SystemExit: no"),
        (ctrl_c, 130, None),
    ],
)
def test_a_single_process_returns_the_same_codes(tmp_path, capsys, target, code, last):
    assert run_single(target, single_placement(), tmp_path) == code
    error = capsys.readouterr().err
    assert (last in error.splitlines()) if last else (error == "")
    assert (tmp_path / "logs/rank-0.error.json").exists() == (last is not None)


def test_a_single_process_logs_the_whole_traceback(tmp_path, capsys):
    run_single(value_error, single_placement(), tmp_path)
    assert (tmp_path / "logs/rank-0.log").read_text().endswith("ValueError: bad\n")
    assert capsys.readouterr().err.endswith(f"  log    {tmp_path}/logs/rank-0.log\n")


def test_a_single_process_hands_its_log_folder_to_the_target(tmp_path):
    seen = []
    run_single(seen.append, single_placement(), tmp_path)
    assert seen == [replace(single_placement(), log_dir=tmp_path / "logs")]


def test_torchrun_gets_its_error_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    place = replace(single_placement(), rank=3, world_size=4, launcher="torchrun", rendezvous="tcp:n0:29500")
    assert run_single(value_error, place, tmp_path) == 1
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: bad"
    assert "in value_error" in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"]) > 0
    assert json.loads((tmp_path / "logs/rank-3.error.json").read_text())["rank"] == 3


def test_a_folder_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match="cannot be written") as caught:
        run_single(value_error, single_placement(), tmp_path / "file")
    assert type(caught.value).__name__ == "EnvironmentError"
    assert not isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("platform", "said"),
    [
        ("linux", ""),
        ("darwin", "warning: Crius is tested on Linux; on macOS it is not\n"),
        ("freebsd14", "warning: Crius is tested on Linux; on freebsd14 it is not\n"),
    ],
)
def test_where_it_is_not_tested_the_launcher_says_so_once(platform, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(local, "sys", SimpleNamespace(platform=platform, stderr=sys.stderr))
    local.warn_where_untested.cache_clear()
    try:
        for _ in range(2):
            assert run_single(lambda _: None, single_placement(), tmp_path) == 0
    finally:
        local.warn_where_untested.cache_clear()
    assert capsys.readouterr().err == said
