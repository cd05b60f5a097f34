"""Continuing a sequence: what is kept changes no logits, and draws follow the probabilities."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from crius.errors import PlanError
from crius.kernels import choice
from crius.kernels.cpu.linear import store_by_columns
from crius.models import registry
from crius.models.decode import cached, generate, sample
from crius.models.layers import Attention, CausalAttention, Linear

SIZES = {"num_layers": 2, "dim": 48, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 64, "vocab_size": 80}
MODELS = {
    "llama3": {},
    "llama3_tied": {"tied_embeddings": True},
    "llama3_of_documents": {"attention_mask": "document"},
    "qwen3": {},
    "qwen3_tied": {"tied_embeddings": True},
    "llama3_imported": {"rope_float32": True},
    "llama3_of_bounded_scores": {"words": '{"attention_softcap": 1.5}'},
}
# of the largest logit: float32 sums in another order
SAME = {torch.float32: 1e-5, torch.float64: 1e-12}
LENGTH, UNCUT = 24, {"temperature": 1.0}


def built(name, dtype=torch.float32, **sizes):
    facts = registry.SPECS[name.partition("_")[0]].describe("debug", **(SIZES | MODELS[name] | sizes))
    model = registry.build(facts).to(dtype).requires_grad_(False)
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.2, generator=random).add_(1.0 if parameter.dim() == 1 else 0.0)
    return model


def ids(rows=2, length=LENGTH):
    return torch.randint(80, (rows, length), generator=torch.Generator().manual_seed(1))


def assert_same(got, want):
    assert (got - want).abs().max() <= SAME[want.dtype] * want.abs().max()


@pytest.mark.parametrize("unit", [1, 3])
@pytest.mark.parametrize("reads", [[10, *[1] * 14], [1] * 24, [7, 9, 8]], ids=["prompt_then_one", "one", "pieces"])
@pytest.mark.parametrize("dtype", SAME)
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_with_kept_keys_are_those_without(name, dtype, reads, unit):
    model, tokens = built(name, dtype), ids()
    want = model(tokens)
    with cached(model, LENGTH, unit=unit) as cache:
        for part, end in zip(tokens.split(reads, dim=1), torch.tensor(reads).cumsum(0), strict=True):
            assert_same(cache.read(part), want[:, end - 1])


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("dtype", SAME)
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_padded_sequence_has_the_logits_that_it_has_alone(name, dtype, unit):
    model, lengths = built(name, dtype), (3, 10, 7)
    rows = [row[:length] for row, length in zip(ids(3), lengths, strict=True)]
    first = torch.tensor([10 - length for length in lengths])
    prompt = torch.stack([torch.cat([row.new_zeros(10 - len(row)), row]) for row in rows])
    following = ids(3, 5)
    with cached(model, 15, first, unit) as cache:
        together = [cache.read(prompt), *(cache.read(following[:, i : i + 1]) for i in range(5))]
    for row, logits in enumerate(torch.stack(together, 1)):
        alone = model(torch.cat([rows[row], following[row]])[None])[0, lengths[row] - 1 :]
        assert_same(logits, alone)


@pytest.mark.parametrize("window", [0, 5])
@torch.inference_mode()
def test_tokens_after_a_cut_are_read_as_if_the_others_had_never_come(window):
    """Slots are added on the way, and a layer with a window has what it needs although the cut is longer than that."""
    model = built("llama3", torch.float64, words=f'{{"pattern": [{{"window": {window}}}, {{}}]}}')
    tokens = ids()
    other = tokens.flip(1)
    want = model(tokens)
    with cached(model, 4, keeps_all=True) as cache:
        cache.reserve(LENGTH)
        cache.read(torch.cat([tokens[:, :4], other[:, :16]], 1))
        cache.cut(4)
        assert_same(cache.read(tokens[:, 4:17]), want[:, 16])
        cache.reserve(2 * LENGTH)
        cache.cut(99)
        for place in range(17, LENGTH):
            assert_same(cache.read(tokens[:, place : place + 1]), want[:, place])


def test_a_model_trains_after_it_generated():
    """Its rotary frequencies were computed in inference mode."""
    model, tokens = built("llama3_imported").requires_grad_(True), ids()
    with torch.inference_mode(), cached(model, LENGTH) as cache:
        cache.read(tokens)
    model(tokens, labels_BT=tokens).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_model_is_as_before_when_its_cache_is_closed():
    model = built("llama3")
    before = dict(model.named_modules())
    with pytest.raises(RuntimeError, match="within"), cached(model, 4):
        assert not any(isinstance(module, CausalAttention) for module in model.modules())
        raise RuntimeError("within")
    assert dict(model.named_modules()) == before


class WindowedAttention(CausalAttention):
    pass


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        (nn.Identity(), "1 of 2 layers"),
        (WindowedAttention(), r"layers\.1\.attention\.inner is a test_decode\.WindowedAttention, a subclass of Causal"),
    ],
    ids=["of_another_class", "of_a_subclass"],
)
def test_attention_of_another_kind_is_refused(inner, said):
    model = built("llama3")
    model.layers["1"].attention.inner = inner
    with pytest.raises(PlanError, match=said), cached(model, 4):
        pass


class OwnAttention(Attention):
    def forward(self, x_BTD, rope, mask):
        return self.wo(self.project(x_BTD)[0].flatten(2))


def test_attention_that_leaves_out_its_inner_module_is_refused_once_the_prompt_was_read():
    model = built("llama3")
    model.layers["1"].attention.__class__ = OwnAttention
    with pytest.raises(PlanError, match=r"layers\.1\.attention\.inner got no keys"), cached(model, 4) as cache:
        cache.read(ids(1, 4))


def test_a_mask_that_a_block_makes_itself_is_refused():
    model = built("llama3")
    block = model.layers["1"]
    window = torch.ones(4, 4, dtype=torch.bool).triu(-1).tril()
    block.register_forward_pre_hook(lambda module, args: (*args[:2], window))
    with pytest.raises(PlanError, match="a mask of its own"), cached(model, 4) as cache:
        cache.read(ids(1, 4))


def test_log_probabilities_are_those_of_all_rows_and_ids_without_a_text_do_not_come():
    model, prompt = built("llama3"), ids(1, 6)[0].tolist()
    steps = list(generate(model, [prompt], lambda logits: logits.argmax(-1), max_new_tokens=8, num_ids=40))
    tokens = torch.tensor([prompt + [int(step.ids_B) for step in steps]])
    with torch.no_grad():
        logits = model(tokens)[0, 5:-1]
    assert tokens[0, 6:].tolist() == logits[:, :40].argmax(-1).tolist()
    want = logits.log_softmax(-1).gather(1, tokens[0, 6:, None])[:, 0]
    torch.testing.assert_close(torch.cat([step.log_probs_B for step in steps]), want, rtol=1e-5, atol=1e-5)


def test_prompts_of_several_lengths_are_continued_as_each_alone():
    model = built("llama3", torch.float64)
    prompts = [row[:length].tolist() for row, length in zip(ids(3), (3, 6, 5), strict=True)]

    def continued(*prompts):
        steps = generate(model, prompts, lambda logits: logits.argmax(-1), max_new_tokens=8)
        return torch.stack([step.ids_B for step in steps], 1).tolist()

    together = continued(*prompts)
    assert together == [continued(prompt)[0] for prompt in prompts]


def test_matrices_stored_by_columns_compute_the_same():
    model, tokens = built("llama3_tied"), ids()
    with torch.no_grad():
        want = model(tokens)
    with choice.applied(replace(choice.current(), linear="onednn")), torch.inference_mode():
        store_by_columns(module.weight for module in model.modules() if isinstance(module, Linear))
        assert model.layers["0"].attention.wq.weight.stride() == (1, 96)
        with cached(model, LENGTH) as cache:
            assert_same(cache.read(tokens[:, :9]), want[:, 8])
            assert_same(cache.read(tokens[:, 9:10]), want[:, 9])
        with cached(model, LENGTH) as cache:
            assert_same(cache.read(tokens[:1, :1]), want[:1, 0])  # one row, which has a kernel of its own


def counts_of(logits, draws=20_000, **cut):
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    drawn = sample(logits.expand(draws, -1), uniform, **cut)
    return torch.bincount(drawn, minlength=logits.shape[-1])


# logits, how they are cut, and the probabilities that are left
LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0, -3.0])
PLAIN = LOGITS.softmax(-1)
CUTS = {
    "temperature_1": (UNCUT, PLAIN),
    "temperature_half": ({"temperature": 0.5}, (LOGITS * 2).softmax(-1)),
    "hot": ({"temperature": 1e6}, torch.full((6,), 1 / 6)),
    "top_k_2": (UNCUT | {"top_k": 2}, PLAIN * torch.tensor([0, 1, 0, 1, 0, 0])),
    "top_k_of_more_than_there_are": (UNCUT | {"top_k": 99}, PLAIN),
    "top_p": (UNCUT | {"top_p": 0.7}, PLAIN * torch.tensor([0, 1, 0, 1, 0, 0])),
    "top_p_of_1": (UNCUT | {"top_p": 1.0}, PLAIN),
    "top_p_within_top_k": (UNCUT | {"top_k": 3, "top_p": 0.85}, PLAIN * torch.tensor([0, 1, 0, 1, 0, 0])),
}


@pytest.mark.parametrize("name", CUTS)
def test_draws_follow_the_probabilities(name):
    cut, probabilities = CUTS[name]
    counts = counts_of(LOGITS, **cut).double()
    expected = probabilities.double() / probabilities.sum() * counts.sum()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = int(possible.sum()) - 1
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom)  # four deviations: p below 1e-3


@pytest.mark.parametrize(
    "cut",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
        {"temperature": 1e-300},
        {"temperature": 5.0, "top_k": 1},
        {"temperature": 5.0, "top_p": 1e-9},
    ],
)
def test_only_the_most_probable_token_is_left(cut):
    assert counts_of(LOGITS, 500, **cut).tolist() == [0, 500, 0, 0, 0, 0]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_a_token_that_is_possible(uniform):
    logits = torch.tensor([[-math.inf, 1.0, 0.0, -math.inf]])
    assert sample(logits, torch.tensor([uniform], dtype=torch.float64), temperature=1.0).item() in (1, 2)


def test_a_token_whose_forerunners_have_all_of_top_p_does_not_come():
    drawn = [sample(torch.zeros(1, 2), torch.tensor([uniform]), temperature=1.0, top_p=0.5) for uniform in (0.0, 0.9)]
    assert drawn[0] == drawn[1]


def test_the_least_temperature_takes_the_largest():
    assert sample(torch.tensor([[4.0, 5.0, 4.0]]), torch.tensor([0.5]), temperature=1e-308).item() == 1
