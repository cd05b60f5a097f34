"""What a resume may change: which changes are refused, and what to type instead."""

import pytest

from crius.config.changes import changes, check_changes
from crius.config.run import RunConfig
from crius.config.toml_file import flatten
from crius.errors import ConfigError

NOW = flatten(RunConfig())


def found(**new):
    """The changes from the defaults, with ``__`` for the dot."""
    return changes(NOW, NOW | {name.replace("__", "."): value for name, value in new.items()})


def test_each_kind_of_change_has_its_effect():
    some = found(optimizer__name="muon", optimizer__lr=0.5, metrics__log_interval=3)
    assert {change.name: change.kind for change in some} == {
        "optimizer.name": "refuse",
        "optimizer.lr": "warn",
        "metrics.log_interval": "free",
    }
    assert str(some[0]) == "optimizer.name: adamw -> muon (refuse)"


def test_steps_follow_from_epochs_where_both_runs_have_them():
    old = NOW | {"training.epochs": 1, "training.steps": 5}
    assert [change.name for change in changes(old, old | {"training.steps": 7})] == []
    assert [change.name for change in changes(old, old | {"training.steps": 7, "training.epochs": 0})] == [
        "training.steps",
        "training.epochs",
    ]


@pytest.mark.parametrize(
    ("change", "allowed", "fix"),
    [
        ({"debug__seed": 7}, ("debug.*",), None),
        (
            {"debug__seed": 7, "data__add_eos": False},
            ("model.*",),
            "--data.add_eos --debug.seed 42, or --job.run_dir NEW for a new run, or "
            "--checkpoint.allow_changes 'model.*' "
            "--checkpoint.allow_changes data --checkpoint.allow_changes debug.seed",
        ),
        ({"lora__rank": 8}, (), "--lora.rank 0, or --job.run_dir NEW for a new run"),
    ],
)
def test_a_refused_change_says_how_to_take_it_back_or_to_allow_it(change, allowed, fix):
    refused = found(**change)
    if fix is None:
        check_changes(refused, allowed, "runs/a")
        return
    with pytest.raises(ConfigError) as caught:
        check_changes(refused, allowed, "runs/a")
    assert caught.value.fix == fix
