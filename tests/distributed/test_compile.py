"""Compiled blocks: one graph for all, the same numbers as eager, and a report that hides nothing.

Each case runs in forked workers: what torch compiles is counted for the whole process.
"""

import functools
import itertools
import json
import logging
import os
from dataclasses import replace

import pytest
import torch
import torch._dynamo.config as dynamo_config
from harness import SMALL, llama, steps_of, train
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from crius.config.training import CompileConfig
from crius.kernels.linear_cross_entropy import token_losses
from crius.launch.local import run_workers
from crius.models import registry
from crius.parallel.compile import CompileReport, compile_blocks, compile_loss, prepare_compile
from crius.parallel.runtime import world

NUM_LAYERS = 10  # more than the 8 graphs that torch allows one function by default
TRACE = CompileConfig(enable=True, backend="aot_eager", max_recompiles=2)
CHECKPOINTS = ("none", "full", "op")

# float32: the compiler fuses and reorders sums, which moves last bits; the loss is a sum over some 100 tokens
SUMS_REORDERED = 1e-6


def in_workers(num_ranks, case, folder):
    """What ``case(placement)`` returns on each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    code = run_workers(functools.partial(save, case, folder), num_ranks, folder)
    assert code == 0, "\n".join(file.read_text() for file in folder.rglob("rank-*.log"))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def save(case, folder, placement):
    torch.set_num_threads(1)
    (folder / f"{placement.rank}.json").write_text(json.dumps(case(placement)))


def joined(placement):
    return world(placement.rank, placement.world_size, torch.device("cpu"), placement.rendezvous, 60)


class Model:
    """A debug Llama, its plan, and a batch of any shape."""

    def __init__(self, num_layers, checkpointing="none"):
        facts = llama(num_layers=num_layers, dim=64, num_heads=4, num_kv_heads=2, ffn_dim=384)
        torch.manual_seed(0)
        self.module = registry.build(facts)
        self.plan = facts.plan
        for block in self.module.layers.values():
            block.forward = checkpointed(block.forward, checkpointing)

    def loss(self, rows=2, tokens=32):
        torch.manual_seed(1)
        inputs, labels = torch.randint(0, 100, (2, rows, tokens))
        positions = torch.arange(tokens).expand(rows, tokens)
        return token_losses(self.module(inputs, positions), labels).sum()

    def validate(self):
        self.module.eval()
        with torch.no_grad():
            self.loss()
        self.module.train()


def checkpointed(forward, mode):
    if mode == "full":
        return functools.partial(checkpoint, forward, use_reentrant=False)
    if mode == "op":
        contexts = functools.partial(create_selective_checkpoint_contexts, save_matmuls)
        return functools.partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
    return forward


def save_matmuls(_context, op, *_args, **_kwargs):
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Lines(logging.Handler):
    """The log lines of ``crius.parallel``."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logger = logging.getLogger("crius.parallel")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def take(self):
        taken, self.lines = self.lines, []
        return taken


def a_run(folder, checkpointing, placement):
    """Steps of one shape, a validation, steps of changing shapes; what the report says on the way."""
    log, config = Lines(), replace(TRACE, cache_dir=str(folder / "cache"))
    prepare_compile(config)
    model = Model(NUM_LAYERS, checkpointing)
    names = [name for name, _ in model.module.named_parameters()]
    report = CompileReport(config)
    report.start()
    found = {"blocks": compile_blocks(model.module, model.plan, config)}
    found["names kept"] = names == [name for name, _ in model.module.named_parameters()]
    numbers = itertools.count(1)

    def step(**shape):
        model.loss(**shape).backward()
        report.step(next(numbers))

    for _ in range(4):
        step()
    found |= {"graphs": report.graphs, "lines": report.lines()}
    model.validate()
    step()
    model.validate()
    step()
    found |= {"graphs with validation": report.graphs, "log of validation": log.take()}
    if checkpointing != "none":
        return found
    # a size that changes once becomes symbolic; a size of 1 and one dim after the other call for graphs of their own
    for shape in ({"tokens": 24}, {"tokens": 1}, {"rows": 3, "tokens": 16}, {"rows": 1}):
        step(**shape)
    return found | {"recompiles": report.recompiles, "log of shapes": log.take()}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    @functools.cache
    def run(checkpointing):
        folder = tmp_path_factory.mktemp(checkpointing)
        return in_workers(1, functools.partial(a_run, folder, checkpointing), folder)[0]

    return run


