"""The driver of a comparison by turns: contestants are processes that train some steps each, one after the other.

If the speed of a machine drifts, or others use it too, all contestants are affected alike, because they are compared
round by round.
"""

import contextlib
import json
import math
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from crius.errors import CriusError
from crius.table import aligned
from crius.tools.bench.result import Samples

END_SECONDS = 10.0
"""Seconds that a contestant may take to end after the last turn; then it is killed."""

_TAIL_LINES = 30


@dataclass(frozen=True)
class Contestant:
    """A program that takes part, see ``benchmarks.contestant``.

    Attributes:
        name: its name.
        argv: command that starts it.
        environ: variables on top of those of this process.
    """

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """Results of one contestant.

    Attributes:
        name: its name.
        facts: its report when it was ready.
        turns: its answers, one per round.
        failure: why it did not finish; empty if it did.
    """

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""

    def samples(self, key: str = "wall_seconds") -> Samples:
        """Seconds per step in each round."""
        return Samples([turn[key] / turn["steps"] for turn in self.turns])

    @property
    def losses(self) -> dict[int, float]:
        """Reported losses by step, the warm-up included."""
        answers = [self.facts, *self.turns]
        return {step: loss for answer in answers for step, loss in answer.get("losses", [])}

    @property
    def tokens_per_second(self) -> float:
        """Median over the rounds, of all ranks."""
        return float(self.facts["tokens_per_step"]) / self.samples().median

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of a rank; None if its FLOPs are unknown."""
        flops = self.facts.get("flops_per_token")
        return flops and self.tokens_per_second / self.facts.get("num_ranks", 1) * flops / 1e12

    @property
    def mfu(self) -> float | None:
        """Share of the device's peak; None if one of both is unknown, as on a CPU."""
        peak = self.facts.get("peak_tflops")
        return self.tflops / peak if peak and self.tflops else None

    @property
    def data_share(self) -> float | None:
        """Share of a step that the slowest rank waits for data; None if the contestant does not say."""
        waits = [turn["data_seconds"] / turn["wall_seconds"] for turn in self.turns if "data_seconds" in turn]
        return statistics.median(waits) if waits else None

    @property
    def peak_gib(self) -> float:
        """Largest memory that torch allocated on a GPU."""
        return max(float(answer.get("peak_gib", 0.0)) for answer in (self.facts, *self.turns))

    @property
    def peak_rss_mib(self) -> float:
        """Largest resident set so far, in MiB."""
        last = self.turns[-1] if self.turns else self.facts
        return float(last.get("peak_rss_mib", 0.0))


class TurnError(CriusError):
    """A contestant died, gave an invalid answer, or took too long."""


def take_turns(
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    steps: int,
    start_seconds: float = 900.0,
    turn_seconds: float = 900.0,
    total_seconds: float = math.inf,
    say: Callable[[str], None] = lambda line: None,
) -> list[Outcome]:
    """Start all contestants, and let them train in turns: ``rounds`` times ``steps`` steps each.

    Every other round goes through them in reverse order. A contestant that fails leaves, and the others continue. If
    the first fails, the comparison ends, as the others are compared with it. No process started here outlives this
    call. Returns the results of each, in their order.

    Args:
        contestants: at least one; all are in memory at the same time.
        rounds: turns of each contestant.
        steps: steps of a turn.
        start_seconds: time until all must be ready; they start at the same time.
        turn_seconds: time of a turn.
        total_seconds: time of starts and rounds; a round begins only if one like the longest would end in time.
        say: receives lines about the progress.
    """
    outcomes = [Outcome(contestant.name) for contestant in contestants]
    begin = time.monotonic()
    longest = 0.0
    end = begin + total_seconds
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ended_by_sigterm())
        players = [stack.enter_context(_Player(contestant)) for contestant in contestants]
        pairs = list(zip(players, outcomes, strict=True))

        def ask(player: _Player, outcome: Outcome, order: int, since: float, seconds: float) -> dict[str, Any]:
            try:
                return player.ask(order, since, min(since + seconds, end))
            except TurnError as error:
                outcome.failure = str(error)
                say(outcome.failure)
                player.kill()
                return {}

        for player, outcome in pairs:
            outcome.facts = ask(player, outcome, 0, begin, start_seconds)
            say(f"{outcome.name}: ready" if outcome.facts else f"{outcome.name}: not started")
        for number in range(rounds):
            start = time.monotonic()
            if outcomes[0].failure or start + longest > end:
                break
            for player, outcome in pairs if number % 2 == 0 else reversed(pairs):
                if not outcome.failure and (answer := ask(player, outcome, steps, time.monotonic(), turn_seconds)):
                    outcome.turns.append(answer)
            longest = max(longest, time.monotonic() - start)
            say(f"round {number + 1} of {rounds}")
        for player in players:  # before waiting for the first, so that all end at the same time
            player.dismiss()
    return outcomes


