"""Flags and TOML to a run: precedence, origins, spellings, mistakes, and what a release may not take away."""

import ast
import dataclasses
import inspect
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import tomli_w
from configured import hint_of
from harness import GOLDEN, parse

from crius import cli
from crius.cli import add_verbs
from crius.cli.app import app
from crius.cli.verbs import Verbs
from crius.config.data import DataConfig, TokenizerConfig
from crius.config.other_trainers import ALIASES, MOVED, NOTHING
from crius.config.resolve import BatchSizes, batch_sizes
from crius.config.run import ModelConfig, RunConfig, replace_fields
from crius.config.toml_file import command_line_flags, flatten, to_toml
from crius.config.training import TrainingConfig
from crius.tokens.tokenizer import build_tokenizer

DEFAULTS = flatten(RunConfig())
RECIPE = tomllib.loads((Path(cli.__file__).parent.parent / "recipes" / "llama3_debug.toml").read_text())
SCHEDULE = "parallelism.pipeline_parallel_schedule"


@pytest.fixture
def crius(capsys):
    """Run the command line in this process; gives exit code, stdout and stderr."""

    def run(*argv):
        code = cli.main([str(argument) for argument in argv])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def shown(crius):
    """The settings that flags give, each with ``value`` and ``origin``."""

    def show(*flags):
        code, out, err = crius("config", "show", "--json", *flags)
        assert code == 0, err
        return json.loads(out)

    return show


@pytest.fixture
def refused(crius):
    """The one message for flags that are refused."""

    def refuse(*flags):
        code, out, err = crius("train", *flags)
        assert (code, out) == (2, "")
        assert err.count("Error: ") == 1
        return err

    return refuse


@pytest.fixture
def toml(tmp_path):
    def write(text, name="a.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_flags_win_over_config_files_over_the_recipe_over_defaults(shown, toml):
    first = toml("[training]\nseq_len = 11\nsteps = 12\n[optimizer]\nlr = 0.25\n", "first.toml")
    last = toml("[training]\nsteps = 22\n[optimizer]\nlr = 0.5\n", "last.toml")
    settings = shown("--recipe", "llama3_debug", "--config", first, "--config", last, "--optimizer.lr", "0.75")
    for name, value, origin in (
        ("optimizer.lr", 0.75, "command line"),
        ("training.steps", 22, str(last)),
        ("training.seq_len", 11, str(first)),
        ("lr_scheduler.warmup_steps", RECIPE["lr_scheduler"]["warmup_steps"], "recipe llama3_debug"),
        ("debug.seed", DEFAULTS["debug.seed"], "default"),
    ):
        assert settings[name] == {"value": value, "origin": origin}


def test_a_config_file_alone_is_the_whole_run(shown, toml):
    settings = shown("--config", toml("[training]\nsteps = 3\n"))
    decided = {"training.steps": 3, "compile.enable": False, "activation_checkpoint.mode": "none"}
    assert {name: entry["value"] for name, entry in settings.items()} == as_json({**DEFAULTS, **decided})


def test_the_tokenizer_of_a_recipe_is_small_and_loses_no_text(shown):
    """It is what ``crius data tokenizer`` makes of the standard library of Python 3.11.7, without its spaces."""
    path = Path(shown("--recipe", "llama3_debug_bpe")["tokenizer.path"]["value"])
    assert (path / "tokenizer.json").stat().st_size <= 40 * 1024
    tokenizer = build_tokenizer(TokenizerConfig(path=str(path)))
    text = Path(dataclasses.__file__).read_text() + "é 東京 \t\x00"
    ids = tokenizer.encode(text)
    assert tokenizer.vocab_size == 2048 and tokenizer.decode(ids) == text and len(ids) < len(text) / 3


def test_without_any_flag_the_debug_recipe_is_used(shown):
    origins = {entry["origin"] for entry in shown().values()}
    assert origins == {"default", "recipe llama3_debug", "default: a CPU", "default: a CPU gains little"}


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--compile.enable"], "compile.enable", True),
        (["--compile.enable", "true"], "compile.enable", True),
        (["--compile.enable", "False"], "compile.enable", False),
        (["--compile.enable=false"], "compile.enable", False),
        (["--compile.no_enable"], "compile.enable", False),
        (["--data.no-shuffle"], "data.shuffle", False),
        (["--training.seq-len", "7"], "training.seq_len", 7),
        (["--parallelism.data-parallel-shard-degree=2"], "parallelism.data_parallel_shard_degree", 2),
        (["--data.path", "a", "--data.path", "b"], "data.path", ["a", "b"]),
        (["--data.path", "a,b"], "data.path", ["a,b"]),
        (["--lr_scheduler.decay_ratio", "0.5"], "lr_scheduler.decay_ratio", 0.5),
        (["--parallelism.reshard_after_forward_mode", "Never"], "parallelism.reshard_after_forward_mode", "never"),
        (["--parallelism.reshard_after_forward_mode", "4"], "parallelism.reshard_after_forward_mode", 4),
        (["--optimizer.implementation", "for_loop"], "optimizer.implementation", "for-loop"),
        *[
            ([f"--{SCHEDULE}", written], SCHEDULE, value)
            for written, value in (
                ("1F1B", "1f1b"),
                ("GPipe", "gpipe"),
                ("INTERLEAVE-1F1B", "interleave_1f1b"),
                ("Interleaved1F1B", "interleave_1f1b"),
                ("InterleavedZeroBubble", "interleave_zero_bubble"),
                ("ZBVZeroBubble", "zbv_zero_bubble"),
                ("DualPipeV", "dualpipev"),
            )
        ],
    ],
)
def test_a_flag_has_more_than_one_spelling(shown, flags, name, value):
    assert shown(*flags)[name] == {"value": value, "origin": "command line"}


