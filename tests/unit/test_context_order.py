"""Which tokens a context-parallel rank holds, without a process group."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from crius.errors import LayoutError, PlanError
from crius.kernels.attention import document_mask, masks_made
from crius.models.layers import CausalAttention, DocumentMask
from crius.parallel.context import (
    ContextShard,
    GatheredAttention,
    GatheredDocumentMask,
    _chunks,
    _fits_flash,
    _flash_on_gpu,
    _split,
    apply_context_parallel,
)

METHODS = ("all_gather", "ulysses")


class CountScores(TorchDispatchMode):
    """Sums queries times keys over calls of the attention kernel."""

    scores = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_scaled_dot_product" in str(func):
            self.scores += args[0].shape[2] * args[1].shape[2]
        return func(*args, **(kwargs or {}))


def token_order(seq_len, degree, method):
    """The tokens of a sequence in the order of the ranks that hold them."""
    order = [chunk for held in _chunks(degree, method) for chunk in held]
    parts = _split(torch.arange(seq_len), len(order), dim=0)
    return torch.cat([parts[chunk] for chunk in order])


class OneOfThree(ContextShard):
    """The shard of one of three ranks, in a process that has the parts of all."""

    def __init__(self, rank):
        super().__init__(None, "all_gather")
        self.chunks = ((0, 5), (1, 4), (2, 3))[rank]

    def gather(self, tensor):
        return torch.cat([tensor] * 3, dim=1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_every_token_is_held_once(method, degree):
    assert torch.equal(token_order(24, degree, method).sort().values, torch.arange(24))


def test_zigzag_gives_a_rank_an_early_and_a_late_chunk():
    order = token_order(16, 4, "all_gather")
    assert order.view(4, 4).tolist() == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_zigzag_gives_every_rank_the_same_causal_work():
    work = (token_order(48, 4, "all_gather") + 1).view(4, -1).sum(dim=1)  # keys that each query sees
    assert work.unique().numel() == 1


@pytest.mark.parametrize("degree, method", [(1, "all_gather"), (1, "ulysses"), (3, "ulysses")])
def test_ulysses_and_a_single_rank_keep_the_order(degree, method):
    assert torch.equal(token_order(12, degree, method), torch.arange(12))


@pytest.mark.parametrize("seq_len, degree, method", [(12, 4, "all_gather"), (10, 4, "ulysses"), (2, 2, "all_gather")])
def test_a_sequence_that_does_not_split_evenly_is_refused(seq_len, degree, method):
    with pytest.raises(LayoutError, match="equal parts"):
        token_order(seq_len, degree, method)


@pytest.mark.parametrize("method", METHODS)
def test_a_single_rank_takes_the_tensor_as_it_is(method):
    shard, tokens = ContextShard(None, method), torch.arange(6)[None]
    assert shard.slice(tokens) is tokens
    assert shard.gather(tokens) is tokens


@pytest.mark.parametrize("num_queries", [4, 12])
def test_the_last_queries_get_what_they_get_among_all(num_queries):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 12, 4, 8, generator=generator)
    k, v = (torch.randn(2, 12, 2, 8, generator=generator) for _ in range(2))
    want = CausalAttention()(q, k, v, None)[:, -num_queries:]
    got = GatheredAttention(ContextShard(None, "all_gather"), CausalAttention()).attend(q[:, -num_queries:], k, v, None)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)  # another kernel path, values of about 1 in float32


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rank", range(3))
def test_every_rank_computes_as_many_scores(rank, masked):
    """Of 24 tokens on 3 ranks: 4 queries meet the keys up to their end, twice: 7 / 12 of 8 queries times 24 keys."""
    q, k = torch.ones(1, 8, 4, 8), torch.ones(1, 8, 2, 8)
    mask = torch.ones(1, 1, 8, 24, dtype=torch.bool) if masked else None
    with CountScores() as counter:
        assert GatheredAttention(OneOfThree(rank), CausalAttention())(q, k, k, mask).shape == q.shape
    assert counter.scores == 8 * 24 * 7 // 12


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("rank", range(3))
def test_a_rank_has_the_rows_of_its_queries_of_the_mask(rank, window):
    positions = torch.cat([torch.arange(count) for count in (7, 1, 16)])[None]
    shard = OneOfThree(rank)
    shard.degree = 3
    shard._order = [*range(6)]
    shard.gather = lambda own: positions
    before = masks_made["sdpa"]
    found = GatheredDocumentMask(shard, DocumentMask())(shard.slice(positions), None, window)
    assert masks_made["sdpa"] == before + 1
    assert torch.equal(found[:, 0], shard.slice(document_mask(positions, window=window)[:, 0]))


@pytest.mark.parametrize(
    ("width", "value_width", "itemsize", "fits"),
    [(256, 256, 2, True), (8, 8, 2, True), (264, 264, 2, False), (60, 60, 2, False), (64, 32, 2, False)]
    + [(64, 64, 4, False)],
)
def test_flash_takes_whole_widths_of_16_bit_numbers(width, value_width, itemsize, fits):
    q = SimpleNamespace(is_cuda=True, itemsize=itemsize, shape=(1, 2, 3, width))
    assert _fits_flash(q, SimpleNamespace(shape=(1, 2, 3, value_width))) == fits


@pytest.mark.parametrize(("capability", "want"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_flash_is_for_ampere_and_later(capability, want, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert _flash_on_gpu() == want


class WindowedAttention(CausalAttention):
    pass


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (WindowedAttention, "layers.1.inner is a test_context_order.WindowedAttention, a subclass of CausalAttention"),
        (nn.Identity, "1 CausalAttention in 2 layers"),
    ],
)
def test_one_layer_that_would_not_see_the_whole_sequence_is_refused(kind, said, method):
    """A rank would attend to its own tokens only, without a word, in this layer alone."""
    model = nn.Module()
    model.layers = nn.ModuleDict(
        {"0": nn.ModuleDict({"inner": CausalAttention()}), "1": nn.ModuleDict({"inner": kind()})}
    )
    with pytest.raises(PlanError) as caught:
        apply_context_parallel(model, None, method)
    assert said in caught.value.what and "--parallelism.context_parallel_degree 1" in caught.value.fix
