"""Real runs beside their plan: memory that is used up, and the comparison at the end."""

import json

import pytest
from harness import SMALL, parse, run

from crius import cli
from crius.config.toml_file import flatten
from crius.metrics.device import machine_of
from crius.tools.plan import remedies
from crius.tools.plan.hardware import KNOWN, user_file, write_hardware
from crius.tools.plan.legal import violations
from crius.train.inputs import describe_model

SHORT = [*SMALL, "--training.steps", "14", "--model.num_layers", "1", "--validation.interval", "0"]


@pytest.mark.parametrize(("phase", "ranks"), [("backward", 1), ("optimizer", 2)])
def test_a_run_out_of_memory_ends_with_its_plan_and_three_flags_that_work(tmp_path, monkeypatch, phase, ranks):
    monkeypatch.setattr(remedies, "LEAST_SAVED", 1)  # of the debug model nothing else would be said
    monkeypatch.setenv("CRIUS_FAULT", f"oom:step=2,phase={phase},rank={ranks - 1}")
    flags = [*SHORT, "--parallelism.data_parallel_shard_degree", str(ranks), "--checkpoint.interval", "1"]
    assert run(flags, tmp_path, is_supervised=True) == 1
    report = json.loads((tmp_path / "logs" / f"rank-{ranks - 1}.error.json").read_text())
    assert (report["exception"], report["step"], report["phase"]) == ("OutOfMemoryError", 2, phase)
    found = json.loads((tmp_path / "incidents" / f"out-of-memory-rank-{ranks - 1}.json").read_text())
    assert "DefaultCPUAllocator" in found["error"]
    assert len(found["remedies"]) == 3
    for one in found["remedies"]:
        assert one["flags"] in report["rendered"]
        assert one["nbytes"] < found["planned_bytes"]
        changed = parse([*flags, *one["flags"].split()])
        assert {name: flatten(changed)[name] for name in one["changes"]} == one["changes"]
        assert not violations(changed, describe_model(changed), one["num_ranks"])


def test_a_run_on_a_known_machine_is_compared_with_its_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    import torch

    name = machine_of(torch.device("cpu"), 1, 1).name
    slow = KNOWN["cpu"].float32_flops / 1000  # far from right: the warning about slow steps does not come
    fields = {"device": name, "threads": 1, "measured": "for a test", "float32_flops": slow}
    write_hardware(type(KNOWN["cpu"])(**{**vars(KNOWN["cpu"]), **fields}), user_file())
    assert run(SHORT, tmp_path / "run") == 0
    text = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    ends = [line for line in text.splitlines() if line.startswith("plan: ")]
    assert len(ends) == 2  # at the start, and what came of it
    assert "planned (" in ends[1]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["plan"]
    assert cli.main(["plan", "compare", str(tmp_path / "run"), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["measured"] == summary["measured"]
    assert compared["plan"] == summary["plan"]
    assert compared["tokens_per_second_error"] == pytest.approx(summary["tokens_per_second_error"])
