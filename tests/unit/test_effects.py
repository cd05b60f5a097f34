"""What was asked for is done, or said: a line for each optimisation, and a strict run ends where one did nothing."""

import logging
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from harness import llama, parse
from torch._inductor.codecache import PyCodeCache

from crius.config.layout import Layout
from crius.config.low_precision import LinearChoice
from crius.config.training import CompileConfig, DenseQuantizeConfig, Float8Config
from crius.errors import EffectError
from crius.parallel.activation_checkpoint import CheckpointedBlocks
from crius.parallel.compile import CompileReport
from crius.parallel.runtime import World
from crius.parallel.tensor import AsyncTensorParallel
from crius.quantize.convert import Converted
from crius.train import effects
from crius.train.build import LowPrecision, low_precision, planned
from crius.train.effects import (
    Effect,
    check,
    of_activation_checkpoint,
    of_async_tensor_parallel,
    of_compile,
    of_lora,
    of_low_precision,
    of_save_ops,
    over_ranks,
    over_stages,
)
from crius.train.inputs import describe_model

CHECKPOINT = Effect(
    name="activation_checkpoint",
    flag="--activation_checkpoint.mode full",
    count=8,
    total=8,
    what="blocks",
    reason="full",
)
ASYNC_TP = of_async_tensor_parallel(AsyncTensorParallel("needs CUDA"))
PLANTED = Effect(name="planted", flag="--planted.enable", count=0, total=4, what="modules", reason="no pattern fits")


def compiled(num_blocks, graphs):
    report = CompileReport(CompileConfig(enable=True))
    report.graphs = graphs
    return of_compile(num_blocks, report)


@pytest.mark.parametrize(
    ("effect", "line"),
    [
        (CHECKPOINT, "activation_checkpoint: 8 of 8 blocks (full)"),
        (ASYNC_TP, "async_tp: 0 fused (needs CUDA)"),
        (PLANTED, "planted: 0 of 4 modules (no pattern fits)"),
        (compiled(8, 1), "compile: 8 of 8 blocks, 1 graph"),
        (compiled(8, 2), "compile: 8 of 8 blocks, 2 graphs"),
        (Effect(name="fsdp", flag="-", count=3, what="units"), "fsdp: 3 units"),
    ],
)
def test_an_effect_is_one_line(effect, line):
    assert str(effect) == line


def test_low_precision_is_counted_over_stages_and_told_for_the_whole_model():
    flags = ["--quantize.dense.float8.enable", "--quantize.dense.float8.enable_fsdp_float8_all_gather"]
    config = parse(flags)
    precision = low_precision(config, describe_model(config), "cpu")
    layers, gathers = of_low_precision(precision, [Converted(49, 49), Converted(7, 0)], shards=2)
    assert str(layers) == (
        "float8: 56 converted, 1 kept: output (sensitive) (tensorwise; emulated: this device has no float8 matmuls)"
    )
    assert str(gathers) == (
        "float8_all_gather: 49 of 56 weights are gathered in float8 "
        "(scales one by one; the rows of the others do not divide into shards)"
    )
    [_, alone] = of_low_precision(precision, [Converted(56, 56)], shards=1)
    assert alone.reason == "cast but not sent: each rank has whole weights"
    assert of_low_precision(precision, [Converted(0)], shards=2)[0].is_inactive


class _Pair(World):
    """Two ranks that count the same."""

    def sum(self, values):
        return 2 * values


def test_document_masks_are_counted_over_all_ranks_by_the_kernel_that_takes_them(monkeypatch):
    monkeypatch.setattr(effects, "masks_made", Counter(varlen=3, flex=1))
    lines = [str(effect) for effect in effects.of_document_masks(_Pair(0, 2, torch.device("cpu")))]
    assert lines == ["document_mask varlen: 6 of 8 masks", "document_mask flex: 2 of 8 masks"]


@dataclass(frozen=True)
class _Gpu(World):
    """A rank with a GPU, whose sums need none."""

    def sum(self, values):
        return values


def watch_on(device, *flags):
    config = parse(flags)
    mesh = SimpleNamespace(layout=Layout.of(config.parallelism, 1), tp=None)
    return effects.EffectWatch(
        SimpleNamespace(config=config, facts=llama(), mesh=mesh, ranks=_Gpu(0, 1, torch.device(device))), strict=False
    )


BUILT = SimpleNamespace(applied=(), precision=None)


