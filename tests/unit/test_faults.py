"""Planted faults, and the files of incidents."""

import json
import math

import pytest
import torch
from harness import Alone

from crius.errors import ConfigError
from crius.launch.status import Status
from crius.train import fault as faults
from crius.train.fault import Fault, planted, read_fault
from crius.train.incident import layer_of, to_json

CPU = torch.device("cpu")

GOOD_FAULTS = {
    "nan:step=5": Fault(kind="nan", first=5, last=5, factor=math.nan),
    "nan:step=5-7,rank=3,where=grad": Fault(kind="nan", first=5, last=7, factor=math.nan, rank=3, where="grad"),
    "spike:step=10,factor=1e3": Fault(kind="spike", first=10, last=10, factor=1000.0),
    "spike:factor=0.5,where=loss,step=1,rank=0": Fault(kind="spike", first=1, last=1, factor=0.5, rank=0),
}


@pytest.mark.parametrize("text", GOOD_FAULTS)
def test_a_fault_is_read(text):
    got, want = read_fault({"CRIUS_FAULT": text}, 10), GOOD_FAULTS[text]
    assert str(got) == str(want) and (got.factor == want.factor or math.isnan(got.factor))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "nan",
            "nan:",
            "nan:step=",
            "nan:step=x",
            "nan:step=5,step=6",
            "nan:step=5,factor=2",
            "nan:step=5,",
            "inf:step=5",
        ),
        *(
            "spike:step=5",
            "spike:step=5,factor=big",
            "nan:step=5,rank=-1",
            "nan:step=5,where=weights",
            "nan:step=5,layer=1",
        ),
    ],
)
def test_a_fault_that_is_not_understood_is_refused_with_the_grammar(text):
    with pytest.raises(ConfigError, match="is not understood") as caught:
        read_fault({"CRIUS_FAULT": text}, 10)
    assert caught.value.exit_code == 2 and faults.GRAMMAR in caught.value.why


@pytest.mark.parametrize(("step", "mended"), [("11", "10"), ("0", "1"), ("7-3", "7")])
def test_a_fault_of_a_step_that_never_comes_is_refused_with_one_that_does(step, mended):
    with pytest.raises(ConfigError, match="never comes") as caught:
        read_fault({"CRIUS_FAULT": f"nan:step={step},rank=1"}, 10)
    assert caught.value.fix == f"CRIUS_FAULT=nan:step={mended},rank=1"
    assert read_fault({"CRIUS_FAULT": caught.value.fix.partition("=")[2]}, 10)


def test_no_fault_costs_nothing():
    assert read_fault({}, 10) is None


@pytest.mark.parametrize("where", ["loss", "grad"])
def test_a_planted_fault_is_in_its_step_alone(where, monkeypatch):
    status = Status()
    monkeypatch.setattr(faults, "status", status)
    fault = Fault(kind="spike", first=2, last=2, factor=8.0, where=where)
    loss = planted(fault, lambda logits, labels: (logits * labels).sum(), True, Alone(0, 1, CPU))
    for step, phase in ((1, "step"), (2, "validation"), (2, "step"), (3, "step")):
        status.update(step=step, phase=phase)
        logits = torch.ones(2, requires_grad=True)
        value = loss(logits, torch.ones(2))
        value.backward()
        is_planted = (step, phase) == (2, "step")
        assert value.item() == (16.0 if is_planted and where == "loss" else 2.0)
        assert logits.grad.tolist() == [8.0 if is_planted else 1.0] * 2


def test_a_fault_for_a_rank_without_the_loss_is_refused():
    with pytest.raises(ConfigError, match="rank 1, which computes no loss"):
        planted(Fault(kind="nan", first=1, last=1, factor=math.nan, rank=1), None, True, Alone(0, 1, CPU))


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
