"""What is exported of a checkpoint is the same in any layout that saved it."""

import hashlib

import pytest
from checkpoint_runs import flags
from harness import train

from crius.tools.convert import exporting
from crius.tools.convert.exporting import export_model, open_source

SAVED = ["--checkpoint.interval", "1", "--validation.interval", "0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one process."""
    place = tmp_path_factory.mktemp("trained")
    train(flags("1", *SAVED, steps=2), place / "mine")
    return place / "mine"


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "pp2"])
def test_an_export_of_any_layout_has_the_bytes_of_one_process(trained, tmp_path, layout, monkeypatch):
    """The run goes on from the weights of one process and saves them after a step too small to change a bit."""
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    still = ["--checkpoint.init_from", str(trained), "--optimizer.lr", "1e-30"]
    train(flags(layout, *SAVED, *still, steps=1), tmp_path / "again")
    source = open_source(str(tmp_path / "again"), -1)
    assert source.facts["ranks"] == f"2 ({layout})"
    assert max(len(tensor.pieces) for tensor in source.weights.tensors.values()) == (1 if layout == "pp2" else 2)
    export_model(source, str(tmp_path / "hf"))
    export_model(open_source(str(trained), -1), str(tmp_path / "one"))
    one, hf = (
        hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest() for name in ("one", "hf")
    )
    assert one == hf and str(trained) in (tmp_path / "hf" / "README.md").read_text()
