"""``crius bench``: what it times, what it makes of the times, and what it refuses."""

import json

import pytest
import torch
from harness import crius, llama, parse

from crius import cli
from crius.config.low_precision import linear_choices
from crius.config.training import FORMATS
from crius.errors import ConfigError
from crius.models.layers import Linear
from crius.tools.bench import checkpoint, machine, optimizer, quantize, speedups
from crius.tools.bench.result import Samples, check_result_file
from crius.train.inputs import describe_model

CPU = torch.device("cpu")
TINY = ["--model.num_layers", "1", "--training.device", "cpu"]
FEW = {"tokens": 32, "repeat": 2, "modes": "eager", "emulated": True, "as_json": True}


def measured(verb, flags, capsys, **options):
    config = parse([*TINY, *flags])
    code = verb(config, describe_model(config), **options)
    return code, json.loads(capsys.readouterr().out)


def test_all_optimizers_step_over_the_parameters_of_the_model(capsys):
    code, found = measured(optimizer.optimizer, [], capsys, repeat=1, as_json=True)
    rows = {row["optimizer"]: row for row in found["rows"]}
    assert (code, list(rows)) == (0, list(optimizer.VARIANTS))
    facts = describe_model(parse(TINY))
    assert found["parameters"] == facts.num_parameters
    assert all(len(row["samples_ms"]) == optimizer.TIMED_STEPS and row["milliseconds"] > 0 for row in rows.values())
    counters = 4 * len(facts.parameter_shapes)  # a step number for each parameter
    exact = 8 * facts.num_parameters + counters
    for name in ("for-loop", "foreach", "fused"):
        assert rows[name]["state_bytes"] == exact
    assert rows["for-loop"]["ratio"] == 1
    assert rows["8bit"]["state_bytes"] < rows["bfloat16"]["state_bytes"] < 0.51 * exact


def test_an_optimizer_really_changes_the_weights_that_it_is_timed_on():
    config = parse(TINY)
    facts = describe_model(config)
    parameters = optimizer.make_parameters(facts, torch.float32, CPU)
    assert {name: tuple(parameter.shape) for name, parameter in parameters} == facts.parameter_shapes
    before = [parameter.detach().clone() for _, parameter in parameters]
    row = optimizer.OptimizerRow("fused")
    optimizer._round(row, config, parameters, facts.plan, CPU)
    assert all(not torch.equal(old, new) for old, (_, new) in zip(before, parameters, strict=True))


def test_a_package_that_is_missing_is_a_row_with_the_line_that_installs_it(monkeypatch, capsys):
    def missing(*arguments, **options):
        raise ModuleNotFoundError("No module named 'torchao'", name="torchao")

    monkeypatch.setattr(optimizer, "build_optimizer", missing)
    code, found = measured(optimizer.optimizer, [], capsys, repeat=1, as_json=True)
    assert code == 0
    assert "torchao is not installed" in found["rows"][0]["refusal"]
    assert "install 'torchao>=0.18'" in found["rows"][0]["refusal"]
    assert measured(optimizer.optimizer, [], capsys, repeat=1, variants="8bit", as_json=True)[0] == 1


def test_a_model_that_does_not_fit_is_refused_with_a_number_of_layers_that_does():
    config = parse(["--model.flavor", "8b"])
    facts = describe_model(config)
    free = 60 << 30
    with pytest.raises(ConfigError) as caught:
        optimizer.check_memory(config, facts, free, CPU)
    layers = int(caught.value.fix.split("--model.num_layers ")[1].split(",")[0])
    for count, fits in ((layers, True), (layers + 1, False)):
        smaller = llama("8b", num_layers=count)
        assert (optimizer.needed_bytes(smaller, "float32") <= free) == fits
    with pytest.raises(ConfigError, match="smaller --model.flavor"):
        optimizer.check_memory(config, facts, 1 << 30, CPU)


def test_peak_memory_is_what_was_taken_on_top():
    before = torch.ones(1 << 22)
    peak = machine.PeakMemory(CPU)
    if peak.read() is None:
        pytest.skip("this kernel does not reset the peak of the resident set")
    del before
    taken = torch.ones(16 << 20)  # 64 MiB
    del taken
    assert (64 << 20) * 0.7 < peak.read() < (64 << 20) * 1.5  # what was freed before may serve part of it


