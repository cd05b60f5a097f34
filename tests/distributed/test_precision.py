"""``crius verify precision``: 200 steps in each format end where bfloat16 does, and what is wrong fails."""

import json
import math
from dataclasses import replace

import pytest
from harness import TEXT, parse

from crius import cli
from crius.cli.app import facts_of
from crius.config.training import FORMATS
from crius.models.layers import Linear
from crius.tools.verify import precision as verb
from crius.tools.verify.options import Formats
from crius.tools.verify.precision import Judge, precision
from crius.train import build as train_precision

LINEARS = 7  # of a block; the output layer is kept
TINY = [
    *("--recipe", "precision", "--model.num_layers", "1", "--training.seq_len", "32"),
    *("--training.global_batch_size", "2", "--training.device", "cpu"),
    *("--data.source", "text", "--data.path", str(TEXT)),
]
PNG = b"\x89PNG\r\n\x1a\n"


def verify(folder, capsys, flags=(), **options):
    """Exit code, and rows by format."""
    capsys.readouterr()
    code = precision(facts_of(parse([*TINY, *flags]), 0, None), folder, Formats(timeout=200, **options), as_json=True)
    found = json.loads(capsys.readouterr().out)
    return code, {row["format"]: row for row in found["rows"]}, found


@pytest.mark.slow
def test_every_format_ends_within_2_percent_of_bfloat16_after_200_steps(tmp_path, capsys):
    code, rows, found = verify(tmp_path, capsys)
    assert list(rows) == ["bfloat16", *FORMATS]
    assert (rows["bfloat16"]["values"]["converted"], rows["bfloat16"]["status"]) == ("0", "reference")
    curves = found["curves"]
    for name in FORMATS:
        assert (rows[name]["status"], rows[name]["values"]["converted"], rows[name]["values"]["kept"]) == (
            "ok",
            str(LINEARS),
            "1",
        ), rows[name]
        assert len(curves[name]) == 200
        assert curves[name] != curves["bfloat16"]
        assert abs(found["gaps"][name]["gap"]) < 0.02 and abs(found["gaps"][name]["last"]) < 0.02
        assert curves[name][-1] < curves[name][0] - 3.0  # it learned: from ln 512 + noise to below 3
        assert "emulated: this device has no" in rows[name]["note"]
        log = (tmp_path / name / "logs" / "rank-0.log").read_text()
        kind = "mxfp8" if name == "mxfp8" else "float8"
        assert f"{kind}: {LINEARS} converted, 1 kept: output (sensitive)" in log
    assert code == 0
    assert (tmp_path / "precision.png").read_bytes().startswith(PNG)
    assert json.loads((tmp_path / "precision.json").read_text()) == found


FEW = {"steps": 3, "formats": "float8_rowwise"}


def test_a_format_that_would_convert_nothing_is_refused(tmp_path, capsys):
    code, rows, _ = verify(tmp_path, capsys, ["--quantize.dense.exclude", "layers"], **FEW)
    assert (code, rows["bfloat16"]["status"], rows["float8_rowwise"]["status"]) == (2, "reference", "refused")


def test_a_run_that_leaves_out_the_conversion_fails(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_precision.LowPrecision, "convert", lambda *arguments: train_precision.Converted(0))
    code, rows, _ = verify(tmp_path, capsys, **FEW)
    assert (code, rows["float8_rowwise"]["status"]) == (1, "FAIL")
    assert "no linear layer was converted" in rows["float8_rowwise"]["note"]


def test_a_run_that_converts_some_of_the_layers_fails(tmp_path, capsys, monkeypatch):
    whole = train_precision.convert

    def without_wq(part, choices, *arguments, **options):
        chosen = [replace(choice, is_converted=choice.is_converted and "wq" not in choice.name) for choice in choices]
        return whole(part, chosen, *arguments, **options)

    monkeypatch.setattr(train_precision, "convert", without_wq)
    code, rows, _ = verify(tmp_path, capsys, **FEW)
    assert code == 1
    assert f"{LINEARS - 1} linear layers were converted, {LINEARS} were to be" in rows["float8_rowwise"]["note"]


