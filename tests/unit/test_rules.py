"""What is refused before anything starts: the value, where it came from, and a fix that works."""

import importlib.util
import re

import pytest
from harness import parse

from crius import cli
from crius.config import rules
from crius.config.rules import Facts
from crius.errors import ConfigError
from crius.launch import environment
from crius.models.registry import SPECS

SHARD = "--parallelism.data_parallel_shard_degree"
REPLICATE = "--parallelism.data_parallel_replicate_degree"
TENSOR = "--parallelism.tensor_parallel_degree"
PIPELINE = "--parallelism.pipeline_parallel_degree"
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
ASYNC = "--parallelism.enable_async_tensor_parallel"
RESHARD = "--parallelism.reshard_after_forward_mode"
FLOAT8 = "--quantize.dense.float8.enable"

# Lines leave this table as the features arrive.
NOT_BUILT = [
    [TENSOR, "2"],
    ["--parallelism.context_parallel_degree", "2"],
    [PIPELINE, "2"],
    ["--parallelism.expert_parallel_degree", "2"],
    [SCHEDULE, "interleave_1f1b"],
    [ASYNC],
    ["--compile.enable"],
    [FLOAT8],
    ["--quantize.dense.mxfp8.enable"],
    ["--activation_checkpoint.mode", "full"],
    ["--checkpoint.enable"],
    ["--checkpoint.interval", "10"],
    ["--checkpoint.load_step", "10"],
    ["--checkpoint.folder", "elsewhere"],
]

# The commands of the mission's row "Command line".
FSDP = [SHARD, "8", "--compile.enable", FLOAT8]
ASYNC_2D = [SHARD, "4", TENSOR, "2", ASYNC, "--compile.enable"]
PIPELINE_3D = [SHARD, "8", TENSOR, "8", PIPELINE, "8", SCHEDULE, "interleave_1f1b", FLOAT8]


def facts_of(flags, *, ranks=0, num_gpus=0):
    """What the rules see of ``crius train FLAGS``; ``ranks`` is what torchrun started, if it did."""
    cli.SOURCES.origins.clear()
    config = parse(flags)
    num_ranks = ranks or config.parallelism.total_ranks(num_gpus or 1)
    return Facts(
        config=config,
        origin=cli.SOURCES.origin,
        specs=SPECS,
        num_ranks=num_ranks,
        asked_ranks=ranks,
        asked_by="torchrun" if ranks else "",
        num_gpus=num_gpus,
        local_ranks=num_ranks,
    )


