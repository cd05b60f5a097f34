"""Llama 3 as a model: its sizes, what a token may see, and that plan, init rules and FLOPs fit it."""

from dataclasses import MISSING, fields, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from harness import GOLDEN, llama
from sigmoid_moe import SMALL as ROUTED
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from crius.config.parallelism import ParallelismConfig
from crius.errors import PlanError
from crius.kernels.choice import Choice, applied
from crius.models import registry
from crius.models.adapted import Adapted
from crius.models.config import LayerKind, RoutedConfig, resized
from crius.models.decoder import Block, check_decoder
from crius.models.description import Buffer
from crius.models.layers import DocumentMask, Linear, rotary_frequencies
from crius.models.plan import match
from crius.models.rope import Llama3Scaling, Rope
from crius.parallel.allocate import allocate
from crius.parallel.fsdp import _placement, plan_units
from crius.parallel.init import init_parameters, init_rules
from crius.tools.plan.shapes import NOT_TRAINABLE_YET

SPEC = registry.SPECS["llama3"]
DEBUG, SMALL = llama(), llama(num_layers=2)

FLAVORS = [(name, flavor) for name, spec in registry.SPECS.items() for flavor in spec.flavors]
USUAL = {field.name: field.default for field in fields(RoutedConfig) if field.default is not MISSING}
# parameters of the published safetensors: meta-llama/Llama-3.1-8B, -70B, -405B and Llama-3.2-1B, Qwen/Qwen3-*
PUBLISHED = {
    ("llama3", "1b"): 1_235_814_400,
    ("llama3", "8b"): 8_030_261_248,
    ("llama3", "70b"): 70_553_706_496,
    ("llama3", "405b"): 405_853_388_800,
    ("qwen3", "0.6b"): 596_049_920,
    ("qwen3", "1.7b"): 1_720_574_976,
    ("qwen3", "4b"): 4_022_468_096,
    ("qwen3", "8b"): 8_190_735_360,
    ("qwen3", "14b"): 14_768_307_200,
    ("qwen3", "32b"): 32_762_123_264,
}
# all, and those that compute one token
WITH_EXPERTS = {
    ("qwen3_moe", "30b-a3b"): (30_532_122_624, 3_353_032_704),
    ("qwen3_moe", "235b-a22b"): (235_093_634_560, 22_190_763_520),
    ("mixtral", "8x7b"): (46_702_792_704, 12_879_925_248),
    ("mixtral", "8x22b"): (140_630_071_296, 39_161_468_928),
}
# rope_theta and rms_norm_eps of their config.json
BASES = {"llama3": (5e5, 1e-5), "qwen3": (1e6, 1e-6), "qwen3_moe": (1e6, 1e-6), "mixtral": (1e6, 1e-5)}
# of models that are planned only: all, and those that compute one token (transformers' classes on the meta device)
PLANNED = {
    "deepseek-v3-671b": (671_026_404_352, 37_552_282_624),
    "deepseek-v2-lite-16b": (15_706_484_224, 2_661_150_208),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912),
}


def meta_model(facts):
    with torch.device("meta"):
        return registry.build(facts)


def started(facts):
    model = registry.build(facts)
    with torch.no_grad():
        init_parameters(model, init_rules(facts), seed=7)
    return model


def random_tokens(length, seed):
    return torch.randint(DEBUG.vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "flavor"), PUBLISHED)
def test_flavor_has_the_published_number_of_parameters(name, flavor):
    facts = registry.SPECS[name].describe(flavor)
    assert facts.num_parameters == facts.num_active_parameters == PUBLISHED[name, flavor]
    assert not registry.families()[name].splits_rows
    assert sum(parameter.numel() for parameter in meta_model(facts).parameters()) == PUBLISHED[name, flavor]


@pytest.mark.parametrize(("name", "flavor"), WITH_EXPERTS)
def test_flavor_with_experts_has_the_published_numbers_of_parameters(name, flavor):
    facts = registry.SPECS[name].describe(flavor)
    assert (facts.num_parameters, facts.num_active_parameters) == WITH_EXPERTS[name, flavor]
    assert registry.families()[name].splits_rows
    assert sum(parameter.numel() for parameter in meta_model(facts).parameters()) == facts.num_parameters