@pytest.mark.parametrize(
    ("device", "dtype", "is_said"), [("cuda", "float32", 1), ("cuda", "bfloat16", 0), ("cpu", "float32", 0)]
)
def test_float32_attention_on_a_gpu_is_said_to_be_slow(device, dtype, is_said, caplog):
    flags = ("--training.mixed_precision_param", dtype, "--activation_checkpoint.mode", "none")
    watch_on(device, *flags).built(BUILT)
    assert sum("float32 attention on a GPU is slow" in line for line in caplog.messages) == is_said


def test_another_kernel_for_the_document_mask_is_warned_of_once(monkeypatch, caplog):
    made = Counter(varlen=2)
    monkeypatch.setattr(effects, "masks_made", made)
    monkeypatch.setattr(effects, "of_document_masks", lambda ranks: [])
    watch = watch_on("cuda", "--model.attention_mask", "document")
    for step, kernel in enumerate(("varlen", "varlen", "flex", "flex", "varlen"), start=1):
        made[kernel] += 1
        watch.step(step)
    assert ["varlen 4; flex 1: one of the first 3 steps" in line for line in caplog.messages] == [True]


def test_a_filter_that_leaves_nothing_says_how_to_convert_all_the_same():
    config = parse(["--quantize.dense.float8.enable"])
    filtered = planned(config, describe_model(config), accelerated=True, emulated="")
    assert "--quantize.dense.auto_filter off" in str(of_low_precision(filtered, [Converted(0)], shards=1)[0])
    assert planned(config, describe_model(config), accelerated=False, emulated="").advice == ""
    others = tuple(replace(choice, reason="an embedding") for choice in filtered.choices)
    assert replace(filtered, choices=others).advice == ""
    first, *rest = filtered.choices
    assert replace(filtered, choices=[replace(first, is_converted=True), *rest]).advice == ""


@pytest.mark.parametrize(("padded", "is_said"), [((16, 32), 1), ((32, 32), 0)])
def test_a_padding_that_no_layer_needs_is_said(padded, is_said):
    same = {"name": "w1", "shape": (16, 32), "local": (16, 32), "is_converted": True, "reason": ""}
    choices = [LinearChoice(**same, padded=shape) for shape in (padded, (16, 32))]
    dense = DenseQuantizeConfig(pad_inner_dim=True, float8=Float8Config(enable=True))
    lines = LowPrecision(dense, choices, "").lines()
    assert all(line.startswith("float8: ") for line in lines)
    assert sum("no layer needs padding" in line for line in lines) == is_said


def test_no_graph_means_that_no_block_is_compiled():
    effect = compiled(8, 0)
    assert effect.is_inactive
    assert str(effect).startswith("compile: 0 of 8 blocks, 0 graphs (torch.compile was called but compiled nothing")


@pytest.mark.parametrize(
    ("count", "total", "is_inactive"), [(0, None, True), (0, 4, True), (0, 0, False), (1, 4, False), (1, None, False)]
)
def test_zero_of_something_is_no_effect_and_zero_of_zero_is_nothing_to_do(count, total, is_inactive):
    effect = Effect(name="x", flag="--x", count=count, total=total, what="things")
    assert effect.is_inactive == is_inactive


def test_a_strict_run_names_every_inactive_optimisation_with_reason_and_fix():
    with pytest.raises(EffectError) as caught:
        check([CHECKPOINT, ASYNC_TP, PLANTED], strict=True)
    assert caught.value.exit_code == 1
    assert str(caught.value) == (
        "EffectError: asked for but without effect: async_tp, planted.\n"
        "  from   --strict\n"
        "  why    async_tp: 0 fused (needs CUDA); planted: 0 of 4 modules (no pattern fits)\n"
        "  fix    leave out --parallelism.enable_async_tensor_parallel, --planted.enable; or leave out --strict, "
        "and the run continues without"
    )


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("crius"), "propagate", True)
    caplog.set_level(logging.INFO, logger="crius.train")
    return lambda: [(record.levelname, record.message) for record in caplog.records]


def test_without_strict_the_inactive_one_is_a_warning(lines):
    check([CHECKPOINT, PLANTED], strict=False)
    assert lines() == [("INFO", str(CHECKPOINT)), ("WARNING", str(PLANTED))]


@pytest.mark.parametrize("strict", [False, True])
def test_a_run_whose_optimisations_all_took_hold_goes_on(strict, lines):
    check([CHECKPOINT], strict=strict)
    assert lines() == [("INFO", str(CHECKPOINT))]


def test_only_rank_0_speaks(lines):
    check([CHECKPOINT, PLANTED], strict=False, rank=3)
    assert lines() == []