@pytest.mark.parametrize("alias", ALIASES)
def test_the_torchtitan_name_of_a_setting_works_as_a_flag_and_in_toml(shown, toml, alias):
    name = ALIASES[alias]
    value = as_json(changed(hint_of(name), DEFAULTS[name]))
    items = value if isinstance(value, list) else [value]
    for spelling in (alias, alias.replace("_", "-")):
        settings = shown(*(f"--{spelling}={item}" for item in items))
        assert settings[name] == {"value": value, "origin": "command line"}
    section, _, key = alias.rpartition(".")
    file = toml(tomli_w.dumps({section: {key: value}} if section else {key: value}))
    assert shown("--config", file)[name] == {"value": value, "origin": str(file)}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--compile.enbale"], "unknown flag --compile.enbale, did you mean --compile.enable?"),
        (["--training.seqlen=3"], "did you mean --training.seq_len?"),
        (
            ["--activation_checkpoint.early_stop"],
            "unknown flag --activation_checkpoint.early_stop: Crius has no such setting.",
        ),
        (["--optimzer.lr", "1"], "did you mean --optimizer.lr?"),
        (["--parallelism.tensor_parallel_size", "2"], "did you mean --parallelism.tensor_parallel_degree?"),
        (["--quantize.linear.float8.recipe_name", "x"], "did you mean --quantize.dense.float8.recipe?"),
        (["--quantize.linear.mx.filter_fqns", "x"], "did you mean --quantize.dense.exclude?"),
        (["--quantize.grouped_mm.float8.fqns", "x"], "float8 and MXFP8 are for linears"),
        (["--fault_tolerance.enable"], "launch.max_restarts restarts all ranks"),
        (["--experimental.custom_import", "x"], "--import MODULE on the command line"),
        (["--zzz"], "unknown flag --zzz: there is no such setting."),
        (["--zzz"], "--help all lists every flag"),
        (["--stps", "4"], "did you mean --steps?"),
        (["--bf16", "true"], "write --training.mixed_precision_param bfloat16 in place of --bf16 true"),
        (["--eval_strategy=no"], "write --validation.interval 0 in place of --eval_strategy no"),
        (["--training.device", "gpu"], "training.device gpu is not one of auto, cpu, cuda.\n"),
        (["my.toml"], "fix    write --config my.toml in place of my.toml"),
        (["--recipe", "llama_debug"], "did you mean llama3_debug?"),
        (["--config", "none.toml"], "none.toml cannot be read: No such file"),
        (["--training.steps", "many"], "training.steps many is not an integer."),
        (["--training.steps", "many"], "fix    crius config explain training.steps says what it takes"),
        (["--training.steps", "1.5"], "training.steps 1.5 is not a whole number"),
        (["--training.steps"], "--training.steps has no value."),
        (["--compile.enable=maybe"], "compile.enable maybe is not true or false."),
        (["--data.source", "jsonll"], "no data source is called jsonll, did you mean jsonl?"),
        (["stray"], "stray"),
        (["--nproc", "-1"], "--nproc -1 is negative"),
    ],
)
def test_a_wrong_flag_is_one_message_that_names_it(refused, flags, said):
    assert said in refused(*flags)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[training]\nseq_lenn = 3", "unknown key training.seq_lenn, did you mean training.seq_len?"),
        ("[trainin]\nseq_len = 3", "did you mean training.seq_len?"),
        ("[float8]\nenable = true", "did you mean quantize.dense.float8.enable?"),
        ("[data]\npaht = 'x'", "did you mean data.path?"),
        ("[compile]\nno_enable = true", "unknown key compile.no_enable"),
        ("training = 3", "training is a section, not a setting."),
        ("[[optimizer]]\nlr = 1", "optimizer is a section, not a setting."),
        ("seq_len = 3", "did you mean training.seq_len?"),
        ("nproc = 2", "unknown key nproc"),
        ("recipe = 'llama3_debug'", "unknown key recipe"),
        ("[data.mix]\npath = 'x'", "write [[data.mix]] in place of [data.mix]"),
        ("[training.steps]\nx = 3", "did you mean training.steps?"),
        ("[training]\nsteps = 1.5", "training.steps 1.5 is not a whole number"),
        ("[training]\nsteps = [1, 2]", "is a list, and the setting takes an integer."),
        ("[training]\nsteps = true", "training.steps = true is true or false, and the setting takes an integer."),
        ("[training]\nsteps = '4'", 'training.steps = "4" is text, and the setting takes an integer.'),
        ("[training]\nsteps = '4'", "steps = 4"),
        ("[optimizer]\nlr = '1e-3'", 'optimizer.lr = "1e-3" is text, and the setting takes a number.'),
        ("[compile]\nenable = 'true'", "enable = true"),
        ("[compile]\nenable = 1", "compile.enable = 1 is an integer, and the setting takes true or false."),
        ("[tokenizer]\npath = 5", 'path = "5"'),
        ("[training]\nmixed_precision_param = 16", 'fix    mixed_precision_param = "auto" or "float32" or "bfloat16"'),
        ("[data]\npath = ['a', 5]", "the setting takes a list whose items are each text."),
        ("[data]\npath = ['ä', 5]", 'fix    path = ["ä", "5"]'),
        ("[training]\nsteps = 'many'", "fix    crius config explain training.steps says what it takes"),
        ("[training]\nsteps = 2020-01-01", "is a date or a time"),
        ("[compile]\ncache_dir = '/tmp/x'", "--compile.cache_dir /tmp/x, if you trust that folder"),
        ("[model]\nnorm_type = 'x'", "unknown key model.norm_type: Crius has no such setting."),
        ("[data]\nsource = 'xls'", "no data source is called xls."),
        ("[metrics]\nlog_freq = 3\nlog_interval = 4", "metrics.log_interval is given twice"),
        ("[training]\nseq-len = 3\nseq_len = 4", "training.seq_len is given twice"),
        ("[training\n", "line 1"),
        ("[training]\nsteps = \n", "line 2"),
    ],
)
def test_a_wrong_toml_key_or_value_is_one_message_that_names_the_file(refused, toml, text, said):
    file = toml(text)
    message = refused("--config", file)
    assert said in message
    assert str(file) in message


