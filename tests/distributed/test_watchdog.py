"""A rank that makes no progress is named, with what it and all others were at, and the run ends."""

import functools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import SMALL, layout_flags, num_ranks, parse, read_metrics, run_job, steps_of, train

from crius.config.operation import LaunchConfig, WatchdogConfig
from crius.errors import HangError
from crius.launch.crew import Supervision
from crius.launch.environment import Placement, single_placement
from crius.launch.local import run_single, run_workers
from crius.launch.report import leave
from crius.launch.status import Heartbeat, status
from crius.launch.watchdog import Hang, Watch, Witness, choose_culprit, hang_error, limit_seconds
from crius.launch.witness import Collective
from crius.train.reports import Pace

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

FORK = multiprocessing.get_context("fork")
LIMIT = 1.0


def stop_self(note=None):
    if note:
        note.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_long():
    time.sleep(60)


def steps(phase, hang, place):
    """Steps of one collective a phase; rank 2 hangs at ``phase`` of step 2."""
    if phase == "start" and place.rank == 2:
        hang()
    torch.set_num_threads(1)
    store, timeout = dist.FileStore(place.rendezvous.removeprefix("file:"), place.world_size), timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    for step in (1, 2, 3):
        for name in ("data", "forward", "backward", "optimizer", "save"):
            status.update(step=step, phase=name)
            if (step, name, place.rank) == (2, phase, 2):
                hang()
            dist.all_reduce(torch.ones(3, 5))


def watched(target, run_dir, num_ranks=3, restarts=0, **limits):
    config = WatchdogConfig(**({"limit_seconds": LIMIT, "startup_seconds": 30.0} | limits))
    how = Supervision(launch=LaunchConfig(max_restarts=restarts), watchdog=config)
    return run_workers(target, num_ranks, run_dir, supervision=how, threads=1)


@pytest.mark.matrix
@pytest.mark.parametrize("phase", ["start", "data", "forward", "backward", "optimizer", "save"])
def test_a_stopped_rank_is_named_within_its_limit_and_2_seconds(phase, tmp_path, capfd):
    note = tmp_path / "stopped"
    job = functools.partial(steps, phase, functools.partial(stop_self, note))
    assert watched(job, tmp_path, **({"startup_seconds": LIMIT} if phase == "start" else {})) == 1
    assert time.monotonic() - float(note.read_text()) < LIMIT + 2
    error = capfd.readouterr().err
    place = "start, before step 1" if phase == "start" else f"{phase} of step 2"
    assert error.startswith(f"\nHangError: rank 2 makes no progress: stopped (SIGSTOP) in {place} for ")
    # the frame that stopped it, told by the process itself once it was woken
    assert f'stack of rank 2, most recent call first:\n  File "{__file__}", line' in error
    assert "in stop_self\n" in error
    assert "restarting" not in error
    assert phase == "start" or error.count("gloo:all_reduce [[3, 5]] seq ") == 2


def test_a_rank_that_is_not_in_the_others_collective_is_named(tmp_path, capfd):
    assert watched(functools.partial(steps, "backward", sleep_long), tmp_path) == 1
    error = capfd.readouterr().err
    assert "\nHangError: rank 2 makes no progress: in backward of step 2 for " in error
    assert "in all_reduce\n" in error
    assert "in sleep_long\n" in error
    assert (tmp_path / "incidents/hang-0.txt").read_text().startswith(error.strip().partition("\nreport")[0])
    record = json.loads((tmp_path / "incidents/hang-0.json").read_text())
    assert [(rank["rank"], rank["phase"], rank["step"]) for rank in record] == [(n, "backward", 2) for n in range(3)]
    dumps = json.loads((tmp_path / "incidents/hang-0.rank-1.flight.json").read_text())
    waiting = {entry["profiling_name"] for dump in dumps for entry in dump.get("entries", ()) if not entry["retired"]}
    assert waiting == {"gloo:all_reduce"}


def slow(place):
    status.update(step=1, phase="forward")
    time.sleep(0.5)


