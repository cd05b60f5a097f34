"""Texts that are nearly the same as earlier ones, by MinHash of their runs of characters."""

from crius.errors import EnvironmentError
from crius.plugins import REQUIREMENTS, install_line

LIKENESS = 0.8
"""Share of runs of characters (Jaccard) from which on two texts count as nearly the same."""

_RUN = 7  # characters: as words, and also for languages without spaces
_HASHES = 128
_SEED = 42


class NearDuplicates:
    """Finds texts that are like an earlier one. It keeps 128 hashes of each text that is not.

    Raises:
        EnvironmentError: rensa is missing.
    """

    def __init__(self) -> None:
        try:
            import rensa  # noqa: PLC0415  optional package
        except ImportError as error:
            raise EnvironmentError(
                "near duplicates need the package rensa, which is not installed.",
                where="--near",
                fix=f"{install_line(REQUIREMENTS['rensa'])}, or leave out --near",
            ) from error
        self._rensa = rensa
        self._seen = rensa.RMinHashDeduplicator(threshold=LIKENESS, num_perm=_HASHES, use_lsh=True, seed=_SEED)

    def earlier(self, text: str, name: str) -> str:
        """Name of an earlier text that is nearly the same as ``text``; empty if there is none."""
        plain = " ".join(text.split())
        hashed = self._rensa.RMinHash(num_perm=_HASHES, seed=_SEED)
        hashed.update([plain[start : start + _RUN] for start in range(max(1, len(plain) - _RUN + 1))])
        found = self._seen.get_duplicates(hashed)
        if found:
            return str(min(found))
        self._seen.add(name, hashed)
        return ""
