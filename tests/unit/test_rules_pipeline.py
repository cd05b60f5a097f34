"""What is refused about a pipeline before anything starts, with a fix that works."""

import importlib.metadata
from types import SimpleNamespace

import pytest
from rule_cases import PIPELINE, RESHARD, SCHEDULE, SHARD
from test_rules import facts_of, repairs

from crius.config import rules_pipeline
from crius.errors import ConfigError

PREFIX = "--parallelism.pipeline_parallel_"
CSV = f"{PREFIX}schedule_csv"
LESS = f"{PREFIX}first_stage_less_layers"
MODULES = f"{PREFIX}module_names_per_stage"
BATCH = ("--training.global_batch_size", "8", "--training.local_batch_size")

# rule, flags, in the sentence, in "from", in "fix"
CASES = [
    (
        rules_pipeline.pipeline_flags_have_effect,
        [SCHEDULE, "gpipe"],
        "schedule has no effect with pipeline_parallel_degree 1",
        SCHEDULE,
        f"leave out {SCHEDULE}",
    ),
    (
        rules_pipeline.pipeline_flags_have_effect,
        [PIPELINE, "2", MODULES, "tok_embeddings,layers.0-3", MODULES, "layers.4-7,norm,output", LESS, "2"],
        "first_stage_less_layers has no effect with explicit modules of each stage",
        LESS,
        f"leave out {LESS}",
    ),
    (
        rules_pipeline.schedule_file_runs,
        [PIPELINE, "2", CSV, "nowhere.csv"],
        "schedule file nowhere.csv cannot be read",
        CSV,
        f"{SCHEDULE} 1f1b",
    ),
    (
        rules_pipeline.stages_per_rank_suit,
        [PIPELINE, "2", f"{PREFIX}stages_per_rank", "2"],
        "1f1b, which needs exactly 1 on each rank",
        f"{PREFIX}stages_per_rank",
        f"{PREFIX}stages_per_rank -1",
    ),
    (
        rules_pipeline.modules_split,
        [PIPELINE, "16"],
        "16 pipeline ranks with 1 stages each make 16 stages, more than the 8 layers of llama3/debug",
        PIPELINE,
        f"{PIPELINE} 8",
    ),
    (
        rules_pipeline.modules_split,
        [PIPELINE, "2", LESS, "20"],
        "leave a stage with",
        "less_layers",
        f"{LESS} 0",
    ),
    (
        rules_pipeline.microbatches_suit,
        [PIPELINE, "4", *BATCH, "4"],
        "2 microbatches per step do not suit 1f1b on 4 pipeline ranks; legal for the 8 sequences of a",
        "--training.local_batch_size",
        "--training.local_batch_size 2",
    ),
    (
        rules_pipeline.split_backward_goes_with,
        [PIPELINE, "2", SCHEDULE, "zbv_zero_bubble", "--compile.enable"],
        "compile.enable does not go with",
        "--compile.enable",
        f"{SCHEDULE} interleave_1f1b",
    ),
    (
        rules_pipeline.split_backward_goes_with,
        [PIPELINE, "2", SHARD, "2", SCHEDULE, "zbv_zero_bubble", RESHARD, "always"],
        "always loses gradients",
        RESHARD,
        f"{RESHARD} never",
    ),
    (
        rules_pipeline.split_backward_goes_with,
        [PIPELINE, "2", SCHEDULE, "dualpipev", "--activation_checkpoint.mode", "full"],
        "activation_checkpoint.mode full does not go with",
        "--activation_checkpoint.mode",
        "--activation_checkpoint.mode none",
    ),
]


@pytest.mark.parametrize(("rule", "flags", "what", "where", "fix"), CASES)
def test_a_pipeline_rule_names_the_value_where_it_came_from_and_a_fix_that_works(rule, flags, what, where, fix):
    [error] = rule(facts_of(flags))
    assert isinstance(error, ConfigError)
    assert what in error.what
    assert where in error.where
    assert fix in error.fix
    for mended in repairs(flags, error.fix.partition(", or ")[0]):
        assert list(rule(facts_of(mended))) == [], f"{mended} is what the fix says"


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


def test_every_pipeline_rule_has_a_case():
    assert {case[0] for case in CASES} == set(rules_pipeline.PIPELINE_RULES)
