"""Rows of tokens to log-probabilities. The rows of a document share their beginning, which is read once.

``context choice choice ...`` is one sequence: a choice sees the context and itself, and its positions continue from the
context's. Sequences of about the same length make a batch.

B batch, T tokens, D model dim, V vocabulary, N targets
"""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from crius.models.decode import cached, log_probs_of
from crius.models.decoder import Decoder
from crius.tools.evaluate.encode import TokenRow
from crius.tools.evaluate.metrics import Score

_WORTH = 0.9
_LOGIT_BYTES = 1 << 26
"""Bytes of float32 logits that are computed at once."""


class Joined(NamedTuple):
    """Rows as one sequence.

    Attributes:
        tokens: common beginning of all rows, then the rest of each row.
        positions: position of each token in its row.
        branches: 0 in the beginning, then the number of the row, from 1.
        places: for each row, positions in the sequence where its targets are predicted.
    """

    tokens: list[int]
    positions: list[int]
    branches: list[int]
    places: list[list[int]]


def join(rows: Sequence[TokenRow]) -> Joined:
    """Rows as one sequence."""
    shared = len(os.path.commonprefix([row.tokens for row in rows]))
    joined = Joined(list(rows[0].tokens[:shared]), list(range(shared)), [0] * shared, [])
    for number, row in enumerate(rows, start=1):
        offset = len(joined.tokens) - shared  # from a place after the beginning of a row to its place in the sequence
        joined.tokens.extend(row.tokens[shared:])
        joined.positions.extend(range(shared, len(row.tokens)))
        joined.branches.extend([number] * (len(row.tokens) - shared))
        first = len(row.tokens) - len(row.targets)
        joined.places.append([*range(first, shared), *range(max(first, shared) + offset, len(row.tokens) + offset)])
    return joined


def saves(rows: Sequence[TokenRow]) -> bool:
    """Whether rows share enough to be one sequence: a mask and long sequences take time too."""
    return len(join(rows).tokens) < _WORTH * sum(len(row.tokens) for row in rows)


def batches(groups: Sequence[Sequence[TokenRow]], batch_tokens: int) -> Iterator[list[int]]:
    """Numbers of groups, the longest first, in batches of at most ``batch_tokens`` with their padding.

    The longest come first, so that a batch that does not fit into memory fails at once.
    """
    lengths = [len(join(rows).tokens) for rows in groups]
    batch: list[int] = []
    for number in sorted(range(len(groups)), key=lambda number: (-lengths[number], number)):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


@torch.inference_mode()
def score(model: Decoder, groups: Sequence[Sequence[TokenRow]]) -> list[list[Score]]:
    """Scores of the rows of each group, in one batch. Logits are computed only for targets.

    Args:
        model: the decoder.
        groups: rows that may share their beginning.
    """
    device = model.tok_embeddings.weight.device
    joined = [join(rows) for rows in groups]
    tokens_BT, positions_BT, branches_BT = (
        pad_sequence([torch.tensor(part) for part in parts], batch_first=True).to(device)
        for parts in zip(*(one[:3] for one in joined), strict=True)
    )
    hidden_BTD = _hidden(model, tokens_BT, positions_BT, branches_BT)
    longest = tokens_BT.shape[1]
    index = [number * longest + place for number, one in enumerate(joined) for places in one.places for place in places]
    hidden_ND = hidden_BTD.flatten(0, 1)[torch.tensor(index, device=device)]
    targets_N = torch.tensor([target for rows in groups for row in rows for target in row.targets], device=device)
    log_probs_N, is_greedy_N = _target_scores(model, hidden_ND, targets_N)
    sizes = [len(row.targets) for rows in groups for row in rows]
    scores = iter(
        Score(float(log_probs.sum()), bool(is_greedy.all()), len(log_probs))
        for log_probs, is_greedy in zip(log_probs_N.split(sizes), is_greedy_N.split(sizes), strict=True)
    )
    return [[next(scores) for _ in rows] for rows in groups]


def _hidden(model: Decoder, tokens_BT: Tensor, positions_BT: Tensor, branches_BT: Tensor) -> Tensor:
    """Input of the output layer, ``(B, T, D)``. Padding is at the end, where no token of a row sees it."""
    if not branches_BT.any():
        return model.hidden(tokens_BT)
    count = tokens_BT.shape[1]
    order = torch.arange(count, device=tokens_BT.device)
    is_shared = (branches_BT[:, None] == 0) | (branches_BT[:, None] == branches_BT[:, :, None])
    distance = positions_BT[:, :, None] - positions_BT[:, None]

    def mask(window: int) -> Tensor:
        sees_BTT = (order <= order[:, None]) & is_shared
        return (sees_BTT & (distance < window) if window else sees_BTT)[:, None]

    with cached(model, count) as cache:
        cache.own_mask = mask
        return model.hidden(tokens_BT, positions_BT)


def _target_scores(model: Decoder, hidden_ND: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target in nats, float64, and whether no other id has a larger one; both on the host."""
    size = max(1, _LOGIT_BYTES // (4 * model.config.vocab_size))
    log_probs = []
    is_greedy = []
    for hidden, targets in zip(hidden_ND.split(size), targets_N.split(size), strict=True):
        logits_NV = model.logits(hidden)
        is_greedy.append(logits_NV.argmax(1) == targets)
        log_probs.append(log_probs_of(logits_NV, targets))
    return torch.cat(log_probs).double().cpu(), torch.cat(is_greedy).cpu()