def test_nobody_watches_when_told_so(tmp_path, capfd):
    assert watched(slow, tmp_path, 2, limit_seconds=0.05, enable=False) == 0
    assert not (tmp_path / "incidents").exists()
    assert capfd.readouterr().err == ""


def test_ranks_that_another_launcher_started_watch_each_other(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = WatchdogConfig(limit_seconds=LIMIT, startup_seconds=30)
    job = functools.partial(steps, "forward", stop_self)
    ranks = []
    for rank in range(3):
        place = Placement(rank, rank, 3, 3, "torchrun", f"file:{tmp_path / 'store'}")
        ranks.append(FORK.Process(target=lambda place=place: leave(run_single(job, place, tmp_path, config))))
        ranks[-1].start()
    began = time.monotonic()
    for process in ranks:
        process.join(20)
    assert time.monotonic() - began < LIMIT + 3
    codes = [process.exitcode for process in ranks]
    assert sorted(codes) == [-signal.SIGKILL, -signal.SIGKILL, 1]
    assert codes[2] == -signal.SIGKILL
    error = capfd.readouterr().err
    assert error.startswith("\nHangError: rank 2 makes no progress: stopped (SIGSTOP) in forward of step 2 for ")
    assert error.count("gloo:all_reduce [[3, 5]] seq ") == 2
    assert "in all_reduce\n" in error
    assert len(list((tmp_path / "incidents").glob("hang-*.txt"))) == 1
    assert list(tmp_path.glob("crius-*")) == []


def is_killed_or_fails(place):
    if place.rank == 0:
        while not place.log_dir.with_name("killed").exists():
            time.sleep(0.01)
        raise RuntimeError("lost")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_leaves_no_folder_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ranks = []
    for rank in range(2):
        place = Placement(rank, rank, 2, 2, "torchrun")
        job = functools.partial(run_single, is_killed_or_fails, place, tmp_path, WatchdogConfig())
        ranks.append(FORK.Process(target=lambda job=job: leave(job())))
        ranks[-1].start()
    os.waitid(os.P_PID, ranks[1].pid, os.WEXITED | os.WNOWAIT)  # a zombie until it is joined
    (tmp_path / "killed").touch()
    for process in reversed(ranks):
        process.join(10)
    assert [process.exitcode for process in ranks] == [1, -signal.SIGKILL]
    assert list(tmp_path.glob("crius-*")) == []


AUTO, GIVEN = WatchdogConfig(startup_seconds=600), WatchdogConfig(startup_seconds=600, limit_seconds=20)


@pytest.mark.parametrize(
    ("beat", "config", "seconds"),
    [
        (Heartbeat(None, "start", 0.0, 0.0), AUTO, 600),
        (Heartbeat(1, "forward", 0.0, 0.0), AUTO, 600),
        (Heartbeat(30, "forward", 0.0, 12.0), AUTO, 12),
        (Heartbeat(30, "save", 0.0, 12.0), AUTO, 600),
        (Heartbeat(None, "start", 0.0, 0.0), GIVEN, 600),
        (Heartbeat(None, "load", 0.0, 0.0), GIVEN, 600),
        (Heartbeat(1, "forward", 0.0, 0.0), GIVEN, 20),
        (Heartbeat(30, "save", 0.0, 20.0), GIVEN, 20),
    ],
)
def test_each_phase_has_its_limit(beat, config, seconds):
    assert limit_seconds(beat, config) == seconds


WAITS = Collective("gloo:all_reduce", "default_pg", 9, [[4]])


def witness(rank, step=7, phase="backward", seconds=5.0, **more):
    return Witness(rank=rank, host="n", pid=9, step=step, phase=phase, seconds=seconds, limit_seconds=4.0, **more)


@pytest.mark.parametrize(
    "others",
    [
        [witness(1, step=8)],
        [witness(1, phase="optimizer")],
        [witness(1, pending=WAITS)],
        [witness(0, seconds=5.1, waits_for=2), witness(1, seconds=5.2, waits_for=0)],
        [witness(0, seconds=4.9), witness(1, seconds=4.8)],
    ],
    ids=["step", "phase", "collective", "save", "time"],
)
def test_who_is_behind_is_named(others):
    assert choose_culprit([*others, witness(2), witness(3, step=9)]).rank == 2


def test_who_waits_in_an_earlier_collective_is_named():
    ranks = [witness(0, pending=WAITS), witness(1, pending=replace(WAITS, seq=8)), witness(2, pending=WAITS)]
    assert choose_culprit(ranks).rank == 1


def test_a_rank_of_another_host_is_named_where_all_of_this_one_wait_for_it():
    error = hang_error([witness(0, phase="save", waits_for=5), witness(1, phase="save", waits_for=5)])
    assert error.what == (
        "rank 5, on another host, makes no progress: rank 0 waits for it in save of step 7 for 5.0 s."
    )


def test_a_stopped_rank_is_named_though_others_are_behind():
    assert choose_culprit([witness(0, step=3), witness(1, state="stopped (SIGSTOP)")]).rank == 1


def test_a_slow_run_is_no_hang():
    watch = Watch(WatchdogConfig(limit_seconds=10), 0.0)
    times = [float(seconds) for seconds in range(200)]
    assert not any(watch.is_late({0: Heartbeat(5, "forward", now - now % 9)}, now) for now in times)


def test_a_launcher_that_was_stopped_with_its_ranks_sees_no_hang():
    watch = Watch(WatchdogConfig(limit_seconds=10), 0.0)
    beats = {0: Heartbeat(5, "forward", 100.0, 0.0)}
    assert not any(watch.is_late(beats, now) for now in (100.0, 101.0, 500.0, 500.1, 505.0 - 2.1))
    assert [watch.is_late(beats, now) for now in (505.0, 507.0, 509.0, 511.0, 511.1)] == [
        False,
        False,
        False,
        False,
        True,
    ]


def test_a_beat_that_cannot_be_read_once_is_no_hang():
    watch = Watch(WatchdogConfig(limit_seconds=10, startup_seconds=10), 0.0)
    times = [tenths / 10 for tenths in range(200)]
    beats = {now: Heartbeat(5, "forward", now) for now in times} | {15.0: Heartbeat()}
    assert not any(watch.is_late({0: beats[now]}, now) for now in times)
    assert [watch.is_late({0: Heartbeat()}, now) for now in (20.0, 20.1)] == [False, True]


def test_ranks_that_wait_for_a_compilation_of_another_are_not_late():
    watch = Watch(WatchdogConfig(startup_seconds=60), 0.0)
    beats = {0: Heartbeat(15, "forward", 0.0, 10.0), 1: Heartbeat(15, "compile", 0.0, 10.0)}
    times = [float(second) for second in range(64)]
    assert [now for now in times if watch.is_late(beats, now)] == [62.0, 63.0]  # longer than it may take itself
    assert choose_culprit([witness(0, step=15, pending=WAITS), witness(1, step=15, phase="compile")]).rank == 1


@pytest.mark.parametrize(("device_type", "least"), [("cpu", 10.0), ("cuda", 100.0)])
def test_steps_of_a_tenth_of_a_second_may_stall_for_10_s_on_a_cpu_and_100_on_gpus(device_type, least):
    pace = Pace(device_type)
    for _ in range(20):
        pace.count(0.1)
    assert pace.limit_seconds() == least


def hang_first(times, note, place):
    """Rank 2 hangs in the first ``times`` attempts."""
    steps("backward", sleep_long if place.attempt < times else lambda: None, place)
    if place.rank == 0:
        note.touch()


def test_a_hang_is_restarted_and_the_run_ends(tmp_path, capfd):
    note = tmp_path / "done"
    assert watched(functools.partial(hang_first, 1, note), tmp_path, restarts=3) == 0
    assert note.exists()
    error = capfd.readouterr().err
    assert error.startswith("\nHangError: rank 2 makes no progress: in backward of step 2 for ")
    assert "restarting from the newest checkpoint (1 of 3)" in error
    assert len(list((tmp_path / "incidents").glob("hang-*.txt"))) == 1


def test_a_hang_at_the_same_step_twice_is_given_up(tmp_path, capfd):
    assert watched(functools.partial(hang_first, 9, tmp_path / "done"), tmp_path, restarts=3) == 1
    error = capfd.readouterr().err
    assert error.count("HangError: rank 2 makes no progress") == 2
    assert "  tries  2, given up: 2 failures in a row at step 2 (launch.max_failures_at_step)" in error


SIX_STEPS = [*SMALL, "--training.steps", "6", "--metrics.log_interval", "1", "--validation.interval", "0"]


def wait_for_dumps(run_dir, loop):
    """Rank 0 does not leave step 3 before there is a first dump, and step 5 before there is a second one."""

    incidents = run_dir / "incidents"

    def wait(step, done):
        if step in (3, 5) and loop.world.rank == 0:
            (run_dir / f"at-{step}").touch()
            wait_until(lambda: len({*incidents.glob("dump-*.json")} - {*incidents.glob("*.flight.json")}) >= step // 2)

    loop.after_step.append(wait)
    return loop


def wait_until(is_true):
    end = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


def launched(layout, run_dir):
    """A run in a process of its own, as ``crius train`` starts it, which nobody watches."""
    config = parse([*SIX_STEPS, *layout_flags(layout)])
    prepare = functools.partial(wait_for_dumps, run_dir)
    job = functools.partial(run_job, config, run_dir, time.monotonic(), prepare=prepare)
    if layout == "1":
        unwatched = WatchdogConfig(enable=False)
        start = functools.partial(run_single, job, single_placement(), run_dir, unwatched)
    else:
        start = functools.partial(run_workers, job, num_ranks(config), run_dir)
    process = FORK.Process(target=lambda: os._exit(start()))
    process.start()
    return process


@pytest.mark.long
@pytest.mark.parametrize("layout", ["1", "fsdp2"])
def test_a_run_that_is_asked_by_a_signal_says_where_its_ranks_are_and_goes_on(layout, tmp_path):
    run_dir, name = tmp_path / "asked", "dump" if layout != "1" else "dump-rank-0"
    run_dir.mkdir()
    process = launched(layout, run_dir)
    incidents = run_dir / "incidents"
    pid = process.pid  # of the launcher first, then of the last rank
    for number, step in enumerate((3, 5)):
        wait_until((run_dir / f"at-{step}").exists)
        time.sleep(0.2)  # the others reach the collective of the next step
        os.kill(pid, signal.SIGUSR2)
        report = incidents / f"{name}-{number}.json"
        wait_until(report.exists)
        ranks = json.loads(report.read_text())
        pid = ranks[-1]["pid"]
        assert [rank["rank"] for rank in ranks] == list(range(2 if layout == "fsdp2" else 1))
        assert all("MainThread:" in rank["threads"] and rank["stack"] for rank in ranks)
        assert "in wait_until" in "".join(ranks[0]["stack"]) and ranks[0]["step"] == step
        assert all((incidents / f"{name}-{number}.rank-{rank['rank']}.flight.json").exists() for rank in ranks)
        if layout == "fsdp2":
            assert ranks[1]["pending"]["name"].startswith("gloo:")
    process.join(60)
    assert process.exitcode == 0
    losses = [record["loss"] for record in steps_of(read_metrics(run_dir))]
    alone = train([*SIX_STEPS, *layout_flags(layout)], tmp_path / "alone")
    assert losses == [record["loss"] for record in steps_of(alone)]


def test_a_full_disk_does_not_hide_the_report(tmp_path):
    (tmp_path / "incidents").touch()
    from_watch = Hang(HangError("rank 2 makes no progress."), [witness(2)], tmp_path)
    assert from_watch.publish(tmp_path / "incidents").startswith("HangError: rank 2 makes no progress.\n")