@pytest.mark.parametrize(("name", "flavor"), [*PUBLISHED, *WITH_EXPERTS])
def test_flavor_has_the_published_frequencies_and_norms(name, flavor):
    """``rope_scaling`` is that of Llama 3.1, but for the factor of 3.2."""
    config = registry.SPECS[name].describe(flavor).config
    factor = 32.0 if flavor == "1b" else 8.0
    scaling = Llama3Scaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    assert (config.rope_theta, config.norm_eps) == BASES[name]
    assert config.rope_scaling == (scaling if name == "llama3" else None)


def told(config):
    """The fields that differ from a plain decoder's."""
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    return ", ".join(f"{name}={value!r}" for name, value in given.items() if value != USUAL.get(name))


def test_the_sizes_of_a_flavor_change_only_with_its_line():
    lines = [f"a plain decoder: {USUAL}"]
    lines += [f"{name}/{flavor}: {told(registry.SPECS[name].flavors[flavor])}" for name, flavor in FLAVORS]
    assert (GOLDEN / "flavors.txt").read_text().splitlines() == lines


@pytest.mark.parametrize("name", PLANNED)
def test_models_that_are_planned_only_have_the_published_numbers_of_parameters(name):
    facts = NOT_TRAINABLE_YET[name]
    assert (facts.num_parameters, facts.num_active_parameters) == PLANNED[name]


@pytest.mark.parametrize("tied", [False, True])
def test_facts_count_what_the_debug_model_has(tied):
    facts = llama(tied_embeddings=tied, vocab_size=301, num_layers=3)
    assert sum(parameter.numel() for parameter in meta_model(facts).parameters()) == facts.num_parameters
    modules = facts.modules(31)
    assert [module.name for module in modules] == [
        "tok_embeddings",
        "layers.0",
        "layers.1",
        "layers.2",
        "norm",
        "output",
    ]
    assert sum(module.parameters for module in modules) == facts.num_parameters
    assert sum(module.flops_per_token for module in modules) == facts.flops_per_token(31)
    in_a_pipeline = sum(module.parameters for module in facts.modules(31, is_cut=True))
    assert in_a_pipeline == facts.num_parameters + tied * facts.vocab_size * facts.dim, "both stages have the weight"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("name", "flavor"), FLAVORS)