# rule, flags, what else is known, in the sentence, in "from", in "fix"
CASES = [
    (rules.known_model, ["--model.name", "llama"], {}, "called llama, did you mean llama3?", "--model.name", "llama3"),
    (rules.known_model, ["--model.flavor", "8"], {}, "no flavor 8", "--model.flavor (command line)", "debug, "),
    (rules.known_model, ["--model.vocab_size", "0"], {}, "vocab_size 0", "--model.vocab_size", "--model.vocab_size -1"),
    (rules.known_model, ["--model.num_layers", "-2"], {}, "num_layers -2", "--model.num_layers", "num_layers -1"),
    (rules.ranges, ["--optimizer.lr", "nan"], {}, "optimizer.lr nan must be a finite number", "--optimizer.lr", "3e-4"),
    (
        rules.data_flags_have_effect,
        ["--data.split", "x"],
        {},
        "data.split has no effect",
        "--data.split",
        "leave it out",
    ),
    (rules.profiler_window, ["--profiler.enable", "--training.steps", "3"], {}, "5 to 6", "start_step", "start_step 1"),
    (rules.degrees_match_ranks, [SHARD, "4"], {"ranks": 3}, "to 4 ranks, but there are 3", "torchrun", f"{SHARD} -1"),
    (rules.degrees_match_ranks, [REPLICATE, "2"], {"ranks": 3}, "3 ranks are no multiple of 2", "torchrun", "start 4"),
    (rules.degrees_match_ranks, [REPLICATE, "2", SHARD, "2"], {"ranks": 3}, "to 4 ranks", "torchrun", "start 4 ranks"),
    (rules.ranks_fit_gpus, [SHARD, "4"], {"num_gpus": 2}, "4 ranks on this machine, but 2 visible", "degrees", "cpu"),
    (rules.ranks_fit_gpus, [], {"num_gpus": 2, "ranks": 4}, "4 ranks on this machine, but 2", "torchrun", "at most 2"),
    (rules.ranks_fit_gpus, ["--training.device", "cuda"], {}, "no GPU", "--training.device", "--training.device cpu"),
    (
        rules.batch_divides,
        [SHARD, "4", "--training.global_batch_size", "10"],
        {},
        "global_batch_size 10 is no multiple of the 4",
        "--training.global_batch_size (command line)",
        "8 or 12",
    ),
    (
        rules.batch_divides,
        ["--training.local_batch_size", "8", "--training.global_batch_size", "4"],
        {},
        "global_batch_size 4 is no multiple of local_batch_size 8",
        "--training.local_batch_size (command line)",
        "8",
    ),
    (rules.reshard_degree_divides, [SHARD, "8", RESHARD, "3"], {}, "mode 3 is no proper", RESHARD, "use 2, 4"),
    (rules.reshard_degree_divides, [SHARD, "2", RESHARD, "2"], {}, "degree 2", RESHARD, "use always or never"),
    (rules.data_path_given, ["--data.path", "x"], {}, "data.path x has no effect", "--data.path", "--data.source text"),
    (rules.data_path_given, ["--data.source", "jsonl"], {}, "jsonl needs data.path", "--data.source", "--data.path"),
    (
        rules.data_path_given,
        ["--data.source", "tokens", "--data.path=a", "--data.path=b"],
        {},
        "takes one data.path, not 2",
        "--data.path",
        "--data.path a",
    ),
    (
        rules.virtual_shards_split,
        [SHARD, "3", "--data.source", "huggingface", "--data.path", "x"],
        {},
        "virtual_shards 8 is no multiple of the 3",
        "--data.virtual_shards (default)",
        "--data.virtual_shards 9",
    ),
    (
        rules.extras_installed,
        ["--metrics.enable_tensorboard"],
        {},
        "needs the package tensorboard, which is not installed",
        "--metrics.enable_tensorboard",
        "pip install",
    ),
    (
        rules.extras_installed,
        ["--data.source", "huggingface", "--data.path", "x"],
        {},
        "package datasets",
        "--data.source",
        "pip install",
    ),
    (
        rules.extras_installed,
        ["--tokenizer.path", "x"],
        {},
        "package tokenizers",
        "--tokenizer.path",
        "pip install",
    ),
    (rules.built_already, ["--compile.enable"], {}, "not built yet: torch.compile", "", "leave out --compile.enable"),
]


@pytest.fixture
def nothing_optional_installed(monkeypatch):
    find_spec = importlib.util.find_spec
    optional = ("datasets", "tokenizers", "tensorboard")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in optional else find_spec(name))


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr(environment, "visible_gpus", lambda environ: 0)


@pytest.mark.parametrize(("rule", "flags", "known", "what", "where", "fix"), CASES)
@pytest.mark.usefixtures("nothing_optional_installed")
def test_a_rule_names_the_value_where_it_came_from_and_a_fix_that_works(rule, flags, known, what, where, fix):
    [error] = rule(facts_of(flags, **known))
    assert isinstance(error, ConfigError)
    assert what in error.what
    assert where in error.where
    assert fix in error.fix
    for mended in repairs(flags, error.fix):
        assert list(rule(facts_of(mended, **known))) == [], f"{mended} is what the fix says"


def test_every_rule_has_a_case_and_an_untouched_run_breaks_none():
    assert {case[0] for case in CASES} == set(rules.RULES)
    for known in ({}, {"num_gpus": 8}, {"ranks": 4}):
        rules.check(facts_of([], **known))


@pytest.mark.parametrize("name", [row[0] for row in rules._RANGES])
def test_a_number_out_of_range_is_refused_with_a_value_that_works(name):
    [error] = rules.ranges(facts_of([f"--{name}=-5"]))
    assert error.what.startswith(f"{name} -5")
    assert error.where == f"--{name} (command line)"
    [mended] = repairs([f"--{name}=-5"], error.fix)
    assert list(rules.ranges(facts_of(mended))) == []


