"""The comparison with other trainers on a CPU: they train the same model on the same tokens, or it says so."""

import importlib.util
import json

import pytest

from benchmarks import bench_cpu
from benchmarks.turns import Outcome

needs_trainer = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "accelerate"))), reason="needs crius[bench]"
)


def outcome(name, cpu, rss, losses):
    turns = [
        {"steps": 2, "wall_seconds": 2 * seconds, "cpu_seconds": 2 * seconds, "peak_rss_mib": rss} for seconds in cpu
    ]
    return Outcome(name, {"tokens_per_step": 10, "losses": sorted(losses.items())}, turns)


SAME = {1: 7.0, 20: 5.0}


@needs_trainer
@pytest.mark.slow
def test_all_trainers_start_alike_and_stay_alike_for_some_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_cpu, "TOLERANCES", {1: 2e-6, 4: 2e-5})  # fp32 losses near 6.2: only the sums differ
    monkeypatch.setattr(bench_cpu, "WARMUP", 2)
    monkeypatch.setattr(bench_cpu, "NUM_TOKENS", 20_000)
    flags = ["--model.flavor", "debug", "--model.num_layers", "2", "--training.seq_len", "32", "--optimizer.lr", "3e-4"]
    out = tmp_path / "peers.json"
    code = bench_cpu.main(["--cases", "eager_1t", "--rounds", "2", "--steps", "1", "--out", str(out), *flags])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0, lines
    last, found = json.loads(lines[-1]), json.loads(out.read_text())
    assert list(last) == ["ratio_vs_best_peer", "rss_ratio"] and list(last["ratio_vs_best_peer"]) == ["eager_1t"]
    assert {key: found[key] for key in last} == last
    trainers = {row["name"]: dict(row["losses"]) for row in found["cases"]["eager_1t"]}
    assert list(trainers) == ["crius", "plain_torch", "hf_trainer"]
    assert trainers["plain_torch"].keys() == trainers["hf_trainer"].keys() == {1, 2, 3, 4}
    assert trainers["plain_torch"][1] - trainers["plain_torch"][4] > 0.01  # they learn: an update is part of a step


def test_the_ratio_is_of_the_best_peer_and_memory_of_the_worst_case():
    first = [outcome("crius", [1, 1], 100, SAME), outcome("a", [1.5, 1.5], 300, SAME), outcome("b", [2, 2], 200, SAME)]
    second = [outcome("crius", [1, 2], 100, SAME), outcome("a", [1, 2], 90, SAME), outcome("b", [3, 3], 400, SAME)]
    found = bench_cpu.summary({"eager_1t": first, "compiled_1t": second})
    assert found == {"ratio_vs_best_peer": {"eager_1t": 1.5, "compiled_1t": 1.0}, "rss_ratio": 0.9}


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ({1: 7.00009, 20: 5.0009}, None),
        ({1: 7.0002, 20: 5.0}, "the loss of step 1 is 2.0e-04"),
        ({1: 7.0, 20: 5.002}, "the loss of step 20 is 2.0e-03"),
        ({1: float("nan"), 20: 5.0}, "the loss of step 1"),
        ({20: 5.0}, "no loss of step 1"),
    ],
)
def test_losses_that_disagree_are_a_problem(losses, said):
    found = bench_cpu.disagreements([outcome("crius", [1], 1, SAME), outcome("a", [1], 1, losses)])
    assert (said is None and not found) or said in found[0]


def test_an_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench_cpu.main(["--cases", "eager_3t"])
    assert "no case eager_3t" in capsys.readouterr().err
