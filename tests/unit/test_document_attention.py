"""The ends of documents, made by the loader on the host, are the document mask: outputs and gradients are the same."""

import random
from collections import Counter

import pytest
import torch
from harness import parse
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from varlen_cpu import register, seen

from crius.data.loader import IGNORE_INDEX, Batch
from crius.kernels import attention
from crius.kernels.attention import causal_attention, document_mask, masked_attention
from crius.kernels.choice import Choice, applied
from crius.models import registry
from crius.models.llama3 import SPEC
from crius.tools.dry_run.recorder import flops
from crius.train.setup import most_documents

VARLEN = Choice(attention=("varlen",))
B, T = 3, 24


def documents(seed, batch=B, tokens=T):
    """Positions of rows that documents of random lengths fill, the longest a row and the shortest a token."""
    rng = random.Random(seed)
    rows = []
    for _ in range(batch):
        lengths, longest = [], rng.choice((1, 3, tokens))
        while sum(lengths) < tokens:
            lengths.append(min(rng.randint(1, longest), tokens - sum(lengths)))
        rows.append(torch.cat([torch.arange(length) for length in lengths]))
    return torch.stack(rows)


def batch_of(positions, most=T):
    tokens = torch.arange(positions.numel()).view_as(positions) % 250
    return Batch(tokens, tokens.roll(-1, 1), positions, tuple(range(len(positions)))).with_ends(most)


@pytest.fixture(autouse=True, scope="module")
def a_kernel_on_the_cpu():
    """torch's operator, for a GPU, with the definition in the place of the kernel."""
    register()


def output_and_gradients(mask, heads=(4, 2), positions=(B, T)):
    torch.manual_seed(0)
    shapes = [(positions[0], n, positions[1], 8) for n in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    output = causal_attention(*inputs) if mask is None else masked_attention(*inputs, mask)
    return [output, *torch.autograd.grad(output, inputs, torch.randn(output.shape))]


@pytest.mark.parametrize("seed", range(20))
def test_ends_say_what_the_dense_mask_shows(seed):
    batch = batch_of(documents(seed))
    found = seen(document_mask(batch.positions_BT, batch.ends_BM).ends)
    want = torch.block_diag(*document_mask(batch.positions_BT)[:, 0].int()).bool()
    assert torch.equal(found, want)
    count = int((batch.positions_BT == 0).sum(1).max())
    width = batch.ends_BM.shape[1]
    assert count <= width < 2 * count and width & (width - 1) == 0


@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("seed", range(6))
def test_attention_by_ends_and_its_gradients_are_those_of_the_dense_mask(seed, window):
    """Keys and values have fewer heads than queries, which torch 2.11 takes without being told."""
    batch = batch_of(documents(seed))
    want = output_and_gradients(document_mask(batch.positions_BT, window=window))
    got = output_and_gradients(document_mask(batch.positions_BT, batch.ends_BM, window))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # float32: another order of sums
    other = output_and_gradients(document_mask(torch.arange(T).repeat(B, 1)))
    assert not torch.allclose(other[0], want[0], atol=1e-3)


class Flops(TorchDispatchMode):
    """FLOPs of what runs inside, as the dry run counts them."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.total += flops(func, args, kwargs or {}, result)
        return result


def test_a_dry_run_counts_documents_as_whole_sequences():
    batch = batch_of(documents(1))
    with Flops() as by_ends:
        output_and_gradients(document_mask(batch.positions_BT, batch.ends_BM))
    with Flops() as causal:
        output_and_gradients(None)
    assert by_ends.total == causal.total > 0


def test_a_model_trains_the_same_by_ends():
    facts = SPEC.describe("debug", num_layers=2, attention_mask="document")
    torch.manual_seed(0)
    model = registry.build(facts)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    batch = batch_of(documents(1))
    assert (batch.labels_BT != IGNORE_INDEX).all()

    def gradients(ends):
        loss = model(batch.tokens_BT, batch.positions_BT, batch.labels_BT, ends)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    torch.testing.assert_close(gradients(batch.ends_BM), gradients(None), rtol=1e-4, atol=1e-4)


def test_microbatches_and_other_orders_keep_the_ends_of_their_rows():
    batch = batch_of(documents(3, batch=4))
    for part, rows in zip(batch.microbatches(2), (slice(0, 2), slice(2, 4)), strict=True):
        assert torch.equal(part.ends_BM, batch.ends_BM[rows])
    assert torch.equal(batch.grouped(2).ends_BM, batch.ends_BM[[0, 2, 1, 3]])
    assert batch.map_tokens(lambda tensor: tensor[:, :3]).ends_BM is batch.ends_BM
    assert batch.counted().ends_BM is None


@pytest.mark.parametrize(("most", "is_given"), [(4, True), (3, False)])
def test_a_row_of_too_many_documents_gives_no_ends(most, is_given):
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 0, 1]])
    assert (batch_of(positions, most).ends_BM is not None) == is_given


@pytest.mark.parametrize(("order", "kind"), [(("varlen", "flex"), BlockMask), (("varlen",), Tensor)])
def test_a_batch_without_ends_takes_another_kernel_and_is_counted(order, kind, monkeypatch):
    made = Counter()
    monkeypatch.setattr(attention, "masks_made", made)
    batch = batch_of(documents(0))
    with applied(Choice(attention=order)):
        assert isinstance(document_mask(batch.positions_BT, batch.ends_BM), attention.Documents)
        assert isinstance(document_mask(batch.positions_BT), kind)
    assert made == {"varlen": 1, "flex" if kind is BlockMask else "sdpa": 1}


DOCUMENT = ("--model.attention_mask", "document")


@pytest.mark.parametrize(
    ("order", "seq_len", "flags", "most"),
    [
        (("varlen", "flex"), 8192, [], 128),
        (("varlen", "flex"), 32, [], 1),
        (("varlen", "flex"), 8192, ["--training.reproducible"], 8192),  # else by the other rows of the rank
        (("varlen",), 256, [], 256),
        (("flash", "efficient", "math"), 8192, [], 0),
        ((), 8192, [], 0),
        (("varlen", "flex"), 8192, ["--model.attention_mask", "causal"], 0),  # windows, of whole rows
    ],
)
def test_how_many_documents_a_row_may_have(order, seq_len, flags, most):
    with applied(Choice(attention=order)):
        assert most_documents(parse([*DOCUMENT, "--training.seq_len", str(seq_len), *flags])) == most


def test_any_number_of_documents_is_one_graph():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    attend = torch.compile(masked_attention, backend=count, fullgraph=True)
    with applied(VARLEN), torch.no_grad():
        for lengths in ((24,), (7, 17), (1, 2, 3, 18), (4,) * 6, (24,)):
            positions = torch.cat([torch.arange(length) for length in lengths]).repeat(B, 1)
            batch = batch_of(positions)
            mask = document_mask(batch.positions_BT, batch.ends_BM)
            q, k, v = (torch.randn(B, heads, T, 8) for heads in (4, 2, 2))
            torch.testing.assert_close(attend(q, k, v, mask), masked_attention(q, k, v, mask))
    assert len(graphs) == 1
