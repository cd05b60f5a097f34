"""``--samples.every`` on several ranks, and on compiled blocks."""

import json

import pytest
from harness import SMALL, layout_flags, read_metrics, train

TINY = [*SMALL, "--training.steps", "5", "--model.num_layers", "2", "--model.dim", "64", "--metrics.log_interval", "1"]
TEXTS = ["--samples.every", "2"]
EXPERTS = ["--model.name", "qwen3_moe", "--model.num_layers", "2"]
COMPILED = ["--compile.enable", "--compile.backend", "aot_eager"]


def texts(run_dir):
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    return [(one["step"], one["prompt"], one["text"], one["tokens"]) for one in rows]


def curve(run_dir):
    return [(one["step"], one.get("loss"), one.get("grad_norm"), one.get("val_loss")) for one in read_metrics(run_dir)]


def log_of(run_dir):
    return (run_dir / "logs/rank-0.log").read_text().splitlines()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    train([*TINY, *TEXTS], folder)
    return texts(folder)


def with_and_without(flags, folder):
    """Folders of two runs, the first one with texts; their curves are the same bit for bit."""
    train([*flags, *TEXTS], folder / "with")
    train(flags, folder / "without")
    assert curve(folder / "with") == curve(folder / "without")
    return folder / "with", folder / "without"


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout",
    ["fsdp2", "ddp2", "tp2", pytest.param("fsdp2_tp2", marks=pytest.mark.slow)],
)
def test_ranks_leave_the_curve_as_it_is_and_write_what_one_process_writes(layout, alone, tmp_path):
    found, _ = with_and_without([*TINY, *layout_flags(layout)], tmp_path)
    assert texts(found) == alone


@pytest.mark.slow
def test_experts_on_two_ranks_leave_the_curve_as_it_is(tmp_path):
    found, _ = with_and_without([*TINY, *EXPERTS, *layout_flags("fsdp2_ep2")], tmp_path)
    assert len(texts(found)) == 9


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", "fsdp2", "tp2"])
def test_compiled_blocks_are_not_compiled_for_texts(layout, alone, tmp_path):
    found, other = with_and_without([*TINY, *COMPILED, *layout_flags(layout)], tmp_path)
    assert texts(found) == alone
    about = [
        [line.partition(", ")[0] for line in log_of(run) if line.startswith("compile: ")] for run in (found, other)
    ]
    assert about[0] == about[1] and "compile: 1 graph" in about[0]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["pp2", "cp2"])
def test_a_layout_that_splits_a_text_has_a_line_instead(layout, tmp_path):
    train([*TINY, *TEXTS, *layout_flags(layout), "--training.steps", "2"], tmp_path)
    assert "samples: none (pipeline and context parallelism split the tokens that a text grows by)" in log_of(tmp_path)
    assert not (tmp_path / "samples.jsonl").exists()
