"""How good plans are, and that any file of measurements is judged."""

import csv
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path

import pytest
from harness import llama, parse
from planner.measurements import judge_rows, read_measurements
from planner.validate import main, validate, validate_file

from crius import cli
from crius.config.layout import Layout
from crius.config.resolve import with_dtype
from crius.config.run import replace_fields
from crius.errors import ConfigError
from crius.tools.plan.compare import WITHOUT_PIPELINE, validated_range
from crius.tools.plan.hardware import KNOWN
from crius.tools.plan.holdings import model_parameters
from crius.tools.plan.rates import TIME, TimeConstants
from crius.tools.plan.time import tokens_per_second
from crius.tools.plan.validate import Errors
from crius.tools.plan.workload import Workload, from_config

ROOT = Path(__file__).parent.parent.parent
ROWS = ROOT / "benchmarks" / "planner" / "measurements.csv"
ROW = {
    **{
        "id": "one",
        "model": "llama3_8b",
        "layers": "32",
        "dim": "4096",
        "ffn": "14336",
        "heads": "32",
        "kv_heads": "8",
    },
    **{"vocab": "128256", "seq_len": "8192", "gpu": "h100_sxm", "n_gpus": "8", "dp_shard": "8", "dp_replicate": "1"},
    **{"tp": "1", "cp": "1", "pp": "1", "ac_mode": "none", "precision": "bf16", "tps_per_gpu": "7000"},
    **{"peak_mem_gib": "", "micro_batch": "1", "framework": "torchtitan", "family": "torchtitan", "zero_stage": "3"},
}


@pytest.fixture(scope="module")
def report():
    return validate_file(ROWS)


def written(tmp_path, *rows):
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


def test_published_speeds_are_explained(report):
    """The figures of docs/planner_accuracy.md, here with constants fitted on the rows: a floor, not the claim."""
    found = report.as_json()
    dense, experts = found["dense"], found["moe"]
    assert dense["tps"]["n"] > 250 and dense["tps"]["median"] < 0.08 and dense["tps"]["p90"] < 0.24
    assert experts["tps"]["n"] > 80 and experts["tps"]["median"] < 0.15
    for kind in (dense, experts):
        for key in ("median", "mape", "p90"):
            assert kind["tps"][key] < kind["constant_mfu"][key]
    assert found["ordering"]["dense"]["accuracy"] > 0.93


@pytest.mark.parametrize("name", ["README.md", "docs/tested.md"])
def test_documents_claim_no_more_rows_than_are_judged(report, name):
    total = len(report.judged) + len(report.unjudged)
    said = f"compared with {len(report.judged)} of {total} published runs"
    assert said in (ROOT / name).read_text().replace("[", "")


def test_published_memory_is_explained(report):
    dense = report.as_json()["dense"]["memory"]
    assert dense["n"] > 90 and dense["median"] < 0.04 and dense["p90"] < 0.15


def test_what_ran_is_said_to_fit_and_what_ran_out_of_memory_is_not(report):
    calls = report.as_json()["memory_calls"]
    assert calls["ran"] > 200 and calls["refused"] <= 0.04 * calls["ran"]
    assert calls["ran_out"] == calls["flagged"] == 1  # Llama 2 70B on 64 A100 with two sequences, whose notes say so


def test_rows_that_were_not_fitted_are_explained_too():
    """The committed figures of ``fit_planner.py``: of rows by constants that were not fitted on them."""
    judged, memory = (
        json.loads((ROOT / "benchmarks" / "planner" / f"{name}.json").read_text())
        for name in ("judged", "judged_memory")
    )
    assert judged["splits"] >= 10 and memory["splits"] >= 10
    assert judged["dense"]["tps"]["median"] <= 0.08 and judged["dense"]["tps"]["p90"] <= 0.24
    assert judged["moe"]["tps"]["median"] <= 0.15
    assert memory["dense"]["median"] <= 0.04 and memory["dense"]["p90"] <= 0.15 and memory["moe"]["median"] <= 0.08
    assert judged["ordering"]["all"] >= 0.95
    each = judged["splits"] / 2  # how often a row is judged
    assert len(judged["rows"]) == (judged["dense"]["tps"]["n"] + judged["moe"]["tps"]["n"]) / each


