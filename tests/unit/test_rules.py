"""What is refused before anything starts: the value, where it came from, and a fix that works."""

import importlib.util
import re
import resource
import sys

import pytest
from configured import configured
from harness import parse
from rule_cases import ASYNC, FLOAT8, PIPELINE, RESHARD, SCHEDULE, SHARD, TENSOR

from crius import cli
from crius.config import rules
from crius.config.facts import Facts
from crius.config.rules_layout import open_files_suffice
from crius.config.run import replace_fields
from crius.config.toml_file import flatten
from crius.errors import ConfigError
from crius.host import Machine
from crius.launch import environment
from crius.models.registry import SPECS
from crius.train.inputs import describe_known_model, resolve

# The commands of the mission's row "Command line".
FSDP = [SHARD, "8", "--compile.enable", FLOAT8]
ASYNC_2D = [SHARD, "4", TENSOR, "2", ASYNC, "--compile.enable"]
PIPELINE_3D = [SHARD, "8", TENSOR, "8", PIPELINE, "8", SCHEDULE, "interleave_1f1b", FLOAT8, "--model.flavor", "405b"]


def facts_of(flags, *, ranks=0, num_gpus=0, is_dry=False, sharing=""):
    """What the rules see of ``crius train FLAGS``; ``ranks`` is what torchrun started, if it did."""
    config, origin = configured(flags)
    decided = flatten(resolve(config, Machine(device="cuda" if num_gpus or is_dry else "cpu")).config)
    config = replace_fields(config, {name: decided[name] for name in ("compile.enable", "activation_checkpoint.mode")})
    model = describe_known_model(config)
    num_ranks = ranks or config.parallelism.total_ranks(num_gpus or 1)
    return Facts(
        asked=config,
        config=config,
        reasons={},
        origin=origin,
        specs=SPECS,
        model=model,
        num_ranks=num_ranks,
        asked_ranks=ranks,
        asked_by="torchrun" if ranks else "",
        num_gpus=num_gpus,
        num_cores=2,
        local_ranks=num_ranks,
        is_dry=is_dry,
        sharing=sharing,
    )


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr(environment, "visible_gpus", lambda environ: 0)


def test_an_untouched_run_breaks_no_rule():
    for known in ({}, {"num_gpus": 8}, {"ranks": 4}):
        rules.check(facts_of([], **known))


@pytest.mark.parametrize(("hard", "is_refused"), [(895, True), (896, False), (resource.RLIM_INFINITY, False)])
def test_512_ranks_need_900_open_files_that_the_host_allows(hard, is_refused, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (512, hard))
    assert len(list(open_files_suffice(facts_of([], ranks=512)))) == is_refused
    assert list(open_files_suffice(facts_of([], ranks=512, is_dry=True))) == []


@pytest.mark.parametrize("name", [name for row in rules.RANGES for name in row.examples])
def test_a_number_out_of_range_is_refused_with_a_value_that_works(name):
    [error] = rules.ranges(facts_of([f"--{name}=-5"]))
    assert error.what.startswith(f"{name} -5")
    assert error.where == f"--{name} (command line)"
    [mended] = repairs([f"--{name}=-5"], error.fix)
    assert list(rules.ranges(facts_of(mended))) == []


@pytest.mark.parametrize(
    "flags",
    [
        [],
        PIPELINE_3D,
        [
            RESHARD,
            "never",
            RESHARD,
            "4",
            "--debug.no_deterministic",
            "--optimizer.lr=nan",
            "--data.path=a",
            "--data.path=b",
        ],
        ["--checkpoint.enable", "--checkpoint.folder=", "--data.source", "text", "--data.path", "x"],
        ["--training.epochs", "2"],
    ],
)
def test_settings_are_those_that_the_command_line_gives(flags):
    """The other tests of rules do not parse."""
    config, origin = configured(flags)
    assert repr(config) == repr(parse(flags))
    assert {name: origin(name) for name in flatten(config)} == {n: cli.SOURCES.origin(n) for n in flatten(config)}


@pytest.mark.usefixtures("no_gpus")
def test_five_violations_are_one_message(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [*(SHARD, "4", "--training.global_batch_size", "10", "--model.flavor", "7b", "--training.steps", "0")]
    flags += ["--lr_scheduler.decay_ratio", "2", "--checkpoint.no_enable", "--checkpoint.keep_last", "3"]
    assert cli.main(["train", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ConfigError: 5 problems")
    values = ("flavor 7b", "steps 0", "decay_ratio 2", "global_batch_size 10", "checkpoint.keep_last has no effect")
    for number, value in enumerate(values, start=1):
        assert re.search(rf"^\[{number}\] ConfigError: .*{value}", err, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize("flags", [FSDP, ASYNC_2D, PIPELINE_3D], ids=["fsdp", "async_2d", "pipeline_3d"])
def test_the_commands_people_come_with_parse_and_break_no_rule(flags, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert cli.main(["config", "show", *flags]) == 0
    shown = capsys.readouterr().out
    for flag in (token for token in flags if token.startswith("--")):
        assert re.search(rf"^{flag[2:]} .* command line$", shown, re.MULTILINE)
    facts = facts_of(flags, is_dry=flags is PIPELINE_3D)
    assert [str(problem) for rule in rules.RULES for problem in rule(facts)] == []


@pytest.mark.usefixtures("no_gpus")
def test_more_processes_than_a_machine_can_bear_are_refused_with_the_dry_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["crius.cli.app"], "usable_cores", lambda: 4)
    assert cli.main(["train", SHARD, "64", TENSOR, "8"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("LayoutError: 512 ranks on this machine, which has 4 CPU cores.")
    assert "--dry_run" in err


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
    kept = [part for token in flags for part in (token.split("=", 1) if token.startswith("--") else [token])]
    if match := re.fullmatch(r"(--[\w.]+): [^\d]*(\d+)(?: or (\d+))?", fix):
        choices = [[(match[1], value)] for value in match.groups()[1:] if value]
    else:
        pairs = re.findall(r"(?<!\()(--\w+\.[\w.]+) (-?\w[\w.-]*)", fix.removeprefix("leave out"))
        choices = [pairs] if pairs else []
    return [[*without(kept, " ".join(name for name, _ in pairs)), *sum(pairs, ())] for pairs in choices]


def without(flags, text):
    """``flags`` without those that ``text`` says to leave out, and their values."""
    named = re.findall(r"--[\w.]*\w", text.rpartition("leave out")[2])
    kept, keep = [], True
    for token in flags:
        keep = token not in named if token.startswith("--") else keep
        kept += [token] if keep else []
    return kept
