"""``benchmarks.data``, ``startup``, ``optimizer``, ``checkpoint``: what is counted, and where a start's time went."""

import json
import sys

import pytest
import torch
from harness import TEXT, parse

from benchmarks import checkpoint, data, optimizer, startup
from benchmarks.rows import Row, measure
from crius.data.cache import open_cached
from crius.data.loader import BatchLoader
from crius.errors import ConfigError, EnvironmentError
from crius.tokens.tokenizer import build_tokenizer
from crius.train.inputs import describe_model

CPU = torch.device("cpu")
CORPUS = ["--data.source", "text", "--data.path", str(TEXT), "--training.seq_len", "16"]
TINY = [*CORPUS, "--training.global_batch_size", "4", "--training.device", "cpu"]
SMALL = ["--model.num_layers", "1", "--training.device", "cpu"]


def measured(module, flags, capsys):
    assert module.main([*flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_rows_take_turns_in_either_order_and_the_first_round_does_not_count():
    done = []
    rows = [Row(name, lambda name=name: done.append(name) or 2.0, parts=lambda: {"part": len(done)}) for name in "ab"]
    measure(rows, 2)
    assert "".join(done) == "abbaab"
    assert [row.samples["part"].seconds for row in rows] == [[4, 5], [3, 6]]
    assert rows[0].amount == 2 and len(rows[0].cells()) == 2


def test_each_way_to_get_tokens_is_timed_as_often_as_asked_and_counts_its_tokens(capsys, tmp_path):
    cache = ["--data.cache_dir", str(tmp_path)]
    found = measured(data, [*TINY, *cache, "--batches", "3", "--repeat", "2"], capsys)
    plain, ahead, tokenised = found["rows"]
    assert plain["amount"] == ahead["amount"] == 3 * 4 * 16
    config = parse([*TINY, *cache])
    file = open_cached(config.data, config.tokenizer, build_tokenizer(config.tokenizer))
    assert tokenised["amount"] == file.meta.num_tokens
    for row in found["rows"]:
        assert len(row["cpu"]["samples_ms"]) == len(row["wall"]["samples_ms"]) == 2
    flags = ["--data.source", "tokens", "--data.path", str(file.folder), *TINY[4:], "--batches", "1", "--repeat", "1"]
    names = [row["name"] for row in measured(data, flags, capsys)["rows"]]
    assert len(names) == 2 and all(name.startswith("batches") for name in names)  # nothing to tokenise


def test_no_sample_reads_what_another_read(capsys, tmp_path, monkeypatch):
    """What was read before lies in caches of the processor and of the order, which flatters."""
    steps = []
    plain = BatchLoader.__next__

    def read(self):
        steps.append(self.step)
        return plain(self)

    monkeypatch.setattr(BatchLoader, "__next__", read)
    measured(data, [*TINY, "--data.cache_dir", str(tmp_path), "--batches", "2", "--repeat", "1"], capsys)
    assert steps == list(range(8))  # two rounds of two rows


def test_a_command_is_timed_with_its_cpu_seconds_and_one_that_fails_is_an_error():
    code = "import sys, time; time.sleep(0.3); sum(range(10**6)); sys.exit(3)"
    row = Row("row", lambda: startup.start(("-c", code), 3))
    row.measure(counts=True)
    assert row.samples["wall"].median > 0.3 and 0 < row.samples["cpu"].median < row.samples["wall"].median
    with pytest.raises(EnvironmentError, match="exits with 1, not 0") as caught:
        startup.start(("-c", "raise SystemExit('no room')"))
    assert "no room" in caught.value.why


def test_imports_are_those_before_the_trainer_runs_and_the_parts_add_up(tmp_path):
    seconds = {"initialise": 3.0, "data": 0.25, "compute": 0.5, "gc": 0.125, "other": 0.0625}
    (tmp_path / "summary.json").write_text(json.dumps({"seconds": seconds}))
    lines = [
        "import time: self [us] | cumulative | imported package",
        "import time:     62500 |      62500 |   huggingface",
        "import time:     62500 |     125000 | crius.cli.app",
        "import time:   1000000 |    1000000 |     torch._C",
        "import time:    500000 |    1500000 |   torch",
        "import time:    250000 |     250000 |   torchvision",
        "import time:    125000 |    1875000 | crius.train.job",
        "import time:   9000000 |    9000000 | torch._dynamo",  # in the first step: part of it
    ]
    parts = startup.parts_of("\n".join(lines), tmp_path)
    assert parts["imports: torch"] == 1500
    assert parts["imports: all others"] == 375
    assert parts["config, corpus, ranks, weights"] == 3000 - 1875
    assert parts["imports: the command line"] == 125  # before the clock of the summary starts
    assert parts["until the first step is done"] == 125 + 3750
    assert sum(parts.values()) - parts["until the first step is done"] == 125 + 1e3 * sum(seconds.values())


def test_a_training_that_compiles_starts_with_a_cold_and_with_a_warm_cache(tmp_path):
    rows = startup.train_rows(TINY, tmp_path, compiles=True)
    folders = [tmp_path / "cold", tmp_path / "warm"]
    for row, folder in zip(rows, folders, strict=True):
        folder.mkdir()
        row.prepare()
        assert row.work.args[0][-2:] == ("--compile.cache_dir", str(folder))
    assert [folder.exists() for folder in folders] == [False, True]
    [plain] = startup.train_rows(TINY, tmp_path, compiles=False)
    assert plain.name == "crius train, one step"


@pytest.mark.slow
def test_the_step_that_is_timed_is_one_of_the_run_that_was_asked_for(tmp_path):
    flags = [*TINY, "--model.num_layers", "1", "--training.steps", "7", "--data.cache_dir", str(tmp_path / "cache")]
    [row] = startup.train_rows(flags, tmp_path, compiles=False)
    row.measure(counts=True)
    assert row.samples["imports: torch"].median > 200  # torch has two thousand modules
    [run_dir] = tmp_path.glob("run-*")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["tokens"]) == (1, 4 * 16)
    assert row.samples["wall"].median > summary["wall_seconds"]


@pytest.mark.long
def test_all_optimizers_step_over_the_parameters_of_the_model(capsys):
    found = measured(optimizer, [*SMALL, "--repeat", "1"], capsys)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == list(optimizer.VARIANTS)
    facts = describe_model(parse(SMALL))
    states = {name: 2**30 * row["parts"]["states GiB"][0] for name, row in rows.items()}
    counters = 4 * len(facts.parameter_shapes)  # a step number for each parameter
    exact = 8 * facts.num_parameters + counters
    assert states["for-loop"] == states["foreach"] == states["fused"] == exact
    assert states["8bit"] < states["bfloat16"] < 0.51 * exact
    assert all(row["amount"] == optimizer.TIMED_STEPS and row["wall"]["milliseconds"] > 0 for row in rows.values())


def test_an_optimizer_really_changes_the_weights_that_it_is_timed_on():
    config = parse(SMALL)
    facts = describe_model(config)
    parameters = optimizer.make_parameters(facts, torch.float32, CPU)
    assert {name: tuple(parameter.shape) for name, parameter in parameters} == facts.parameter_shapes
    before = [parameter.detach().clone() for _, parameter in parameters]
    optimizer.rows_of(config, facts, parameters, ["fused"])
    assert all(not torch.equal(old, new) for old, (_, new) in zip(before, parameters, strict=True))


@pytest.mark.long
def test_a_package_that_is_missing_is_reported_with_the_line_that_installs_it(monkeypatch, capsys):
    def missing(*arguments, **options):
        raise ModuleNotFoundError("No module named 'torchao'", name="torchao")

    monkeypatch.setattr(optimizer, "build_optimizer", missing)
    config = parse(SMALL)
    facts = describe_model(config)
    parameters = optimizer.make_parameters(facts, torch.float32, CPU)
    assert optimizer.rows_of(config, facts, parameters, []) == []
    assert " 'torchao>=0.18'" in capsys.readouterr().err
    with pytest.raises(EnvironmentError, match="8bit needs torchao"):
        optimizer.rows_of(config, facts, parameters, ["8bit"])


def test_peak_memory_is_what_was_taken_on_top():
    before = torch.ones(1 << 22)
    peak = optimizer.PeakMemory(CPU)
    if peak.read() is None:
        pytest.skip("this kernel does not reset the peak of the resident set")
    del before
    taken = torch.ones(16 << 20)  # 64 MiB
    del taken
    assert (64 << 20) * 0.7 < peak.read() < (64 << 20) * 1.5  # what was freed before may serve part of it


def test_checkpoints_are_timed_in_a_folder_of_their_own(tmp_path, capsys):
    mine = tmp_path / "bench-checkpoint" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    found = measured(checkpoint, ["--folder", str(tmp_path), "--gib", "0.01", "--repeat", "1"], capsys)
    assert len(found["rows"]) == 8 and all(row["amount"] > 0 for row in found["rows"])
    assert mine.read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["bench-checkpoint"]


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        (data, ["--repeat", "0"], "argument --repeat: 0 is not positive"),
        (data, ["--out", "/"], "argument --out: / cannot be written"),
        (data, ["--parallelism.tensor_parallel_degree", "2"], "no effect: one rank reads"),
        (data, ["--model.num_layerz", "2"], "did you mean --model.num_layers"),
        (startup, ["--job.run_dir", "x"], "no effect"),
        (optimizer, ["--variants", "adafactor"], "adafactor"),
        (optimizer, ["--parallelism.data_parallel_shard_degree", "2"], "no effect"),
        (optimizer, ["--model.flavor", "405b"], "are free"),
        (checkpoint, ["--gib", "nan"], "--gib nan"),
        (checkpoint, ["--gib", "1e9"], "or another --folder"),
    ],
)
def test_a_wrong_call_says_why(module, arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = [] if module is checkpoint else TINY
    with pytest.raises((ConfigError, SystemExit)) as caught:
        module.main([*given, *arguments])
    assert said in str(caught.value) + capsys.readouterr().err


def test_the_command_line_exits_as_crius_does_and_keeps_the_text_of_a_file_for_results(tmp_path, monkeypatch, capsys):
    from benchmarks.command import end_with

    old = tmp_path / "old.json"
    old.write_text("{}")
    monkeypatch.setattr(sys, "argv", ["data", *TINY, "--out", str(old), "--training.steps", "0"])
    with pytest.raises(SystemExit, match="2"):
        end_with(data.main)
    assert "training.steps" in capsys.readouterr().err and old.read_text() == "{}"
