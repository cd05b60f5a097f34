"""``benchmarks/growth.py`` and ``scaling.py``: the arithmetic of what they say, and that no document drifts from it."""

import json
import sys

import pytest
from harness import ROOT, parse

sys.path.insert(0, str(ROOT / "benchmarks"))
import growth
import growth_costs
import scaling

RESULTS = ROOT / "benchmarks" / "results" / "2026-11-21-cpu"
SIZES = [10.0, 100.0, 1000.0]


def claim(y, theory=1.0, tolerance=0.1, **options):
    return growth.Claim(cost="work", unit="s", y=y, theory=theory, tolerance=tolerance, why="", **options)


@pytest.mark.parametrize("exponent", [-1, 0, 0.5, 1, 2])
def test_the_exponent_of_a_power_is_found_whatever_its_factor(exponent):
    assert growth.slope(SIZES, [7 * x**exponent for x in SIZES]) == pytest.approx(exponent)


def test_an_exponent_is_the_slope_with_the_least_squares():
    x, y = [1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 2.0, 4.0]
    # in base 2: x is 0, 1, 2, 3 and y is 0, 1, 1, 2; sum of (x - 1.5)(y - 1) is 3, of squares of x - 1.5 is 5
    assert growth.slope(x, y) == pytest.approx(3 / 5)


@pytest.mark.parametrize(
    ("x", "y"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, 2.0], [0.0, 1.0]), ([0, 1.0], [1, 1])]
)
def test_what_has_no_exponent_is_refused(x, y):
    with pytest.raises(ValueError, match="two or more positive pairs"):
        growth.slope(x, y)


@pytest.mark.parametrize(
    ("exponent", "kind", "holds"),
    [
        (1.0, "equals", True),
        (1.09, "equals", True),
        (1.11, "equals", False),
        (0.89, "equals", False),
        (1.09, "at most", True),
        (1.11, "at most", False),
        (0.0, "at most", True),
    ],
)
def test_a_claim_holds_within_its_tolerance(exponent, kind, holds):
    assert claim([x**exponent for x in SIZES], kind=kind).holds(SIZES) == holds


def test_a_claim_of_large_sizes_does_not_look_at_small_ones():
    y = [500.0, 100.0, 1000.0]  # what a small size costs is mostly constant
    assert not claim(y).holds(SIZES)
    assert claim(y, fitted=2).holds(SIZES)


def test_a_cost_that_grows_otherwise_is_a_fail_in_the_table():
    table = growth.Table("files", "files", SIZES, [claim(SIZES), claim([x**2 for x in SIZES])])
    text = growth.render({"tables": {"files": table.as_dict()}})
    assert [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("| work")] == ["PASS", "FAIL"]


def test_costs_of_a_corpus_are_measured_on_as_many_files_as_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(growth_costs.time, "sleep", lambda seconds: None)
    monkeypatch.chdir(ROOT)
    found = growth_costs._files_cost(3, tmp_path, rounds=1)
    assert len(list((tmp_path / "corpus").iterdir())) == 3
    assert set(found) == {"first", "again", "batch", "resume"} and all(seconds > 0 for seconds in found.values())


@pytest.mark.parametrize(
    ("size", "inner", "rate"),
    [
        (8, 1, scaling.NVLINK),  # a node
        (4, 2, scaling.NVLINK),
        (16, 1, 8 * scaling.INFINIBAND),  # all adapters of a node carry the ring
        (64, 2, 4 * scaling.INFINIBAND),
        (64, 8, scaling.INFINIBAND),  # one member a node
        (8, 64, scaling.INFINIBAND),
    ],
)
def test_a_ring_is_as_fast_as_the_links_that_its_members_have(size, inner, rate):
    assert scaling.bandwidth(size, inner) == rate