def test_each_shape_is_timed_once_in_each_format(capsys):
    code, found = measured(quantize.quantize, ["--model.num_layers", "2"], capsys, **FEW)
    assert code == 0
    shapes = {(row["out_features"], row["in_features"]): row["layers"] for row in found["rows"]}
    assert shapes == {
        (128, 128): {"attention.wq": 2, "attention.wo": 2},
        (64, 128): {"attention.wk": 2, "attention.wv": 2},
        (384, 128): {"feed_forward.w1": 2, "feed_forward.w3": 2},
        (128, 384): {"feed_forward.w2": 2},
        (512, 128): {"output": 1},
    }
    for shape in shapes:
        timed = [row["format"] for row in found["rows"] if (row["out_features"], row["in_features"]) == shape]
        assert timed == ["bfloat16", *FORMATS]
    assert found["emulated"] and found["recommended"] == []


def test_shapes_are_those_of_a_rank(capsys):
    flags = ["--parallelism.tensor_parallel_degree", "8", "--model.vocab_size", "2256"]
    config = parse([*TINY, *flags])
    facts = describe_model(config)
    choices = linear_choices(config, facts, facts.plan, accelerated=True)
    shapes = {(shape.out_features, shape.in_features): shape for shape in quantize.shapes_of(config, facts)}
    assert set(shapes) == {choice.local for choice in choices}
    output = shapes[282, 128]  # 2256 / 8, no multiple of 16: timed in bfloat16 alone
    works = quantize._works(config, output, list(FORMATS), ["eager"], 32, CPU, True)
    assert list(works) == [("bfloat16", "eager")]


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_timed_is_the_layer_that_a_run_would_have(name):
    dense = quantize.replace_fields(parse(TINY), FORMATS[name]).quantize.dense
    shape = speedups.Shape(64, 128)
    low = quantize.make_linear(shape, dense, CPU, True)
    high = quantize.make_linear(shape, None, CPU, True)
    assert type(low).multiply is not Linear.multiply
    assert not isinstance(high, type(low))
    with torch.no_grad():
        low.weight.copy_(high.weight)
    x = torch.randn(32, 128, dtype=torch.bfloat16)
    difference = (low(x) - high(x)).norm() / high(x).norm()
    assert 0 < difference < 0.1  # a rounding to three bits behind the point is up to 2**-4, 0.02 in the mean


def test_mxfp8_keeps_in_other_blocks_what_a_scale_for_the_row_loses():
    """Both have power-of-two scales, which change no rounding until numbers are too small for E4M3: their curves are
    alike. A number 10**6 times as large as the others leaves nothing of its row, but of MXFP8 only of its block."""
    x, weight = torch.ones(32, 128, dtype=torch.bfloat16), torch.full((64, 128), 0.5, dtype=torch.bfloat16)
    x[:, 0], weight[:, 0] = 1e6, 0  # the large one itself adds nothing
    found = {}
    for name in ("float8_rowwise", "mxfp8"):
        dense = quantize.replace_fields(parse(TINY), FORMATS[name]).quantize.dense
        layer = quantize.make_linear(speedups.Shape(64, 128), dense, CPU, True)
        with torch.no_grad():
            layer.weight.copy_(weight)
            found[name] = layer(x).float()
    assert (found["float8_rowwise"] == 0).all()
    assert (found["mxfp8"] == 96 * 0.5).all()  # three of four blocks


def shape_of(out_features, layers, kept=(), **milliseconds):
    shape = speedups.Shape(out_features, 128, layers=layers, kept=dict.fromkeys(kept, "sensitive"))
    shape.times = {(name, "compiled"): Samples([1e-3 * value]) for name, value in milliseconds.items()}
    return shape


