"""``crius config explain``: what a setting means, holds and is called elsewhere."""

import json

import pytest

from crius import cli
from crius.cli.explaining import DEFAULTS
from crius.config.names import SHORT
from crius.config.other_trainers import ALIASES, MOVED


@pytest.fixture
def explain(capsys):
    """Exit code, stdout and stderr of ``crius config explain`` in this process."""

    def run(*argv):
        code = cli.main(["config", "explain", *map(str, argv)])
        return code, *capsys.readouterr()

    return run


def test_a_setting_is_explained_with_its_value_and_origin(explain, tmp_path):
    (tmp_path / "mine.toml").write_text("[training]\nseq_len = 512\n")
    flags = ["--recipe", "llama3_8b", "--optimizer.lr", "1e-3", "--config", tmp_path / "mine.toml"]
    origins = {
        "optimizer.lr": (0.001, "command line"),
        "training.seq_len": (512, str(tmp_path / "mine.toml")),
        "model.flavor": ("8b", "recipe llama3_8b"),
        "debug.seed": (42, "default"),
    }
    for name, (value, origin) in origins.items():
        code, out, _ = explain(name, *flags, "--json")
        found = json.loads(out)
        assert (code, found["name"], found["value"], found["origin"]) == (0, name, value, origin)
    code, out, _ = explain("optimizer.lr", *flags)
    assert out.splitlines()[:2] == ["--optimizer.lr", "  Peak learning rate."]
    rows = [line.split(maxsplit=1) for line in out.splitlines()[3:]]
    assert ["value", "0.001   (command line)"] in rows and ["default", "0.0003"] in rows
    assert ["type", "a number"] in rows and ["rule", "It must be above 0."] in rows
    assert ["also", "learning_rate, lr"] in rows


def test_choices_rules_and_what_this_machine_decides_are_told(explain):
    _, out, _ = explain("training.mixed-precision-param", "--training.mixed_precision_param", "auto", "--json")
    found = json.loads(out)
    assert found["choices"] == ["auto", "float32", "bfloat16"]
    assert (found["value"], found["decided"] in ("float32", "bfloat16")) == ("auto", True)
    assert found["why"] and found["meaning"].startswith("dtype of weights in matmuls")
    _, out, _ = explain("parallelism.tensor_parallel_degree")
    assert (
        "Tensor parallelism gives each rank whole heads and equal parts of the hidden dim and of the sequence." in out
    )


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("metrics.log_freq", "metrics.log_interval"),
        ("seq_len", "training.seq_len"),
        ("per_device_train_batch_size", "training.local_batch_size"),
        ("training.batch_size", "training.local_batch_size"),
        ("args.num_train_epochs", "training.epochs"),
        ("bf16", "training.mixed_precision_param"),
        ("beta2", "optimizer.beta2"),
    ],
)
def test_names_of_other_trainers_are_found(explain, written, name):
    code, out, _ = explain(written)
    assert code == 0
    assert out.splitlines()[0].startswith(f"{written} is ") and f"--{name}" in out.splitlines()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("optimizer.lrr", "did you mean optimizer.lr?"),
        ("fp16", "bfloat16 needs none"),
        ("quantize.dense", "quantize.dense is a section, not a setting."),
        ("zzz", "there is no such setting"),
        ("layout", "layout is an option of crius train, not a setting"),
        ("warmup_ratio", "fix    crius train --help all lists every flag"),
        ("zzz.seq_len", "did you mean training.seq_len?"),
        ("zzz.yyy", "there is no such setting"),
    ],
)
def test_an_unknown_setting_is_an_error_with_a_guess_or_a_reason(explain, written, said):
    code, out, err = explain(written)
    assert (code, out) == (2, "") and said in err


def test_every_name_of_other_trainers_leads_to_a_setting():
    assert {ours.split(" ")[0] for ours in (ALIASES | SHORT | MOVED).values()} <= set(DEFAULTS)