@pytest.mark.parametrize(
    ("file", "medians"),
    [
        ("unseen.csv", {"nvidia": 0.067, "nemo-automodel": 0.097, "nanotron-logs": 0.66}),
        (
            "unseen_later.csv",
            {"nvidia": 0.13, "maxtext": 0.086, "kempner": 0.218, "fms-fsdp": 0.059, "torchtitan": 0.2},
        ),
    ],
)
def test_runs_found_afterwards_are_judged_and_as_far_off_as_the_document_says(file, medians):
    report = validate_file(ROWS.with_name(file))
    assert not report.unjudged and len(report.judged) == 35
    found = {name: figures["tps"]["median"] for name, figures in report.as_json()["families"].items()}
    assert found == pytest.approx(medians, rel=0.05)


def test_every_row_is_judged_or_has_a_reason(report):
    with ROWS.open(newline="") as file:
        names = [row["id"] for row in csv.DictReader(file)]
    assert sorted(names) == sorted([one.row.name for one in report.judged] + [one.name for one in report.unjudged])
    assert all(one.reason for one in report.unjudged)
    assert {one.name.partition("-")[0] for one in report.unjudged} == {"maxtextt", "picotron"}  # TPUs; no figures


def test_the_table_has_every_family(report):
    text = "\n".join(report.table())
    for family in {one.row.family for one in report.judged}:
        assert family in text
    assert "not judged: 7" in text and "ordering: " in text


def test_errors_are_shares_of_what_was_measured():
    errors = Errors.of([(110, 100), (80, 100), (100, 100), (103, 100)])
    assert (errors.n, errors.median, errors.p90) == (4, pytest.approx(0.065), pytest.approx(0.2))
    assert errors.mape == pytest.approx(0.0825)
    assert errors.bias == pytest.approx(0.015)
    assert Errors.of([]).as_json() == {"n": 0, "median": None, "mape": None, "p90": None, "bias": None}


def test_a_row_is_planned_as_it_says(tmp_path):
    full = {**ROW, "tp": "2", "dp_shard": "4", "async_tp": "1", "ac_mode": "selective_layer3", "compile": "1"}
    measured, unjudged = read_measurements(written(tmp_path, full))
    work = measured[0].workload
    assert not unjudged
    assert (work.layout.tp, work.layout.dp_shard, work.async_tp, work.compile) == (2, 4, True, True)
    assert (work.activation_checkpoint, work.selective_layers) == ("selective", 3)
    found = validate(measured).judged[0]
    assert found.speed == tokens_per_second(work, measured[0].hardware)
    assert found.error == found.speed / 7000 - 1


def test_experts_in_one_batched_matmul_are_visited_by_all_tokens_and_nothing_is_routed(tmp_path):
    experts = {**ROW, "framework": "kempnerforge(FSDP2)", "n_experts": "16", "top_k": "2", "moe_ffn": "7168"}
    batched = {**experts, "notes": "packed FSDP=8; experts as bmm, not grouped_mm"}
    routed, visited = (row.workload for row in judge_rows([{**experts, "notes": ""}, batched])[0])
    assert (routed.model.top_k, visited.model.top_k) == (2, 16)
    assert routed.model.is_routed and not visited.model.is_routed
    on = KNOWN["h100-80g"]
    for name in ("expert_traffic", "expert_seconds", "expert_efficiency"):
        slower = replace(TIME, **{name: getattr(TIME, name) * (0.5 if "efficiency" in name else 2)})
        assert tokens_per_second(routed, on, slower) < tokens_per_second(routed, on)
        assert tokens_per_second(visited, on, slower) == tokens_per_second(visited, on)