BIG = {"bfloat16": 10.0, "float8_tensorwise": 5.0, "float8_rowwise": 6.0}
SMALL = {"bfloat16": 1.0, "float8_tensorwise": 2.0, "float8_rowwise": 1.5}
OUTPUT = {"bfloat16": 20.0, "float8_tensorwise": 10.0, "float8_rowwise": 10.0}


def test_the_advice_is_the_fastest_format_without_the_layers_that_lose():
    shapes = [
        shape_of(1, {"feed_forward.w1": 4}, **BIG),
        shape_of(2, {"attention.wk": 4, "attention.wv": 4}, **SMALL),
        shape_of(3, {"output": 1}, kept=["output"], **OUTPUT),
    ]
    found = speedups.totals(shapes, "float8_tensorwise", "compiled")
    # 4 x 10 + 8 x 1 + 20, then 4 x 5 + 8 x 2 + 20, then 4 x 5 + 8 x 1 + 20 ms: the output layer is kept though it gains
    assert (found.high, found.all_converted, found.gains_only) == pytest.approx((0.068, 0.056, 0.048))
    assert found.losing == ("attention.wk", "attention.wv")
    flags = speedups.recommended_flags(shapes, ["float8_tensorwise", "float8_rowwise"], "compiled")
    assert parse(flags).quantize.dense.float8.recipe == "tensorwise"
    assert parse(flags).quantize.dense.exclude == ("attention.wk", "attention.wv")
    assert "--compile.enable" in flags
    slow = [shape_of(2, {"attention.wk": 4}, **SMALL)]
    assert speedups.recommended_flags(slow, ["float8_tensorwise", "float8_rowwise"], "compiled") == []


def test_the_table_marks_what_loses_and_says_that_emulation_is_no_speed():
    done = crius(
        *("bench", "quantize", *TINY, "--emulated", "--modes", "eager", "--tokens", "32", "--repeat", "1"),
        *("--formats", "float8_rowwise"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "which is not a speed of the format" in done.stdout and "recommended" not in done.stdout
    lines = [line for line in done.stdout.splitlines() if "attention.wq x 1, attention.wo x 1" in line]
    assert len(lines) == 1 and "!" in lines[0], done.stdout  # three roundings more than bfloat16, at this size


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["quantize", "--training.device", "cpu"], "this device has no float8 matmuls"),
        (["quantize", "--gpu", "h100"], "--gpu here"),
        (["quantize", "--formats", "float4"], "there is no float4"),
        (["quantize", "--emulated", "--tokens", "0"], "--tokens 0 is not positive"),
        (["quantize", "--emulated", "--tokens", "48"], "--tokens 48 is not a multiple of 32"),
        (["quantize", "--quantize.dense.mxfp8.enable"], "no effect: all formats are timed"),
        (["optimizer", "--variants", "adafactor"], "adafactor"),
        (["optimizer", "--repeat", "0"], "--repeat 0 is not positive"),
        (["optimizer", "--parallelism.data_parallel_shard_degree", "2"], "no effect"),
        (["optimizer", "--model.flavor", "9b"], "9b"),
        (["optimizer", "--model.flavor", "405b", "--training.device", "cpu"], "are free"),
    ],
)
def test_a_wrong_call_exits_with_2_and_says_why(arguments, said, capsys):
    from crius import cli

    assert cli.main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_checkpoints_are_timed_in_a_folder_of_their_own(tmp_path, capsys):
    mine = tmp_path / "bench-checkpoint" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert checkpoint.checkpoint(tmp_path, gib=0.01, repeat=1, as_json=True) == 0
    assert all(row["gb_per_second"] > 0 for row in json.loads(capsys.readouterr().out)["rows"])
    assert mine.read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["bench-checkpoint"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gib", "nan"], "must be positive"),
        (["--gib", "1e9"], "or another --folder"),
        (["--folder", "/dev/null"], "no folder can be made in /dev/null"),
    ],
)
def test_checkpoints_that_cannot_be_timed_exit_with_2_and_say_why(flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "checkpoint", *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_file_for_results_is_tried_without_a_change_of_it(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "folder" / "new.json"
    old.write_text("{}")
    check_result_file(old)
    check_result_file(new)
    assert old.read_text() == "{}" and not new.exists()
