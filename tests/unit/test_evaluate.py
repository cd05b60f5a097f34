"""A validation that a run is asked to stop in ends between two batches."""

import itertools

import torch
from harness import Alone
from torch import nn

from crius.config.layout import Layout
from crius.config.parallelism import ParallelismConfig
from crius.data.loader import Batch
from crius.launch.stop import StopRequest
from crius.train import loop
from crius.train.step import evaluate

CPU = torch.device("cpu")


class Scores:
    """Scores 2 nats a batch, and asks its run to stop in the batch of number ``last``."""

    def __init__(self, request, last):
        self.request, self.last, self.count = request, last, 0

    def score(self, batch):
        self.count += 1
        self.request.number = 15 if self.count == self.last else None
        return torch.tensor(2.0, dtype=torch.float64)


def validation(last, num_batches, monkeypatch):
    """The record, and how many batches were scored."""
    monkeypatch.setattr(loop.dist, "all_reduce", lambda values, op: None)
    request = StopRequest()
    runner, part = Scores(request, last), nn.Linear(1, 1)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    batches = itertools.repeat(Batch(tokens, tokens, tokens, (0, 1)), num_batches)
    layout = Layout.of(ParallelismConfig(), 1)
    must_stop = lambda: loop.stop_number(request, 2) > 0  # noqa: E731
    record = evaluate([part], runner, batches, lambda b: b, torch.ones(1), Alone(0, 1, CPU), layout, 3, must_stop)
    assert part.training
    return record, runner.count


def test_a_validation_stops_between_two_batches(monkeypatch):
    assert validation(2, 5, monkeypatch) == (None, 2)


def test_a_validation_that_nobody_stops_is_whole(monkeypatch):
    record, count = validation(9, 5, monkeypatch)
    assert (count, record.val_samples, record.val_loss) == (5, 10, 2 / 8)


def test_nobody_is_asked_where_no_signal_is_caught():
    assert loop.stop_number(None, 2) == 0
