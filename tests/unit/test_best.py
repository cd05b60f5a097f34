"""Which of several runs is best, and what differs between them: ``crius runs`` and ``crius compare``."""

import json

import pytest
from report_runs import write_run

from crius import cli
from crius.tools.report.runs import find_runs, rank, short_names

START = {"time": 1.0, "step": 0, "tokenizer_hash": "t", "data_hash": "d"}


def trained(folder, val_loss=None, start=None, **settings):
    """A run with that last validation loss; ``__`` in a setting stands for a dot."""
    settings = {name.replace("__", "."): value for name, value in settings.items()}
    run = write_run(folder, settings=settings, files={"starts.jsonl": json.dumps(START | (start or {})) + "\n"})
    if val_loss is not None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 3, "val_loss": val_loss}) + "\n")
    return run


def ranked(folder):
    """Name of the best run in a folder, and why there is none."""
    rows = find_runs(folder)
    found = rank(rows)
    return None if found.best is None else rows[found.best].name, found.why


def shown(capsys, *command):
    cli.main([*map(str, command)])
    return capsys.readouterr().out.splitlines()


def test_a_list_shows_the_settings_that_differ_and_marks_the_lowest_validation_loss(tmp_path, capsys):
    trained(tmp_path / "a", 2.5, optimizer__lr=0.1, validation__interval=1)
    trained(tmp_path / "b", 2.0, optimizer__lr=0.2, checkpoint__folder="elsewhere")
    trained(tmp_path / "c", optimizer__lr=0.3, compile__enable=True)
    head, *rows, legend = shown(capsys, "runs", tmp_path)
    cells = {row.split()[0]: row.split() for row in rows}
    assert head.split()[-3:] == ["lr", "compile.enable", "validation.interval"] and legend == "* lowest validation loss"
    assert {name: row[4] for name, row in cells.items()} == {"a": "2.5000", "b": "*2.0000", "c": "-"}
    assert {name: row[-3:] for name, row in cells.items()} == {
        "a": ["0.1", "-", "1"],
        "b": ["0.2", "-", "500"],
        "c": ["0.3", "true", "500"],
    }
    found = json.loads("\n".join(shown(capsys, "runs", tmp_path, "--json")))
    assert (found["best"], found["not_compared"]) == ("b", "")
    rates = dict(zip([run["name"] for run in found["runs"]], found["settings"]["optimizer.lr"], strict=True))
    assert rates == {"a": 0.1, "b": 0.2, "c": 0.3}


def test_nothing_is_shown_where_nothing_differs_and_one_run_is_not_best(tmp_path, capsys):
    trained(tmp_path / "a", 2.0)
    (tmp_path / "b").mkdir()
    head, row = shown(capsys, "runs", tmp_path)
    assert head.endswith("last record") and "*" not in row
    (tmp_path / "b" / "run.lock").touch()  # a run without settings does not differ in all of them
    assert shown(capsys, "runs", tmp_path)[0] == head


def test_many_settings_that_differ_are_counted(tmp_path, capsys):
    trained(tmp_path / "a")
    values = {"seq_len": 64, "steps": 7, "local_batch_size": 2, "max_norm": 2.0, "gc_interval": 9, "dtype": "bfloat16"}
    trained(tmp_path / "b", **{f"training__{name}": value for name, value in values.items()})
    lines = shown(capsys, "runs", tmp_path)
    assert lines[0].split()[-4:] == ["steps", "seq_len", "local_batch_size", "dtype"]
    assert lines[-1] == "2 more settings differ: crius compare lists them"


@pytest.mark.parametrize(
    ("settings", "start", "why"),
    [
        ({"validation__num_samples": 9}, {}, "validation.num_samples"),
        ({"data__path": ("x",)}, {}, "data.path"),
        ({"training__seq_len": 64}, {}, "training.seq_len"),
        ({}, {"tokenizer_hash": "u"}, "tokenizer_hash"),
        ({}, {"data_hash": "e"}, "data_hash"),
        ({"debug__seed": 7}, {"data_hash": "e"}, ""),
        ({"validation__interval": 7, "optimizer__lr": 1.0}, {}, ""),
    ],
)
def test_runs_whose_validation_data_differ_are_not_compared(settings, start, why, tmp_path, capsys):
    trained(tmp_path / "a", 2.0)
    trained(tmp_path / "b", 3.0, start, **settings)
    trained(tmp_path / "c", training__seq_len=99)  # without a validation it does not count
    told = f"no run is best: the validation data differ ({why})" if why else ""
    assert ranked(tmp_path) == (None if why else "a", told)
    for command in (("runs", tmp_path), ("compare", tmp_path / "a", tmp_path / "b")):
        lines = shown(capsys, *command)
        assert lines[-1] == (told or "* lowest validation loss")
        assert any("*2.0000" in line or "2.000000 *" in line for line in lines) == (not why)


def test_runs_that_trained_on_other_data_and_validate_on_the_same_are_compared(tmp_path):
    for name, val_loss, data in (("a", 3.0, "x"), ("b", 2.0, "y")):
        trained(tmp_path / name, val_loss, {"data_hash": data}, data__path=(data,), validation__path=("z",))
    assert ranked(tmp_path) == ("b", "")


@pytest.mark.parametrize("val_loss", [None, float("nan"), float("inf")])
def test_a_run_without_a_validation_loss_is_never_best(val_loss, tmp_path):
    trained(tmp_path / "a", val_loss)
    assert ranked(tmp_path) == (None, "")
    trained(tmp_path / "b", 9.0)
    assert ranked(tmp_path) == ("b", "")


def test_a_comparison_ends_with_the_validation_losses(tmp_path, capsys):
    a, b = trained(tmp_path / "a", 2.5), trained(tmp_path / "b", 2.0)
    *_, losses, legend = shown(capsys, "compare", a, b)
    assert losses.split() == ["validation", "loss", "2.500000", "2.000000", "*"]
    assert legend == "* lowest validation loss"
    found = json.loads("\n".join(shown(capsys, "compare", a, b, "--json")))
    assert (found["best"], found["not_compared"]) == ("b", "")


def test_a_name_is_as_short_as_it_says_one_setting():
    names = ["optimizer.lr", "compile.enable", "quantize.dense.float8.enable", "layout", "mine.enable", "mine.own"]
    assert short_names(names) == [
        "lr",
        "compile.enable",
        "quantize.dense.float8.enable",
        "layout",
        "mine.enable",
        "own",
    ]


def test_a_secret_in_a_setting_is_not_listed(tmp_path, capsys):
    trained(tmp_path / "a")
    run = trained(tmp_path / "b")
    text = (run / "run.toml").read_text()
    (run / "run.toml").write_text(text.replace('load_path = ""', 'load_path = "https://me:secret@host/x"'))
    assert "load_path" in (out := "\n".join(shown(capsys, "runs", tmp_path))) and "secret" not in out