def test_wrong_keys_and_values_of_files_and_flags_are_reported_together(crius, toml):
    files = toml("[training]\nstepz = 1\nseq_len = '64'\n", "a.toml"), toml("[optimizer]\nlrr = 1\n", "b.toml")
    flags = ["--config", files[0], "--config", files[1], "--data.source", "xls", "--model.norm_type", "8", "--zzz"]
    code, _, message = crius("train", *flags, "--training.gc_interval", "many")
    assert code == 2
    assert message.count("ConfigError: unknown ") == 4
    flagged = ("--model.norm_type", "--zzz", "gc_interval many")
    for said in ("7 problems", "stepz", '"64" is text', "optimizer.lrr", "called xls", *flagged):
        assert said in message


def test_neither_a_flag_without_a_value_nor_a_key_given_twice_hides_other_mistakes(crius, toml):
    file = toml("[training]\nseq-len = 3\nseq_len = 4\nstepz = 1\nsteps = '2'\n")
    flags = ["--config", file, "--training.gc_interval", "--zzz", "3", "--debug.seed", "--optimizer.lr", "many"]
    code, _, message = crius("train", *flags)
    assert code == 2
    for said in ("7 problems", "seq_len is given twice", "stepz", '"2" is text', "--zzz", "optimizer.lr many"):
        assert said in message
    assert "--training.gc_interval has no value" in message and "--debug.seed has no value" in message