@pytest.mark.parametrize(("stated", "compiled"), [("", True), ("0", False), ("1", True)])
def test_kempnerforge_compiles_unless_a_row_says_no(stated, compiled):
    (row,), _ = judge_rows([{**ROW, "framework": "kempnerforge(FSDP2)", "compile": stated}])
    assert row.workload.compile is compiled


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "voodoo2"}, "GPU 'voodoo2' is not known"),
        ({"gpu": "a100_pcie"}, "not known"),
        ({"gpu": "h200_nvl"}, "not known"),
        ({"seq_len": ""}, "seq_len is not stated"),
        ({"layers": "many"}, "layers is 'many', not a number"),
        ({"layers": "-3"}, "layers is -3"),
        ({"layers": "3.5"}, "layers is 3.5"),
        ({"dim": "inf"}, "dim is inf"),
        ({"n_gpus": "16"}, "multiply to 8"),
        ({"precision": "int3"}, "precision 'int3'"),
        ({"ac_mode": "selective_layerx"}, "ac_mode"),
        ({"ac_mode": "some"}, "ac_mode"),
        ({"tps_per_gpu": ""}, "neither"),
        ({"oom": "1"}, "ran out of memory (oom), and had 7000 tokens/s"),
        ({"heads": "9999"}, "head_dim is 0"),
        ({"vocab": "1e308"}, "vocab is 1e308"),
        ({"tps_per_gpu": "1e-320"}, "tps_per_gpu is 1e-320"),
        ({"pp": "1000", "n_gpus": "8000"}, "pp is 1000, more than there are layers"),
    ],
)
def test_a_row_that_cannot_be_planned_says_why_and_hides_no_other(tmp_path, change, reason):
    report = validate_file(written(tmp_path, {**ROW, "oom": ""}, {**ROW, "id": "two", **change}))
    assert [one.row.name for one in report.judged] == ["one"]
    assert report.unjudged[0].name == "two"
    assert reason in report.unjudged[0].reason
    assert json.loads(json.dumps(report.as_json()))["not_judged"][0]["id"] == "two"
    assert any("two" in line for line in report.table())


@pytest.mark.parametrize(
    ("change", "field", "expected"),
    [
        ({"hbm_gib": "95 GiB"}, "hardware.memory_bytes", 95 * 2**30),
        ({"hbm_gib": "80GB"}, "hardware.memory_bytes", 80 * 2**30),
        ({"intra_node": "4 GPUs"}, "hardware.gpus_per_node", 4),
        ({"intra_node": "NVLink"}, "hardware.gpus_per_node", 8),
        ({"zero_stage": "ZeRO-2"}, "workload.zero_stage", 2),
        ({"zero_stage": "9"}, "workload.zero_stage", 3),
        ({"zero_stage": "FSDP"}, "workload.zero_stage", 3),
        ({"params": "8B"}, "workload.model.published_parameters", 8_000_000_000),
        ({"params": "8"}, "workload.model.published_parameters", None),
        ({"params": "7.5 billion"}, "workload.model.published_parameters", None),
        ({"tps_per_gpu": "7,000"}, "tokens_per_second", 7000),
        ({"tps_per_gpu": "~7.5k tokens/s"}, "tokens_per_second", 7500),
        ({"peak_mem_gib": "n/a"}, "memory_bytes", None),
        ({"peak_mem_gib": "71.5 GiB"}, "memory_bytes", 71.5 * 2**30),
        ({"dp_shard": "-1"}, "workload.layout.dp_shard", 8),
        ({"cp": "2", "dp_shard": "4"}, "workload.layout.cp", 2),
        ({"cp": "2", "dp_shard": "8"}, "workload.layout.dp_shard", 4),
        ({"micro_batch": "", "local_batch": "4", "pp": "2", "dp_shard": "4"}, "workload.num_microbatches", 2),
        ({"micro_batch": "", "local_batch": "4", "pp": "2", "dp_shard": "4"}, "workload.microbatch", 2),
        ({"pp": "2", "dp_shard": "4", "schedule": "Interleaved 1F1B", "vpp": "3"}, "workload.stages_per_rank", 3),
        ({"pp": "2", "dp_shard": "4", "schedule": "ZBV"}, "workload.schedule", "zbv_zero_bubble"),
        ({"precision": "BF16 mixed"}, "workload.precision", "bfloat16"),
        ({"precision": "FP8-delayed"}, "workload.precision", "float8"),
        ({"ac_mode": "Selective-Op"}, "workload.activation_checkpoint", "selective"),
        ({"ac_mode": "full block"}, "workload.activation_checkpoint", "full"),
        ({"compile": "Yes"}, "workload.compile", True),
        ({"tied": "True"}, "workload.model.tied_embeddings", True),
        ({"gpu": "NVIDIA H100 PCIe"}, "hardware.name", "h100-pcie"),
        ({"gpu": "H100 NVL 94GB"}, "hardware.name", "h100-nvl"),
        ({"gpu": "h100-sxm", "hbm_gib": "95"}, "hardware.name", "h100-96g"),
        ({"gpu": "A100-SXM4-40GB"}, "hardware.name", "a100-40g"),
        ({"gpu": "NVIDIA GeForce RTX 4090"}, "hardware.name", "rtx-4090"),
        ({"gpu": "rtx4090"}, "hardware.name", "rtx-4090"),
        ({"gpu": "H800"}, "hardware.name", "h800"),
        ({"gpu": "gh200_96gb"}, "hardware.name", "gh200"),
        ({"gpu": "GB200 NVL72"}, "hardware.name", "gb200"),
    ],
)
def test_fields_are_read_as_people_write_them(change, field, expected):
    measured, unjudged = judge_rows([{**ROW, "peak_mem_gib": "60", **change}])
    assert not unjudged
    assert attrgetter(field)(measured[0]) == expected