def test_a_description_is_what_is_built(name, flavor, tied):
    """Linear layers, parameters and their order, and the contract of ``Decoder``."""
    facts = registry.SPECS[name].describe(flavor, tied_embeddings=tied, num_layers=2)
    model = meta_model(facts)
    linears = [(name, tuple(m.weight.shape)) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert list(facts.linears.items()) == linears
    check_decoder(model, facts)


@pytest.mark.parametrize(
    "words",
    [
        '{"qkv_bias": true, "o_bias": true, "mlp_bias": true, "norms": "both", "qk_norm": "all"}',
        '{"norms": "post", "qk_norm": "head", "rotary_share": 1}',
    ],
)
def test_a_model_of_words_is_what_is_built(words):
    facts = llama(num_layers=1, words=words)
    check_decoder(meta_model(facts), facts)


def test_runs_of_equal_layers_are_the_layers_one_by_one():
    kinds = (LayerKind(window=3), LayerKind(), LayerKind())
    configs = [registry.SPECS[name].flavors[flavor] for name, flavor in FLAVORS]
    for config in (*configs, replace(ROUTED, num_layers=9, num_dense_layers=2, pattern=kinds)):
        runs = config.layers()
        assert all(one != other for (_, one), (_, other) in pairwise(runs))
        listed = [layer for count, layer in runs for _ in range(count)]
        assert listed == [config.layer(index) for index in range(config.num_layers)]


@pytest.mark.parametrize("window", [0, 1, 3, 7, 9])
def test_the_mean_context_is_that_of_each_token(window):
    seen = [min(place, window or place) for place in range(1, 8)]
    assert replace(SMALL.attention, window=window).mean_context(7) == sum(seen) / 7


def test_debug_flavor_fits_the_layouts_it_is_meant_for():
    """8 layers for 8 pipeline ranks, heads and widths for 8 and 4 tensor-parallel ranks and float8's blocks of 16."""
    assert (DEBUG.num_layers, DEBUG.num_heads, DEBUG.num_kv_heads) == (8, 8, 4)
    assert (DEBUG.dim % 128, DEBUG.ffn_dim % 128) == (0, 0)
    assert 1_000_000 <= DEBUG.num_parameters <= 6_000_000


@pytest.mark.parametrize("tied", [False, True])
def test_flops_per_token_is_the_hand_count_of_the_linear_layers(tied):
    facts = llama(tied_embeddings=tied)
    linears = [module for module in meta_model(facts).modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 7 * facts.num_layers + 1
    weights = sum(linear.in_features * linear.out_features for linear in linears)
    # a multiply-add is 2 FLOPs; the backward does each matmul twice, for its input and for its weight
    attention = facts.num_layers * 2 * facts.num_heads * facts.config.head_dim * 100  # scores and their sum over values
    assert facts.matmul_parameters == weights
    assert facts.flops_per_token(199) == 3 * 2 * (weights + attention)


@torch.no_grad()
def test_flops_per_token_is_what_torch_counts():
    """The plain attention kernel computes the whole square of scores: every token visits all 24."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        started(SMALL)(random_tokens(24, 0))
    assert 3 * counter.get_total_flops() == SMALL.flops_per_token(47) * 2 * 24


def test_frozen_weights_cost_a_third_less_and_adapters_as_much_as_weights():
    shapes = {"layers.0.attention.wk": (64, 128), "layers.1.feed_forward.w2": (128, 384)}
    adapted = replace(SMALL, adapted=Adapted(4, tuple(shapes)))
    assert [weight.unit for weight in adapted.trained] == ["layers.0", "layers.0", "layers.1", "layers.1"]
    assert adapted.num_trained == 4 * (128 + 64 + 384 + 128)
    frozen = SMALL.flops_per_token(17) - 2 * SMALL.matmul_parameters
    assert adapted.flops_per_token(17) == frozen + 6 * adapted.num_trained


@pytest.mark.parametrize("scaling", [None, Llama3Scaling(factor=8.0), Llama3Scaling(factor=2.0, low_freq_factor=3.0)])
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_both_forms_of_the_frequencies_are_the_same_numbers(theta, scaling):
    """One is written as the paper has it, in float64, the other as transformers computes it."""
    rope = Rope(theta=theta, dim=64, scaling=scaling)
    device = torch.device("cpu")
    plain = rotary_frequencies(replace(rope, scaling=None), device)
    got = rotary_frequencies(rope, device)
    rounded = rotary_frequencies(replace(rope, is_float32=True), device)
    torch.testing.assert_close(got.float(), rounded, rtol=1e-6, atol=0)
    assert plain[0] == got[0] == 1.0
    assert plain[31].item() == pytest.approx(theta ** (-62 / 64), rel=1e-12)
    if scaling and theta == 5e5:
        assert got[31] == plain[31] / scaling.factor


def test_a_loss_without_chunks_is_the_sum_over_tokens_with_a_label():
    model = started(SMALL)
    tokens = random_tokens(24, 0)
    labels = tokens.roll(-1, 1)
    labels[:, 20:] = -100
    assert model.loss.chunks is None
    with torch.no_grad():
        logits = model(tokens)[:, :20].flatten(0, 1).double()
        want = nn.functional.cross_entropy(logits, labels[:, :20].flatten(), reduction="sum")
        torch.testing.assert_close(model(tokens, labels_BT=labels), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mask", ["causal", "document"])
@torch.no_grad()
def test_a_later_token_never_changes_earlier_logits(mask):
    model = started(llama(num_layers=2, attention_mask=mask))
    tokens = random_tokens(24, 0)
    changed = tokens.clone()
    changed[:, 17] = (tokens[:, 17] + 1) % DEBUG.vocab_size
    positions = torch.arange(24).expand(2, -1)
    before, after = model(tokens, positions), model(changed, positions)
    assert torch.equal(before[:, :17], after[:, :17])
    assert (before[:, 17:] != after[:, 17:]).any(dim=-1).all()


@pytest.mark.parametrize("mask", ["causal", "document"])
@torch.no_grad()
def test_only_the_document_mask_hides_other_documents(mask):
    """Positions turn the rotary angles under either mask; a 0 starts a document only under ``document``."""
    model = started(llama(num_layers=2, attention_mask=mask))
    positions = torch.cat((torch.arange(9), torch.arange(15))).expand(2, -1)
    tokens, other = random_tokens(24, 0), random_tokens(24, 1)
    changed = torch.cat((other[:, :9], tokens[:, 9:]), dim=1)
    second, second_changed = (model(ids, positions)[:, 9:] for ids in (tokens, changed))
    assert torch.equal(second, second_changed) == (mask == "document")


@torch.no_grad()
def test_a_packed_document_is_computed_as_if_it_were_alone():
    """Its positions restart and nothing before it is seen."""
    model = started(llama(num_layers=2, attention_mask="document"))
    tokens = random_tokens(24, 0)
    positions = torch.cat((torch.arange(9), torch.arange(15))).expand(2, -1)
    alone = model(tokens[:, 9:], torch.arange(15).expand(2, -1))
    # float32 logits of magnitude 3, summed over another number of (masked) tokens (measured: 1e-6)
    torch.testing.assert_close(model(tokens, positions)[:, 9:], alone, rtol=0, atol=1e-5)


def test_document_mask_is_the_table_of_who_sees_whom():
    mask = DocumentMask()(torch.tensor([[0, 1, 0, 0, 1]]))
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_plan_covers_each_parameter_once(tied):
    facts = llama(tied_embeddings=tied)
    model = meta_model(facts)
    units = plan_units(facts.plan, model, ParallelismConfig())
    assert len(units) == facts.num_layers + (1 if tied else 2)
    for name, _ in model.named_parameters():
        assert sum(name.startswith(f"{module}.") for unit in units for module in unit.modules) == 1, name
    assert [unit.modules for unit in units if not unit.reshard_after_forward] == [units[0 if tied else -1].modules]
    assert "output" in units[0 if tied else -1].modules, "its backward comes first"


@pytest.mark.parametrize(("shards", "dim"), [(4, 0), (8, 0), (16, 1)])
def test_experts_are_cut_inside_of_each_if_there_are_fewer_than_shards(shards, dim):
    experts = nn.Parameter(torch.empty(8, 16, 4, device="meta"))
    mesh = SimpleNamespace(experts=None, shards=SimpleNamespace(size=(2, shards).__getitem__))
    place = _placement({experts}, mesh)
    assert place(experts).dim == dim and place(nn.Parameter(torch.empty(8))) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fsdp_units": ("tok_embeddings", "layers.*", "norm+output", "experts.*")}, "'experts.*' matches no module"),
        ({"fsdp_units": ("tok_embeddings", "layers.*", "norm+head")}, "'head' matches no module"),
        ({"block": "blocks.*"}, "'blocks.*' matches no module"),
        ({"embeddings": ("tok_embeddings", "pos_embeddings")}, "'pos_embeddings' matches no module"),
        ({"tensor_parallel": {"head": "logits"}}, "'head' matches no module"),
        ({"tensor_parallel": {"output": "logits"}}, "no tensor-parallel row of the sharding plan covers tok_embed"),
        ({"fsdp_units": ("tok_embeddings", "layers.*", "output")}, "norm.weight is in no FSDP unit"),
        (
            {"fsdp_units": ("tok_embeddings", "layers.*.attention", "norm+output")},
            "layers.0.attention_norm.weight is in no FSDP unit",
        ),
        (
            {"fsdp_units": ("tok_embeddings", "layers.*", "layers.1", "norm+output")},
            "layers.1.attention_norm.weight is in 2 FSDP units",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_by_name(change, named):
    with pytest.raises(PlanError) as caught:
        check_decoder(meta_model(SMALL), replace(SMALL, plan=replace(SMALL.plan, **change)))
    assert named in caught.value.what
    assert caught.value.fix


STATE = Buffer("shift", (2,), value=0.5)
COUNTER = Buffer("seen", (2,), "int64", persistent=False)


class WithBuffers(Block):
    """A block with a state and a counter."""

    def __init__(self, config, index):
        super().__init__(config, index)
        self.register_buffer("shift", torch.zeros(2))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64), persistent=False)


def with_buffers(*buffers, block=WithBuffers):
    [(count, layer)] = SMALL.layers
    return replace(SMALL, block=block, layers=((count, replace(layer, buffers=buffers)),))


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ((STATE,), "buffer layers.0.seen (2,) int64 persistent=False is not in the description"),
        ((STATE, COUNTER, Buffer("bias", (8,))), "the described buffer layers.0.bias (8,) float32 is not in the model"),
        ((STATE._replace(shape=(3,)), COUNTER), "layers.0.shift is (2,) float32, described as (3,) float32"),
        ((STATE._replace(dtype="float64"), COUNTER), "layers.0.shift is (2,) float32, described as (2,) float64"),
        ((STATE, COUNTER._replace(persistent=True)), "is (2,) int64 persistent=False, described as (2,) int64"),
        ((STATE._replace(persistent=False),), "described as (2,) float32 persistent=False"),
    ],
)
def test_buffers_are_held_against_the_description(told, named):
    model = with_buffers(*told)
    with pytest.raises(PlanError) as caught:
        check_decoder(meta_model(model), model)
    assert named in caught.value.what


def test_a_counter_has_a_dtype_whose_sums_no_layout_changes():
    class Rounding(WithBuffers):
        def __init__(self, config, index):
            super().__init__(config, index)
            self.register_buffer("seen", torch.zeros(2), persistent=False)

    model = with_buffers(STATE, COUNTER._replace(dtype="float32"), block=Rounding)
    with pytest.raises(PlanError, match=r"layers\.0\.seen is a counter of torch\.float32"):
        check_decoder(meta_model(model), model)


def test_buffers_start_as_described_and_are_no_parameters():
    model = with_buffers(STATE, COUNTER)
    check_decoder(meta_model(model), model)
    buffers = dict(started(model).named_buffers())
    assert list(buffers) == [buffer.name for buffer in model.buffers] and len(buffers) == 4
    assert buffers["layers.1.shift"].tolist() == [0.5, 0.5] and buffers["layers.1.seen"].tolist() == [0, 0]
    offloaded = meta_model(model)
    allocate(offloaded, "cpu", buffers="meta")
    assert {one.device.type for one in offloaded.parameters()} == {"cpu"}
    assert {one.device.type for one in offloaded.buffers()} == {"meta"}
    assert model.num_parameters == SMALL.num_parameters
    assert model.state_names == [*(weight.name for weight in SMALL.weights), "layers.0.shift", "layers.1.shift"]


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_an_init_rule_and_every_rule_a_parameter(tied):
    facts = llama(num_layers=2, tied_embeddings=tied)
    names = [name for name, _ in meta_model(facts).named_parameters()]
    patterns = [pattern for pattern, _ in init_rules(facts)]
    chosen = [next(pattern for pattern in patterns if match(pattern, name)) for name in names]
    unused = {"output.weight"} if tied else set()
    assert set(chosen) == set(patterns) - unused


def test_a_parameter_without_an_init_rule_is_refused_by_name():
    model = registry.build(SMALL)
    rules = [rule for rule in init_rules(SMALL) if rule[0] != "layers.*.ffn_norm.weight"]
    with pytest.raises(PlanError, match=r"no init rule fits parameter layers\.0\.ffn_norm\.weight"), torch.no_grad():
        init_parameters(model, rules, seed=7)


@torch.no_grad()
def test_weights_start_at_the_size_their_rule_says():
    parameters = dict(started(DEBUG).named_parameters())
    residual = 0.02 / 16**0.5  # two writes to the residual stream in each of 8 layers
    want = {
        "tok_embeddings.weight": 1.0,
        "output.weight": 128**-0.5,
        "layers.3.attention.wq.weight": 0.02,
        "layers.3.feed_forward.w1.weight": 0.02,
        "layers.3.attention.wo.weight": residual,
        "layers.3.feed_forward.w2.weight": residual,
    }
    for name, std in want.items():
        # 16,384 numbers or more: the standard error of their std is 0.6 %; clamping at 3 std takes 0.7 % off it
        assert parameters[name].std().item() == pytest.approx(std, rel=0.03), name
        assert parameters[name].abs().max().item() <= 3 * std * (1 + 1e-6), name  # float32 rounding of the product
        assert parameters[name].mean().item() == pytest.approx(0, abs=0.04 * std), name  # 5 standard errors
    assert (parameters["norm.weight"] == 1).all()


def test_a_fresh_model_scores_like_a_uniform_guess():
    """The output layer starts so that no token is preferred much: loss ln(V) and half the logits' variance of 1."""
    tokens = random_tokens(64, 0)
    with torch.no_grad():
        logits = started(DEBUG)(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), random_tokens(64, 1).flatten()).item()
    # 128 tokens with a standard deviation of 1 each: 0.09 standard error
    assert loss == pytest.approx(torch.tensor(DEBUG.vocab_size).log().item() + 0.5, abs=0.4)


class Strange(Block):
    """A block that breaks the contract in each way there is."""

    def __init__(self, config, index):
        super().__init__(config, index)
        self.feed_forward.w1 = nn.Linear(config.dim, config.ffn_dim)
        self.feed_forward.dropout = nn.Dropout(0.1)
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(2))
        self.attention.wo = Linear(config.num_heads * config.head_dim, config.dim + 1, bias=False)
        del self.ffn_norm


