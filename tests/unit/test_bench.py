"""``crius bench``: what it times, what it makes of the times, and what it refuses."""

import importlib
import importlib.util
import json
import shlex

import pytest
import torch
from harness import crius, parse

from crius import cli
from crius.cli.bench import MOVED
from crius.config.low_precision import linear_choices
from crius.config.training import FORMATS
from crius.models.layers import Linear
from crius.tools import bench as tools_bench
from crius.tools.bench import quantize, speedups
from crius.tools.bench.options import Timed
from crius.tools.bench.result import Samples
from crius.train.inputs import describe_model

CPU = torch.device("cpu")
TINY = ["--model.num_layers", "1", "--training.device", "cpu"]
FEW = {"tokens": 32, "repeat": 2, "modes": "eager", "emulated": True}


def test_each_shape_is_timed_once_in_each_format(capsys):
    config = parse([*TINY, "--model.num_layers", "2"])
    assert quantize.quantize(config, describe_model(config), Timed(**FEW), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
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


@pytest.mark.long
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
    ],
)
def test_a_wrong_call_exits_with_2_and_says_why(arguments, said, capsys):
    assert cli.main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", tools_bench.MOVED)
def test_a_module_that_moved_says_where_it_is(name):
    with pytest.raises(ModuleNotFoundError, match=f"crius.tools.bench.{name} has moved: it is benchmarks.{name}, in"):
        exec(f"from crius.tools.bench import {name}")
    assert importlib.util.find_spec(f"benchmarks.{name}")


@pytest.mark.parametrize("verb", MOVED)
def test_a_verb_that_moved_says_what_replaces_it_with_the_flags_that_were_given(verb, capsys):
    given = ["--training.steps", "3", "--vs", "--a 1 --b 2"] if verb == "train" else ["--help"]
    assert cli.main(["bench", verb, *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ConfigError: crius bench {verb} has moved.")
    python, _, module, *flags = shlex.split(error.partition("  fix    ")[2])
    assert (python, flags[:2]) == ("python", given[:2])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(module).main(["--help"])
