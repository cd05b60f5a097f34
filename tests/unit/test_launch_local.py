"""Local workers end together, say why once, and never outlive the launcher.

This file is also the program under test: ``python test_launch_local.py TARGET NUM_RANKS RUN_DIR`` starts workers.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import crius
from crius.errors import DataError, LayoutError
from crius.launch import crew, local
from crius.launch.local import scratch_folder
from crius.launch.status import status

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def speak(place):
    status.update(step=1)
    print(f"out of rank {place.rank}", os.environ["OMP_NUM_THREADS"], os.environ["GLOO_SOCKET_IFNAME"])
    os.write(2, f"raw error of rank {place.rank}\n".encode())


def rank_2_raises(place):
    status.update(step=5, phase="data")
    if place.rank == 2:
        raise ValueError("three is bad")
    time.sleep(0.3)
    raise RuntimeError("[gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:1")


def hang(place):
    (place.log_dir / f"pid-{place.rank}").write_text(str(os.getpid()))
    time.sleep(60)


def rank_1_raises_others_hang(place):
    status.update(step=3, phase="forward")
    if place.rank == 1:
        raise ValueError("alone")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang(place)


def rank_1_is_killed(place):
    status.update(step=4, phase="data")
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("Connection reset by peer")


def killed_beside_its_own_child(place):
    if place.rank == 1:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        child.start()
        (place.log_dir / "child").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def bad_layout(place):
    raise LayoutError("degree 6 does not divide 8.", where="--parallelism", fix="use 4")


def rank_1_has_bad_data(place):
    status.update(step=2)
    if place.rank == 1:
        raise DataError("document 7 is empty.")
    hang(place)


def thread_that_never_ends(place):
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise ValueError("with a thread")


def save_when_asked(place):
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    (place.log_dir / f"pid-{place.rank}").write_text(str(os.getpid()))
    while not asked.is_set():
        time.sleep(0.02)
    raise SystemExit(75)


def end_when_asked(place):
    with contextlib.suppress(SystemExit):
        save_when_asked(place)


def fail_to_save_when_asked(place):
    try:
        save_when_asked(place)
    except SystemExit:
        if place.rank == 1:
            raise DataError("the disk is full.") from None


def deaf(place):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang(place)


def lose_the_log_folder(place):
    if place.rank == 1:
        shutil.rmtree(place.log_dir)
        raise DataError("document 7 is empty.")


def count_objects(place):
    (place.log_dir / "objects").write_text(str(len(gc.get_objects())))


def exit_75(place):
    raise SystemExit(75)


def exit_3(place):
    raise SystemExit(3 if place.rank == 1 else 0)


def command(target, num_ranks, run_dir, *options):
    return [sys.executable, __file__, target.__name__, str(num_ranks), str(run_dir), *options]


def environ(tmp_path):
    scratch = tmp_path / "tmp"
    scratch.mkdir(exist_ok=True)
    ours = {"PYTHONPATH": str(Path(crius.__file__).parents[1]), "TMPDIR": str(scratch)}
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | ours


def processes_that_mention(text):
    """Command lines of live processes (no zombies) that name ``text``: forked workers keep their parent's."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


