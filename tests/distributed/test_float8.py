"""Low precision in every layout: the curve of one device, and no more communication than without it."""

import functools
import json
import re
import time

import pytest
from harness import TEXT, layout_flags, parse, steps_of, train

from crius.launch.local import run_workers
from crius.parallel import tensor
from crius.tools.dry_run.run import dry_run

pytestmark = pytest.mark.usefixtures("imported_torchao")

FLOAT8 = ["--quantize.dense.float8.enable"]
GATHER = [*FLOAT8, "--quantize.dense.float8.enable_fsdp_float8_all_gather"]
SECTIONS = {
    "tensorwise": FLOAT8,
    "rowwise": [*FLOAT8, "--quantize.dense.float8.recipe", "rowwise"],
    "mxfp8": ["--quantize.dense.mxfp8.enable"],
    "gather": GATHER,
    "gather, scales at once": [*GATHER, "--quantize.dense.float8.precompute_scale"],
}
# a vocabulary that no tensor-parallel degree divides into blocks of 16, and fewer key/value heads than tp4 has ranks
TINY = [
    *("--training.steps", "2", "--training.seq_len", "32", "--training.global_batch_size", "8"),
    *("--model.num_layers", "2", "--model.vocab_size", "2256"),
    *("--optimizer.lr", "3e-4", "--data.source", "text", "--data.path", str(TEXT), "--validation.interval", "0"),
]
# Relative, of loss and gradient norm. One scale for a tensor: a layout changes what the tensor is, and so every
# rounding, by up to 2**-4 each; measured up to 8e-6 and 2e-4. A scale that is a power of two, for a row or a block,
# moves no rounding but those of numbers near zero; measured up to 6e-7 and 2e-5.
TOLERANCE = {"tensorwise": (5e-5, 1e-3), "rowwise": (5e-6, 2e-4), "mxfp8": (5e-6, 2e-4)}


@pytest.fixture(scope="module")
def curve(tmp_path_factory):
    """Loss and gradient norm of each step of a run, which is made once, and its log."""

    @functools.cache
    def run(section, layout, *flags):
        folder = tmp_path_factory.mktemp("run")
        heads = "4" if section == "mxfp8" else "2"  # of which tp2 leaves whole blocks of 32
        given = [*TINY, *SECTIONS[section], "--model.num_kv_heads", heads, *layout_flags(layout, 8), *flags]
        records = steps_of(train(given, folder))
        return [(record["loss"], record["grad_norm"]) for record in records], (folder / "logs/rank-0.log").read_text()

    return run


def apart(found, wanted):
    """The largest relative difference of losses and of gradient norms."""
    pairs = list(zip(found, wanted, strict=True))
    return tuple(max(abs(a[i] - b[i]) / abs(b[i]) for a, b in pairs) for i in (0, 1))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("section", "layout"),
    [
        *(("tensorwise", "fsdp2_tp2"), ("rowwise", "fsdp2_tp2"), ("mxfp8", "fsdp2_tp2")),
        *(pytest.param("tensorwise", layout, marks=pytest.mark.slow) for layout in ("fsdp4", "tp4", "pp2")),
    ],
)
def test_a_layout_follows_the_curve_of_one_device(section, layout, curve):
    (found, log), (wanted, _) = curve(section, layout), curve(section, "1")
    loss, grad_norm = apart(found, wanted)
    assert loss < TOLERANCE[section][0]
    assert grad_norm < TOLERANCE[section][1]
    count = re.search(r"(?:float8|mxfp8): (\d+) converted, 1 kept: output \(sensitive\) \(.*emulated: this device", log)
    assert count, log
    assert int(count[1]) == 14  # 7 in each of 2 layers, summed over the stages


def test_recipes_are_not_one_another(curve):
    assert curve("tensorwise", "1")[0][0] != curve("rowwise", "1")[0][0]


