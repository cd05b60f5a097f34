"""Run folders for the tests of reports: written by hand, and real ones that were hit by planted faults."""

import json
import os
import subprocess
import sys

from harness import ROOT

from crius.config.run import RunConfig, replace_fields
from crius.config.toml_file import to_toml


def write_run(folder, losses=(3.0, 2.5, 2.25), *, settings=None, starts=(0,), fields=None, files=None):
    """A run folder.

    Args:
        folder: of the run; made.
        losses: of the steps from 1 on; None: not finite.
        settings: dotted settings that differ from the defaults.
        starts: the steps from which the run was started.
        fields: further fields of each record.
        files: more files, by path; what is no text becomes JSON.
    """
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(to_toml(replace_fields(RunConfig(), settings or {})))
    records = [
        {"step": step, "loss": loss, "tokens_per_second": 100.0 + step, "memory_gib": 0.5, "goodput": 0.5}
        for step, loss in enumerate(losses, start=1)
    ]
    lines = [json.dumps(record | (fields or {})) + "\n" for record in records]
    (folder / "metrics.jsonl").write_text("".join(lines))
    began = [
        {"time": 1.8e9 + step, "step": step, "layout": "fsdp2", "host": "here", "torch": "2.13"} for step in starts
    ]
    (folder / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in began))
    for name, content in (files or {}).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def train(folder, *flags, faults=""):
    """A real run in ``folder``, with planted faults (docs/faults.md); returns the folder."""
    command = [sys.executable, "-m", "crius", "train", *flags, "--job.run_dir", str(folder)]
    environ = {"CRIUS_FAULT": faults} if faults else {}
    fixed = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env={**os.environ, **fixed, **environ}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
