"""What ``crius data doctor`` found, as lines and as data."""

import re
import shlex
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from crius.config.changes import flag
from crius.config.data import DataConfig, TokenizerConfig
from crius.errors import DataError
from crius.table import aligned

SHARES = (5, 25, 50, 75, 95, 99)
"""Percentiles of the lengths that are reported."""

_MOST_REASONS = 50
_MOST_KEYS = 20
_BAR = 40  # characters


@dataclass
class Tally:
    """A number of rows, and the first of them.

    Attributes:
        rows: number of rows.
        first: place of the first one, ``file:line``; empty without any.
        error: the error of the first one; None if the rows are not refused.
        like: place of the earlier row that the first one repeats.
    """

    rows: int = 0
    first: str = ""
    error: DataError | None = None
    like: str = ""

    def add(self, place: str) -> None:
        """Count a row."""
        self.rows += 1
        self.first = self.first or place

    def as_dict(self) -> dict[str, Any]:
        """The same as data."""
        about = {"reason": self.error.what, "fix": self.error.fix} if self.error else {}
        like = {"like": self.like} if self.like else {}
        return {**about, "rows": self.rows, "first": self.first, **like}

    def __str__(self) -> str:
        if not self.rows:
            return "none"
        repeats = f" is like {self.like}" if self.like else ""
        return f"{self.rows:,}, first {self.first}{repeats}"


