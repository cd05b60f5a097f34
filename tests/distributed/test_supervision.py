"""A run that fails starts again, one that is asked to stop saves first, and nothing of it is left."""

import contextlib
import functools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from crius.config.operation import LaunchConfig, WatchdogConfig
from crius.errors import DataError, HangError
from crius.launch import stop
from crius.launch.crew import CrewAttempt, History, Supervision, reason_to_stop
from crius.launch.local import run_workers
from crius.launch.report import Blame, Failure, leave
from crius.launch.status import status
from crius.signals import STOP_SIGNALS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks with torch imported")

FORK = multiprocessing.get_context("fork")


def supervised(target, run_dir, num_ranks=3, **launch):
    how = Supervision(launch=LaunchConfig(**launch), watchdog=WatchdogConfig())
    return run_workers(target, num_ranks, run_dir, supervision=how, grace_seconds=0.5, threads=1)


def fail(make, place):
    """Rank 1 fails at the step that ``make`` gives the attempt; None: all is well."""
    (place.log_dir / f"started-{place.attempt}-{place.rank}").write_text(str(time.monotonic()))
    store = dist.FileStore(place.rendezvous.removeprefix("file:"), place.world_size)
    assert store.add(f"rank-{place.rank}", 1) == 1  # no words of an attempt before
    step, error = make(place.attempt)
    status.update(step=step, phase="forward")
    if error and place.rank == 1:
        if error is not signal.SIGKILL:
            raise error
        os.kill(os.getpid(), signal.SIGKILL)
    if error:
        time.sleep(10)
    if place.attempt:
        (place.log_dir / "attempts.json").write_bytes((place.scratch / "attempts.json").read_bytes())


def starts(run_dir):
    return len(list((run_dir / "logs").glob("started-*-0")))


def test_a_killed_rank_is_said_and_all_start_again(tmp_path, capfd):
    target = functools.partial(fail, lambda attempt: (3, None if attempt else signal.SIGKILL))
    assert supervised(target, tmp_path) == 0
    error = capfd.readouterr().err
    assert error.startswith("\nFAILED rank 1 step 3: killed by SIGKILL")
    assert error.endswith("\nrestarting from the newest checkpoint (1 of 3)\n")
    [attempt] = json.loads((tmp_path / "logs/attempts.json").read_text())
    assert (attempt["attempt"], attempt["step"], attempt["cause"][:29]) == (0, 3, "rank 1: killed by SIGKILL (ou")
    again = float((tmp_path / "logs/started-1-0").read_text())
    assert attempt["started"] < attempt["ended"] < again < attempt["ended"] + 2
    assert not list(tmp_path.glob("logs/*.error.json"))


@pytest.mark.parametrize(
    ("error", "attempts"),
    [(ValueError("odd"), 2), (signal.SIGKILL, 2), (DataError("document 7 is empty."), 1), (SystemExit(3), 2)],
    ids=["exception", "killed", "user", "exit"],
)
def test_what_the_user_has_to_mend_is_not_tried_again(tmp_path, error, attempts, capfd):
    assert supervised(functools.partial(fail, lambda attempt: (5, error)), tmp_path) == 1
    assert starts(tmp_path) == attempts
    lines = capfd.readouterr().err.splitlines()
    given_up = "  tries  2, given up: 2 failures in a row at step 5 (launch.max_failures_at_step)"
    assert (given_up in lines) == (attempts == 2)
    assert lines[-1] == "also failed: rank 0, 2 (ended by the launcher at step 5, forward)"


def test_restarts_come_to_an_end_although_each_gets_further(tmp_path, capfd):
    assert supervised(functools.partial(fail, lambda attempt: (attempt + 1, OSError(5))), tmp_path, max_restarts=2) == 1
    assert starts(tmp_path) == 3
    assert "  tries  3, given up: launch.max_restarts 2\n" in capfd.readouterr().err


def failure(blame=Blame.SIGNAL, rendered=""):
    return Failure(rank=0, step=1, phase="data", headline="x", blame=blame, monotonic=0.0, rendered=rendered)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([0], ""),
        ([0, 0], "2 failures in a row before step 1"),
        ([5, 6, 7], ""),
        ([5, 3], "2 failures in a row at step 5"),
        ([5, 6, 6], "2 failures in a row at step 6"),
        ([5, 6, 7, 8], "launch.max_restarts 3"),
    ],
)
def test_a_run_is_given_up_when_it_does_not_get_further(steps, reason):
    history = History()
    for number, step in enumerate(steps):
        history.add(CrewAttempt(number, 0.0, 1.0, step, ""))
    assert reason_to_stop(failure(), history, LaunchConfig()).split(" (")[0] == reason


