"""``crius bench calibrate``: what it finds, and what it refuses to write."""

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import parse

from crius import cli
from crius.host import cpu_with_cores
from crius.tools.bench import calibrate
from crius.tools.bench.calibrate import Probe, solved
from crius.tools.plan.hardware import KNOWN, hardware
from crius.tools.plan.memory import memory
from crius.tools.plan.time import step_time
from crius.tools.plan.workload import from_config
from crius.train.inputs import describe_model

CPU = KNOWN["cpu"]
GIB = 2**30


def probe(sizes, truth):
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    config = parse([*flags, "--training.mixed_precision_param", "float32"])
    work = from_config(config, describe_model(config), 1, device="cpu")
    tokens = work.microbatch * work.num_microbatches * work.seq_len
    return Probe("a model", work, step_time(work, truth).total, memory(work, truth).total, tokens)


@pytest.mark.parametrize("reach", [0.5, 1.1])
def test_calibration_finds_what_made_the_runs_as_fast_as_they_were(reach):
    truth = replace(CPU, memory_efficiency=reach, op_seconds=3e-5, resident_bytes=0.4 * GIB, resident_share=0.2)
    probes = [probe(sizes, truth) for sizes in (calibrate._EMPTY, *calibrate._SIZES["cpu"])]
    found = solved(replace(truth, memory_efficiency=None, op_seconds=None, resident_bytes=0), probes)
    assert found.memory_efficiency == pytest.approx(reach, rel=0.02)
    assert found.op_seconds == pytest.approx(3e-5, rel=0.02)
    assert found.resident_bytes == pytest.approx(0.4 * GIB, rel=1e-3)
    assert found.resident_share == pytest.approx(0.2, rel=1e-3)
    other = probe({"model.flavor": "debug", "training.seq_len": 512}, truth)
    assert step_time(other.workload, found).total == pytest.approx(other.seconds, rel=0.02)


def test_matmuls_that_other_programs_slowed_are_mended_by_the_runs():
    probes = [probe(sizes, CPU) for sizes in (calibrate._EMPTY, *calibrate._SIZES["cpu"])]
    found = solved(replace(CPU, float32_flops=CPU.float32_flops / 3, memory_efficiency=None), probes)
    errors = [step_time(one.workload, found).total / one.seconds for one in probes[1:]]
    assert errors == pytest.approx([1, 1], rel=0.15)


def _model_of(settings):
    return {name: value for name, value in settings.items() if name.startswith(("model.", "training."))}


@pytest.fixture
def quick(monkeypatch):
    """Short timings, and runs that take what is planned for a CPU, or what the test makes of it.

    They are not of this machine, so that the plan of them may be any share off.
    """
    runs = []

    def of(change, most_off=1e9):
        monkeypatch.setattr(calibrate, "MOST_OFF", most_off)

        def run(settings, kind, folder, until, *, is_needed=True):
            runs.append((settings, is_needed))
            return change(len(runs), probe(_model_of(settings), CPU))

        monkeypatch.setattr(calibrate, "_probe", run)
        return runs

    monkeypatch.setattr("crius.tools.bench.calibrate_kernels.BUDGET_SECONDS", 0.02)
    return of


@pytest.mark.long
def test_calibrate_measures_this_machine_and_writes_a_file_that_plans(user_cache, quick, capsys):
    quick(lambda _, one: one)
    file = user_cache / "mine.toml"
    assert cli.main(["bench", "calibrate", "--out", str(file), "--json"]) == 0
    found = hardware(str(file))
    assert json.loads(capsys.readouterr().out)["float32_flops"] == found.float32_flops > 1e8
    assert found.device == cpu_with_cores()
    assert found.link_bandwidth > 1e6
    assert 0 < found.hop_seconds < 1
    assert found.threads == torch.get_num_threads()


@pytest.mark.long
def test_a_machine_whose_runs_contradict_each_other_is_not_written(user_cache, quick, capsys):
    quick(lambda number, one: replace(one, seconds=one.seconds * (10 if number == 3 else 1)), calibrate.MOST_OFF)
    assert cli.main(["bench", "calibrate"]) == 1
    printed = capsys.readouterr()
    assert "contradict each other, and nothing was written" in printed.err
    assert "check a model: planned" in printed.err
    assert "stop other programs and run it again" in printed.err
    assert "wrote" not in printed.out
    assert not list(user_cache.rglob("*.toml"))


def test_a_run_that_is_not_done_in_time_ends_the_calibration_and_leaves_no_process(user_cache, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "LIMIT_SECONDS", 1)
    begin = time.monotonic()
    assert cli.main(["bench", "calibrate"]) == 1
    assert time.monotonic() - begin < 20
    assert "could not be measured within 1 s, and nothing was written" in capsys.readouterr().err
    assert not list(user_cache.rglob("*.toml"))
    for _ in range(100):
        if not _processes("crius-calibrate-"):
            break
        time.sleep(0.1)
    assert _processes("crius-calibrate-") == []


def _processes(words):
    """Command lines of processes that name ``words``, this one's aside."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and entry.name != str(os.getpid()):
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            found += [line] if words in line else []
    return found


@pytest.mark.long
def test_second_turns_that_are_not_done_in_time_do_not_count(user_cache, quick):
    def change(number, one):
        if number > 3:
            raise subprocess.TimeoutExpired("crius train", 1)
        return one

    runs = quick(change)
    assert cli.main(["bench", "calibrate"]) == 0
    assert [is_needed for _, is_needed in runs] == [True, True, True, False]


@pytest.mark.long
def test_a_slow_machine_has_shorter_runs(user_cache, quick, monkeypatch):
    monkeypatch.setattr(calibrate, "SLOW_SECONDS", 0)
    runs = quick(lambda _, one: one)
    assert cli.main(["bench", "calibrate"]) == 0
    assert [settings["training.steps"] for settings, _ in runs] == [30, 20, 12, 20, 12]
