"""The pages of what ran on a GPU are those of the committed results."""

import json

import pytest

from benchmarks.gpu import results


def call_of(folder, name, date, rows, **environment):
    """Write the results of a call."""
    known = {"date": f"{date} 10:00 UTC", "commit": "0123456789abcdef", "device": "NVIDIA H100", "dry": False}
    lines = [known | environment]
    for step, check, ok, figures in rows:
        lines.append({"step": step, "check": check, "ok": ok, "seconds": 1.0, "detail": "a | b", "figures": figures})
    path = folder / date / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


RATIO = {"ratio": 1.034, "low": 1.021, "high": 1.04, "goal": 1.02, "reached": True}


def test_of_a_check_the_newest_row_counts_and_a_dry_run_never(tmp_path):
    call_of(tmp_path, "check", "2027-01-02", [("runs", "float8", True, {"gap": 0.001})])
    call_of(tmp_path, "check", "2027-01-01", [("runs", "float8", False, {}), ("runs", "plain", True, {})])
    call_of(tmp_path, "bench", "2027-01-03", [("runs", "plain", False, {})], dry=True)
    found = {result.key[1]: result.row["ok"] for result in results.read(tmp_path)}
    assert found == {"float8": True, "plain": True}


def test_the_page_has_a_line_for_each_check_with_ratio_and_ceiling(tmp_path):
    rows = [
        ("kernels", "system: ceiling matmul bfloat16", True, {"tflop_per_s": 800.0}),
        ("bf16", "crius, 8B, 4 layers", True, {"tokens_per_second": 80_000.0, "tflops": 500.0, "mfu": 0.505}),
        ("bf16", "crius over titan-fsdp", True, RATIO),
        ("bf16", "crius over titan-amp", True, RATIO | {"goal": 1.05, "reached": False}),
        ("runs", "experts", False, {}),
    ]
    call_of(tmp_path, "bench", "2027-01-01", rows)
    text = results.page(results.read(tmp_path))
    assert "| 80,000 tokens/s, MFU 50.5% |  | 62.5% | NVIDIA H100 | 2027-01-01 | 0123456789ab |" in text
    assert "| crius over titan-fsdp | ok |" in text and "| 1.034 [1.021, 1.040] |" in text
    assert "| 1.034 [1.021, 1.040], goal 1.05 missed |" in text
    assert "| experts | FAIL | a \\| b |" in text
    assert "4 checks are right, 1 are not" in text and "1.034 times as fast" in text and results.NEVER in text


@pytest.mark.parametrize("name", ["gpu_results", "tested"])
def test_the_committed_pages_are_those_of_the_committed_results(name):
    found = results.read()
    if name == "gpu_results":
        assert results.PAGE.read_text() == results.page(found)
    else:
        text = results.SUMMARY_PAGE.read_text()
        assert results.replaced(text, results.summary(found) + "\n") == text