def test_a_ring_sends_what_its_algorithm_sends():
    assert scaling.on_the_wire("all-gather", 8) == scaling.on_the_wire("reduce-scatter", 8) == 7 / 8
    assert scaling.on_the_wire("all-reduce", 8) == 14 / 8
    assert scaling.on_the_wire("send", 8) + scaling.on_the_wire("recv", 8) == 1


def test_sharding_is_exposed_by_what_compute_is_too_short_for():
    seconds = {("fsdp", "all-gather"): 4.0, ("fsdp", "reduce-scatter"): 2.0}
    counts = {("fsdp", "all-gather"): 8, ("fsdp", "reduce-scatter"): 4}
    ends = 4.0 / 8 + 2.0 / 4
    # 2 s of gathers in 3 s of forward; 2 s of gathers and 2 s of reduce-scatters in 6 s of backward
    assert scaling.exposed_sharding(seconds, counts, 3.0, 9.0, 1) == ends
    assert scaling.exposed_sharding(seconds, counts, 1.0, 3.0, 1) == ends + 1 + 2
    kept = counts | {("fsdp", "all-gather"): 4}  # weights stay for the backward: 4 s in the forward
    assert scaling.exposed_sharding(seconds, kept, 1.0, 3.0, 1) == 4.0 / 4 + 2.0 / 4 + 3
    replicas = seconds | {("dp_replicate", "all-reduce"): 5.0}
    both = counts | {("dp_replicate", "all-reduce"): 5}
    # the all-reduces take another link: the slower of the two decides
    assert scaling.exposed_sharding(replicas, both, 1.0, 3.0, 1) == ends + 1 + max(4, 5) - 2 + 1


def report_of(flops=3e15, **traffic):
    rows = [{"kind": kind, "axis": axis, "count": 1, "bytes": size} for (kind, axis), size in traffic["rows"].items()]
    stage = {"pp_rank": 0, "flops": flops, "collectives": rows}
    return {"stages": [stage], "ranks": [{"peak_bytes": 2**30}], "model_flops": flops}


def test_tensor_parallel_traffic_is_exposed_and_sharded_traffic_is_not():
    hidden = {("all-gather", "fsdp"): 1e9}
    shown = hidden | {("all-gather", "tp"): 8e9}
    without, with_tp = (scaling.forecast(report_of(rows=rows), "70b/fsdp8_tp8") for rows in (hidden, shown))
    assert with_tp["exposed_seconds"] - without["exposed_seconds"] == pytest.approx(8e9 * 7 / 8 / scaling.NVLINK)
    assert without["tokens_per_second_per_gpu"] > with_tp["tokens_per_second_per_gpu"]


def test_a_measured_step_takes_the_place_of_the_assumed_rate():
    report = report_of(rows={("all-gather", "fsdp"): 8})
    assumed, measured = (scaling.forecast(report, "8b/fsdp8", seconds) for seconds in (None, 2.0))
    assert assumed["compute_seconds"] == pytest.approx(3e15 / (scaling.ACHIEVED * scaling.PEAK_TFLOPS * 1e12))
    assert (measured["compute_seconds"], measured["is_measured"]) == (2.0, True)
    assert "2.00*" in scaling.render({"rows": [measured]})


def test_every_case_is_a_run_of_its_gpus():
    for name, (_, degrees, local, microbatches) in scaling.CASES.items():
        config = parse(scaling.flags(name))
        pp, replicate, shard, tp = degrees
        assert config.parallelism.total_ranks(1) == pp * replicate * shard * tp in (8, 64, 512)
        assert config.training.global_batch_size == local * microbatches * replicate * shard


@pytest.mark.parametrize(
    ("script", "result", "document"),
    [(growth, "growth.json", "docs/growth.md"), (scaling, "scaling.json", "benchmarks/README.md")],
    ids=["growth", "scaling"],
)
def test_the_tables_in_the_documents_are_those_of_the_results(script, result, document):
    record = json.loads((RESULTS / result).read_text())
    assert script.render(record) in (ROOT / document).read_text()