def wait_until(claim, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def launch(tmp_path):
    """Run a launcher to its end; afterwards no process and no temporary folder may be left."""

    def run(target, num_ranks, *options, **extra):
        return subprocess.run(
            command(target, num_ranks, tmp_path, *options),
            env=environ(tmp_path) | extra,
            capture_output=True,
            text=True,
            timeout=30,
        )

    yield run
    assert processes_that_mention(str(tmp_path)) == []
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.fixture
def start(tmp_path):
    """Start a launcher and wait until its workers run; in the end none of them may be left."""
    started = []

    def run(target, num_ranks, *options):
        process = subprocess.Popen(
            command(target, num_ranks, tmp_path, *options),
            env=environ(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        pids = [tmp_path / f"logs/pid-{rank}" for rank in range(num_ranks)]
        wait_until(lambda: all(path.exists() and path.read_text() for path in pids))
        return process

    yield run
    wait_until(lambda: processes_that_mention(str(tmp_path)) == [], seconds=3)
    for process in started:
        process.communicate(timeout=10)


def test_success_is_0_and_every_rank_has_its_output(launch, tmp_path):
    done = launch(speak, 3)
    assert done.returncode == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert done.stdout == f"out of rank 0 {threads} lo\n"
    assert done.stderr == "raw error of rank 0\n"
    for rank in (1, 2):
        log = (tmp_path / f"logs/rank-{rank}.log").read_text()
        assert log == f"out of rank {rank} {threads} lo\nraw error of rank {rank}\n"


def test_what_the_user_set_stays(launch, tmp_path):
    assert launch(speak, 2, OMP_NUM_THREADS="5", GLOO_SOCKET_IFNAME="eth7").stdout == "out of rank 0 5 eth7\n"


def test_a_collection_in_a_worker_leaves_what_the_launcher_made_alone(tmp_path):
    assert local.run_workers(count_objects, 1, tmp_path) == 0
    assert int((tmp_path / "logs/objects").read_text()) < len(gc.get_objects()) / 10


@pytest.mark.long
def test_spawned_workers_behave_like_forked_ones(launch, tmp_path):
    assert launch(speak, 2, "spawn").stdout.startswith("out of rank 0")
    done = launch(rank_2_raises, 3, "spawn")
    assert done.returncode == 1
    assert "FAILED rank 2 step 5: ValueError: three is bad" in done.stderr


def test_the_last_block_names_the_rank_that_failed_first(launch, tmp_path):
    done = launch(rank_2_raises, 4)
    assert done.returncode == 1
    block = done.stderr.splitlines()
    assert block[:2] == ["", "FAILED rank 2 step 5: ValueError: three is bad"]
    assert block[-5:] == [
        f'  File "{__file__}", line {rank_2_raises.__code__.co_firstlineno + 3}, in rank_2_raises',
        '    raise ValueError("three is bad")',
        "  phase  data",
        f"  log    {tmp_path}/logs/rank-2.log",
        "also failed: rank 0, 1, 3 (lost their peer)",
    ]
    assert (tmp_path / "logs/rank-2.log").read_text().endswith("ValueError: three is bad\n")
    record = json.loads((tmp_path / "logs/rank-2.error.json").read_text())
    assert (record["rank"], record["step"], record["phase"], record["exception"]) == (2, 5, "data", "ValueError")


def test_reports_of_an_earlier_run_do_not_stay(launch, tmp_path):
    launch(rank_2_raises, 3)
    launch(speak, 2)
    assert list(tmp_path.glob("logs/*.error.json")) == []


def test_peers_that_hang_are_ended(launch, tmp_path):
    began = time.monotonic()
    done = launch(rank_1_raises_others_hang, 3, "grace=0.3")
    assert time.monotonic() - began < 10
    assert done.returncode == 1
    assert "FAILED rank 1 step 3: ValueError: alone" in done.stderr
    assert done.stderr.endswith("also failed: rank 0, 2 (ended by the launcher at step 3, forward)\n")


def test_a_worker_killed_by_a_signal_is_named_with_its_step(launch, tmp_path):
    done = launch(rank_1_is_killed, 3)
    assert done.returncode == 1
    assert "\nFAILED rank 1 step 4: killed by SIGKILL (out of memory killer?)\n  phase  data\n" in done.stderr
    assert done.stderr.endswith("also failed: rank 0, 2 (lost their peer)\n")


def test_a_killed_worker_is_seen_while_its_own_child_lives(tmp_path):
    with (tmp_path / "stderr").open("w") as stderr:
        line = command(killed_beside_its_own_child, 2, tmp_path, "grace=0.2")
        code = subprocess.run(line, env=environ(tmp_path), stdout=stderr, stderr=stderr, timeout=20).returncode
    os.kill(int((tmp_path / "logs/child").read_text()), signal.SIGKILL)
    assert code == 1
    assert "FAILED rank 1 before step 1: killed by SIGKILL" in (tmp_path / "stderr").read_text()
    wait_until(lambda: processes_that_mention(str(tmp_path)) == [])


def test_an_error_of_all_ranks_is_one_message_and_its_exit_code(launch, tmp_path):
    done = launch(bad_layout, 3)
    assert done.returncode == 2
    assert done.stderr == (
        "\nLayoutError: degree 6 does not divide 8.\n  from   --parallelism\n  fix    use 4\n  rank   0, 1, 2\n"
    )


def test_a_crius_error_of_one_rank_names_it(launch, tmp_path):
    done = launch(rank_1_has_bad_data, 2, "grace=0.2")
    assert done.returncode == 1
    assert "\nDataError: document 7 is empty.\n  rank   1, step 2\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_is_shown_even_if_it_cannot_be_written_to_the_run(launch, tmp_path):
    done = launch(lose_the_log_folder, 2)
    assert (done.returncode, done.stderr) == (1, "\nDataError: document 7 is empty.\n  rank   1\n")


def test_a_failing_worker_does_not_wait_for_its_threads(launch, tmp_path):
    began = time.monotonic()
    assert launch(thread_that_never_ends, 2).returncode == 1
    assert time.monotonic() - began < 10


def test_preempted_and_saved_is_75(launch, tmp_path):
    assert launch(exit_75, 2).returncode == 75


def test_an_exit_without_an_error_is_a_failure(launch, tmp_path):
    done = launch(exit_3, 2)
    assert done.returncode == 1
    assert "FAILED rank 1 before step 1: exited with status 3 and left no report" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_signal_ends_all_without_a_traceback(start, tmp_path, number, code, whole_group):
    process = start(hang, 3)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    _, error = process.communicate(timeout=10)
    assert process.returncode == code
    assert error == f"\nstopped by {number.name}\n"
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_workers_may_save_when_asked_to_stop(start, tmp_path, number, code):
    process = start(save_when_asked, 2)
    process.send_signal(number)
    _, error = process.communicate(timeout=10)
    assert process.returncode == code
    assert error == f"\nstopped by {number.name}, saved first\n"


def test_a_job_that_is_done_when_the_signal_comes_is_done(start, tmp_path):
    process = start(end_when_asked, 2)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=10) == ("", "")
    assert process.returncode == 0


def test_an_error_while_stopping_is_shown(start, tmp_path):
    process = start(fail_to_save_when_asked, 2)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=10)
    assert process.returncode == 143
    assert error == "\nDataError: the disk is full.\n  rank   1\n\nstopped by SIGTERM\n"


def test_workers_that_ignore_sigterm_are_killed_after_the_grace(start, tmp_path):
    process = start(deaf, 2, "stop=0.3")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 143


def test_a_second_signal_kills_at_once(start, tmp_path):
    process = start(deaf, 2, "stop=60")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode == 130


@pytest.mark.parametrize("options", [[], ["poll"]], ids=["kernel", "polling"])
def test_workers_end_when_the_launcher_is_killed(start, tmp_path, options):
    process = start(deaf, 3, *options)
    assert len(processes_that_mention(str(tmp_path))) == 4
    process.kill()
    process.wait(timeout=5)
    wait_until(lambda: processes_that_mention(str(tmp_path)) == [], seconds=3)


def test_the_folder_of_a_killed_launcher_goes_with_the_next_one_and_that_of_a_live_one_stays(start, tmp_path):
    killed, alive = start(deaf, 1), None
    scratch = tmp_path / "tmp"
    [left] = scratch.iterdir()
    others = [scratch / "crius-verify-1", scratch / "crius-foreign"]
    for other in others:
        other.mkdir()
    (scratch / "crius-foreign/owner").touch()  # its launcher has not locked it yet
    killed.kill()
    killed.wait(timeout=5)
    (tmp_path / "logs/pid-0").unlink()
    alive = start(hang, 1)
    [mine] = set(scratch.iterdir()) - set(others)
    assert mine != left
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(scratch))
        with scratch_folder() as new:
            assert set(scratch.iterdir()) == {*others, mine, new}
    assert set(scratch.iterdir()) == {*others, mine}
    alive.terminate()


def main(name, num_ranks, run_dir, *options):
    """The program under test."""
    if "spawn" in options:
        crew._Process = multiprocessing.get_context("spawn").Process
    if "poll" in options:  # as on a system whose kernel cannot tie a process to its parent
        crew._PR_SET_PDEATHSIG = 9999
    seconds = dict(option.split("=") for option in options if "=" in option)
    return local.run_workers(
        globals()[name],
        int(num_ranks),
        Path(run_dir),
        grace_seconds=float(seconds.get("grace", 2)),
        stop_seconds=float(seconds.get("stop", 30)),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