def test_a_block_that_breaks_the_contract_is_told_all_of_it_at_once():
    facts = replace(llama(num_layers=1), block=Strange)
    with pytest.raises(PlanError) as caught:
        check_decoder(meta_model(facts), facts)
    for said in (
        "parameter layers.0.gain (3,) is not in the description",
        "the described weight layers.0.ffn_norm.weight (128,) is not in the model",
        "parameter layers.0.attention.wo.weight is (129, 128), described as (128, 128)",
        "layers.0.feed_forward.w1 is a Linear, not crius.models.layers.Linear",
        "parameter layers.0.feed_forward.w1.bias (384,) is not in the description",
        "layers.0.feed_forward.dropout is a dropout",
        "buffer layers.0.seen (2,) float32 is not in the description",
        "row 'layers.*.ffn_norm' matches no module",
    ):
        assert said in caught.value.what, said
    assert "docs/adding_a_model.md" in caught.value.fix


def test_weights_in_another_order_are_no_description():
    facts = llama(num_layers=1)
    [(count, layer)] = facts.layers
    swapped = replace(facts, layers=((count, replace(layer, weights=layer.weights[::-1])),))
    with pytest.raises(PlanError, match=r"layers\.0\.attention_norm\.weight has another position in the description"):
        check_decoder(meta_model(facts), swapped)


