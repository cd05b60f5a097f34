"""Mixtures as settings: tables of TOML, texts on a command line, and back."""

import json

import numpy as np
import pytest
from mixture_samples import mixture_flags

from crius import cli
from crius.cli.from_python import check_arguments, words_of
from crius.cli.settings import config_of, run_of
from crius.config.changes import changes, kind_of
from crius.config.toml_file import differences, flatten, to_toml
from crius.errors import ConfigError
from crius.host import Machine
from crius.train.inputs import open_run_data, resolve


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return mixture_flags(tmp_path_factory.mktemp("mixture") / "data")


def opened(flags, *more):
    return open_run_data(resolve(run_of(*flags, *more), Machine(device="cpu")).config, 1)[1]


def test_a_mixture_survives_run_toml_and_flags(flags, tmp_path):
    run = resolve(run_of(*flags), Machine(device="cpu")).config
    assert [json.loads(text)["source"] for text in run.data.mix] == ["text", "jsonl", "jsonl"]
    assert json.loads(run.data.mix[2])["format"] == "chat"
    assert run.model.attention_mask == "document", "one source has conversations"
    (tmp_path / "run.toml").write_text(to_toml(run))
    again = config_of(str(tmp_path))
    assert "data.mix" not in differences(run, again) and "data.stage" not in differences(run, again)
    spaced = [part for text in run.data.mix for part in ("--data.mix", text.replace(": ", " :  "))]
    assert run_of(*flags, *spaced).data.mix == run.data.mix, "one spelling"


def test_python_takes_the_tables_of_a_mixture(flags, tmp_path):
    run = run_of(*flags)
    tables = {"data.mix": list(map(json.loads, run.data.mix)), "data.stage": list(map(json.loads, run.data.stage))}
    check_arguments(tables, ())
    assert run_of(*words_of(tables, "llama3_debug", tmp_path)).data.mix == run.data.mix
    assert run_of(*words_of(run, "", tmp_path)).data == run.data


def test_a_mixture_replaces_the_data_of_a_recipe(flags):
    run = run_of(*(flag.replace("llama3_debug", "smollm2_sft") for flag in flags))
    assert run.data.source == "stdlib" and run.data.mix


def test_other_shares_are_refused_at_a_resume(flags):
    old = flatten(run_of(*flags))
    new = old | {"data.mix": (old["data.mix"][0].replace("0.5", "0.6"), *old["data.mix"][1:])}
    assert [change.name for change in changes(old, new)] == ["data.mix"]
    assert kind_of("data.mix") == kind_of("data.stage") == kind_of("data.alpha") == "refuse"