@dataclass(kw_only=True)
class Diagnosis:
    """What was found in the files of a corpus.

    Attributes:
        data: the section, with the source and the format of the files.
        tokenizer: the tokenizer; None if tokens were not counted.
        files: the files.
        rows: rows of the files, or documents.
        refused: refused rows by their reason, in which numbers are left out.
        unused: keys that nothing uses, with the number of rows or messages.
        tallies: rows by what is odd about them.
        lengths: tokens of each conversation or document.
        targets: those of them that are trained on.
        is_damaged: whether the rest of a file cannot be read.
    """

    data: DataConfig
    tokenizer: TokenizerConfig | None
    files: Sequence[Path]
    rows: int = 0
    refused: dict[str, Tally] = field(default_factory=dict)
    unused: Counter[str] = field(default_factory=Counter)
    tallies: dict[str, Tally] = field(default_factory=dict)
    lengths: "array[int]" = field(default_factory=lambda: array("I"))
    targets: "array[int]" = field(default_factory=lambda: array("I"))
    is_damaged: bool = False

    def refuse(self, error: DataError, place: str) -> None:
        """Count a row that a run refuses."""
        reason = re.sub(r"\d[\d,.]*", "N", error.what)
        if reason not in self.refused and len(self.refused) >= _MOST_REASONS:
            error = DataError(reason := "other reasons")
        self.refused.setdefault(reason, Tally(error=error)).add(place)

    @property
    def num_refused(self) -> int:
        """Number of rows that a run refuses."""
        return sum(tally.rows for tally in self.refused.values())

    @property
    def is_ready(self) -> bool:
        """Whether a run can read the files and has something to train on."""
        most = self._most_skipped() if self.data.bad_rows == "skip" else 0
        has_targets = self.tokenizer is None or sum(self.targets) > 0
        return self.num_refused <= most and self.num_refused < self.rows and has_targets

    def _most_skipped(self) -> int:
        """Number of rows that a run leaves out at most, with ``data.bad_rows skip``."""
        if self.is_damaged or self.data.source == "text":
            return 0
        return min(self.rows - 1, max(1, self.rows // 100))

    def seq_len(self) -> int:
        """The power of two that holds 99 of 100 conversations; 0 if documents, or no tokens, were counted."""
        if self.data.format != "chat" or not self.lengths:
            return 0
        return 1 << max(0, int(np.percentile(self.lengths, 99)) - 1).bit_length()

    def flags(self) -> list[str]:
        """Flags of a run on the files."""
        default = DataConfig()
        given = {name: value for name, value in vars(self.data).items() if value != getattr(default, name)}
        if 0 < self.num_refused <= self._most_skipped():
            given["bad_rows"] = "skip"
        flags = [word for name, value in given.items() for word in flag(f"data.{name}", value)]
        if self.tokenizer:
            own = TokenizerConfig()
            changed = {name: value for name, value in vars(self.tokenizer).items() if value != getattr(own, name)}
            flags += [word for name, value in changed.items() for word in flag(f"tokenizer.{name}", value)]
        if self.data.format == "chat" and self.data.packing:
            flags += flag("model.attention_mask", "document")
        return flags + (flag("training.seq_len", self.seq_len()) if self.seq_len() else [])

    def as_dict(self) -> dict[str, Any]:
        """The same as data."""
        return {
            "files": [str(file) for file in self.files],
            "source": self.data.source,
            "format": self.data.format,
            "rows": self.rows,
            "refused": [tally.as_dict() for tally in self.refused.values()],
            "unused_keys": dict(self.unused.most_common()),
            **{name.replace(" ", "_"): tally.as_dict() for name, tally in self.tallies.items()},
            "tokens": self._tokens() if self.lengths else None,
            "flags": self.flags(),
            "ready": self.is_ready,
        }

    def _tokens(self) -> dict[str, Any]:
        lengths = np.asarray(self.lengths)
        return {
            "total": int(lengths.sum(dtype=np.int64)),
            "trained": sum(self.targets),
            "least": int(lengths.min()),
            "percentiles": {str(share): int(np.percentile(lengths, share)) for share in SHARES},
            "most": int(lengths.max()),
            "longer_than_seq_len": int((lengths > self.seq_len()).sum()) if self.seq_len() else 0,
        }

    def lines(self) -> list[str]:
        """The same as text."""
        number = len(self.files)
        files = str(self.files[0]) if number == 1 else f"{number:,} files"
        lines = [f"{files}: {self.data.source}, {self.data.format}, {self.rows:,} rows, {self.num_refused:,} refused"]
        for tally in self.refused.values():
            error = tally.error
            assert error is not None
            lines.append(f"  {tally.rows:,} refused, first {tally.first}: {error.what}")
            if error.fix:
                lines.append(f"    fix: {error.fix}")
        named = ", ".join(f"{name} ({count:,})" for name, count in self.unused.most_common(_MOST_KEYS))
        lines.append(f"keys that nothing uses: {named or 'none'}")
        lines += [f"{name}: {tally}" for name, tally in self.tallies.items()]
        if self.lengths:
            lines += self._picture(self._tokens())
        if not self.is_ready:
            lines.append(f"a run refuses these files{'' if self.refused else ': they have nothing to train on'}")
        return [*lines, f"flags: {shlex.join(self.flags())}"]

    def _picture(self, tokens: Mapping[str, Any]) -> Iterator[str]:
        """Lines about the lengths."""
        lengths = np.asarray(self.lengths)
        shares = ", ".join(f"{share} % {length:,}" for share, length in tokens["percentiles"].items())
        yield f"tokens of a row: least {tokens['least']:,}, {shares}, most {tokens['most']:,}"
        bins = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64))
        first = int(np.flatnonzero(bins)[0])
        rows = []
        for power, count in enumerate(bins.tolist()[first:], start=first):
            rows.append([f"<= {1 << power:,}", f"{count:,}", "".ljust(-(-count * _BAR // int(bins.max())), "█")])
        yield from (f"  {line}" for line in aligned(rows, left={2}))
        if self.seq_len():
            yield f"longer than {self.seq_len():,} tokens: {tokens['longer_than_seq_len']:,}"
        share = 100 * tokens["trained"] / max(1, tokens["total"])
        yield f"trained on: {tokens['trained']:,} of {tokens['total']:,} tokens ({share:.1f} %)"