@pytest.mark.parametrize(
    ("sizes", "follow"),
    [
        ({"dim": 384, "num_heads": 6}, {"head_dim": 64, "num_kv_heads": 3, "ffn_dim": 1152}),
        ({"num_heads": 7, "dim": 126}, {"head_dim": 18, "num_kv_heads": 7, "ffn_dim": 384}),
        ({"dim": 100, "ffn_dim": 50}, {"head_dim": 12, "num_kv_heads": 4, "ffn_dim": 50}),
        ({"head_dim": 24}, {"head_dim": 24, "num_kv_heads": 4, "ffn_dim": 384}),
    ],
)
def test_sizes_that_hang_on_a_given_one_follow_it(sizes, follow):
    config = resized(DEBUG.config, **sizes)
    assert {name: getattr(config, name) for name in follow} == follow


def test_experts_and_the_factor_of_embeddings_follow_the_width_unless_they_are_given():
    routed = resized(ROUTED, dim=2 * ROUTED.dim, shared_ffn_dim=ROUTED.shared_ffn_dim)
    assert (routed.expert_ffn_dim, routed.shared_ffn_dim) == (2 * ROUTED.expert_ffn_dim, ROUTED.shared_ffn_dim)
    gemma = registry.SPECS["gemma2"].flavors["debug"]
    assert resized(gemma, dim=256).embedding_multiplier == 16
    given = resized(gemma, dim=256, embedding_multiplier=3.0)
    assert given.embedding_multiplier == resized(given, dim=128).embedding_multiplier == 3


def test_a_head_that_was_never_dim_by_heads_stays():
    config = resized(registry.SPECS["qwen3"].flavors["8b"], dim=2048, num_heads=16)
    assert (config.head_dim, config.num_kv_heads, config.ffn_dim) == (128, 4, 6144)


class Recorder(nn.Module):
    """A layer that keeps the mask that it gets."""

    def forward(self, x_BTD, rope, mask):
        self.mask = mask
        return x_BTD


@pytest.mark.parametrize("positions", [None, torch.arange(16).expand(2, -1)])
def test_windows_end_where_rows_end_though_a_rank_has_half_of_the_sequence(positions):
    model = registry.build(llama(num_layers=2, words='{"pattern": [{"window": 5}, {}]}'))
    model.tok_embeddings = nn.Identity()
    model.layers = nn.ModuleDict({"0": Recorder()})
    model._embedded = lambda tokens: torch.zeros(2, 8, 128)  # as tensor parallelism scatters it
    with applied(Choice(attention=("varlen", "flex"))):
        model.hidden(torch.zeros(2, 16, dtype=torch.int64), positions)
    ends, window = model.layers["0"].mask
    assert (ends.tolist(), window) == ([0, 16, 32], 5)