@pytest.mark.matrix
@pytest.mark.parametrize(("section", "layout"), [("gather", "fsdp2_tp2"), ("gather, scales at once", "fsdp2_tp2")])
def test_a_float8_gather_changes_no_number(section, layout, curve):
    """In float32 a weight is rounded once, by the scale of the whole weight, before the gather or after it."""
    found, log = curve(section, layout)
    assert found == curve("tensorwise", layout)[0]
    assert "float8_all_gather: 14 of 14 weights are gathered in float8" in log


@pytest.mark.long
def test_checkpointing_recomputes_the_same_bits(curve):
    checkpointed = curve("tensorwise", "fsdp2_tp2", "--activation_checkpoint.mode", "selective")[0]
    assert checkpointed == curve("tensorwise", "fsdp2_tp2")[0]


@pytest.mark.long
def test_a_sequence_gathered_in_float8_is_the_same_sequence(curve, monkeypatch):
    found, log = curve("tensorwise", "fsdp2_tp2")
    assert "4 of 4 gathers of a sequence are in float8" in log
    monkeypatch.setattr(tensor, "_rounding", lambda *arguments: None)
    wanted, log = curve("tensorwise", "fsdp2_tp2", "--metrics.log_interval", "1")
    assert "gathers of a sequence" not in log
    loss, grad_norm = apart(found, wanted)
    assert loss == 0
    assert grad_norm < 1e-9  # of three summands of a gradient, one order of the sum or another


@pytest.mark.slow
def test_blocks_compile_to_one_graph(curve):
    found, log = curve("tensorwise", "tp2", "--compile.enable", "--compile.backend", "aot_eager")
    assert "compile: 2 of 2 blocks, 1 graph" in log
    loss, grad_norm = apart(found, curve("tensorwise", "1")[0])
    assert loss < TOLERANCE["tensorwise"][0]
    assert grad_norm < TOLERANCE["tensorwise"][1]


def _dry(given, path, placement):
    config = parse(given)
    report = dry_run(config, config.parallelism.total_ranks(1), 0, time.monotonic())
    stage = report.stages[0]
    path.write_text(
        json.dumps({"flops": stage.flops, "traffic": {" ".join(key): n for key, n in stage.traffic.items()}})
    )


@pytest.mark.long
def test_float8_communicates_as_often_and_less(tmp_path):
    """On a device with float8 matmuls: the same gathers and scatters, in half the bytes where they are in float8."""
    plain = ["--model.num_layers", "2", "--training.seq_len", "32", "--training.mixed_precision_param", "bfloat16"]
    plain += ["--parallelism.data_parallel_shard_degree", "2", "--parallelism.tensor_parallel_degree", "2"]
    reports = []
    for section in ("", "rowwise", "gather, scales at once"):
        flags = [*SECTIONS[section], "--quantize.dense.auto_filter", "off"] if section else []
        path = tmp_path / f"{len(reports)}.json"
        assert run_workers(functools.partial(_dry, [*plain, *flags], path), 1, tmp_path) == 0
        reports.append(json.loads(path.read_text()))
    assert reports[0] == reports[1]  # nothing is gathered in float8
    before, after = reports[0]["traffic"], reports[2]["traffic"]
    assert reports[0]["flops"] == reports[2]["flops"]
    for kind in ("all-gather fsdp", "reduce-scatter fsdp", "all-gather tp", "reduce-scatter tp"):
        assert after[f"{kind} count"] == before[f"{kind} count"]
    for kind in ("reduce-scatter fsdp", "reduce-scatter tp"):
        assert after[f"{kind} bytes"] == before[f"{kind} bytes"]
    tokens, dim, blocks = 4 * 32, 128, 2
    assert before["all-gather tp bytes"] - after["all-gather tp bytes"] == 2 * blocks * tokens * dim
    weights = (2 * 128 + 2 * 64 + 3 * 384) * 128 // 2  # of a block and tensor-parallel rank
    gathers = 2 * blocks  # forward and backward
    assert before["all-gather fsdp bytes"] - after["all-gather fsdp bytes"] == gathers * weights
    assert after["all-reduce fsdp count"] == 1  # the scales of all weights
