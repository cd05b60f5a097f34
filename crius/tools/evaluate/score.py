"""Rows of tokens to log-probabilities, in batches of rows of about the same length.

B batch, T tokens, D model dim, V vocabulary, N targets
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from crius.models.decoder import Decoder
from crius.tools.evaluate.encode import Row
from crius.tools.evaluate.metrics import Score

_LOGIT_BYTES = 1 << 26
"""Logits of so many bytes, in float32, are made at once."""


def batches(rows: Iterable[Row], batch_tokens: int) -> Iterator[list[tuple[int, ...]]]:
    """Different token rows, the longest first, in batches of at most ``batch_tokens`` with their padding.

    The longest come first, so that what does not fit into the memory shows at once.
    """
    batch: list[tuple[int, ...]] = []
    for tokens in sorted({row.tokens for row in rows}, key=lambda tokens: (-len(tokens), tokens)):
        if batch and len(batch[0]) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(tokens)
    if batch:
        yield batch


@torch.inference_mode()
def score(model: Decoder, rows: Sequence[Row]) -> list[Score]:
    """Scores of ``rows``, one batch. Rows with the same tokens are read once.

    Shorter rows are padded at their end, which no earlier token sees. Logits are computed only where there is a target.

    Args:
        model: the decoder.
        rows: of about the same length.
    """
    device = model.tok_embeddings.weight.device
    places = {tokens: place for place, tokens in enumerate(dict.fromkeys(row.tokens for row in rows))}
    longest = max(map(len, places))
    tokens_BT = torch.tensor([(*tokens, *[0] * (longest - len(tokens))) for tokens in places])
    hidden_BTD = model.hidden(tokens_BT.to(device))
    index = [
        places[row.tokens] * longest + place
        for row in rows
        for place in range(len(row.tokens) - len(row.targets), len(row.tokens))
    ]
    targets_N = torch.tensor([target for row in rows for target in row.targets], device=device)
    hidden_ND = hidden_BTD.flatten(0, 1)[torch.tensor(index, device=device)]
    log_probs_N, is_greedy_N = _target_scores(model, hidden_ND, targets_N)
    scores, begin = [], 0
    for row in rows:
        end = begin + len(row.targets)
        scores.append(Score(float(log_probs_N[begin:end].sum()), bool(is_greedy_N[begin:end].all()), end - begin))
        begin = end
    return scores


def _target_scores(model: Decoder, hidden_ND: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target in nats, float64, and whether no other id has a larger one; both on the host.

    The softmax is the one in float32 that lm-eval and the loss of transformers take. With 49,152 ids torch 2.13 on a
    CPU rounds each log-probability up by about 8e-6 nats there.
    """
    size = max(1, _LOGIT_BYTES // (4 * model.config.vocab_size))
    log_probs, is_greedy = [], []
    for hidden, targets in zip(hidden_ND.split(size), targets_N.split(size), strict=True):
        logits_NV = model.output(hidden).float()
        is_greedy.append(logits_NV.argmax(1) == targets)
        log_probs.append(logits_NV.log_softmax(1).gather(1, targets[:, None])[:, 0])
    return torch.cat(log_probs).double().cpu(), torch.cat(is_greedy).cpu()