def test_nan_ends_a_curve_as_a_failure_and_the_picture_is_drawn(tmp_path, capsys, monkeypatch):
    def poisoned(self, x):
        y = self.multiply(x, self.weight)
        return y if type(self).multiply is Linear.multiply else y * math.nan

    monkeypatch.setattr(Linear, "forward", poisoned)
    code, rows, found = verify(tmp_path, capsys, steps=3, formats="float8_rowwise,float32")
    assert (code, rows["float8_rowwise"]["status"]) == (1, "FAIL")
    assert "loss nan" in rows["float8_rowwise"]["note"]
    assert found["curves"]["float8_rowwise"] == []
    assert rows["float32"]["status"] == "ok"  # the others go on
    assert (tmp_path / "precision.png").read_bytes().startswith(PNG)


def test_layouts_train_the_formats_too(tmp_path, capsys):
    code, rows, _ = verify(tmp_path, capsys, layout="fsdp2", **FEW)
    assert code == 0
    assert [(row["ranks"], row["values"]["converted"]) for row in rows.values()] == [(2, "0"), (2, str(LINEARS))]


def test_a_gap_beyond_the_tolerance_is_a_failure():
    judge = Judge(steps=20, tolerance=0.02)
    expected = [4.0] * 20

    def result(curve, converted=7, layers=("MXFP8Linear",)):
        counts = {"converted": converted, "planned": 7, "kept": 1}
        return {"loss": curve, "ended": "", "how": "", "layers": list(layers), **counts}

    assert judge.complaint("mxfp8", result([4.07] * 20), expected) == ""
    assert "gap +2.50 %" in judge.complaint("mxfp8", result([4.1] * 20), expected)
    assert "gap -2.50 %" in judge.complaint("mxfp8", result([3.9] * 20), expected)
    assert "last +5.00 %" in judge.complaint("mxfp8", result([4.0] * 19 + [4.2]), expected)
    assert "not finite" in judge.complaint("mxfp8", result([4.0] * 19 + [math.nan]), expected)
    assert "no linear layer" in judge.complaint("mxfp8", result([4.0] * 20, converted=0), expected)
    assert "Float8Linear and not" in judge.complaint("mxfp8", result([4.0] * 20, layers=["Float8Linear"]), expected)
    assert judge.values(result([4.0] * 19 + [4.02]), expected)["largest %"] == "+0.50"
    assert judge.shown == [1, 5, 10, 15, 20]


def test_without_matplotlib_nothing_is_trained_and_the_install_line_is_said(tmp_path, capsys, monkeypatch):
    find = verb.importlib.util.find_spec
    monkeypatch.setattr(verb.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert cli.main(["verify", "precision", *TINY, "--job.run_dir", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "matplotlib" in error and " 'matplotlib>=3.8'" in error
    assert not (tmp_path / "bfloat16").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--formats", "float8_rowwis"], "did you mean float8_rowwise?"),
        (["--plot", "curves.jpg"], "--plot curves.png"),
        (["--steps", "0"], "--steps 0 is not positive"),
        (["--tolerance", "0"], "--tolerance 0.0 is not positive"),
        (["--layout", "fsdp2x"], "fsdp2x is not a layout term"),
        (["--quantize.dense.float8.enable"], "no effect: a format sets them"),
        (["--parallelism.data_parallel_shard_degree", "2"], "--layout, such as fsdp2"),
        (["--training.steps", "-3", "--training.seq_len", "-1"], "seq_len"),
    ],
)
def test_a_wrong_call_exits_with_2_and_says_why(arguments, said, tmp_path, capsys):
    assert cli.main(["verify", "precision", *TINY, "--job.run_dir", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err