def ratios(outcome: Outcome, base: Outcome, key: str) -> Samples:
    """``outcome`` over ``base`` in each round that both finished."""
    return Samples([a / b for a, b in zip(outcome.samples(key).seconds, base.samples(key).seconds, strict=False)])


def median_ratio(outcome: Outcome, base: Outcome, key: str) -> float:
    """Median over the rounds of ``outcome`` over ``base``."""
    return statistics.median(ratios(outcome, base, key).seconds)


def largest_difference(losses: Mapping[int, float], base: Mapping[int, float]) -> float | None:
    """Largest relative difference of the losses at the steps that both have; None if they have no step in common."""
    both = losses.keys() & base.keys()
    return max((abs(losses[step] - base[step]) / abs(base[step]) for step in both), default=None)


def row(outcome: Outcome, base: Outcome) -> dict[str, Any]:
    """A contestant for the JSON; its ratios are those of its times to the ones of ``base``."""
    found = {"name": outcome.name, "failure": outcome.failure, "facts": outcome.facts}
    if not outcome.turns or not base.turns:
        return found
    return found | {
        "tokens_per_second": outcome.tokens_per_second,
        "mfu": outcome.mfu,
        "wall": outcome.samples().as_dict(),
        "cpu": outcome.samples("cpu_seconds").as_dict(),
        "peak_gib": outcome.peak_gib,
        "peak_rss_mib": outcome.peak_rss_mib,
        "data_share": outcome.data_share,
        "wall_ratio": median_ratio(outcome, base, "wall_seconds"),
        "cpu_ratio": median_ratio(outcome, base, "cpu_seconds"),
        "loss_difference": largest_difference(outcome.losses, base.losses),
        "losses": sorted(outcome.losses.items()),
    }


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """All contestants that finished a turn: medians of the rounds, and spreads between the quartiles.

    ``wall x`` and ``CPU x`` are their times over those of the first one, round by round, and ``apart`` is the
    largest relative difference of their losses from its losses.
    """
    times = ("ms/step", "spread", "CPU-s/step", "spread", "fastest", "tokens/s")
    rows = [("", *times, "MFU", "peak GiB", "RSS MiB", "data", "wall x", "CPU x", "apart")]
    for outcome in outcomes:
        if not outcome.turns or not outcomes[0].turns:
            continue
        wall = outcome.samples()
        cpu = outcome.samples("cpu_seconds")
        apart = largest_difference(outcome.losses, outcomes[0].losses)
        rows.append(
            (
                outcome.name,
                f"{1e3 * wall.median:.1f}",
                f"{wall.spread:.1%}",
                f"{cpu.median:.4f}",
                f"{cpu.spread:.1%}",
                f"{min(cpu.seconds):.4f}",
                f"{outcome.tokens_per_second:,.0f}",
                "" if outcome.mfu is None else f"{outcome.mfu:.1%}",
                f"{outcome.peak_gib:.2f}" if outcome.peak_gib else "",
                f"{outcome.peak_rss_mib:.0f}",
                "" if outcome.data_share is None else f"{outcome.data_share:.2%}",
                f"{median_ratio(outcome, outcomes[0], 'wall_seconds'):.3f}",
                f"{median_ratio(outcome, outcomes[0], 'cpu_seconds'):.3f}",
                "" if apart is None else f"{apart:.1e}",
            )
        )
    return aligned(rows, left=(0,))


class _Player:
    """A contestant's process group, ended when the context is left."""

    def __init__(self, contestant: Contestant) -> None:
        self._contestant = contestant
        self._said = b""
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            list(contestant.argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **contestant.environ},
            start_new_session=True,
        )

    def __enter__(self) -> "_Player":
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        assert self._process.stdout
        self.dismiss()
        if kind is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        self.kill()
        self._process.stdout.close()
        self._errors.close()

    def dismiss(self) -> None:
        """Ask the process to end."""
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ask(self, steps: int, since: float, deadline: float) -> dict[str, Any]:
        """Order ``steps`` steps, or with 0 wait until the contestant is ready; returns its answer.

        Args:
            steps: steps of the turn.
            since: monotonic time since which it could answer.
            deadline: monotonic time.

        Raises:
            TurnError: there is no answer.
        """
        assert self._process.stdin
        if steps:
            with contextlib.suppress(BrokenPipeError):  # the missing answer shows it
                self._process.stdin.write(f"{steps}\n".encode())
                self._process.stdin.flush()
        line = self._line(since, deadline)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._error(f"said {line[:200].decode(errors='replace')!r}, which is not an answer")
        return answer

    def _line(self, since: float, deadline: float) -> bytes:
        assert self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._said:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._error(f"did not answer within {deadline - since:g} s")
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(1.0)
                    raise self._error(f"ended with exit code {self._process.poll()}")
                self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line

    def _error(self, what: str) -> TurnError:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return TurnError(
            f"{self._contestant.name} {what}.",
            where=" ".join(self._contestant.argv),
            why="\n".join(["the end of its stderr:", *(f"    {line}" for line in lines)])
            if lines
            else "it said nothing",
        )


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that the started processes are ended."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
