"""``crius sweep`` with real runs: a failure, Ctrl-C, and the same command again."""

import os
import signal
import subprocess
import sys
import time

import pytest
from harness import ROOT

import crius


@pytest.mark.slow
def test_a_sweep_outlives_a_failure_stops_at_ctrl_c_and_continues(tmp_path):
    flags = [
        "--model.num_layers",
        "1",
        "--seq_len",
        "32",
        "--batch",
        "4",
        "--steps",
        "200",
        "--metrics.log_interval",
        "1",
    ]
    flags += ["--validation.interval", "0", "--debug.seed", "7", "--lr", "1e30,1e-3", "--job.run_dir", "s"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "crius", "sweep", *flags]
    process = subprocess.Popen(command, cwd=tmp_path, env=environ, start_new_session=True, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "s" / "lr_1e-3" / "metrics.jsonl"
    while not (metrics.exists() and '"step": 3' in metrics.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the run gets it too
    assert process.wait(60) == 130
    failed, stopped = (crius.load_run(tmp_path / "s" / name) for name in ("lr_1e30", "lr_1e-3"))
    assert (failed.state, stopped.state, stopped.summary["stopped_by"]) == ("failed", "stopped", "SIGINT")

    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr  # the first one fails again
    assert f"resume: step {stopped.summary['steps']}" in (tmp_path / "s" / "logs" / "lr_1e-3.log").read_text()
    finished = crius.load_run(tmp_path / "s" / "lr_1e-3")
    assert finished.state == "finished" and finished.metrics["step"] == list(range(1, 201))
    assert "failed (NonFiniteError)" in done.stdout and "  NonFiniteError: step " in done.stdout