def test_a_file_of_wrong_keys_alone_is_a_short_message(crius, toml):
    _, _, message = crius("train", "--config", toml("\n".join(f"[a.b{number}]\nx = 1" for number in range(3000))))
    assert "2980 more keys are unknown" in message and message.count("\n") < 100


def test_a_known_name_is_a_known_name_and_no_table_has_one_twice():
    known = {*DEFAULTS, *(".no_".join(name.rsplit(".", 1)) for name in DEFAULTS)}
    assert {value.split()[0] for value in (*MOVED.values(), *ALIASES.values())} <= known
    assert not (MOVED.keys() | NOTHING.keys() | ALIASES.keys()) & DEFAULTS.keys()
    assert not MOVED.keys() & NOTHING.keys() and not ALIASES.keys() & (MOVED.keys() | NOTHING.keys())


@pytest.mark.parametrize("flavor", ["8B", "8b"])
def test_a_flavor_is_taken_ignoring_case(shown, toml, flavor):
    assert shown("--model.flavor", flavor)["model.flavor"]["value"] == "8b"
    assert shown("--config", toml(f"[model]\nflavor = '{flavor}'\nname = 'LLAMA3'\n"))["model.flavor"]["value"] == "8b"


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--lr", "0.5"], "optimizer.lr", 0.5),
        (["--steps=7"], "training.steps", 7),
        (["--batch", "4"], "training.global_batch_size", 4),
        (["--seq-len", "32", "--training.seq_len", "16"], "training.seq_len", 16),
    ],
)
def test_short_forms_of_the_most_used_settings(shown, flags, name, value):
    assert shown(*flags)[name] == {"value": value, "origin": "command line"}


def test_a_layout_in_one_word_is_its_degrees_and_options(shown, toml):
    settings = shown("--layout", "hsdp2x4_tp2+full")
    for name, value in (
        ("parallelism.data_parallel_replicate_degree", 2),
        ("parallelism.data_parallel_shard_degree", 4),
        ("parallelism.tensor_parallel_degree", 2),
        ("parallelism.pipeline_parallel_degree", 1),
        ("activation_checkpoint.mode", "full"),
    ):
        assert settings[name] == {"value": value, "origin": "command line"}
    assert settings["training.local_batch_size"]["value"] == -1
    file = toml("[training]\nglobal_batch_size = 32\n[parallelism]\ntensor_parallel_degree = 8\n")
    settings = shown("--config", file, "--layout", "fsdp2_accum4")
    assert settings["training.global_batch_size"]["value"] == 32
    assert settings["training.local_batch_size"]["value"] == 4
    assert settings["parallelism.tensor_parallel_degree"]["value"] == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--layout", "fdsp4"], "fdsp4 is not a layout term, did you mean fsdp?"),
        (
            ["--layout", "tp2", "--parallelism.tensor_parallel_degree", "4"],
            "both set parallelism.tensor",
        ),
        (["--layout", "fsdp4_accum3", "--batch", "8"], "8 is not a multiple of 4 data-parallel ranks x 3 microbatches"),
    ],
)
def test_a_wrong_layout_is_one_message(refused, flags, said):
    assert said in refused(*flags)


