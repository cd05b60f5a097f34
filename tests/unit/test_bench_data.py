"""``crius bench data`` and ``crius bench startup``: what is counted, and where a start's time is said to go."""

import dataclasses
import json

import pytest
from harness import TEXT, parse

from crius import cli
from crius.data.cache import open_cached
from crius.data.loader import BatchLoader
from crius.data.tokenizer import build_tokenizer
from crius.errors import EnvironmentError
from crius.tools.bench import data, startup
from crius.tools.bench.result import Samples

CORPUS = ["--data.source", "text", "--data.path", str(TEXT), "--training.seq_len", "16"]
TINY = [*CORPUS, "--training.global_batch_size", "4"]


def measured(verb, flags, capsys, **options):
    assert verb(parse(flags), as_json=True, **options) == 0
    return json.loads(capsys.readouterr().out)


def test_each_way_to_get_tokens_is_timed_as_often_as_asked_and_counts_its_tokens(capsys, tmp_path):
    found = measured(data.data, [*TINY, "--data.cache_dir", str(tmp_path)], capsys, batches=3, repeat=2)
    plain, ahead, tokenised = found["rows"]
    assert plain["tokens"] == ahead["tokens"] == 3 * 4 * 16
    config = parse([*TINY, "--data.cache_dir", str(tmp_path)])
    file = open_cached(config.data, config.tokenizer, build_tokenizer(config.tokenizer))
    assert tokenised["tokens"] == file.meta.num_tokens
    for row in found["rows"]:
        assert len(row["cpu"]["samples_ms"]) == len(row["wall"]["samples_ms"]) == 2
        rate = row["tokens"] / (row["cpu"]["milliseconds"] / 1e3)
        assert row["tokens_per_second_per_core"] == pytest.approx(rate)


def test_tokens_are_timed_without_a_tokenisation(capsys, tmp_path):
    config = parse([*TINY, "--data.cache_dir", str(tmp_path)])
    folder = open_cached(config.data, config.tokenizer, build_tokenizer(config.tokenizer)).folder
    flags = ["--data.source", "tokens", "--data.path", str(folder), *TINY[4:]]
    names = [row["name"] for row in measured(data.data, flags, capsys, batches=1, repeat=1)["rows"]]
    assert len(names) == 2 and all(name.startswith("batches") for name in names)


def test_no_sample_reads_what_another_read(capsys, tmp_path, monkeypatch):
    """What was read before lies in caches of the processor and of the order, which flatters."""
    steps = []
    plain = BatchLoader.__next__

    def read(self):
        steps.append(self.step)
        return plain(self)

    monkeypatch.setattr(BatchLoader, "__next__", read)
    measured(data.data, [*TINY, "--data.cache_dir", str(tmp_path)], capsys, batches=2, repeat=2)
    assert steps == list(range(8))  # two samples of two rows


def row_of(code, text, **options):
    return startup.StartupRow("row", ("-c", text), code=code, **options)


def test_a_command_is_timed_from_start_to_end_with_its_cpu_seconds():
    row = row_of(3, "import sys, time; time.sleep(0.3); sys.exit(3)")
    row.start(counts=False)
    row.start()
    assert len(row.wall.seconds) == len(row.cpu.seconds) == 1
    assert row.wall.median > 0.3
    assert 0 < row.cpu.median < row.wall.median


def test_a_command_that_fails_is_no_time_but_an_error_with_what_it_said():
    with pytest.raises(EnvironmentError, match="exits with 1, not 0") as caught:
        row_of(0, "raise SystemExit('no room')").start()
    assert "no room" in caught.value.why


