"""The chunked loss is the loss: same value and gradients as with all logits at once, at a fraction of the memory."""

from dataclasses import replace

import pytest
import torch
from harness import llama, parse
from test_rules import facts_of
from torch._subclasses.fake_tensor import FakeTensorMode

from crius.config.resolve import loss_chunks
from crius.config.rules_quantize import chunked_loss_has_its_layer
from crius.config.run import RunConfig
from crius.data import loader
from crius.kernels import linear_cross_entropy as kernel
from crius.kernels.linear_cross_entropy import (
    IGNORE_INDEX,
    Chunks,
    linear_cross_entropy,
    reference,
    score_block,
    softcapped_score,
    token_losses,
)
from crius.models import registry
from crius.tools.dry_run.recorder import Recorder
from crius.train.build import describe_loss, set_up_loss
from crius.train.inputs import describe_model

CHUNKS = [Chunks(1, 1), Chunks(7, 3), Chunks(17, 17), Chunks(1000, 8)]  # of 34 tokens: 7 leaves a rest


def case(dtype=torch.float64):
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 17, 8, dtype=dtype), torch.randn(23, 8, dtype=dtype)
    labels = torch.randint(0, 23, (2, 17))
    labels[0, :5] = IGNORE_INDEX
    return hidden, weight, labels