@pytest.mark.parametrize("written", ["[data]\npath = ['b', 'c']", "[data]\npath = []", "[data]\npath = 'b'"])
def test_a_list_replaces_the_list_of_a_weaker_source(shown, toml, written):
    weak, strong = toml("[data]\npath = ['a']\n", "weak.toml"), toml(written, "strong.toml")
    want = tomllib.loads(written)["data"]["path"]
    assert shown("--config", weak, "--config", strong)["data.path"]["value"] == ([want] if want == "b" else want)
    assert shown("--config", strong, "--data.path", "z")["data.path"] == {"value": ["z"], "origin": "command line"}


def test_run_toml_gives_back_every_setting_but_the_folder(tmp_path):
    config = everything_changed(RunConfig())
    same = [name for name, value in flatten(config).items() if value == DEFAULTS[name] and name != "model.from_hf"]
    assert all(len(get_args(hint_of(name))) == 1 for name in same), "a choice of one cannot be changed, all others can"
    (tmp_path / "run.toml").write_text(to_toml(config))
    flags = ["--config", str(tmp_path / "run.toml"), *command_line_flags(config)]
    by_epochs = replace_fields(config, {"training.steps": DEFAULTS["training.steps"]})  # they come to the steps anew
    assert parse(flags) == replace(by_epochs, job=RunConfig().job)
    by_steps = replace_fields(config, {"training.epochs": -1})
    (tmp_path / "run.toml").write_text(to_toml(by_steps))
    assert parse(flags) == replace(by_steps, job=RunConfig().job)
    assert command_line_flags(config) == [f"--compile.cache_dir={config.compile.cache_dir}"], "a file may not say it"


@pytest.mark.parametrize(
    ("flags", "name", "want"),
    [
        (["--training.steps", "3", "--training.steps", "4"], "training.steps", 4),
        (["--training.steps=3", "--training.seq_len", "8", "--training.steps", "4"], "training.steps", 4),
        (["--training.local_batch_size", "-1", "--training.local_batch_size", "2"], "training.local_batch_size", 2),
        (["--metrics.log_freq", "3", "--metrics.log_interval", "5"], "metrics.log_interval", 5),
        (["--compile.enable", "--data.source", "text", "--compile.no_enable"], "compile.enable", False),
        (["--compile.enable=false", "--compile.enable"], "compile.enable", True),
        (["--data.path", "a", "--data.path", "b"], "data.path", ("a", "b")),
    ],
)
def test_of_a_flag_given_twice_the_last_one_counts_and_lists_collect(flags, name, want):
    given = flatten(parse([*flags, "--debug.seed", "7"]))
    assert (given[name], given["debug.seed"]) == (want, 7)


def test_every_setting_has_a_flag():
    config = everything_changed(RunConfig())
    flags = []
    for name, value in flatten(config).items():
        for item in value if isinstance(value, tuple) else [value]:
            flags.append(f"--{name}={item}")
    assert parse(flags) == config


def test_config_diff_names_the_settings_that_differ(crius, toml, tmp_path):
    left = toml("[training]\nsteps = 3\n[data]\npath = ['a']\n", "left.toml")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text("[training]\nsteps = 4\n[data]\npath = ['a']\n")
    code, out, _ = crius("config", "diff", left, tmp_path / "run")
    assert (code, out) == (0, "training.steps: 3 -> 4\n")
    _, out, _ = crius("config", "diff", left, tmp_path / "run", "--json")
    assert json.loads(out) == {"training.steps": {"left": 3, "right": 4}}
    assert crius("config", "diff", "llama3_debug", "llama3_debug")[:2] == (0, "no difference\n")
    older = toml("[training]\nsteps = 3\n[data]\npath = ['a']\n[compile]\ncache_dir = '/tmp/x'\n", "older.toml")
    code, out, err = crius("config", "diff", left, older)
    assert (code, out) == (0, "no difference\n")
    assert f"warning: compile.cache_dir in {older} is left out" in err
    code, _, err = crius("config", "diff", left, "nowhere")
    assert code == 2
    assert "nowhere is not a run folder, a TOML file or a recipe" in err


