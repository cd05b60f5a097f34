"""Single bits of a run folder that flip: state, data and settings are equal, or the difference is reported in words.

Metrics, logs and summaries have no hash, and nothing continues from them: a flipped digit of a loss stays.
"""

import contextlib
import functools
import io
import logging
import os
import random
import shutil
import signal
import sys

import pytest
import torch
from checkpoint_runs import contents, flags
from harness import parse, train

from crius.checkpoint.contents import contents_hash
from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import CheckpointFolder
from crius.checkpoint.load import dtype_of, find, load_tensors
from crius.cli import main
from crius.data.sample_log import next_attempt
from crius.errors import ConfigError
from crius.metrics.sinks import JsonlSink
from crius.tools.plan.compare import compare_run
from crius.tools.report.history import read_run
from crius.tools.report.page import page
from crius.tools.report.payload import payload
from crius.train.inputs import describe_model
from crius.train.saving import check_newest

STEPS, MORE = 4, 6
EVERY = ("--checkpoint.interval", "2", "--metrics.log_interval", "1")
LOG = logging.getLogger("crius")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a run of four steps, with two checkpoints."""
    run_dir = tmp_path_factory.mktemp("begun")
    train(flags("1", *EVERY, steps=STEPS), run_dir)
    return run_dir


@pytest.fixture
def run_dir(begun, tmp_path):
    """A copy of it."""
    return shutil.copytree(begun, tmp_path / "run")


def flip(run_dir, choice):
    """Flip one bit of a file, any file with the same probability; returns its path and how to undo the flip."""
    path = choice.choice(sorted(path for path in run_dir.rglob("*") if path.is_file() and path.stat().st_size))
    before = path.read_bytes()
    at, bit = choice.randrange(len(before)), choice.randrange(8)
    path.write_bytes(before[:at] + bytes([before[at] ^ 1 << bit]) + before[at + 1 :])
    return path, lambda: path.write_bytes(before)


@contextlib.contextmanager
def heard():
    """What Crius prints and logs."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    LOG.addHandler(handler)
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            yield text
    finally:
        LOG.removeHandler(handler)


def loaded(run_dir):
    """Step, state, settings and a hash of all tensors of the checkpoint that a resume takes."""
    folder = CheckpointFolder(open_disk(str(run_dir / "checkpoints")))
    found = find(folder, -1, rank=0, size=1, gather=lambda value: [value], verify=True)
    manifest = found.manifest
    tensors = {name: torch.empty(e.shape, dtype=dtype_of(manifest, name)) for name, e in manifest.tensors.items()}
    load_tensors(found.sources(tensors), tensors)
    return manifest.step, found.state, manifest.config, contents_hash(folder.disk, found.name, manifest)


def read_checkpoints(run_dir, good):
    """The checkpoint before the damaged one is taken, and the damage is reported, by the resume and by verify."""
    with heard() as text:
        found = loaded(run_dir)
        code = main(["checkpoint", "verify", str(run_dir)])
        assert main(["checkpoint", "ls", str(run_dir)]) == 0
    assert found == good[found[0]]
    assert code == 1 and "DAMAGED" in text.getvalue()
    assert found[0] == STEPS or f"FALLING BACK to step {found[0]}" in text.getvalue()
    return text.getvalue()


def read_samples(run_dir, good):
    """The next attempt has a number that no other has, and the audit finds what was not logged."""
    assert 1 <= next_attempt(run_dir) <= 10**10
    with heard() as text:
        code = main(["data", "audit", str(run_dir)])
    assert code in (0, 1, 2)
    return text.getvalue()


def read_settings(run_dir, good):
    """The settings are read, or the file is refused; a resume compares them with those of the checkpoint."""
    with heard() as text:
        assert main(["config", "show", "--config", str(run_dir / "run.toml")]) in (0, 2)
    return text.getvalue()


def read_reports(run_dir, good):
    """A resume goes on with the whole records; a plan is compared or the reason why not is given; there is a report."""
    config = parsed()
    with heard() as text:
        with contextlib.suppress(ConfigError):
            compare_run(run_dir, config, describe_model(config))
        assert page(payload([read_run(run_dir)])).endswith("</html>\n")
        JsonlSink(run_dir, resumed_step=STEPS).close()
    return text.getvalue()


def read_newest(run_dir, good):
    """A start finds the newest checkpoint, or refuses with a reason."""
    folder = CheckpointFolder(open_disk(str(run_dir / "checkpoints")))
    try:
        return check_newest(run_dir, folder, -1, accepts=False)
    except ConfigError as error:
        assert "--checkpoint.restart" in error.fix
        return str(error)


READERS = {
    "newest_checkpoint.json": read_newest,
    **{"checkpoints": read_checkpoints, "data": read_samples, "run.toml": read_settings},
    **{"metrics.jsonl": read_reports, "plan.json": read_reports, "summary.json": read_reports, "logs": read_reports},
    "starts.jsonl": read_reports,
}


@functools.cache
def parsed():
    """The settings of the run, which take half a second to parse."""
    return parse(flags("1", *EVERY, steps=STEPS))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_bit_that_flips_is_found_by_every_reader_in_words(count, run_dir, monkeypatch):
    monkeypatch.setattr(LOG, "propagate", False)
    choice, metrics = random.Random(count), (run_dir / "metrics.jsonl").read_bytes()
    good = {STEPS: loaded(run_dir)}
    shutil.move(run_dir / "checkpoints" / "step-00000004", run_dir.parent / "kept")
    good[2] = loaded(run_dir)
    shutil.move(run_dir.parent / "kept", run_dir / "checkpoints" / "step-00000004")
    seen = set()
    for _ in range(count):
        path, undo = flip(run_dir, choice)
        kind = path.relative_to(run_dir).parts[0]
        text = READERS[kind](run_dir, good)
        assert "Traceback" not in text, (path, text)
        seen.add(kind)
        undo()
        (run_dir / "metrics.jsonl").write_bytes(metrics)
        (run_dir / "metrics.lost.jsonl").unlink(missing_ok=True)
    assert seen == set(READERS) or count < 100


def resumed(run_dir):
    """Exit code and output of the same command again, with more steps, in a process of its own."""
    command = ["train", "--config", str(run_dir / "run.toml"), "--job.run_dir", str(run_dir)]
    command += ["--training.steps", str(MORE), "--launch.max_restarts", "0"]
    output = run_dir.with_suffix(".txt")
    sys.stdout.flush()
    if (child := os.fork()) == 0:  # torch is imported already
        code = 99
        try:
            file = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            signal.alarm(120)
            code = main(command)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output.read_text()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_a_resume_after_a_bit_flipped_ends_equal_or_reports_the_difference(count, begun, tmp_path):
    choice = random.Random(count)
    whole = shutil.copytree(begun, tmp_path / "whole")
    assert resumed(whole)[0] == 0
    want = contents(whole, MORE)
    for number in range(count):
        run_dir = shutil.copytree(begun, tmp_path / str(number))
        path, _ = flip(run_dir, choice)
        code, text = resumed(run_dir)
        assert "Traceback" not in text, (path, text)
        if code == 0 and (run_dir / "checkpoints" / f"step-{MORE:08d}").is_dir():
            assert contents(run_dir, MORE) == want or "changed since the checkpoint" in text, (path, text)
        else:
            assert code in (1, 2) and "fix" in text, (path, code, text)
        if "step-00000004" in path.parts:  # the resume looks at no older one
            assert "DAMAGED" in text, (path, text)
        shutil.rmtree(run_dir)