@pytest.mark.matrix
@pytest.mark.parametrize("checkpointing", CHECKPOINTS)
def test_all_blocks_share_one_graph(checkpointing, run_of):
    found = run_of(checkpointing)
    assert (found["blocks"], found["graphs"]) == (NUM_LAYERS, 1)


@pytest.mark.matrix
@pytest.mark.parametrize("checkpointing", CHECKPOINTS)
def test_validation_adds_one_graph_and_no_recompilation(checkpointing, run_of):
    """Without gradient it is another graph; back in training nothing is compiled again."""
    found = run_of(checkpointing)
    assert found["graphs with validation"] == 2
    assert [line.split(" once more")[1] for line in found["log of validation"]] == [
        " for validation, which needs no gradient"
    ]


def test_compiling_keeps_parameter_names(run_of):
    assert run_of("none")["names kept"]


def test_the_report_names_the_backend_that_has_no_cache(run_of):
    (line,) = run_of("none")["lines"]
    assert line.startswith("compile: 1 graph, ")
    assert line.endswith(" s, no cache (backend aot_eager)")


def test_each_recompilation_is_logged_with_function_and_guard(run_of):
    found = run_of("none")
    lines = [line for line in found["log of shapes"] if line.startswith("INFO")]
    assert len(lines) == found["recompiles"] >= 3
    assert lines[0].startswith("INFO compile: step 7 compiled forward (models/decoder.py:")
    assert lines[0].endswith("size mismatch at index 1. expected 32, actual 24")


def test_too_many_recompilations_warn_once_with_tensor_and_dimension(run_of):
    warnings = [line for line in run_of("none")["log of shapes"] if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert "3 recompilations after step 3, more than compile.max_recompiles 2" in warnings[0]
    assert "size of dim 1 of" in warnings[0]
    assert "--training.seq_len" in warnings[0]


def fall_back(folder, cause, placement):
    """A run whose blocks end up eager, although compile is on."""
    config = replace(TRACE, cache_dir=str(folder / "cache"))
    prepare_compile(config)
    os.environ["TORCHDYNAMO_DISABLE"] = "1" if cause == "variable" else "0"
    dynamo_config.disable = cause == "setting"  # what TORCH_COMPILE_DISABLE=1 sets when torch is imported
    torch.compiler.set_stance("force_eager" if cause == "stance" else "default")
    model = Model(2)
    report = CompileReport(config)
    report.start()
    compile_blocks(model.module, model.plan, config)
    model.loss().backward()
    return {"lines": report.lines(), "graphs": report.graphs}


@pytest.mark.parametrize(
    ("cause", "reason"),
    [("setting", "TORCH_COMPILE_DISABLE"), ("variable", "TORCHDYNAMO_DISABLE"), ("stance", "compiled nothing")],
)
def test_a_silent_fallback_to_eager_shows(cause, reason, tmp_path):
    (found,) = in_workers(1, functools.partial(fall_back, tmp_path, cause), tmp_path)
    assert found["graphs"] == 0
    assert found["lines"][0].startswith("compile: 0 graphs, the model runs eager (")
    assert reason in found["lines"][0]


def break_off(folder, planted, placement):
    """The error of a run whose blocks cannot be compiled, although torch is told to suppress errors."""
    config = replace(TRACE, cache_dir=str(folder / "cache"))
    prepare_compile(config)
    dynamo_config.suppress_errors = True
    model = Model(1)
    if planted == "graph break":
        norm = next(iter(model.module.layers.values())).ffn_norm
        norm.forward = torch.compiler.disable(norm.forward)
    compile_blocks(model.module, model.plan, replace(config, backend=broken if planted == "backend" else "eager"))
    try:
        model.loss()
    except Exception as error:
        return str(error)


def broken(graph, inputs):
    raise NotImplementedError("planted")


@pytest.mark.parametrize(("planted", "says"), [("backend", "planted"), ("graph break", "torch.compiler.disable")])
def test_a_block_that_cannot_be_compiled_ends_the_run(planted, says, tmp_path):
    """So the report needs no word on blocks that are half compiled."""
    (error,) = in_workers(1, functools.partial(break_off, tmp_path, planted), tmp_path)
    assert says in error


def train_loss(folder, placement):
    """Gradients of the logits through the plain and the compiled loss."""
    config = replace(TRACE, cache_dir=str(folder / "cache"))
    prepare_compile(config)
    report = CompileReport(config)
    report.start()
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 8, 16, dtype=torch.bfloat16), torch.randint(-100, 16, (2, 8)).clamp(min=-100)
    labels[labels < 0] = -100
    grads = []
    for loss in (token_losses, compile_loss(token_losses, config)):
        leaf = logits.clone().requires_grad_()
        loss(leaf, labels).sum().backward()
        grads.append(leaf.grad.tolist())
    report.step(1)
    return {"grads": grads, "graphs": report.graphs}