def test_config_show_prints_every_setting_with_its_value_and_origin(crius, shown):
    _, out, _ = crius("config", "show", "--training.steps", "7")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert list(lines) == list(DEFAULTS)
    assert lines["training.steps"].split(maxsplit=2)[1:] == ["7", "command line"]
    assert list(shown()) == list(DEFAULTS)


@pytest.mark.parametrize(
    ("local", "total", "ranks", "want"),
    [
        (-1, -1, 1, BatchSizes(8, 8, 1)),
        (-1, -1, 4, BatchSizes(2, 8, 1)),
        (-1, -1, 3, BatchSizes(3, 9, 1)),
        (-1, -1, 16, BatchSizes(1, 16, 1)),
        (2, -1, 2, BatchSizes(2, 8, 2)),
        (4, -1, 4, BatchSizes(4, 16, 1)),
        (3, -1, 1, BatchSizes(3, 9, 3)),
        (-1, 64, 2, BatchSizes(8, 64, 4)),
        (-1, 26, 2, BatchSizes(1, 26, 13)),
        (2, 16, 4, BatchSizes(2, 16, 2)),
        (-1, 10, 4, "global_batch_size 10 is not a multiple of the 4 data-parallel ranks; nearest that work: 8 or 12"),
        (-1, 3, 4, "global_batch_size 3 is not a multiple of the 4 data-parallel ranks; the least that works: 4"),
        (3, 16, 2, "not a multiple of local_batch_size 3 x 2 data-parallel ranks = 6; nearest that work: 12 or 18"),
        (8, 4, 1, "not a multiple of local_batch_size 8 x 1 data-parallel ranks = 8; the least that works: 8"),
    ],
)
def test_batch_sizes_are_filled_in_or_refused_with_the_nearest_that_work(local, total, ranks, want):
    training = TrainingConfig(local_batch_size=local, global_batch_size=total)
    if isinstance(want, BatchSizes):
        assert batch_sizes(training, ranks) == want
        return
    with pytest.raises(ValueError, match=f"{re.escape(want)}$") as caught:
        batch_sizes(training, ranks)
    for fixed in re.findall(r"\d+", want.rpartition(":")[2]):
        assert batch_sizes(replace(training, global_batch_size=int(fixed)), ranks).total == int(fixed), caught


def test_every_setting_has_a_docstring():
    """The docstring is the help text."""
    bare = []
    for section in {type(section) for section, _ in settings_of(RunConfig())}:
        body = ast.parse(inspect.getsource(section)).body[0].body
        for node, after in zip(body, [*body[1:], None], strict=True):
            has_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
            if isinstance(node, ast.AnnAssign) and not has_text:
                kind = get_type_hints(section)[node.target.id]
                if not dataclasses.is_dataclass(kind):
                    bare.append(f"{section.__name__}.{node.target.id}")
    assert bare == []


def test_help_lists_every_setting(crius, monkeypatch):
    assert {f"--{name}" for name in DEFAULTS} <= set(flags_of(crius, monkeypatch, "train"))


def verbs_of(group):
    for member in group:
        yield from verbs_of(member) if isinstance(member, Verbs) else [member]


