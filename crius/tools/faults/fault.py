"""Faults that a user plants to test a run: the grammar of ``CRIUS_FAULT``. Their effects are in planted.py.

Several are joined by semicolons: ``CRIUS_FAULT='kill:step=7,rank=1;kill:step=13,attempt=1'``.
"""

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from crius.errors import ConfigError
from crius.launch.environment import FAULTS
from crius.launch.status import PHASES

PROCESS_KINDS = ("kill", "stop", "hang", "raise", "oom")
GRAMMAR = {
    "nan": "nan:step=N[,rank=R][,where=loss|grad]",
    "spike": "spike:step=N,factor=F[,rank=R][,where=loss|grad]",
    "dropout": "dropout:p=P",
    **{
        kind: f"{kind}:step=N[,phase=PHASE][,rank=R][,attempt=A] or {kind}:phase=start|load[,rank=R][,attempt=A]"
        for kind in PROCESS_KINDS
    },
    "disk": "disk:save=N,error=enospc|erofs|slow[,seconds=S][,rank=R]",
}
"""Grammar of each kind of fault. Steps and saves count from 1; N of nan, spike and disk may be a span N-M."""

BEFORE_STEPS = ("start", "load")
"""Phases outside steps."""


@dataclass(frozen=True, kw_only=True)
class LossFault:
    """Wrong values in the loss or in its gradient.

    Attributes:
        first: first step, from 1.
        last: last step.
        factor: factor of the loss or of its gradient; NaN for a NaN.
        rank: rank with the fault; None for all that compute the loss.
        where: loss: in the loss, and so in every gradient; grad: only in the gradients.
    """

    first: int
    last: int
    factor: float
    rank: int | None = None
    where: Literal["loss", "grad"] = "loss"

    def __str__(self) -> str:
        what = "NaN" if math.isnan(self.factor) else f"factor {self.factor:g}"
        place = "loss" if self.where == "loss" else "gradients"
        return f"{what} in the {place} of {_span_words('step', self.first, self.last)} on {_rank_words(self.rank)}"


@dataclass(frozen=True, kw_only=True)
class DropoutFault:
    """Dropout of the input of the output layer in training, drawn from torch's default generator of the device.

    Attributes:
        p: probability that a number becomes 0, in (0, 1).
    """

    p: float

    def __str__(self) -> str:
        return f"dropout {self.p:g} of the last hidden state on every rank"