def test_blank_fields_take_the_usual_value(tmp_path):
    blank = {**ROW, "micro_batch": "", "framework": "", "zero_stage": "", "kv_heads": "", "ac_mode": "", "family": ""}
    report = validate_file(written(tmp_path, blank))
    assert not report.unjudged
    assert report.judged[0].row.workload.model.num_kv_heads == 32


def test_a_file_of_a_spreadsheet_is_read(tmp_path):
    """With a byte order mark, and a row with more cells than columns."""
    file = written(tmp_path, ROW)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().rstrip() + b",and,more\r\n")
    report = validate_file(file)
    assert [one.row.name for one in report.judged] == ["one"] and not report.unjudged


def test_missing_columns_are_one_error(tmp_path):
    short = {key: value for key, value in ROW.items() if key not in ("gpu", "vocab")}
    with pytest.raises(ConfigError, match="lack the columns vocab, gpu") as caught:
        validate_file(written(tmp_path, short))
    assert "rows.csv" in caught.value.where
    assert "says 'id," in caught.value.why


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_what_separates_columns_is_read_off_the_header(tmp_path, delimiter):
    file = tmp_path / "rows.csv"
    lines = "\n".join(delimiter.join(cells) for cells in (ROW, ROW.values()))
    file.write_text(f"\n \n{lines}\n")
    report = validate_file(file)
    assert [one.row.name for one in report.judged] == [ROW["id"]] and not report.unjudged


def test_a_file_of_which_nothing_can_be_judged_is_no_success(tmp_path, capsys):
    file = written(tmp_path, {**ROW, "gpu": "abacus"})
    assert main([str(file)]) == 1
    assert "GPU 'abacus' is not known" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "id,model\n", "\x00\xff"])
def test_a_file_that_is_no_table_is_an_error(tmp_path, text):
    file = tmp_path / "rows.csv"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError) as caught:
        validate_file(file)
    assert "rows.csv" in caught.value.where and caught.value.why and caught.value.fix
    with pytest.raises(ConfigError, match="cannot be read"):
        validate_file(tmp_path / "none.csv")


@pytest.mark.parametrize("said", [{"oom": "1"}, {"oom": "yes", "peak_mem_gib": "79"}, {"tps_per_gpu": "OOM"}])
def test_runs_out_of_memory_are_called_and_counted(tmp_path, said):
    """8B on eight cards of 80 GB: with 8 sequences a microbatch it does not fit, with one it does and did."""
    ran = {**ROW, "oom": "", "compile": "1"}
    out = {**ran, "id": "out", "micro_batch": "8", "tps_per_gpu": "", **said}
    missed = {**out, "id": "missed", "micro_batch": "1"}
    report = validate_file(written(tmp_path, ran, out, missed))
    assert not report.unjudged and len(report.judged) == 3
    calls = {"ran": 1, "refused": 0, "ran_out": 2, "flagged": 1, "missed": ["missed"]}
    assert report.as_json()["memory_calls"] == calls
    assert "1 of 2 that ran out of memory are" in "\n".join(report.table())
    assert [one.row.name for one in report.worst()] == ["one"]
    assert report.speed().n == 1 and report.memory().n == 0


