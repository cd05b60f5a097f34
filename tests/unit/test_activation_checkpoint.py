"""Activation checkpointing keeps less, computes again, and changes no bit of loss and gradients."""

import gc
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import sigmoid_moe
import torch
import torch._functorch.config as functorch_config
from harness import llama
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from crius.config.training import ActivationCheckpointConfig
from crius.errors import ConfigError
from crius.models import registry
from crius.models.llama3 import Llama3Config
from crius.models.plan import ShardingPlan, decoder_plan
from crius.models.spec import BLOCK, described
from crius.parallel import activation_checkpoint
from crius.parallel.activation_checkpoint import CATEGORIES, apply_activation_checkpoint, resolve_save_ops
from crius.parallel.init import init_parameters, init_rules

CONFIG = Llama3Config(dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=61)
SIGMOID = replace(sigmoid_moe.SMALL, dim=32, ffn_dim=48, expert_ffn_dim=16, shared_ffn_dim=16, vocab_size=61)
MATMULS = 7  # linears of a block
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def selective(*save_ops, option="op"):
    return ActivationCheckpointConfig(mode="selective", selective_option=option, save_ops=save_ops)


def default():
    return ActivationCheckpointConfig(mode="selective")


NONE, FULL = ActivationCheckpointConfig(), ActivationCheckpointConfig(mode="full")
CASES = {
    "full": FULL,
    "every_block": selective(option=1),
    "every_second_block": selective(option=2),
    "no_block": selective(option=9),
    "default_ops": default(),
    "no_ops": selective(),
    "attention": selective("attention"),
    "matmul": selective("matmul"),
    "attention_and_names": selective("attention", "aten.mm.default", "aten.silu.default"),
}


