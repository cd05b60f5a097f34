"""What ``crius tune`` chooses for a model and conversations, each with its reason. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from crius.data.samples import SampleSource, pack

LEAST_STEPS = 50
"""Fewest optimizer steps of a run."""
EPOCHS = 3
MOST_BATCH = 16
"""Passes over the data, and most sequences of a step, where the data is large enough."""
LONGEST = 4096
"""Most tokens of a sequence that is chosen; a longer one must be given."""
MOST_PADDING = 0.1
RANK = 16
FEW_WEIGHTS = 1e9
RATES = (5e-5, 1e-5)
RATES_OF_ADAPTERS = (5e-4, 2e-4)
"""Peak learning rates of models with fewer weights than ``FEW_WEIGHTS``, and of larger ones."""
TOKENS_FOR_ALL = 20
"""All weights are trained if an epoch has a token to predict for so many weights."""
HELD_OUT = 20
"""Conversations that are held out, but at most a tenth of all and at least 2 %."""


@dataclass
class Choices:
    """Settings that were chosen, in the order in which they are printed.

    Attributes:
        given: settings of the command line, which win.
        values: values by dotted name.
        reasons: why, by dotted name.
        notes: lines about the data.
    """

    given: Mapping[str, str]
    values: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def take(self, name: str, value: object, why: str) -> None:
        """Choose a value, unless one was given."""
        if name not in self.given:
            self.values[name] = str(value)
            self.reasons[name] = why

    def leave(self, name: str) -> None:
        """Do not choose ``name`` after all."""
        self.values.pop(name, None)

    def words(self) -> list[str]:
        """Flags of a command."""
        return [word for name, value in self.values.items() for word in (f"--{name}", value)]

    def lines(self) -> list[str]:
        """For people."""
        width = max((len(f"{name} {value}") for name, value in self.values.items()), default=0)
        chosen = [f"  {f'{name} {value}':<{width}}   {self.reasons[name]}" for name, value in self.values.items()]
        return [*self.notes, *chosen]


def lengths_of(source: SampleSource) -> npt.NDArray[np.int64]:
    """Tokens of each conversation in the file of ``source``, those that are held out too."""
    documents = source.file.documents
    return np.diff(np.append(documents, source.file.meta.num_tokens))


def held_out_fraction(conversations: int) -> float:
    """Share of the conversations to hold out."""
    return round(min(0.1, max(0.02, HELD_OUT / conversations)), 4)


def seq_len_for(lengths: npt.NDArray[np.int64], context: int) -> tuple[int, str]:
    """Tokens of a sequence, and the reason: the least power of two that 99 % of the conversations fit into, and in
    which they are packed with at most ``MOST_PADDING``, if enough sequences are left for ``LEAST_STEPS``.

    Args:
        lengths: tokens of each conversation.
        context: longest context of the model; 0: not known.
    """
    most = min(context or LONGEST, LONGEST)
    fitting = max(128, 1 << (math.ceil(float(np.percentile(lengths, 99))) - 1).bit_length())
    chosen = min(fitting, most)
    sequences, padding = _packed(lengths, chosen)
    while padding > MOST_PADDING and 2 * chosen <= min(most, 8 * fitting) and sequences * EPOCHS >= 2 * LEAST_STEPS:
        chosen *= 2
        sequences, padding = _packed(lengths, chosen)
    longer = int((lengths > chosen).sum())
    what = f"{longer:,} of {len(lengths):,} conversations are longer" if longer else "all conversations fit"
    return chosen, f"{what}, with {padding:.0%} padding; the longest has {int(lengths.max()):,} tokens"


def _packed(lengths: npt.NDArray[np.int64], seq_len: int) -> tuple[int, float]:
    """Number of packed sequences, and the share of padding in them."""
    cut = np.minimum(lengths, seq_len)
    sequences = len(pack(cut, seq_len, 0).firsts) - 1
    return sequences, 1 - float(cut.sum()) / (sequences * seq_len)


def schedule_for(sequences: int, unit: int = 1, batch: int = 0, epochs: int = 0) -> tuple[int, int, int]:
    """Sequences of a step, epochs, and the steps that follow, at least ``LEAST_STEPS`` where both are open.

    Args:
        sequences: sequences of an epoch.
        unit: sequences of which the batch is a multiple.
        batch: given sequences of a step; 0: open.
        epochs: given passes over the data; 0: open.
    """
    passes = epochs or EPOCHS
    if not batch:
        batch = MOST_BATCH
        while batch > 1 and -(-passes * sequences // batch) < LEAST_STEPS:
            batch //= 2
        batch = -(-batch // unit) * unit
    if not epochs:
        passes = max(passes, -(-(LEAST_STEPS - 1) * batch // sequences))
        while -(-passes * sequences // batch) < LEAST_STEPS:
            passes += 1
    return batch, passes, -(-passes * sequences // batch)


def trains_all(weights: int, targets: int) -> tuple[bool, str]:
    """Whether the data is large enough to train all weights, and the reason."""
    need = weights // TOKENS_FOR_ALL
    relation = "enough" if targets >= need else "few"
    return targets >= need, f"{targets:,} tokens to predict are {relation} for {weights / 1e6:,.1f} M weights"


def learning_rate(weights: int, *, adapters: bool) -> tuple[float, str]:
    """Peak learning rate, and the reason. Figures: docs/fine_tuning.md, and arXiv:2106.09685 for adapters."""
    small, large = RATES_OF_ADAPTERS if adapters else RATES
    what = "adapters" if adapters else "all weights"
    return small if weights < FEW_WEIGHTS else large, f"usual for {what} of a model of this size"