def test_imports_are_those_before_the_trainer_runs_and_the_parts_add_up(tmp_path):
    seconds = {"initialise": 3.0, "data": 0.25, "compute": 0.5, "gc": 0.125, "other": 0.0625}
    (tmp_path / "summary.json").write_text(json.dumps({"seconds": seconds}))
    lines = [
        "import time: self [us] | cumulative | imported package",
        "import time:     62500 |      62500 |   cyclopts",
        "import time:     62500 |     125000 | crius.cli.app",
        "import time:   1000000 |    1000000 |     torch._C",
        "import time:    500000 |    1500000 |   torch",
        "import time:    250000 |     250000 |   torchvision",
        "import time:    125000 |    1875000 | crius.train.job",
        "import time:   9000000 |    9000000 | torch._dynamo",  # in the first step: part of it
    ]
    parts = startup._parts("\n".join(lines), tmp_path)
    assert parts["imports: torch"] == 1.5
    assert parts["imports: all others"] == 0.375
    assert parts["config, corpus, ranks, weights"] == 3.0 - 1.875
    assert parts["imports: the command line"] == 0.125  # before the clock of the summary starts
    assert parts["until the first step is done"] == 0.125 + 3.75
    assert sum(parts.values()) - parts["until the first step is done"] == 0.125 + sum(seconds.values())


def test_a_training_that_compiles_starts_with_a_cold_and_with_a_warm_cache(tmp_path):
    config = parse([*TINY, "--compile.enable"])
    cold, warm = startup._train_rows(config, tmp_path)
    folders = [tmp_path / "cold", tmp_path / "warm"]
    for row, folder in zip((cold, warm), folders, strict=True):
        folder.mkdir()
        row.prepare()
        assert f"--compile.cache_dir={folder}" in row.command
    assert [folder.exists() for folder in folders] == [False, True]
    [plain] = startup._train_rows(dataclasses.replace(config, compile=parse(TINY).compile), tmp_path)
    assert plain.name == "crius train, one step"


@pytest.mark.slow
def test_the_step_that_is_timed_is_one_of_the_run_that_was_asked_for(tmp_path):
    flags = [*TINY, "--model.num_layers", "1", "--training.steps", "7", "--data.cache_dir", str(tmp_path / "cache")]
    [row] = startup._train_rows(parse(flags), tmp_path)
    row.start()
    assert row.command[:3] == ("-X", "importtime", "-m") and len(row.wall.seconds) == 1
    assert all(samples.seconds[0] >= 0 for samples in row.samples_of.values())
    assert row.samples_of["imports: torch"].seconds[0] > 0.2  # torch has two thousand modules
    [run_dir] = tmp_path.glob("run-*")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["tokens"]) == (1, 4 * 16)
    assert row.wall.seconds[0] > summary["wall_seconds"]


def test_the_table_and_the_json_have_every_command_and_every_part(capsys):
    row = startup.StartupRow("crius --help", (), wall=Samples([0.25, 0.25]), cpu=Samples([0.125, 0.125]))
    row.samples_of["first batch"] = Samples([0.0625, 0.0625])
    row.samples_of["compile"] = Samples([0.0, 0.0])
    startup._print([row], as_json=True)
    [found] = json.loads(capsys.readouterr().out)["rows"]
    assert (found["name"], found["wall"]["milliseconds"], found["cpu"]["samples_ms"]) == (row.name, 250, [125, 125])
    assert found["parts_ms"] == {"first batch": [62.5, 62.5], "compile": [0, 0]}
    startup._print([row], as_json=False)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split() for line in lines[1:]] == [
        ["crius", "--help", "0.250", "0%", "0.125"],
        ["first", "batch", "0.062"],
        ["compile", "0.000"],
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["data", "--batches", "-1"], "batches are at least 0"),
        (["data", "--repeat", "0"], "rounds at least 1"),
        (["data", "--parallelism.tensor_parallel_degree", "2"], "no effect: one rank reads"),
        (["startup", "--repeat", "0"], "--repeat 0 is not positive"),
        (["startup", "--job.run_dir", "x"], "no effect"),
    ],
)
def test_a_wrong_call_exits_with_2_and_says_why(arguments, said, capsys):
    assert cli.main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_verb_prints_a_rate_a_core(tmp_path, capsys):
    flags = [*TINY, "--data.cache_dir", str(tmp_path), "--batches", "2", "--repeat", "1"]
    assert cli.main(["bench", "data", *flags]) == 0
    out = capsys.readouterr().out
    assert "tokens/s/core" in out
    assert len([line for line in out.splitlines() if line.startswith(("batches,", "tokenised"))]) == 3
