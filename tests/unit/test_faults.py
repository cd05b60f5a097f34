"""Planted faults, and the files of incidents."""

import errno
import functools
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from harness import Alone
from torch import nn

from crius.errors import ConfigError
from crius.launch.environment import single_placement
from crius.launch.local import run_workers
from crius.launch.status import Status
from crius.launch.status import status as status_of_process
from crius.tools.faults import planted
from crius.tools.faults.fault import GRAMMAR, DiskFault, DropoutFault, LossFault, ProcessFault, read_faults
from crius.tools.faults.planted import before_write, plant_in_loss, planted_in_process
from crius.train.stability import layer_of, to_json

CPU = torch.device("cpu")

GOOD_FAULTS = {
    "nan:step=5": [LossFault(first=5, last=5, factor=math.nan)],
    "nan:step=5-7,rank=3,where=grad": [LossFault(first=5, last=7, factor=math.nan, rank=3, where="grad")],
    "spike:step=10,factor=1e3": [LossFault(first=10, last=10, factor=1000.0)],
    "spike:factor=0.5,where=loss,step=1,rank=0": [LossFault(first=1, last=1, factor=0.5, rank=0)],
    "dropout:p=0.1": [DropoutFault(p=0.1)],
    "kill:step=3": [ProcessFault(kind="kill", step=3)],
    "stop:step=3,phase=save,rank=2,attempt=1": [ProcessFault(kind="stop", step=3, phase="save", rank=2, attempt=1)],
    "hang:phase=start;raise:phase=load,rank=1": [
        ProcessFault(kind="hang", step=None, phase="start"),
        ProcessFault(kind="raise", step=None, phase="load", rank=1),
    ],
    "disk:save=2,error=enospc;nan:step=1;disk:save=1-9,error=slow,seconds=0.5,rank=1": [
        DiskFault(first=2, last=2, error="enospc"),
        LossFault(first=1, last=1, factor=math.nan),
        DiskFault(first=1, last=9, error="slow", seconds=0.5, rank=1),
    ],
}


@pytest.mark.parametrize("text", GOOD_FAULTS)
def test_faults_are_read_in_their_order(text):
    got, want = read_faults({"CRIUS_FAULT": text}, 10, 4), GOOD_FAULTS[text]
    assert list(map(repr, got)) == list(map(repr, want))  # the fields, among which a NaN is a NaN
    assert all(map(str, got))


BAD_FAULTS = {
    **{"nan": "step is missing", "nan:step=": "step '' is not a whole", "nan:step=x": "step 'x' is not a whole"},
    **{"nan:step=5,step=6": "'step' is given twice", "nan:step=5,factor=2": "nan has no 'factor'"},
    **{"nan:step=5,": "nan has no ''", "inf:step=5": "there is no fault 'inf'", "nan:rank=1": "step is missing"},
    **{"nan:step=5-": "is not a whole", "spike:step=5": "factor is missing", "spike:step=5,factor=big": "not a number"},
    **{"spike:step=5,factor=inf": "is not a number", "nan:step=5,rank=-1": "rank '-1' is not a whole"},
    **{"nan:step=5,where=weights": "is not one of loss, grad", "nan:step=5,layer=1": "nan has no 'layer'"},
    **{"dropout:p=1": "is not between", "dropout:": "p is missing", "dropout:p=nan": "is not a number"},
    **{"kill:step=1-2": "happens once", "kill:rank=1": "step is missing", "kill:step=1,phase=save=": "is not one of"},
    **{"kill:step=1,phase=start": "comes before the steps", "kill:step=1,phase=lunch": "is not one of start, load"},
    **{"disk:save=1": "error is missing", "disk:save=1,error=eio": "is not one of enospc"},
    **{"disk:save=1,error=erofs,seconds=2": "seconds are for error=slow"},
    **{"nan:step=1;": "there is no fault ''", "nan:step=1;spike:step=2": "factor is missing"},
}