def test_the_compiled_loss_has_the_gradient_of_the_plain_one(tmp_path):
    (found,) = in_workers(1, functools.partial(train_loss, tmp_path), tmp_path)
    plain, compiled = map(torch.tensor, found["grads"])
    assert found["graphs"] == 1
    torch.testing.assert_close(compiled, plain, rtol=0, atol=0)  # aot_eager runs the same ATen ops


@pytest.mark.long
def test_the_compilation_of_a_validation_is_no_time_of_the_steps(tmp_path):
    """What a validation compiles takes longer than these steps: taken from them it left compute and goodput 0."""
    size = ("--training.steps", "5", "--model.num_layers", "1", "--validation.interval", "2")
    records = train([*SMALL, *size, "--compile.enable", "--compile.backend", "aot_eager"], tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    seconds = summary["seconds"]
    warm = sum(record["step_seconds"] for record in steps_of(records)[1:])
    assert seconds["compute"] > warm / 2 > 0 and summary["goodput"] > 0
    assert seconds["compile"] > 0 and min(seconds.values()) >= 0
    assert sum(seconds.values()) == pytest.approx(summary["wall_seconds"], rel=1e-3)


def sharded(folder, placement):
    """Losses and gradient norms of FSDP with full activation checkpointing: eager, compiled, and compiled once more
    from the cache."""
    config = CompileConfig(enable=True, cache_dir=str(folder / "cache"))
    prepare_compile(config, local_ranks=2)
    found = {}
    with joined(placement) as ranks:
        mesh = init_device_mesh("cpu", (ranks.size,))
        for run in ("eager", "cold", "warm"):
            torch._dynamo.reset()
            model = Model(2, "full")
            report = CompileReport(config)
            report.start()
            if run != "eager":
                compile_blocks(model.module, model.plan, config)
            for block in model.module.layers.values():
                fully_shard(block, mesh=mesh)
            fully_shard(model.module, mesh=mesh)
            loss = model.loss()
            loss.backward()
            norm = sum(p.grad.full_tensor().square().sum() for p in model.module.parameters()).sqrt()
            found[run] = {"numbers": (loss.item(), norm.item()), "line": report.lines()[0]}
            dist.barrier()  # all ranks have written the cache before one reads it
    return found


@pytest.fixture(scope="module")
def sharded_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return in_workers(2, functools.partial(sharded, folder), folder)


@pytest.mark.slow
def test_compiled_equals_eager_under_fsdp_and_checkpointing(sharded_runs):
    for found in sharded_runs:
        for run in ("cold", "warm"):
            assert found[run]["numbers"] == pytest.approx(found["eager"]["numbers"], rel=SUMS_REORDERED)


@pytest.mark.slow
def test_a_second_run_finds_its_graphs_in_the_cache(sharded_runs):
    """The first may find what the other rank has just written."""
    for found in sharded_runs:
        assert found["cold"]["line"].startswith("compile: 1 graph, ")
        assert found["warm"]["line"].endswith(" s, cache hit")
    assert any(found["cold"]["line"].endswith("miss") for found in sharded_runs)