class CountOps(TorchDispatchMode):
    """Counts ops by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def build(config, *, compile_backend=None, mask="causal", facts=None):
    torch.set_num_threads(1)
    facts = facts or llama(CONFIG, attention_mask=mask)
    model = registry.build(facts)
    with torch.no_grad():
        init_parameters(model, init_rules(facts), seed=0)
    done = apply_activation_checkpoint(model, facts.plan, config, compile_enabled=compile_backend is not None)
    for block in model.layers.values() if compile_backend else ():
        block.forward = torch.compile(block.forward, backend=compile_backend, fullgraph=True)
    return model, done


def loss_of(model):
    tokens = torch.arange(32).view(2, 16) % CONFIG.vocab_size
    return model(tokens).square().mean()


def loss_and_gradients(model):
    loss = loss_of(model)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def bytes_kept(config):
    """Bytes that the forward leaves for the backward, those that selective checkpointing caches among them."""
    model, _ = build(config)
    before = live_storages()
    loss = loss_of(model)
    kept = {key: size for key, size in live_storages().items() if key not in before}
    loss.backward()
    return sum(kept.values())


def live_storages():
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    functorch_config.activation_memory_budget = 1.0


@pytest.mark.parametrize("mask", ["causal", "document"])
@pytest.mark.parametrize("name", CASES)
def test_no_bit_changes(name, mask):
    want = loss_and_gradients(build(NONE, mask=mask)[0])
    got = loss_and_gradients(build(CASES[name], mask=mask)[0])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.full
@pytest.mark.parametrize(("name", "graphs"), [("full", 1), ("every_second_block", 2), ("default_ops", 1)])
def test_no_bit_changes_when_compiled_and_blocks_share_a_graph(name, graphs, fresh_compiler):
    """By aot_eager, whose graphs call the kernels that eager calls."""
    counter = CompileCounterWithBackend("aot_eager")
    want = loss_and_gradients(build(NONE)[0])
    model, done = build(CASES[name], compile_backend=counter)
    got = loss_and_gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert counter.frame_count == graphs
    if name == "default_ops":
        assert done.matches() == {"attention": 1, "matmul_every_other": 4, "reduce_scatter": 0}


@pytest.mark.parametrize(
    "config, matmuls, attentions",
    [
        (NONE, 0, 0),
        # the last matmul of a block, w2, is not needed for its own gradient: recomputation stops before it
        (FULL, 4 * (MATMULS - 1), 4),
        (selective(option=2), 2 * (MATMULS - 1), 2),
        (selective("attention"), 4 * (MATMULS - 1), 0),
        (selective("matmul"), 0, 4),
        (default(), 4 * 3, 0),  # the second, fourth and sixth of a block
    ],
    ids=["none", "full", "every_second_block", "attention", "matmul", "default_ops"],
)
def test_what_is_not_kept_is_computed_again(config, matmuls, attentions):
    model, _ = build(config)
    loss = loss_of(model)
    with CountOps() as backward:
        loss.backward()
    gradient_matmuls = 2 * (4 * MATMULS + 1)  # two a linear, the output layer too
    assert backward.counts["aten.mm.default"] - gradient_matmuls == matmuls
    assert backward.counts[ATTENTION] == attentions


@pytest.mark.parametrize("config", [FULL, default(), selective()], ids=["full", "default_ops", "no_ops"])
def test_experts_are_chosen_once(config):
    """Another choice the second time would be another gradient."""
    model, _ = build(config, facts=described("routed", SIGMOID, decoder_plan(SIGMOID), BLOCK))
    forward, backward = CountOps(), CountOps()
    with forward:
        loss = loss_of(model)
    with backward:
        loss.backward()
    choices = "aten.topk.default"
    assert forward.counts[choices] == 3 * 3  # the best two of a group, the best groups, the experts, in three layers
    assert backward.counts[choices] == 0
    assert backward.counts["aten.sigmoid.default"] == 3  # scores are computed again


@pytest.mark.slow
def test_memory_shrinks_in_the_order_of_the_modes():
    none, half, ops, full = (bytes_kept(config) for config in (NONE, selective(option=2), default(), FULL))
    assert full < ops < none
    assert full < half < none


@pytest.mark.slow
def test_more_saved_ops_keep_more():
    sizes = [bytes_kept(selective(*ops)) for ops in ((), ("attention",), ("attention", "matmul_every_other"))]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("config", [FULL, default(), selective(option=2)], ids=["full", "ops", "every_second_block"])
def test_parameters_keep_their_names(config):
    names = [name for name, _ in build(NONE)[0].named_parameters()]
    assert [name for name, _ in build(config)[0].named_parameters()] == names


@pytest.mark.parametrize(
    "config, count",
    [
        (NONE, 0),
        (FULL, 4),
        (selective(option=2), 2),
        (selective(option=3), 1),
        (selective(option=5), 0),
        (default(), 4),
    ],
)
def test_the_number_of_blocks_is_reported(config, count):
    done = build(config)[1]
    assert (done.count, done.total) == (count, 4)
    assert ("every block keeps" in done.description) == (config is FULL)


@pytest.mark.parametrize(
    ("devices", "is_split"), [([], False), (["cuda"], False), (["cpu"], True), (["cuda", "cpu"], True)]
)
def test_a_block_is_split_on_a_cpu_if_one_of_its_weights_is(devices, is_split, monkeypatch):
    class Split(nn.Parameter):
        pass

    monkeypatch.setattr(activation_checkpoint, "DTensor", Split)
    block = nn.Linear(2, 2)
    for name, device in zip(("weight", "bias"), devices, strict=False):
        split = Split(torch.zeros(2))
        split.device_mesh = SimpleNamespace(device_type=device)
        setattr(block, name, split)
    assert activation_checkpoint._is_split_on_cpu(block) == is_split


def test_every_second_block_is_the_second_and_the_fourth():
    model, _ = build(selective(option=2))
    assert [name for name, block in model.layers.items() if "forward" in vars(block)] == ["1", "3"]


def test_an_entry_that_matches_nothing_is_seen():
    model, done = build(selective("attention", "matmul_every_other", "reduce_scatter", "aten.tanh.default"))
    want = {"attention": 1, "matmul_every_other": 4, "reduce_scatter": 0, "aten.tanh.default": 0}
    assert set(done.matches().values()) == {0}  # before the first forward
    for _ in range(2):  # microbatches do not add up
        loss_and_gradients(model)
        assert done.matches() == want


def test_validation_needs_no_recomputation():
    model, _ = build(default())
    with torch.no_grad(), CountOps() as ops:
        loss_of(model)
    assert ops.counts["aten.mm.default"] == 4 * MATMULS + 1


class Dropping(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(share)

    def forward(self, x):
        return self.dropout(self.linear(x)).sin()


@pytest.mark.parametrize("config", [FULL, selective("matmul")], ids=["full", "matmul"])
def test_dropout_draws_the_same_mask_again(config):
    gradients = []
    for each in (NONE, config):
        torch.manual_seed(0)
        model = nn.Sequential(Dropping(0.5), Dropping(0.5))
        only_blocks = ShardingPlan(block="*", fsdp_units=("*",), embeddings=())
        apply_activation_checkpoint(model, only_blocks, each, compile_enabled=False)
        model(torch.ones(4, 8)).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.long
def test_memory_budget_keeps_the_share_it_is_given(fresh_compiler):
    sizes = []
    for budget in (0.0, 0.5, 1.0):
        torch.compiler.reset()
        config = ActivationCheckpointConfig(mode="memory_budget", memory_budget=budget)
        model, done = build(config, compile_backend="aot_eager")
        assert done.count == (4 if budget < 1 else 0)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.nbytes) or x, lambda x: x):
            loss_of(model)
        sizes.append(sum(kept))
    assert sizes == sorted(set(sizes))


def test_memory_budget_ends_with_its_run(fresh_compiler):
    for budget, count in ((1.0, 0), (0.25, 4)):
        config = ActivationCheckpointConfig(mode="memory_budget", memory_budget=budget)
        assert build(config, compile_backend="aot_eager")[1].count == count
    assert getattr(functorch_config, "unsafe_treat_script_objects_as_zero_size", True)
    assert functorch_config.activation_memory_budget == 0.25
    build(NONE)
    assert functorch_config.activation_memory_budget == 1.0


def test_memory_budget_without_compile_is_refused():
    with pytest.raises(ConfigError, match=r"memory_budget needs torch\.compile"):
        build(ActivationCheckpointConfig(mode="memory_budget"))


@pytest.mark.parametrize(
    "entry, suggestion",
    [
        ("atention", "attention"),
        ("matmuls", "matmul"),
        ("aten.mm", "aten.mm.default"),
        ("aten.mmm.default", "aten.mm.default"),
        ("aten.mm.defaults", "aten.mm.default"),
    ],
)
def test_an_unknown_entry_is_refused_with_a_suggestion(entry, suggestion):
    with pytest.raises(ConfigError) as error:
        resolve_save_ops(("attention", entry))
    assert entry in error.value.what
    assert suggestion in error.value.fix


@pytest.mark.parametrize("entries", [("matmul", "matmul_every_other"), ("aten.mm.default", "matmul"), ("matmul",) * 2])
def test_an_op_named_twice_is_refused(entries):
    with pytest.raises(ConfigError, match="twice"):
        resolve_save_ops(entries)


def test_the_attention_category_knows_the_kernels_of_this_torch():
    """So that a kernel that a new torch adds or renames shows up."""
    names = {name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names() if "." not in name}
    kernels = {f"{name}.default" for name in names if name.startswith("aten._scaled_dot_product_")}
    elsewhere = {name for name in kernels if "backward" in name or "math" in name or "quantized" in name}
    assert kernels - elsewhere <= set(CATEGORIES["attention"])