def test_a_hang_and_a_lost_peer_differ():
    hang = failure(Blame.ERROR, str(HangError("rank 2 makes no progress.")))
    assert reason_to_stop(hang, History(), LaunchConfig())
    assert not reason_to_stop(failure(Blame.PEER_LOSS), History(), LaunchConfig())


def write_size(attempt, place):
    (place.log_dir / f"{attempt}-{place.rank}").write_text(str(place.world_size))
    time.sleep(0 if attempt == 1 else 10)


def test_an_attempt_may_have_other_ranks_and_each_poll_is_told(tmp_path, capfd):
    polls = []

    def kill(attempt, pids):
        polls.append((attempt, set(pids)))
        if 2 in pids and (tmp_path / "logs/0-2").exists():
            os.kill(pids[2], signal.SIGKILL)

    how = Supervision(
        launch=LaunchConfig(),
        watchdog=WatchdogConfig(),
        assignment=lambda attempt: (functools.partial(write_size, attempt), 3 - attempt),
        on_poll=kill,
    )
    assert run_workers(write_size, 9, tmp_path, supervision=how, grace_seconds=0.2) == 0
    sizes = {path.name: path.read_text() for path in (tmp_path / "logs").glob("[01]-*")}
    assert sizes == {"0-0": "3", "0-1": "3", "0-2": "3", "1-0": "2", "1-1": "2"}
    assert (0, {0, 1, 2}) in polls


def save_together(place, start_seconds=0.0):
    """Steps of a few milliseconds; all ranks agree that one of them was asked to stop, save, and leave."""
    (place.log_dir / f"pid-{place.rank}").write_text(str(os.getpid()))
    time.sleep(start_seconds)
    request = stop.catch_stop_signals(has_launcher=True, scratch=place.scratch)
    torch.set_num_threads(1)
    store = dist.FileStore(place.rendezvous.removeprefix("file:"), place.world_size)
    dist.init_process_group(
        "gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=timedelta(seconds=30)
    )
    for step in range(1, 10_000):
        status.update(step=step, phase="data")
        time.sleep(0.002)
        asked = torch.tensor([int(request.number is not None)])
        dist.all_reduce(asked)
        if asked.item():
            (place.log_dir / f"saved-{place.rank}").write_text(str(step))
            (place.log_dir / f"signal-{place.rank}").write_text(str(request.number))
            raise SystemExit(stop.PREEMPTED)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def stop_all(cases, target=save_together):
    """For each ``(folder, seconds, send)`` start a launcher and, so long after its ranks began, ``send`` it something.

    Returns:
        The exit code of each, and those of its processes that are left.
    """
    launchers = []
    for folder, _, _ in cases:
        folder.mkdir()
        launchers.append(FORK.Process(target=lambda folder=folder: leave(supervised(target, folder, 2))))
        launchers[-1].start()
    pids = [[int(read(folder / f"logs/pid-{rank}")) for rank in range(2)] for folder, _, _ in cases]
    began = time.monotonic()
    for index in sorted(range(len(cases)), key=lambda index: cases[index][1]):
        time.sleep(max(0.0, began + cases[index][1] - time.monotonic()))
        cases[index][2](launchers[index].pid, pids[index])
    for launcher in launchers:
        launcher.join(30)
    return [(launcher.exitcode, list(filter(is_alive, own))) for launcher, own in zip(launchers, pids, strict=True)]


def read(path):
    """What ``path`` says, as soon as it says something."""
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, path
        time.sleep(0.005)
    return path.read_text()


def to_launcher(number):
    return lambda launcher, pids: os.kill(launcher, number)


def to_all(launcher, pids):
    """What ``timeout`` and a scheduler do: the launcher twice, and its workers as well."""
    os.kill(launcher, signal.SIGTERM)
    time.sleep(0.02)
    for pid in (*pids, launcher):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def to_rank_1(launcher, pids):
    os.kill(pids[1], signal.SIGUSR1)


@pytest.mark.long
def test_stopped_at_20_random_moments_a_run_saves_20_times_and_leaves_no_process(tmp_path, capfd):
    moments = random.Random(1)
    ways = [to_launcher(signal.SIGTERM)] * 11 + [to_launcher(signal.SIGUSR1)] * 3 + [to_all] * 3 + [to_rank_1] * 3
    cases = [(tmp_path / str(number), moments.uniform(0, 0.4), way) for number, way in enumerate(ways)]
    ends = [end for first in range(0, 20, 5) for end in stop_all(cases[first : first + 5])]
    assert ends == [(stop.PREEMPTED, [])] * 20
    for folder, _, _ in cases:
        assert len({(folder / f"logs/saved-{rank}").read_text() for rank in range(2)}) == 1


