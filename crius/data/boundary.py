"""How documents are told apart in a stream of tokens: what comes in front of a document and what ends it. No torch."""

from dataclasses import dataclass

from crius.config.data import DataConfig
from crius.data.tokenizer import Tokenizer
from crius.errors import DataError

VERSION = 2
"""Version of the rule. Under version 1 no document had a BOS, and positions restarted behind the EOS."""

NO_LABEL = -100
"""Label of a token after which nothing is predicted: ``IGNORE_INDEX`` of ``batch``, which imports torch."""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """A document is the inputs ``start t1 .. tn`` with the labels ``t1 .. tn end``: no label crosses a boundary.

    A token folder holds ``t1 .. tn eos`` of each document. The place of an EOS holds two things: the last label of its
    document and the first input of the next. Where ``start`` is the EOS itself, inputs and labels are the stored
    tokens, and the first document of a stream has no start.

    Attributes:
        eos_id: id that is stored behind each document.
        start_id: first input of a document, the id of BOS or of EOS.
        end_label: label after the last token of a document, the id of EOS or ``NO_LABEL``.
    """

    eos_id: int
    start_id: int
    end_label: int

    @property
    def has_bos(self) -> bool:
        """Whether documents start with another token than the EOS."""
        return self.start_id != self.eos_id

    @property
    def identity(self) -> str:
        """Changes when the same stored tokens give other inputs or labels; empty where they are the stored tokens."""
        if not self.has_bos and self.end_label == self.eos_id:
            return ""
        return f", boundaries {VERSION}: start {self.start_id}, end {self.end_label}"

    def describe(self) -> str:
        """The rule in a few words, for the log."""
        start = f"start with id {self.start_id} ({'BOS' if self.has_bos else 'EOS'})"
        end = "their end is not predicted" if self.end_label == NO_LABEL else f"end with id {self.eos_id} (EOS)"
        return f"documents {start}, {end}"


def boundary_of(data: DataConfig, tokenizer: Tokenizer) -> Boundary:
    """The boundary that ``data.add_bos`` and ``data.add_eos`` ask for.

    Raises:
        DataError: ``data.add_bos`` is on and the tokenizer has no BOS.
    """
    start = tokenizer.eos_id
    if tokenizer.adds_bos if data.add_bos is None else data.add_bos:
        if tokenizer.bos_id is None:
            raise DataError(
                f"tokenizer {tokenizer.name} has no token that begins a document.",
                where="--data.add_bos",
                why="neither its post-processor nor bos_token of tokenizer_config.json names a token that it has",
                fix="--data.no_add_bos: a document then starts with the end-of-document token",
            )
        start = tokenizer.bos_id
    return Boundary(eos_id=tokenizer.eos_id, start_id=start, end_label=tokenizer.eos_id if data.add_eos else NO_LABEL)
