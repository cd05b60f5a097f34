"""``benchmarks/bench_sft.py`` on a small random model: tokens, labels and losses are those of TRL, with PEFT too."""

import json

import pytest
from harness import ROOT
from tiny_source import save_source

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]


def test_losses_of_twenty_steps_are_those_of_trl(tmp_path, monkeypatch, capsys):
    """Rounding alone lies between them: 2e-6 of losses near 7."""
    pytest.importorskip("trl"), pytest.importorskip("peft")
    from benchmarks import bench_sft

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "hub").mkdir()
    save_source(tmp_path / "hub")
    rows = [{"prompt": f"What is {n} + {n}?\nAnswer:", "completion": f"It is {2 * n}. 🙂"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--threads", "1", "--batch", "2", "--seq_len", "80", "--out", str(tmp_path / "out.json")]
    bench_sft.main([str(tmp_path / "hub"), str(tmp_path / "rows.jsonl"), *flags])  # speed is another question
    told = json.loads((tmp_path / "out.json").read_text())
    assert [line for line in told["problems"] if "speed" not in line] == [], capsys.readouterr().out
    for case in ("full", "lora"):
        assert told["cases"][case]["apart"] <= 1e-5
        losses = [dict(contestant["losses"]) for contestant in told["cases"][case]["contestants"]]
        assert all(len(found) == 20 and found[1] != found[20] for found in losses)