GATHER = "buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(arg0, 2, '1')\n"
SCATTER = "buf1 = torch.ops._c10d_functional.reduce_scatter_tensor.default(buf0, 'sum', 2, '1')\n"
FUSED = "buf2 = torch.ops.symm_mem.fused_all_gather_matmul.default(arg0, [arg1], 1, '1')\n"
GRAPHS = {
    "forward": f"# AOT ID: ['0_forward']\n{FUSED * 4}",
    "backward": f"# AOT ID: ['0_backward']\n{GATHER * 2}{SCATTER * 2}{FUSED}",
    "of validation": f"# AOT ID: ['1_inference']\n{FUSED * 3}{GATHER}",
}


def test_async_tensor_parallelism_says_what_was_fused_in_each_direction(tmp_path, monkeypatch):
    monkeypatch.setattr(PyCodeCache, "modules", [])
    async_tp = AsyncTensorParallel()
    for name, code in GRAPHS.items():
        path = tmp_path / f"{name}.py"
        path.write_text(code)
        PyCodeCache.modules.append(SimpleNamespace(__file__=str(path)))
    line = (
        "async_tp: 8 of 13 fused, forward 7 of 8, backward 1 of 5 (the others are not next to a matmul that Inductor "
    )
    assert str(of_async_tensor_parallel(async_tp)) == line + "can fuse them with)"


class TwoRanks(World):
    """The first of two ranks; the other counted 4 and 2."""

    def gather(self, values):
        return torch.stack((values, torch.tensor([4, 2])))


def test_blocks_are_counted_over_stages_and_what_stays_is_that_of_the_block_that_keeps_most():
    first = CheckpointedBlocks(3, 4, "full", Counter(mm=2, sdpa=5))
    parts = [first, CheckpointedBlocks(1, 2, "full", Counter(mm=3, sdpa=1))]
    assert str(of_activation_checkpoint(parts)) == "activation_checkpoint: 4 of 6 blocks (full)"
    found = of_save_ops(parts)
    assert [(effect.name, effect.count) for effect in found] == [("save_ops mm", 3), ("save_ops sdpa", 5)]
    whole = over_ranks(found, TwoRanks(0, 2, torch.device("cpu")))
    assert [(effect.name, effect.count) for effect in whole] == [("save_ops mm", 4), ("save_ops sdpa", 5)]


@pytest.mark.parametrize(
    ("trained", "frozen", "share"),
    [(4_900_000, 134_500_000, "4.9 M of 139.4 M"), (99_999, 1, "99,999 of 0.1 M")],
)
def test_adapters_are_counted_with_the_parameters_that_they_train(trained, frozen, share):
    part = torch.nn.ModuleDict({name: torch.nn.Module() for name in ("wq", "wk", "norm")})
    for name, weight in (("wq", "lora_A"), ("wq", "lora_B"), ("wk", "lora_A"), ("norm", "weight")):
        part[name].register_parameter(weight, torch.nn.Parameter(torch.zeros(1)))
    config = SimpleNamespace(lora=SimpleNamespace(rank=16))
    job = SimpleNamespace(config=config, facts=SimpleNamespace(num_trained=trained, num_parameters=frozen))
    line = str(of_lora(job, SimpleNamespace(parts=[part])))
    assert line == f"lora: 2 linears, rank 16, {share} parameters trained"


class FourRanks(World):
    """The second of two pipeline ranks with two replicas each, as the four of them would sum."""

    def sum(self, values):
        other = torch.tensor([[3, 3], [0, 4], [0, 0], [5, 8], [4, 4], [1, 4]])
        return values.add_(other).mul_(2)


def test_the_stages_of_a_pipeline_sum_to_the_model_and_replicas_count_once():
    """A stage without a block is no reason to end the run, an optimisation that no stage has is."""
    mine = [Effect(name=name, flag="-", count=count, total=total, what="x") for name, count, total in STAGE]
    mine.append(replace(mine[-1], count=6, total=8, parts={"forward": (4, 4), "backward": (2, 4)}))
    whole = over_stages(mine, FourRanks(2, 4, torch.device("cpu")), pipeline_ranks=2)
    assert [(effect.count, effect.total) for effect in whole] == [(3, 3), (0, 4), (0, None), (11, 16)]
    assert [effect.is_inactive for effect in whole] == [False, True, True, False]
    assert str(whole[-1]) == "async_tp: 11 of 16 x, forward 8 of 8, backward 3 of 8"


STAGE = [("compile", 0, 0), ("planted", 0, 0), ("async_tp", 0, None)]
