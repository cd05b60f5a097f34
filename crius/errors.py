"""Every error that a user can cause: what is wrong, where the value came from, why, and a fix that works."""

from collections.abc import Sequence


class CriusError(Exception):
    """Base of all errors Crius raises on purpose.

    Args:
        what: one sentence with the offending value.
        where: flag, file or line of the value; empty if there is no such place.
        why: rule that was broken; empty if ``what`` already says it.
        fix: text to type, or change to make, so that it works.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        super().__init__(what, where, why, fix)  # all four, so that the error survives pickling
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.why, self.fix)

    def body(self) -> str:
        """The message without the class name: ``what`` and the aligned ``from``, ``why`` and ``fix`` lines."""
        rows = (("from", self.where), ("why", self.why), ("fix", self.fix))
        return "\n".join([self.what, *(f"  {label:<6} {text}" for label, text in rows if text)])

    def __str__(self) -> str:
        return f"{type(self).__name__}: {self.body()}"


def _rebuild(cls: type[CriusError], what: str, where: str, why: str, fix: str) -> CriusError:
    return cls(what, where=where, why=why, fix=fix)


class ConfigError(CriusError):
    """A flag, a TOML key or a combination of values is wrong. Exit code 2."""

    exit_code = 2

    @classmethod
    def together(cls, problems: Sequence[CriusError]) -> CriusError:
        """One error that reports all ``problems``, each once; a single problem is returned as it is."""
        problems = list({str(problem): problem for problem in problems}.values())
        if len(problems) == 1:
            return problems[0]
        blocks = [f"[{number}] {problem}" for number, problem in enumerate(problems, start=1)]
        return cls("\n".join([f"{len(problems)} problems, all found before anything was started:", *blocks]))


class LayoutError(ConfigError):
    """The parallel degrees do not fit the ranks, the devices or the model. Exit code 2."""


class PlanError(CriusError):
    """A sharding plan does not match its model."""


class DataError(CriusError):
    """A corpus, a document, a token or a tokenizer cannot be used."""


class MissingPathError(DataError):
    """A path that was given leads nowhere. Exit code 2."""

    exit_code = 2


class CheckpointError(CriusError):
    """A checkpoint cannot be written, read or trusted."""


class CorruptionError(CriusError):
    """A device or its memory gave other results when work was repeated."""


class HangError(CriusError):
    """A rank makes no progress."""


class OutOfMemoryError(CriusError):
    """A device, or the host of a CPU run, has no memory left for a tensor."""


class EnvironmentError(CriusError):
    """A package, a device or a permission that the run needs is missing."""


class NonFiniteError(CriusError):
    """The loss or a gradient is NaN or infinite; the update was not applied."""


class SpikeError(CriusError):
    """The loss or the gradient norm jumped; the update was not applied."""


class EffectError(CriusError):
    """An optimisation that was asked for had no effect, and the run is strict."""