def test_a_signal_that_comes_before_a_worker_is_ready_waits_for_it(tmp_path, capfd):
    late = functools.partial(save_together, start_seconds=0.3)
    assert stop_all([(tmp_path / "run", 0.0, to_launcher(signal.SIGHUP))], late) == [(stop.PREEMPTED, [])]
    assert (tmp_path / "run/logs/signal-1").read_text() == str(int(signal.SIGHUP))


@pytest.fixture
def ignored():
    """SIGHUP and SIGTERM are ignored, as where a shell said ``trap "" HUP TERM``."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGTERM)}
    yield list(before)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_is_ignored_stays_ignored_and_the_workers_are_told_by_another_signal(tmp_path, ignored, capfd):
    def send(launcher, pids):
        for number in ignored:
            for pid in (launcher, *pids):
                os.kill(pid, number)
        time.sleep(0.3)
        assert not list((tmp_path / "run/logs").glob("saved-*"))
        os.kill(launcher, signal.SIGINT)

    assert stop_all([(tmp_path / "run", 0.0, send)]) == [(130, [])]
    assert capfd.readouterr().err == "\nstopped by SIGINT, saved first\n"


@pytest.mark.parametrize("catch", [stop.catch_stop_signals, stop.leave_on_stop_signals])
def test_no_handler_is_put_where_a_signal_is_ignored(catch, ignored):
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        catch()
        kept = [number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert kept == ignored


EARLY = """
import os, signal, sys, types
import crius.__main__ as entry
slow = {"torch", "crius.cli"} & set(sys.modules)
sys.modules["crius.cli"] = sys.modules["crius"].cli = cli = types.ModuleType("crius.cli")
cli.main = lambda argv: os.kill(os.getpid(), int(sys.argv[2]))
print(sorted(slow), flush=True)
entry.main()
"""


@pytest.mark.parametrize(
    ("verb", "number", "code"),
    [
        ("train", signal.SIGTERM, stop.PREEMPTED),
        ("train", signal.SIGHUP, stop.PREEMPTED),
        ("train", signal.SIGINT, 130),
        ("config", signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_the_signals_of_a_run_are_caught_before_anything_slow_is_imported(verb, number, code):
    done = subprocess.run([sys.executable, "-c", EARLY, verb, str(int(number))], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "[]\n")
    assert ("before anything was started" in done.stderr) == (verb == "train")


def test_what_comes_twice_at_once_is_one_signal_to_the_launcher():
    moments = iter((10.0, 10.02, 10.32))
    with stop.caught_signals(lambda: next(moments)) as stops:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert [stop.monotonic for stop in stops] == [10.0, 10.32]


def test_a_late_signal_does_not_change_the_exit_code_that_is_known():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        stop.ignore_stop_signals()
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_ctrl_c_saves_and_is_130(tmp_path, capfd):
    assert stop_all([(tmp_path / "run", 0.1, to_launcher(signal.SIGINT))]) == [(130, [])]
    assert (tmp_path / "run/logs/signal-0").read_text() == str(int(signal.SIGINT))
    assert capfd.readouterr().err == "\nstopped by SIGINT, saved first\n"


def note_signals(folder, echo, has_launcher):
    stop.ECHO_SECONDS = echo
    request = stop.catch_stop_signals(has_launcher=has_launcher)
    (folder / "ready").write_text("yes")
    for _ in range(1000):
        time.sleep(0.01)
        if request.number is not None and not (folder / "noted").exists():
            (folder / "noted").write_text(str(request.number))
    sys.exit(3)


@pytest.mark.parametrize(
    ("echo", "has_launcher", "code"),
    [(0.0, False, 128 + signal.SIGTERM), (60.0, False, None), (0.0, True, None)],
    ids=["alone", "echo", "launcher"],
)
def test_a_second_signal_ends_a_process_without_a_launcher(tmp_path, echo, has_launcher, code):
    process = FORK.Process(target=note_signals, args=(tmp_path, echo, has_launcher))
    process.start()
    read(tmp_path / "ready")
    os.kill(process.pid, signal.SIGUSR1)
    assert int(read(tmp_path / "noted")) == signal.SIGUSR1
    os.kill(process.pid, signal.SIGTERM)
    process.join(1.0 if code is None else 10)
    assert process.exitcode == code
    process.kill()
    process.join()