@dataclass(frozen=True, kw_only=True)
class ProcessFault:
    """An event in the process of a rank, once.

    Attributes:
        kind: kill: SIGKILL; stop: SIGSTOP; hang: it sleeps for ever; raise: RuntimeError; oom: torch's allocator is
            asked for more memory than can exist.
        step: step, from 1; None in the phases of ``BEFORE_STEPS``.
        phase: one of ``PHASES``.
        rank: rank of the process.
        attempt: number of restarts before the event, so that a restarted run does not meet it again.
    """

    kind: Literal["kill", "stop", "hang", "raise", "oom"]
    step: int | None
    phase: str = "forward"
    rank: int = 0
    attempt: int = 0

    def __str__(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        attempt = f", attempt {self.attempt}" if self.attempt else ""
        return f"{self.kind} in {self.phase}{step} on rank {self.rank}{attempt}"

    def is_at(self, step: int | None, phase: str) -> bool:
        """Whether the event is due here. Under a pipeline forward and backward are one phase, so either matches."""
        same = {"forward": ("forward", "pipeline"), "backward": ("backward", "pipeline")}
        here = {**same, "pipeline": ("pipeline", "forward")}.get(self.phase, (self.phase,))
        return phase in here and (self.phase in BEFORE_STEPS or step == self.step)


@dataclass(frozen=True, kw_only=True)
class DiskFault:
    """A disk that is full, read-only or slow while checkpoints are saved.

    Attributes:
        first: first save, counted by each process from 1.
        last: last save.
        error: enospc, erofs: each write fails with that error; slow: each write first sleeps.
        seconds: sleep of a slow write.
        rank: rank whose writes are affected; None for all.
    """

    first: int
    last: int
    error: Literal["enospc", "erofs", "slow"]
    seconds: float = 1.0
    rank: int | None = None

    def __str__(self) -> str:
        what = f"{self.seconds:g} s per write" if self.error == "slow" else self.error.upper()
        return f"{what} in {_span_words('save', self.first, self.last)} on {_rank_words(self.rank)}"


Fault = LossFault | DropoutFault | ProcessFault | DiskFault


def read_faults(environ: Mapping[str, str], steps: int, num_ranks: int, attempt: int = 0) -> tuple[Fault, ...]:
    """The faults that the environment asks for, in its order; empty if there are none.

    Args:
        environ: variables of this process.
        steps: steps of the run.
        num_ranks: ranks of this attempt.
        attempt: restarts of the run so far. A restart may have other ranks, so a fault of another attempt may name any.

    Raises:
        ConfigError: a fault does not follow the grammar, or is for a step or a rank that the run does not have.
    """
    whole = environ.get(FAULTS, "")
    texts = whole.split(";") if whole else []
    faults = []
    for place, text in enumerate(texts):
        try:
            fault = _parse(text)
        except ValueError as error:
            raise _not_understood(text, str(error)) from None
        mended = _mended(text, fault, steps, num_ranks if getattr(fault, "attempt", attempt) == attempt else None)
        if mended != text:
            raise ConfigError(
                f"{FAULTS} {text} never happens: the run has steps 1 to {steps} and ranks 0 to {num_ranks - 1}.",
                where=f"environment variable {FAULTS}",
                fix=f"{FAULTS}={shlex.quote(';'.join([*texts[:place], mended, *texts[place + 1 :]]))}",
            )
        faults.append(fault)
    return tuple(faults)


def _mended(text: str, fault: Fault, steps: int, num_ranks: int | None) -> str:
    """``text`` with an existing step and rank in place of missing ones; if ``num_ranks`` is None, any rank exists."""
    if isinstance(fault, (LossFault, DiskFault)) and not 1 <= fault.first <= fault.last:
        first = min(max(fault.first, 1), steps)
        text = re.sub(r"(step|save)=[\d-]+", rf"\1={first}", text)
    elif isinstance(fault, LossFault) and fault.last > steps:
        text = re.sub(r"step=[\d-]+", f"step={min(fault.first, steps)}", text)
    elif isinstance(fault, ProcessFault) and fault.step is not None and not 1 <= fault.step <= steps:
        text = re.sub(r"step=\d+", f"step={min(max(fault.step, 1), steps)}", text)
    rank = None if isinstance(fault, DropoutFault) else fault.rank
    if rank is not None and num_ranks is not None and rank >= num_ranks:
        text = re.sub(r"rank=\d+", f"rank={num_ranks - 1}", text)
    return text


def _not_understood(text: str, why: str) -> ConfigError:
    kind = text.partition(":")[0]
    grammar = GRAMMAR.get(kind) or " or ".join(GRAMMAR.values())
    fix = f"unset {FAULTS}, or e.g. {FAULTS}=nan:step=5"
    return ConfigError(
        f"{FAULTS} {text} is not understood: {why}.",
        where=f"environment variable {FAULTS}",
        why=f"the grammar is {grammar}; faults are joined by ;",
        fix=fix,
    )


def _parse(text: str) -> Fault:
    """The fault that ``text`` stands for. Raises ValueError with the reason if it is wrong."""
    kind, _, rest = text.partition(":")
    if kind not in GRAMMAR:
        raise ValueError(f"there is no fault {kind!r}")
    pairs = [part.partition("=") for part in rest.split(",")] if rest else []
    taken = re.findall(r"(\w+)=", GRAMMAR[kind])
    values: dict[str, Any] = {}
    for name, _, value in pairs:
        if name not in taken or name in values:
            raise ValueError(f"{name!r} is given twice" if name in values else f"{kind} has no {name!r}")
        try:
            values[name] = _VALUES[name](value)
        except ValueError as error:
            raise ValueError(f"{name} {value!r} {error}") from None
    if kind in PROCESS_KINDS:
        return _process_fault(kind, values)
    for name in re.findall(r"(\w+)=", re.sub(r"\[.*?\]", "", GRAMMAR[kind])):
        if name not in values:
            raise ValueError(f"{name} is missing")
    if kind == "dropout":
        return DropoutFault(**values)
    first, last = values.pop("save" if kind == "disk" else "step")
    if kind == "disk":
        if "seconds" in values and values["error"] != "slow":
            raise ValueError("seconds are for error=slow")
        return DiskFault(first=first, last=last, **values)
    return LossFault(first=first, last=last, **{"factor": math.nan} | values)


def _process_fault(kind: Any, values: dict[str, Any]) -> ProcessFault:
    has_step = values.get("phase") not in BEFORE_STEPS
    if has_step != ("step" in values):
        raise ValueError("step is missing" if has_step else f"phase {values['phase']} comes before the steps")
    first, last = values.pop("step", (None, None))
    if first != last:
        raise ValueError("it happens once: give one step, not a span")
    return ProcessFault(kind=kind, step=first, **values)


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise ValueError("is not a whole number")
    return int(text)


def _span(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    return _whole(first), _whole(last if dash else first)


def _number(text: str, low: float = -math.inf, high: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("is not a number")
    if not low < value < high:
        raise ValueError(f"is not between {low} and {high}")
    return value


def _one_of(choices: Sequence[str], text: str) -> str:
    if text not in choices:
        raise ValueError(f"is not one of {', '.join(choices)}")
    return text


_VALUES: dict[str, Callable[[str], Any]] = {
    "step": _span,
    "save": _span,
    "rank": _whole,
    "attempt": _whole,
    "factor": _number,
    "p": partial(_number, low=0, high=1),
    "seconds": partial(_number, low=0, high=3600),
    "where": partial(_one_of, ("loss", "grad")),
    "error": partial(_one_of, ("enospc", "erofs", "slow")),
    "phase": partial(_one_of, PHASES),
}


def _span_words(noun: str, first: int, last: int) -> str:
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"


def _rank_words(rank: int | None) -> str:
    return "every rank" if rank is None else f"rank {rank}"
