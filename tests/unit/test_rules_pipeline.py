"""What is refused about a pipeline before anything starts, with a fix that works."""

import importlib.metadata
from types import SimpleNamespace

import pytest
from rule_cases import PIPELINE, SCHEDULE
from test_rules import facts_of, repairs

from crius.config import rules_pipeline

PREFIX = "--parallelism.pipeline_parallel_"
CSV = f"{PREFIX}schedule_csv"


@pytest.fixture
def installed(monkeypatch):
    """Has the machine another torch, as far as the rules can see."""

    def install(version):
        monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [SimpleNamespace(version=version)])

    return install


STAGES_PER_RANK = {
    "gpipe": [1],
    "1f1b": [1],
    "interleave_1f1b": [1, 2, 3],
    "interleave_zero_bubble": [2, 3],
    "zbv_zero_bubble": [2],
    "dualpipev": [2],
}


@pytest.mark.parametrize(("schedule", "suiting"), STAGES_PER_RANK.items())
def test_a_schedule_runs_these_numbers_of_stages_per_rank_and_no_other(schedule, suiting):
    flags = [PIPELINE, "2", SCHEDULE, schedule, f"{PREFIX}stages_per_rank"]
    accepted = [each for each in (1, 2, 3) if not [*rules_pipeline.stages_per_rank_suit(facts_of([*flags, str(each)]))]]
    assert accepted == suiting


ZERO_BUBBLE_ROWS = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"


@pytest.mark.parametrize("schedule", ["interleave_zero_bubble", "zbv_zero_bubble", "dualpipev", "file"])
@pytest.mark.parametrize("version", ["2.11.0", "2.12.1"])
def test_a_split_backward_is_refused_on_a_torch_that_fails_in_it(version, schedule, installed, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(ZERO_BUBBLE_ROWS)
    flags = [PIPELINE, "2", *([CSV, str(path)] if schedule == "file" else [SCHEDULE, schedule])]
    installed(version)
    [error] = rules_pipeline.split_backward_goes_with(facts_of(flags))
    assert f"needs torch 2.13 or newer; torch {version} is installed" in error.what
    assert error.fix.endswith(" 'torch>=2.13'")
    if schedule != "file":
        [mended] = repairs(flags, error.fix.partition(", or ")[0])
        assert not [one for rule in rules_pipeline.PIPELINE_RULES for one in rule(facts_of(mended))]
    installed("2.13.0")
    assert list(rules_pipeline.split_backward_goes_with(facts_of(flags))) == []


@pytest.mark.parametrize(
    ("version", "schedule"),
    [("2.14.0.dev20260801+cu130", "dualpipev"), ("2.15.0", "zbv_zero_bubble"), ("2.11.0", "interleave_1f1b")],
)
def test_a_torch_that_can_run_the_schedule_is_taken(version, schedule, installed):
    installed(version)
    flags = [PIPELINE, "2", SCHEDULE, schedule]
    assert not [one for rule in rules_pipeline.PIPELINE_RULES for one in rule(facts_of(flags))]


@pytest.mark.parametrize("rows", ["0F0,0F1,0B1,0B0\n1F1,1B1,1F0,1B0\n", "0F0,0F1,0B0,0B1\n1F1,1F0,1B1,1B0\n"])
def test_a_schedule_file_whose_last_stage_runs_out_of_order_is_refused(rows, tmp_path):
    """torch takes the losses of the last stage in the order of its forwards, whichever microbatches they are of."""
    path = tmp_path / "mine.csv"
    path.write_text(rows)
    [error] = rules_pipeline.schedule_file_runs(facts_of([PIPELINE, "2", CSV, str(path)]))
    assert "runs the last stage's microbatches out of order" in error.what


def test_a_schedule_file_that_is_not_there_is_refused():
    [error] = rules_pipeline.schedule_file_runs(facts_of([PIPELINE, "2", CSV, "nowhere.csv"]))
    assert "schedule file nowhere.csv cannot be read" in error.what
    assert CSV in error.where and f"{SCHEDULE} 1f1b" in error.fix