def test_only_layouts_that_differ_by_more_than_ten_percent_are_ordered():
    slow, near, fast = (
        {**ROW, "id": name, "tps_per_gpu": tps} for name, tps in (("a", "100"), ("b", "105"), ("c", "200"))
    )
    rows, _ = judge_rows([slow, {**near, "micro_batch": "2"}, {**fast, "compile": "1"}])
    assert validate(rows).ordering().as_json() == {"n": 2, "right": 2, "accuracy": 1.0}
    again, _ = judge_rows([slow, {**slow, "id": "d", "tps_per_gpu": "150"}])
    assert validate(again).ordering().n == 0  # one layout, published twice
    other, _ = judge_rows([slow, {**fast, "gpu": "h200", "compile": "1"}])
    assert validate(other).ordering().n == 0


def test_the_script_starts_from_the_root():
    command = [sys.executable, "benchmarks/planner/validate.py", "--help"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, cwd=ROOT, env=environ, capture_output=True).returncode == 0


def test_the_script_prints_the_table_and_json(capsys):
    assert main([str(ROWS)]) == 0
    assert "constant MFU" in capsys.readouterr().out
    assert main([str(ROWS), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"n", "median", "mape", "p90"} <= set(found["dense"]["tps"]) & set(found["moe"]["memory"])


OWN = {
    **{"id": "a", "model.flavor": "8b", "training.seq_len": "8192", "training.local_batch_size": "1"},
    **{"training.global_batch_size": "8", "parallelism.data_parallel_shard_degree": "8", "compile.enable": "true"},
    **{"gpu": "h100", "num_gpus": "8", "tokens_per_second_per_rank": "7000", "memory_gib": "50"},
}


def test_runs_of_crius_are_judged_by_their_settings(tmp_path, capsys):
    rows = [OWN, {**OWN, "id": "b", "memory_gib": "", "training.seq_len": "4096"}, {**OWN, "id": "c"}]
    rows[2]["model.flavor"] = "9b"
    rows.append({**OWN, "id": "d", "training.seq_len": "many"})
    rows.append({**OWN, "id": "e", "num_gpus": "7"})
    rows.append({**OWN, "id": "f", "gpu": "abacus"})
    assert cli.main(["plan", "validate", str(written(tmp_path, *rows)), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["rows"]] == ["a", "b"]
    assert (found["tokens_per_second"]["n"], found["memory"]["n"]) == (2, 1)
    flags = ["--model.flavor", "8b", "--training.seq_len", "8192", "--training.local_batch_size", "1"]
    config = parse(["--config", os.devnull, *flags])
    sizes = {"training.global_batch_size": 8, "parallelism.data_parallel_shard_degree": 8, "compile.enable": True}
    work = from_config(with_dtype(replace_fields(config, sizes), on_gpu=True), llama("8b"), 8)
    assert found["rows"][0]["planned_speed"] == pytest.approx(tokens_per_second(work, KNOWN["h100-80g"]))
    open_row = {key: value for key, value in OWN.items() if key not in ("compile.enable", "training.local_batch_size")}
    assert cli.main(["plan", "validate", str(written(tmp_path, open_row)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == found["rows"][:1], "what a GPU does by itself"
    reasons = {one["id"]: one["reason"] for one in found["not_judged"]}
    assert "no model llama3/9b" in reasons["c"] and "training.seq_len" in reasons["d"]
    assert "multiply to 8 ranks, but there are 7" in reasons["e"] and "abacus" in reasons["f"]
    assert cli.main(["plan", "validate", str(written(tmp_path, OWN))]) == 0
    assert "tokens per second: 1 runs, median" in capsys.readouterr().out


def test_a_table_of_other_trainers_is_sent_to_the_script(tmp_path, capsys):
    assert cli.main(["plan", "validate", str(written(tmp_path, ROW))]) == 2
    assert f"python benchmarks/planner/validate.py {tmp_path}" in capsys.readouterr().err
    short = {key: value for key, value in OWN.items() if key not in ("gpu", "memory_gib")}
    assert cli.main(["plan", "validate", str(written(tmp_path, short))]) == 2
    assert "lack the columns gpu, memory_gib" in capsys.readouterr().err


EIGHT_B = Workload(model=llama("8b"), layout=Layout(dp_shard=8), seq_len=8192, compile=True)

LARGEST = llama("405b")


def test_what_was_measured_is_within_the_validated_range():
    assert validated_range(EIGHT_B, KNOWN["h100-96g"]) == []
    assert validated_range(replace(EIGHT_B, model=LARGEST, layout=Layout(dp_shard=64, tp=2)), KNOWN["gb200"]) == []


@pytest.mark.parametrize(
    ("workload", "gpu", "reason"),
    [
        (EIGHT_B, "rtx-4090", "no measurement on rtx-4090"),
        (replace(EIGHT_B, layout=Layout(dp_shard=4096)), "h200", "4096 GPUs"),
        (replace(EIGHT_B, seq_len=2**20), "h200", "1048576 tokens"),
        (replace(EIGHT_B, layout=Layout(tp=32)), "h200", "tp 32"),
        (replace(EIGHT_B, layout=Layout(pp=2), schedule="dualpipev"), "h200", "dualpipev"),
        (replace(EIGHT_B, cpu_offload=True), "h200", "offloaded"),
        (replace(EIGHT_B, layout=Layout(dp_shard=1024)), "h200", "1024 shards"),
        (
            replace(EIGHT_B, model=LARGEST, layout=Layout(dp_shard=512)),
            "h200",
            "406 billion parameters per tensor-parallel rank without a pipeline",
        ),
        (
            replace(EIGHT_B, model=LARGEST, layout=Layout(dp_shard=256, tp=2)),
            "h100-96g",
            "measured up to 118 on hopper",
        ),
        (replace(EIGHT_B, precision="float8"), "a100-80g", "no float8"),
        (replace(EIGHT_B, precision="float8"), "mi300x", "one measurement of tensorwise float8"),
        (replace(EIGHT_B, precision="nvfp4"), "h100-80g", "no nvfp4"),
        (EIGHT_B, "h100-pcie", "no measurement on h100-pcie"),
    ],
)
def test_outside_of_it_the_reason_is_said(workload, gpu, reason):
    assert any(reason in text for text in validated_range(workload, KNOWN[gpu]))


def test_without_a_pipeline_the_range_of_each_generation_is_that_of_its_rows():
    most = dict.fromkeys(WITHOUT_PIPELINE, 0.0)
    for row in read_measurements(ROWS)[0]:
        work = row.workload
        if work.layout.pp == 1:
            whole = model_parameters(work.model) / work.layout.tp
            most[row.hardware.generation] = max(most[row.hardware.generation], whole)
    assert all(most[name] <= limit <= 1.05 * most[name] for name, limit in WITHOUT_PIPELINE.items())


@pytest.fixture(scope="module")
def fit_planner():
    pytest.importorskip("scipy")
    spec = importlib.util.spec_from_file_location("fit_planner", ROOT / "benchmarks" / "fit_planner.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_constants_are_within_their_bounds_and_near_their_priors(fit_planner):
    for field in fields(TimeConstants):
        prior, spread, upper = fit_planner.PRIORS[field.name]
        value = getattr(TIME, field.name)
        assert value <= upper * 1.001
        if not field.name.startswith("bias"):
            assert abs(value / prior - 1) < 4 * spread, field.name


def test_no_group_is_on_both_sides_of_a_split(fit_planner):
    rows = [row for row in read_measurements(ROWS)[0] if row.tokens_per_second is not None]
    for split in range(4):
        fitted, judged = fit_planner.halves(rows, split)
        assert len(fitted) + len(judged) == len(rows)
        assert not {fit_planner.group_of(row) for row in fitted} & {fit_planner.group_of(row) for row in judged}
    assert fit_planner.halves(rows, 0)[0] == fit_planner.halves(rows, 1)[1]


def test_a_fit_finds_the_constants_that_made_the_rows(fit_planner):
    """On rows of one GPU, in which only its matmuls are slower than the prior says."""
    rows = [row for row in read_measurements(ROWS)[0] if row.tokens_per_second and row.hardware.name == "a100-40g"][::3]
    priors = fit_planner.to_vector({name: value for name, (value, _, _) in fit_planner.PRIORS.items()})
    shared, others = fit_planner.to_constants(priors)
    truth = replace(shared, matmul_ampere=0.6)
    speeds = fit_planner.speeds(rows, (truth, others))
    rows = [replace(row, tokens_per_second=speed) for row, speed in zip(rows, speeds, strict=True)]
    found, _ = fit_planner.fit(rows, most=5)
    assert found.matmul_ampere == pytest.approx(0.6, rel=0.1)
    assert found.matmul_hopper == pytest.approx(truth.matmul_hopper, rel=0.01)  # no row says anything of it