@pytest.mark.full
def test_no_released_flag_disappears(crius, monkeypatch):
    """Scripts rely on flags. A new flag: add its line to tests/golden/flags.txt, which is sorted.

    A flag that has to go: keep its name as a row of ``ALIASES`` or ``MOVED`` and say so in the commit message.
    """
    released = (GOLDEN / "flags.txt").read_text().splitlines()
    add_verbs()
    others = (
        "verify",
        "bench",
        "plan",
        "doctor",
        "data show",
        "data mix",
        "config explain",
        "tune",
    )  # repeat those of train
    now = []
    for verb in verbs_of(app):
        words = " ".join(verb.words)
        found = flags_of(crius, monkeypatch, *verb.words)
        now += [f"{words} {flag}" for flag in found if "." not in flag or not words.startswith(others)]
        now += [f"{words} {flag}" for flag in verb.moved]
    now.sort()
    assert released == sorted(set(released))
    assert set(released) - set(now) == set(), "released flags are gone; see the docstring of this test"
    assert set(now) - set(released) == set(), "new flags: add these lines to tests/golden/flags.txt"


def test_a_default_changes_only_with_its_line():
    """A config that leaves a setting out has another curve once the default changes: say so in the commit message."""
    released = (GOLDEN / "defaults.txt").read_text().splitlines()
    assert released == [f"{name} = {value!r}" for name, value in sorted(DEFAULTS.items())]


def flags_of(crius, monkeypatch, *verb):
    """Every flag that the help of a verb names at the start of an entry."""
    monkeypatch.setenv("COLUMNS", "300")
    code, out, _ = crius(*verb, "--help", "all")
    assert code == 0
    entries = re.findall(r"^  (?:[A-Z]+ )?((?:--[\w.]+ ?)+)", out, re.MULTILINE)
    return sorted({flag for entry in entries for flag in entry.split()})


def settings_of(config):
    """Pairs of a section and a field of it, of all settings."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings_of(value)
        else:
            yield config, field.name


def changed(kind, default):
    """Another value of the type than the default, with characters that quoting can get wrong."""
    if kind is bool or bool in get_args(kind):
        return not default
    if kind is str:
        return 'it\'s "a" = [b], c'
    if get_origin(kind) is tuple:
        return ("one.txt", "two, three.txt")
    if get_origin(kind) is Literal:
        return next((choice for choice in get_args(kind) if choice != default), default)
    if kind in (int, float):
        return kind(default + 3) + (0.0625 if kind is float else 0)
    return changed(min(get_args(kind), key=lambda part: part not in (bool, int, float)), 1)


def everything_changed(config):
    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        nested = dataclasses.is_dataclass(value)
        values[field.name] = (
            everything_changed(value) if nested else changed(get_type_hints(type(config))[field.name], value)
        )
    if isinstance(config, DataConfig):
        values["source"] = "jsonl"  # one that there is
    if isinstance(config, ModelConfig):
        values["from_hf"] = ""  # it would be read
    return type(config)(**values)


def as_json(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[training]\nsteps = " + b"9" * 5000, "an integer of thousands of digits"),
        (
            b"[training]\nsteps = " + b"9" * 4000,
            "9999999999999999999999999999999999999999... does not fit",
        ),
        (b"[training]\nsteps = " + b"[" * 5000, "nested too deeply"),
        (b"[training]\nsteps = " + b"[" * 90 + b"]" * 90, "nested deeper than 50 levels"),
        (b".".join([b"a"] * 2000) + b" = 1", "nested deeper than 50 levels"),
        (b"#" * (1 << 20) + b"\n", "larger than 1,048,576 bytes"),
        (b'["a\\u001b[31m"]\nx = 1', "unknown key 'a\\x1b[31m.x'"),
        (b"x = '\xff'", "is not valid TOML"),
        (b"[training]\nsteps = 1e400", "does not fit into 64 bits"),
    ],
)
def test_a_hostile_file_of_settings_is_a_short_message(refused, tmp_path, content, said):
    (tmp_path / "a.toml").write_bytes(content)
    message = refused("--config", tmp_path / "a.toml")
    assert said in message and len(message) < 1000


def test_a_flag_of_thousands_of_digits_is_a_short_message(refused):
    assert "does not fit into 64 bits" in (message := refused("--training.seq_len", "9" * 5000))
    assert len(message) < 1000


def test_an_argument_that_is_not_utf8_is_a_message(refused):
    assert r"'caf\udce9.toml' is not UTF-8" in refused("--config", "caf\udce9.toml")
