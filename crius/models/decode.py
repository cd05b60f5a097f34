"""Token-by-token generation with a cache: keys and values of tokens that were read are kept, not computed again.

The model's own blocks do the computation. While a batch is continued, each layer's ``CausalAttention`` is replaced by
a module that also keeps the keys and values. The rest of the block is unchanged.

B batch, T tokens that are read together, S slots of the cache, N query heads, K key/value heads, H head dim,
V vocabulary
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crius.errors import PlanError
from crius.kernels.attention import Mask, cached_attention, softcapped
from crius.kernels.cpu.linear import linear
from crius.models.decoder import Decoder
from crius.models.layers import CausalAttention, DocumentMask, replaceable

_FIX = "use crius.models.layers.CausalAttention and its mask in the block: docs/adding_a_model.md"


class CachedAttention(nn.Module):
    """Attention of new tokens to themselves and to earlier tokens. It keeps the keys and values that later ones need.

    Args:
        cache: tokens that were read.
        like: the attention that this replaces. With a window, the keys and values of as many tokens are kept, unless
            the cache keeps those of all.
    """

    def __init__(self, cache: "Cache", like: CausalAttention) -> None:
        super().__init__()
        self.cache = cache
        self.scale = like.scale
        self.softcap = like.softcap
        self.window = like.window
        self.kept: tuple[Tensor, Tensor] | None = None

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Mask | None) -> Tensor:
        """``(B, T, N, H)``. ``mask`` is None, since ``_NoMask`` makes none: the mask is the cache's.

        Raises:
            PlanError: the block made a mask, which does not cover earlier tokens.
        """
        if mask is not None:
            raise PlanError(
                "a block calls its attention with a mask of its own.",
                why="it does not cover the tokens whose keys and values are kept",
                fix=_FIX,
            )
        if self.window and not self.cache.keeps_all:
            return self._in_window(q_BTNH, k_BTKH, v_BTKH)
        kept = self.kept
        begin = self.cache.length
        end = begin + k_BTKH.shape[1]
        if kept is None or kept[0].shape[1] < self.cache.capacity:
            slots = self.cache.capacity  # the input has as many heads as this rank holds
            grown = (
                k_BTKH.new_empty(k_BTKH.shape[0], slots, *k_BTKH.shape[2:]),
                v_BTKH.new_empty(v_BTKH.shape[0], slots, *v_BTKH.shape[2:]),
            )
            for new, old in zip(grown, kept or (), strict=False):
                new[:, :begin] = old[:, :begin]
            kept = grown
            self.kept = grown
        keys, values = kept
        keys[:, begin:end] = k_BTKH
        values[:, begin:end] = v_BTKH
        first = max(0, begin + 1 - self.window) if self.window else 0
        mask = self.cache.mask_of(end - first, self.window)
        return cached_attention(q_BTNH, keys[:, first:end], values[:, first:end], mask, self.scale, self.softcap)

    def _in_window(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        if self.kept is None:
            keys = k_BTKH
            values = v_BTKH
        else:
            keys = torch.cat((self.kept[0], k_BTKH), dim=1)
            values = torch.cat((self.kept[1], v_BTKH), dim=1)
        mask = self.cache.mask_of(keys.shape[1], self.window)
        y_BTNH = cached_attention(q_BTNH, keys, values, mask, self.scale, self.softcap)
        stop = keys.shape[1] - self.cache.padding
        first = max(0, stop - self.window + 1)
        self.kept = (keys[:, first:stop], values[:, first:stop])
        return y_BTNH


class _NoMask(nn.Module):
    """Replaces ``DocumentMask``: a sequence that is continued is one document."""

    def forward(self, *_: Tensor | int | None) -> None:
        """No mask."""


class Cache:
    """The tokens that were read, and the method ``read`` that reads more.

    Sequences of different lengths end in the same slot. Shorter sequences start with padding, which no token sees.

    Args:
        model: the decoder.
        capacity: number of slots.
        first_B: slot of each sequence's first token; None: no sequence has padding.
        unit: tokens are read in multiples of this number. Tensor parallelism splits them over its ranks.
        keeps_all: layers with a window too keep the keys and values of all tokens, so that ``cut`` may be called.

    Attributes:
        capacity: number of slots; more slots are added by ``reserve``.
        length: number of filled slots.
        padding: number of tokens that are read only to fill a unit.
        own_mask: function from a window to the mask of all tokens, for a first and only read of sequences that share
            tokens; None: each row is one sequence.
    """

    def __init__(
        self,
        model: Decoder,
        capacity: int,
        first_B: Tensor | None = None,
        unit: int = 1,
        *,
        keeps_all: bool = False,
    ) -> None:
        self.keeps_all = keeps_all
        self.capacity = 0
        self.length = 0
        self.padding = 0
        self.own_mask: Callable[[int], Tensor] | None = None
        self._slots_T = torch.arange(0)
        self._masks: dict[tuple[int, int], Tensor | None] = {}
        self._model = model
        self._first_B = first_B
        self._unit = unit
        self.reserve(capacity)

    def reserve(self, capacity: int) -> None:
        """Have slots for ``capacity`` tokens."""
        unit = self._unit
        self.capacity = max(self.capacity, -(-capacity // unit) * unit + unit)

    def cut(self, length: int) -> None:
        """Forget the tokens after the first ``length``."""
        assert self.keeps_all
        self.length = min(self.length, length)

    def read(self, tokens_BT: Tensor) -> Tensor:
        """Logits ``(B, V)`` of the token after the last of ``tokens_BT``.

        Raises:
            PlanError: a block does not call its attention, so that no keys and values are kept.
        """
        count = tokens_BT.shape[1]
        read_BT = F.pad(tokens_BT, (0, -count % self._unit))  # the next tokens overwrite the slots of this padding
        slots_T = torch.arange(self.length, self.length + read_BT.shape[1], device=tokens_BT.device)
        positions_BT = slots_T[None]
        if self._first_B is not None:
            positions_BT = (positions_BT - self._first_B[:, None]).clamp(min=0)
        self.padding = read_BT.shape[1] - count
        self._slots_T = slots_T
        self._masks = {}
        hidden_BTD = self._model.hidden(read_BT, positions_BT)
        if self.length == 0:
            self._check()
        self.length += count
        logits_BV: Tensor = self._model.output(hidden_BTD, partial(self._logits, place=count - 1))
        return softcapped(logits_BV, self._model.config.logits_softcap)

    def _check(self) -> None:
        for name, module in self._model.named_modules():
            if isinstance(module, CachedAttention) and module.kept is None:
                raise PlanError(
                    f"{name} got no keys of the prompt.",
                    why="the block computes its attention without it, so that later tokens would not see earlier ones",
                    fix=_FIX,
                )

    def mask_of(self, num_keys: int, window: int = 0) -> Tensor | None:
        """Mask of the tokens that are being read and the newest ``num_keys`` slots, as ``cached_attention`` takes it.

        Args:
            num_keys: number of slots, those of the tokens that are being read included.
            window: newest tokens that a token attends to, itself included; 0: all.
        """
        if (num_keys, window) not in self._masks:
            own = self.own_mask
            self._masks[num_keys, window] = own(window) if own else self._mask(num_keys, window or num_keys)
        return self._masks[num_keys, window]

    def _mask(self, num_keys: int, window: int) -> Tensor | None:
        first_B = self._first_B
        slots_T = self._slots_T
        is_plain = len(slots_T) in (1, num_keys) and num_keys <= window
        if first_B is None and is_plain:
            return None
        end = self.length + len(slots_T)
        places_S = torch.arange(end - num_keys, end, device=slots_T.device)
        sees_BTS = ((places_S <= slots_T[:, None]) & (places_S > slots_T[:, None] - window))[None]
        if first_B is not None:  # padding sees itself: a softmax over no key would be NaN
            sees_BTS = sees_BTS & (places_S >= first_B[:, None, None]) | (places_S == slots_T[:, None])
        return sees_BTS[:, None]

    def _logits(
        self,
        hidden_BTD: Tensor,
        weight_VD: Tensor,
        first_row: int = 0,
        gather: Callable[[Tensor], Tensor] | None = None,
        *,
        place: int,
    ) -> Tensor:
        """Logits ``(B, V)`` of the token at ``place``; the other arguments are as an ``Output`` layer passes them."""
        logits_BV = linear(hidden_BTD[:, place], weight_VD)
        if gather is None:
            return logits_BV
        num_rows = self._model.config.vocab_size
        most = -(-num_rows // self._unit)  # the last ranks may have fewer rows
        return gather(F.pad(logits_BV, (0, most - logits_BV.shape[1]))).movedim(0, 1).flatten(1)[:, :num_rows]


@contextmanager
def cached(
    model: Decoder, capacity: int, first_B: Tensor | None = None, unit: int = 1, *, keeps_all: bool = False
) -> Iterator[Cache]:
    """Give ``model`` a cache while the context is open; arguments as in ``Cache``.

    Raises:
        PlanError: a layer has no ``CausalAttention``, or a subclass of it; or the mask is of a subclass.
    """
    cache = Cache(model, capacity, first_B, unit, keeps_all=keeps_all)
    names = replaceable(model, CausalAttention, _FIX)
    if len(names) != len(model.layers):
        raise PlanError(
            f"{len(names)} of {len(model.layers)} layers have a crius.models.layers.CausalAttention.",
            why="it is replaced by a module that keeps keys and values",
            fix=_FIX,
        )
    replacements: dict[str, nn.Module] = {}
    for name in names:
        replaced = model.get_submodule(name)
        assert isinstance(replaced, CausalAttention)
        replacements[name] = CachedAttention(cache, replaced)
    replacements |= {name: _NoMask() for name in replaceable(model, DocumentMask, _FIX)}
    before = {name: model.get_submodule(name) for name in replacements}
    try:
        for name, module in replacements.items():
            model.set_submodule(name, module)
        yield cache
    finally:
        for name, module in before.items():
            model.set_submodule(name, module)


def log_probs_of(logits_NV: Tensor, ids_N: Tensor) -> Tensor:
    """Log-probability ``(N,)`` of each id in nats, float32, over all rows of the model.

    The softmax is in float32, as in lm-eval and in the loss of transformers. With 49,152 ids torch 2.13 on a CPU rounds
    each log-probability up by about 8e-6 nats there.
    """
    return logits_NV.float().log_softmax(-1).gather(1, ids_N[:, None])[:, 0]


class Step(NamedTuple):
    """The next token of each sequence, and its log-probability (``log_probs_of``): at temperature 1, without cuts."""

    ids_B: Tensor
    log_probs_B: Tensor


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    pick: Callable[[Tensor], Tensor],
    *,
    max_new_tokens: int,
    num_ids: int | None = None,
    unit: int = 1,
) -> Iterator[Step]:
    """Continue ``prompts`` together, until ``max_new_tokens`` is reached or the caller stops the iteration.

    Args:
        model: the decoder, whole or this rank's part of it.
        prompts: token ids of each prompt, at least one per prompt.
        pick: function from logits ``(B, V)`` to ids ``(B,)``, such as ``argmax`` or ``sample``.
        max_new_tokens: most tokens that are generated per sequence.
        num_ids: number of ids that the tokenizer has a text for, which alone are picked; the model may have more rows,
            and a log-probability is over all of them. None: all rows.
        unit: as in ``Cache``.
    """
    device = model.tok_embeddings.weight.device
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    tokens_BT = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)])
    first_B = torch.tensor(padding, device=device) if any(padding) else None
    tokens_BT = tokens_BT.to(device)
    with cached(model, longest + max_new_tokens, first_B, unit) as cache:
        yield from continued(cache, tokens_BT, pick, max_new_tokens=max_new_tokens, num_ids=num_ids)


@torch.inference_mode()
def continued(
    cache: Cache,
    tokens_BT: Tensor,
    pick: Callable[[Tensor], Tensor],
    *,
    max_new_tokens: int,
    num_ids: int | None = None,
) -> Iterator[Step]:
    """Read ``tokens_BT`` after the tokens of ``cache``, and continue them; see ``generate``. The last token is not
    read."""
    for _ in range(max_new_tokens):
        logits_BV = cache.read(tokens_BT)
        ids_B = pick(logits_BV[:, :num_ids])
        tokens_BT = ids_B[:, None]
        yield Step(ids_B, log_probs_of(logits_BV, ids_B))


def sample(logits_BV: Tensor, uniform_B: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Draw ids ``(B,)`` from the probabilities that ``logits_BV`` stand for.

    Args:
        logits_BV: logits of the next token.
        uniform_B: a random number from [0, 1) for each row.
        temperature: divisor of the logits; 0 takes the largest.
        top_k: number of most probable ids that are kept; 0 keeps all.
        top_p: of the ids that ``top_k`` kept, the fewest most probable ids whose probabilities sum to this are kept.
    """
    if temperature == 0:
        return logits_BV.argmax(-1)
    scores_BV = logits_BV.double()
    scores_BV = (scores_BV - scores_BV.amax(-1, keepdim=True)) / temperature
    order_BV = None
    if top_k or top_p < 1:
        scores_BV, order_BV = scores_BV.topk(min(top_k or scores_BV.shape[1], scores_BV.shape[1]))
    probs_BV = scores_BV.softmax(-1)
    if top_p < 1:
        probs_BV = probs_BV * (probs_BV.cumsum(-1) - probs_BV < top_p)
    sums_BV = probs_BV.cumsum(-1)
    wanted_B1 = uniform_B.to(sums_BV)[:, None] * sums_BV[:, -1:]
    places_B1 = torch.searchsorted(sums_BV, wanted_B1, right=True).clamp(max=sums_BV.shape[1] - 1)
    return (places_B1 if order_BV is None else order_BV.gather(1, places_B1))[:, 0]