@pytest.mark.usefixtures("no_gpus")
def test_five_violations_are_one_message(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [*(SHARD, "4", "--training.global_batch_size", "10", "--model.flavor", "7b", "--training.steps", "0")]
    assert cli.main(["train", *flags, "--data.path", "x", "--compile.enable"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ConfigError: 5 problems")
    for number, value in enumerate(("flavor 7b", "steps 0", "global_batch_size 10", "data.path x", "compile"), start=1):
        assert re.search(rf"^\[{number}\] ConfigError: .*{value}", err, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", NOT_BUILT, ids=lambda flags: flags[0][2:])
def test_what_is_not_built_yet_is_refused_alone(flags):
    [error] = rules.built_already(facts_of(flags))
    assert f"({flags[0]} {(*flags, 'True')[1]})" in error.what
    assert list(rules.built_already(facts_of(without(flags, error.fix)))) == []


def test_all_that_is_not_built_yet_is_refused_in_one_line():
    flags = [token for row in NOT_BUILT for token in row]
    [error] = rules.built_already(facts_of(flags))
    assert "\n" not in error.what
    assert all(f"({row[0]} " in error.what for row in NOT_BUILT)
    assert without(flags, error.fix) == []


@pytest.mark.parametrize("flags", [FSDP, ASYNC_2D, PIPELINE_3D], ids=["fsdp", "async_2d", "pipeline_3d"])
def test_the_commands_people_come_with_parse_and_say_in_one_line_what_is_not_built(
    flags, capsys, tmp_path, monkeypatch, no_gpus
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", "show", *flags]) == 0
    shown = capsys.readouterr().out
    for flag in (token for token in flags if token.startswith("--")):
        assert re.search(rf"^{flag[2:]} .* command line$", shown, re.MULTILINE)
    assert cli.main(["train", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"ConfigError: not built yet: .*\.\n  fix    leave out .*\n", err)
    rules.check(facts_of(without(flags, err), num_gpus=8))


def test_eight_shards_need_eight_gpus_or_none():
    rules.check(facts_of([SHARD, "8"]))
    rules.check(facts_of([SHARD, "8"], num_gpus=8))
    with pytest.raises(ConfigError, match="8 ranks on this machine, but 4 visible GPUs"):
        rules.check(facts_of([SHARD, "8"], num_gpus=4))
    rules.check(facts_of([SHARD, "8", "--training.device", "cpu"], num_gpus=4))


@pytest.mark.usefixtures("no_gpus")
def test_torchrun_with_another_number_of_processes_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert cli.main(["train", SHARD, "4"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("LayoutError: the degrees multiply to 4 ranks, but there are 3")
    assert "  from   torchrun\n" in err


@pytest.mark.usefixtures("no_gpus")
def test_nproc_that_contradicts_the_degrees_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", SHARD, "4", "--nproc", "2"]) == 2
    assert "  from   --nproc (command line)\n" in capsys.readouterr().err


def repairs(flags, fix):
    """``flags`` with each set of ``--flag value`` (or ``--flag: text: value or value``) that ``fix`` names."""
    kept = " ".join(flags).replace("=", " ")
    if match := re.fullmatch(r"(--[\w.]+): [^\d]*(\d+)(?: or (\d+))?", fix):
        choices = [[(match[1], value)] for value in match.groups()[1:] if value]
    else:
        pairs = re.findall(r"(--[\w.]+) (-?\w[\w.-]*)", fix.removeprefix("leave out"))
        choices = [pairs] if pairs else []
    return [[*without(kept.split(), " ".join(name for name, _ in pairs)), *sum(pairs, ())] for pairs in choices]


def without(flags, text):
    """``flags`` without those that ``text`` says to leave out, and their values."""
    named = re.findall(r"--[\w.]*\w", text.rpartition("leave out")[2])
    kept, keep = [], True
    for token in flags:
        keep = token not in named if token.startswith("--") else keep
        kept += [token] if keep else []
    return kept