@pytest.mark.parametrize("text", BAD_FAULTS)
def test_a_fault_that_is_not_understood_is_refused_with_the_grammar(text):
    with pytest.raises(ConfigError, match="is not understood") as caught:
        read_faults({"CRIUS_FAULT": text}, 10, 4)
    bad = text.split(";")[-1]
    assert caught.value.what.startswith(f"CRIUS_FAULT {bad} is not") and BAD_FAULTS[text] in caught.value.what
    assert caught.value.exit_code == 2 and GRAMMAR.get(bad.partition(":")[0], GRAMMAR["disk"]) in caught.value.why


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ("nan:step=11,rank=1", "nan:step=10,rank=1"),
        ("nan:step=0,rank=1", "nan:step=1,rank=1"),
        ("nan:step=7-3", "nan:step=7"),
        ("nan:step=8-12,where=grad", "nan:step=8,where=grad"),
        ("nan:step=1;nan:step=11", "'nan:step=1;nan:step=10'"),
        ("kill:step=0,rank=4", "kill:step=1,rank=3"),
        ("kill:step=11,attempt=1,rank=9", "kill:step=10,attempt=1,rank=9"),  # a restart may have more ranks
        ("disk:save=3-2,error=slow", "disk:save=3,error=slow"),
        ("disk:save=1,error=slow,rank=4", "disk:save=1,error=slow,rank=3"),
    ],
)
def test_a_fault_that_never_comes_is_refused_with_one_that_does(text, mended):
    with pytest.raises(ConfigError, match="never happens: the run has steps 1 to 10 and ranks 0 to 3") as caught:
        read_faults({"CRIUS_FAULT": text}, 10, 4)
    assert caught.value.fix == f"CRIUS_FAULT={mended}"
    assert read_faults({"CRIUS_FAULT": mended.strip("'")}, 10, 4)


def test_no_fault_costs_nothing():
    assert read_faults({}, 10, 1) == ()
    loss = SumOfInput()
    plant_in_loss((), loss, None)
    assert not loss._forward_hooks and not loss._forward_pre_hooks


class SumOfInput(nn.Module):
    def forward(self, x):
        return x.sum()


@pytest.fixture
def status(monkeypatch):
    """The status of a process of its own."""
    status = Status()
    monkeypatch.setattr(planted, "status", status)
    return status


@pytest.mark.parametrize("where", ["loss", "grad"])
def test_a_planted_fault_is_in_its_step_alone(where, status):
    fault = LossFault(first=2, last=2, factor=8.0, where=where)
    loss = SumOfInput()
    plant_in_loss([fault], loss, Alone(0, 1, CPU))
    for step, phase in ((1, "forward"), (2, "validation"), (2, "forward"), (2, "pipeline"), (3, "forward")):
        status.update(step=step, phase=phase)
        logits = torch.ones(2, requires_grad=True)
        value = loss(logits)
        value.backward()
        is_planted = step == 2 and phase != "validation"
        assert value.item() == (16.0 if is_planted and where == "loss" else 2.0)
        assert logits.grad.tolist() == [8.0 if is_planted else 1.0] * 2


def test_a_fault_for_a_rank_without_the_loss_is_refused():
    with pytest.raises(ConfigError, match="rank 1, which does not compute the loss"):
        plant_in_loss([LossFault(first=1, last=1, factor=math.nan, rank=1)], SumOfInput(), Alone(0, 1, CPU))


def test_dropout_draws_from_the_generator_of_the_device_in_training_alone(status):
    loss = nn.Identity()
    plant_in_loss([DropoutFault(p=0.25)], loss, Alone(0, 1, CPU))
    ones = torch.ones(1000)
    status.update(step=1, phase="forward")
    with torch.random.fork_rng():
        state = torch.get_rng_state()
        first, second = loss(ones), loss(ones)
        torch.set_rng_state(state)
        again = loss(ones)
        status.update(phase="validation")
        at_rest = torch.get_rng_state()
        assert torch.equal(loss(ones), ones) and torch.equal(torch.get_rng_state(), at_rest)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert first.unique().tolist() == pytest.approx([0, 1 / 0.75]) and 150 < (first == 0).sum() < 350


@pytest.mark.parametrize(
    ("asked", "here", "comes"),
    [
        *[("forward", "forward", True), ("forward", "pipeline", True), ("forward", "backward", False)],
        *[("backward", "backward", True), ("backward", "pipeline", True), ("backward", "forward", False)],
        *[("pipeline", "pipeline", True), ("pipeline", "forward", True), ("save", "save", True)],
        *[("save", "optimizer", False), ("validation", "pipeline", False)],
    ],
)
def test_a_fault_of_forward_or_backward_comes_under_a_pipeline_too(asked, here, comes):
    fault = ProcessFault(kind="kill", step=3, phase=asked)
    assert fault.is_at(3, here) == comes and not fault.is_at(2, here)


def test_a_raise_is_planted_once_on_its_rank_in_its_attempt(status):
    faults = [ProcessFault(kind="raise", step=2, phase="data", rank=1, attempt=1)]

    def steps():
        for step, phase in ((1, "data"), (2, "data"), (2, "data"), (2, "forward")):
            status.update(step=step, phase=phase)

    for rank, attempt in ((0, 1), (1, 0)):
        with planted_in_process(faults, rank, attempt):
            steps()
    with pytest.raises(RuntimeError, match="planted: raise in data of step 2 on rank 1"):
        with planted_in_process(faults, 1, 1):
            steps()
    steps()  # the run is over