WEIGHTS = {
    "tokens": ([{"tokens": 6400}, {"tokens": 3200}, {"tokens": 3200}], lambda sizes: [2, 1, 1]),
    "epochs": ([{"epochs": 1}, {"epochs": 2}, {"epochs": 0.5}], lambda sizes: sizes * [1, 2, 0.5]),
    "by size": ([{}] * 3, lambda sizes: sizes),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_tokens_epochs_and_sizes_give_weights(name, flags):
    given, expected = WEIGHTS[name]
    texts = []
    for text, share in zip(run_of(*flags).data.mix, given, strict=True):
        table = {key: value for key, value in json.loads(text).items() if key != "weight"}
        texts += ["--data.mix", json.dumps(table | share)]
    more = ["--data.alpha", "1"] if name == "by size" else []
    mixed = opened(flags, *texts, *more).train
    weights = np.array(mixed.stages[0][1], dtype=float)
    wanted = np.array(expected(np.array(mixed.plan.sizes)), dtype=float)
    assert weights / weights.sum() == pytest.approx(wanted / wanted.sum(), abs=1e-6)


def test_all_sources_that_cannot_be_opened_are_reported_together(flags, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": 1}\n')
    texts = [
        {"name": "empty", "path": str(empty), "weight": 1},
        {"name": "broken", "path": str(broken), "field": "text", "weight": 1},
    ]
    given = [part for text in texts for part in ("--data.mix", json.dumps(text))]
    flags = [*flags[:2], *flags[4:]]
    with pytest.raises(ConfigError) as caught:
        opened(flags, *given)
    said = str(caught.value)
    assert "2 problems" in said and "[[data.mix]] empty" in said and "[[data.mix]] broken" in said


def test_the_plan_of_a_mixture_is_shown_before_a_run(flags, capsys):
    assert cli.main(["data", "mix", "show", *flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    mixed = opened(flags).train
    assert [one["sequences"] for one in plan["sizes"].values()] == list(mixed.plan.sizes)
    assert plan["sizes"]["chat"]["labels"] < plan["sizes"]["chat"]["tokens"]
    spans = plan["spans"]
    assert [(span["first_step"], span["last_step"]) for span in spans][0] == (1, 19)
    ended = [one["name"] for span in spans for one in span["sources"] if one["ends"]]
    assert ended == ["sums"] and sum(one["sequences"] for span in spans for one in span["sources"]) == 300
    assert cli.main(["data", "mix", "show", *flags]) == 0
    assert "share 0.5000, 57 sequences" in capsys.readouterr().out


def test_validation_texts_that_are_also_trained_on_are_counted(tmp_path, capsys):
    texts = [f"text number {number} " * 20 for number in range(60)]
    rows = {"a": texts[:40], "b": [*texts[40:], *texts[38:40]]}  # b ends with the end of a, which is held out
    flags = ["--training.seq_len", "32", "--validation.fraction", "0.1", "--training.global_batch_size", "2"]
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
        entry = {"name": name, "path": str(tmp_path / f"{name}.jsonl"), "weight": 1}
        flags += ["--data.mix", json.dumps(entry)]
    held = [*rows["a"][-4:], *rows["b"][-2:]]
    trained = [*rows["a"][:-4], *rows["b"][:-2]]
    assert not {*held} & {*trained}
    assert cli.main(["data", "mix", "show", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["validation"]
    assert {name: one["in_training"] for name, one in found.items()} == {"a": 0, "b": 0}
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows["b"][::-1]))
    assert cli.main(["data", "mix", "show", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["validation"]
    assert found["a"]["in_training"] == 2 and found["b"]["in_training"] == 0


def test_a_sample_is_shown_with_its_source(flags, capsys):
    mixed = opened(flags).train
    wanted = [sample for name in mixed.plan.names for sample in range(30) if mixed.origin(sample)[0] == name][::7]
    assert cli.main(["data", "show", *flags, *(f"--sample={sample}" for sample in wanted)]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("=== ")]
    assert [line.rpartition(", of ")[2] for line in heads] == [mixed.origin(sample)[0] for sample in sorted(wanted)]
    assert any("conversation" in line and line.endswith("of chat") for line in heads)


@pytest.mark.parametrize("share", ["1" + "0" * 400, "1e300"])
def test_absurd_weights_and_paths_are_errors(share, capsys):
    flags = []
    for name, path, weight in (("a", "a\\u0000", "0.5"), ("b", "\\ud800", "0.5"), ("c", "c", share)):
        flags += ["--data.mix", f'{{"name": "{name}", "path": "{path}", "weight": {weight}}}']
    assert cli.main(["data", "mix", "show", *flags]) == 2
    said = capsys.readouterr().err
    assert "which is not a positive number below" in said and said.count("which does not exist") == 2


def test_keys_without_effect_are_refused(tmp_path, capsys):
    flags = []
    for name, extra in {"a": {"field": "body"}, "b": {"columns": ["x=prompt"], "format": "documents"}}.items():
        (tmp_path / f"{name}.txt").write_text("some words\n" * 99)
        entry = {"name": name, "path": str(tmp_path / f"{name}.txt"), "weight": 1, **extra}
        flags += ["--data.mix", json.dumps(entry)]
    assert cli.main(["data", "mix", "show", *flags]) == 2
    said = capsys.readouterr().err
    assert 'a of data.mix has field = "body", which has no effect' in said and "b of data.mix has columns" in said


def test_an_entry_is_mended_by_its_keys_and_not_by_flags(tmp_path, capsys):
    rows = tmp_path / "rows.csv"
    rows.write_text("a,b\nx,y\n")
    (tmp_path / "more.jsonl").write_text('{"text": "x"}\n')
    flags = []
    for name, table in {"rows": {"path": str(rows), "field": "c"}, "both": {"path": str(tmp_path)}}.items():
        flags += ["--data.mix", json.dumps({"name": name, "weight": 1, **table})]
    assert cli.main(["data", "mix", "show", *flags]) == 2
    said = capsys.readouterr().err
    assert 'columns = ["a", "b"] if these are a question and its answer, else field = ' in said
    assert "[[data.mix]] both, path" in said and 'source = "csv" or source = "jsonl"' in said