def gradients(function, hidden, weight, labels):
    """Loss, gradient of the hidden states, gradient of the weight, in float64."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = function(hidden, weight, labels)
    (loss / 7).backward()
    return [tensor.detach().double() for tensor in (loss, hidden.grad, weight.grad)]


def distances(got, want):
    return [((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("chunks", CHUNKS, ids=lambda chunks: f"{chunks.tokens}-{chunks.block_tokens}")
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # float64: sums in another order. float32: likewise. bfloat16: its rounding, 2**-9, of the logits' gradient
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)],
)
def test_chunks_change_neither_loss_nor_gradients(chunks, dtype, tolerance):
    hidden, weight, labels = case(dtype)
    want = gradients(reference, hidden.double(), weight.double(), labels)
    got = gradients(lambda *args: linear_cross_entropy(*args, chunks), hidden, weight, labels)
    assert max(distances(got, want)) < tolerance


@pytest.mark.parametrize("chunks", CHUNKS[:2], ids=lambda chunks: f"{chunks.tokens}-{chunks.block_tokens}")
def test_bounded_logits_have_the_gradients_of_their_formula(chunks):
    def formula(hidden, weight, labels):
        logits = 2 * torch.tanh(torch.nn.functional.linear(hidden, weight) / 2)
        return token_losses(logits, labels).sum(dtype=torch.float64)

    bounded = replace(chunks, score=softcapped_score(2.0))
    want = gradients(formula, *case())
    got = gradients(lambda *args: linear_cross_entropy(*args, bounded), *case())
    assert max(distances(got, want)) < 1e-14


@pytest.mark.parametrize("ranks", [1, 3])
def test_many_rows_of_a_vocabulary_lose_no_digits(ranks):
    """torch's softmax on a CPU adds up 49,152 exponentials 2e-6 to 8e-6 too low, which no rank's part may show."""
    logits = 6 * torch.randn(8, 49_152, generator=torch.Generator().manual_seed(0)) + 20
    logits[:, 1] = -200  # its exponential is 0
    targets = torch.arange(8) * 6_000
    want = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
    slopes = logits.double().softmax(-1)
    slopes[range(8), targets] -= 1
    parts = logits.chunk(ranks, dim=1)
    width, told = parts[0].shape[1], []

    def scored(gather):
        return [
            score_block(part.clone(), targets - rank * width, True, gather if ranks > 1 else None)
            for rank, part in enumerate(parts)
        ]

    scored(lambda numbers: told.append(numbers) or numbers[None])
    got = scored(lambda numbers: torch.stack(told))
    for losses, _ in got:
        assert (losses.double() - want).abs().max() < 4e-6  # rounded at 32 to 64
    found = torch.cat([gradient for _, gradient in got], 1).double()
    assert (found - slopes).norm() < 2e-7 * slopes.norm() and found.sum(1).abs().max() < 5e-7


@pytest.mark.parametrize("gather", [None, lambda numbers: numbers[None]])
def test_a_compiled_score_is_the_eager_one(gather):
    logits = torch.randn(4, 9)
    targets = torch.tensor([0, 3, 8, IGNORE_INDEX])
    torch._dynamo.reset()
    found = torch.compile(score_block, backend="eager", fullgraph=True)(logits.clone(), targets, True, gather)
    for got, want in zip(found, score_block(logits.clone(), targets, True, gather), strict=True):
        torch.testing.assert_close(got, want)


def test_labels_are_ignored_by_one_number_everywhere():
    assert IGNORE_INDEX == loader.IGNORE_INDEX == torch.nn.CrossEntropyLoss().ignore_index


def test_the_gradient_is_the_derivative():
    hidden, weight, labels = case()
    hidden, weight = hidden[:, :5].clone().requires_grad_(), weight.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda hidden, weight: linear_cross_entropy(hidden, weight, labels[:, 2:7], Chunks(3, 2)), (hidden, weight)
    )


def test_a_bfloat16_weight_gets_a_gradient_that_was_summed_in_float32():
    """200 chunks that each add 1 to a sum of 256: in bfloat16 the sum would not move."""
    hidden, weight = torch.zeros(200, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    hidden[:] = 1.0
    hidden[0] = 512.0
    weight.requires_grad_()
    linear_cross_entropy(hidden, weight, torch.zeros(200, dtype=torch.int64), Chunks(1, 1)).backward()
    assert weight.grad.flatten().tolist() == pytest.approx([-355.5, 355.5], rel=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_without_labels_costs_and_changes_nothing(dtype):
    hidden, weight, labels = case(dtype)
    function = lambda *args: linear_cross_entropy(*args, Chunks(7, 3))  # noqa: E731
    loss, *grads = gradients(function, hidden, weight, torch.full_like(labels, IGNORE_INDEX))
    assert loss == 0 and not any(grad.any() for grad in grads)


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_what_needs_no_gradient_gets_none(wanted):
    hidden, weight, labels = case()
    _, *want = gradients(reference, hidden, weight, labels)
    given = {"hidden": hidden.clone(), "weight": weight.clone()}
    given[wanted].requires_grad_()
    (linear_cross_entropy(*given.values(), labels, Chunks(7, 3)) / 7).backward()
    torch.testing.assert_close(given[wanted].grad, want[wanted == "weight"])
    assert sum(tensor.grad is None for tensor in given.values()) == 1


def test_without_gradients_only_losses_are_computed():
    hidden, weight, labels = case()
    weight.requires_grad_()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels, Chunks(7, 3))
    assert not loss.requires_grad
    torch.testing.assert_close(loss, reference(hidden, weight.detach(), labels), rtol=1e-14, atol=0)


def test_on_a_cpu_only_tokens_with_a_label_are_multiplied(monkeypatch):
    """As in fine-tuning, where most tokens are only read; on fake tensors, which have no numbers, all of them."""
    rows = []
    monkeypatch.setattr(
        kernel, "linear", lambda x, weight: rows.append(len(x)) or torch.nn.functional.linear(x, weight)
    )
    hidden, weight, labels = case()
    labels[:, 4:] = IGNORE_INDEX
    labels[1, 1] = 3
    gradients(lambda *args: linear_cross_entropy(*args, Chunks(1000, 8)), hidden, weight, labels)
    assert rows == [int((labels != IGNORE_INDEX).sum())] * 2  # logits, and the gradient of the hidden state
    rows.clear()
    with FakeTensorMode() as mode:
        fake = map(mode.from_tensor, (hidden, weight, labels))
        linear_cross_entropy(*fake, Chunks(1000, 8))
    assert rows == [34]


def test_the_backward_may_run_twice():
    """A pipeline that splits its backward asks for the hidden state's gradient first, then for the weight's."""
    hidden, weight, labels = case()
    _, *want = gradients(reference, hidden, weight, labels)
    hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels, Chunks(7, 3)) / 7
    [first] = torch.autograd.grad(loss, hidden, retain_graph=True)
    [second] = torch.autograd.grad(loss, weight)
    torch.testing.assert_close([first, second], want)


@pytest.mark.parametrize("parts", [[12, 11], [8, 8, 7], [23, 0]])
def test_parts_of_the_vocabulary_make_up_the_whole(parts):
    """As the ranks of a tensor-parallel group do, one after the other: what is gathered is what all of them found."""
    hidden, weight, labels = case()
    want = gradients(reference, hidden, weight, labels)
    rows = list(weight.split(parts))
    first_rows = [sum(parts[:index]) for index in range(len(parts))]
    chunks = Chunks(34, 5)
    stats = [[] for _ in parts]
    for index, part in enumerate(rows):  # the second rank's numbers are not known yet, so this round's are not used
        gather = lambda numbers, index=index: stats[index].append(numbers) or numbers[None]  # noqa: E731
        linear_cross_entropy(hidden, part, labels, chunks, first_rows[index], gather)
    found = []
    for index, part in enumerate(rows):
        gathered = iter([torch.stack(numbers) for numbers in zip(*stats, strict=True)])
        function = lambda *args, index=index, each=gathered: linear_cross_entropy(  # noqa: E731
            *args, chunks, first_rows[index], lambda numbers: next(each)
        )
        found.append(gradients(function, hidden, part, labels))
    losses, of_hidden, of_weight = zip(*found, strict=True)
    assert max(distances([losses[0], sum(of_hidden), torch.cat(of_weight)], want)) < 1e-13
    torch.testing.assert_close(losses[-1], losses[0], rtol=0, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_has_the_same_loss_and_gradients_chunked_and_off(tied):
    found = []
    for how in ("off", "chunked"):
        config = parse(["--kernels.linear_cross_entropy", how, "--kernels.loss_chunk_tokens", "13"])
        facts = llama(num_layers=1, dim=64, tied_embeddings=tied)
        torch.manual_seed(0)
        model = registry.build(facts)
        set_up_loss(model, loss_chunks(config, facts.vocab_size, "cpu"), config)
        tokens = torch.randint(0, facts.vocab_size, (2, 17))
        loss = model(tokens[:, :-1], None, tokens[:, 1:])
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())  # float32, another order


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kernels.linear_cross_entropy", "off"], "off (as asked): 39.1 MiB of logits per microbatch"),
        (["--kernels.linear_cross_entropy", "chunked"], "chunked (as asked)"),
        ([], "chunked (auto)"),
        ([], "at most 4,096 of 10,000 tokens at a time, 24.0 MiB of logits instead of 234.4 MiB"),
        (["--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "gpipe"], "gpipe"),
    ],
)
def test_the_log_says_what_was_chosen(flags, says):
    config = parse(flags)
    chunks = loss_chunks(config, describe_model(config).vocab_size, "cpu")
    assert says in describe_loss(replace(chunks, block_tokens=1024), 10_000, 2048, 2)


@pytest.mark.parametrize("asked", ["chunked", "auto"])
def test_an_output_layer_in_low_precision_has_no_chunks(asked):
    flags = ["--quantize.dense.float8.enable", "--quantize.dense.include", "output"]
    config = parse([*flags, "--kernels.linear_cross_entropy", asked])
    chunks = loss_chunks(config, describe_model(config).vocab_size, "cpu", in_low_precision=True)
    assert chunks.tokens is None and "low precision" in chunks.reason
    found = list(chunked_loss_has_its_layer(facts_of([*flags, "--kernels.linear_cross_entropy", asked])))
    assert len(found) == (asked == "chunked")
    if found:
        assert found[0].fix.startswith("--kernels.linear_cross_entropy off")


def loss_bytes(function, tokens, dim, vocabulary):
    """Most bytes of forward and backward together, beside the operands and their gradients, in bfloat16."""
    recorder = Recorder({})
    with FakeTensorMode(), recorder.running():
        hidden = torch.empty(1, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocabulary, dim, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(1, tokens, dtype=torch.int64)
        recorder.phase("loss")
        function(hidden, weight, labels).backward()
        recorder.phase("end")
        gradients = hidden.grad.nbytes + weight.grad.nbytes
    (start, peak), *_ = [ends for label, *ends in recorder.timeline.peaks() if label[0] == "loss"]
    return peak.total() - start.total() - gradients


def test_the_loss_of_32k_tokens_takes_less_than_a_twentieth_of_the_memory():
    config = parse(["--model.flavor", "8b", "--training.mixed_precision_param", "bfloat16"])
    cut = loss_chunks(config, describe_model(config).vocab_size, "cuda")
    chunks = Chunks(cut.tokens, cut.block_tokens)
    sizes = (32768, 4096, 128256)
    eager = loss_bytes(reference, *sizes)
    chunked = loss_bytes(lambda *args: linear_cross_entropy(*args, chunks), *sizes)
    print(f"32768 tokens, {chunks.tokens} a chunk: {chunked / 2**30:.2f} GiB instead of {eager / 2**30:.2f}")
    assert chunked < 0.05 * eager


@pytest.mark.parametrize(
    ("device", "vocab_size", "num_ranks", "want"),
    [
        ("cuda", 128_256, 1, (4185, 261)),  # 1 GiB of bfloat16, and 128 MiB of float32
        ("cuda", 128_256, 2, (8371, 523)),
        ("cpu", 512, 1, (8192, 4096)),  # 8 MiB of each
        ("cpu", 128_256, 1, (256, 16)),  # the fewest tokens of a matmul
    ],
)
def test_a_chunk_of_the_loss_has_the_bytes_of_its_device(device, vocab_size, num_ranks, want):
    found = loss_chunks(RunConfig(), vocab_size, device, num_ranks=num_ranks)
    assert (found.tokens, found.block_tokens) == want
