"""A step in microbatches is the step of the whole batch."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from crius.data.loader import Batch
from crius.train.step import Accumulation, Late


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

    def forward(self, tokens_BT, positions_BT, labels_BT, ends_BM):
        return ((self.weight * tokens_BT - labels_BT) ** 2).sum() + 0 * positions_BT.sum()


TOKENS = torch.arange(24).view(6, 4)
BATCH = Batch(tokens_BT=TOKENS, labels_BT=2 * TOKENS, positions_BT=TOKENS, sample_ids=tuple(range(6)))


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_microbatches_have_the_loss_and_gradient_of_the_batch_and_the_last_one_is_told(size):
    model = Squares()
    last = []
    sync = SimpleNamespace(start_microbatch=lambda is_last: last.append(is_last))
    runner = Accumulation(model, sync, size)
    losses = runner.forward_backward(BATCH, torch.tensor(24.0, dtype=torch.float64))
    assert last == [False] * (6 // size - 1) + [True]
    assert losses.tolist() == [(part.tokens_BT**2).sum().item() / 24 for part in BATCH.microbatches(size)]
    assert model.weight.grad.item() == pytest.approx(2 * (TOKENS**2).sum().item() / 24)
    assert not losses.requires_grad  # else it holds the graph until it is reported


@pytest.mark.parametrize(
    ("looks", "seconds", "arrives"), [([True], 0, True), ([False, True], 9, True), ([False], 0, False)]
)
def test_numbers_on_their_way_are_waited_for_at_most_as_long_as_asked(looks, seconds, arrives):
    late = Late(torch.ones(2))
    assert late.has_arrived() and late.read() == [1.0, 1.0]
    late._arrived = SimpleNamespace(query=iter(looks).__next__)
    assert late.arrives_within(seconds) is arrives