def test_a_fault_before_the_first_update_comes_at_once(status):
    faults = [ProcessFault(kind="raise", step=None, phase="start")]
    with pytest.raises(RuntimeError, match="planted: raise in start on rank 0"):
        with planted_in_process(faults, 0, 0):
            pytest.fail("it went on")


def test_a_fault_that_did_not_come_is_told(status, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("crius"), "propagate", True)
    with planted_in_process([ProcessFault(kind="raise", step=2, phase="save")], 0, 0):
        status.update(step=2, phase="optimizer")
    status.update(phase="save")  # of another run of this process
    assert [record.getMessage() for record in caplog.records] == [
        "CRIUS_FAULT plants a fault: raise in save of step 2 on rank 0",
        "CRIUS_FAULT planted a fault that did not happen: raise in save of step 2 on rank 0",
    ]


def walk(text, note, placement):
    """Go through the steps of a run, with the faults of ``text``."""
    with planted_in_process(read_faults({"CRIUS_FAULT": text}, 3, 2), placement.rank, placement.attempt):
        for step in (1, 2, 3):
            for phase in ("data", "forward", "forward", "backward", "optimizer"):
                status_of_process.update(step=step, phase=phase)
        note.write_text("through")


def test_a_killed_rank_is_named_with_its_step_and_phase(tmp_path, capfd):
    text = "kill:step=2,phase=optimizer,rank=1"
    assert run_workers(functools.partial(walk, text, tmp_path / "note"), 2, tmp_path, grace_seconds=0.5) == 1
    said = capfd.readouterr().err
    assert "FAILED rank 1 step 2: killed by SIGKILL" in said and "phase  optimizer" in said


def process_state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["stop", "hang"])
def test_a_stopped_process_goes_on_when_continued_and_one_that_hangs_never(kind, tmp_path):
    note, placement = tmp_path / "note", single_placement()
    process = multiprocessing.get_context("fork").Process(target=walk, args=(f"{kind}:step=2", note, placement))
    process.start()
    try:
        want = "T" if kind == "stop" else "S"
        give_up = time.monotonic() + 20
        while process_state(process.pid) != want and time.monotonic() < give_up:
            time.sleep(0.02)
        process.join(0.3)
        assert process.is_alive() and process_state(process.pid) == want and not note.exists()
        os.kill(process.pid, signal.SIGCONT)
        process.join(10 if kind == "stop" else 0.3)
        assert process.is_alive() == (kind == "hang") and note.exists() == (kind == "stop")
    finally:
        process.kill()
        process.join()


def test_a_full_disk_fails_the_writes_of_its_save_alone():
    faults = read_faults({"CRIUS_FAULT": "disk:save=2-3,error=enospc;disk:save=4,error=erofs,rank=1"}, 1, 2)
    found = {}
    for rank in (0, 1):
        for save in (1, 2, 3, 4, 5):
            for _ in range(2):
                try:
                    before_write(faults, rank, save)
                except OSError as error:
                    found.setdefault(rank, []).append((save, error.errno))
    full = [(2, errno.ENOSPC)] * 2 + [(3, errno.ENOSPC)] * 2
    assert found == {0: full, 1: full + [(4, errno.EROFS)] * 2}


def test_a_slow_disk_makes_each_write_wait(monkeypatch):
    waits = []
    monkeypatch.setattr(planted.time, "sleep", waits.append)
    for _ in range(2):
        before_write([DiskFault(first=1, last=1, error="slow", seconds=2.5)], 3, 1)
    assert waits == [2.5, 2.5]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("layers.11.attention.wq.weight", "layers.11"),
        ("tok_embeddings.weight", "tok_embeddings"),
        ("decoder.blocks.3.norm", "decoder.blocks.3"),
        ("scale", "scale"),
    ],
)
def test_parameters_are_summed_by_layer(name, layer):
    assert layer_of(name) == layer


def test_an_incident_is_json_also_where_numbers_are_not_finite():
    report = {"a": math.inf, "b": [{"x": math.nan, "y": 1.5}, {"x": 2.0}], "c": [], "d": [1, 2], "e": {"f": -math.inf}}
    want = {"a": "inf", "b": [{"x": "nan", "y": 1.5}, {"x": 2.0}], "c": [], "d": [1, 2], "e": {"f": "-inf"}}
    text = to_json(report)
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == want
    assert len(text.splitlines()) == 10
