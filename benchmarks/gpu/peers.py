"""Crius beside torchtitan itself and Hugging Face with Liger, in turns on one GPU. No torch here.

What is compared, in which order, with what batch, recomputation and compilation, stands in this file before a round.
The contestants of a group are processes that live at the same time and train in turns, every other round in reverse
order, so that a GPU whose clocks change favours none of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.gpu.record import error_in
from benchmarks.gpu.round import Round
from benchmarks.gpu.runs import text_flags
from benchmarks.turns import Contestant, Outcome, median_ratio, ratios, take_turns

ROUNDS = 12
STEPS = 6
WARM_STEPS = 4
REPORT_STEPS = 3
"""Each turn has at least one report whose steps are all of this turn: torchtitan's own rate comes from it."""
START_SHARE = 0.75
"""Of a group's seconds: a contestant that compiles longer is left out, and the others are still measured."""

FLOAT8 = ("--quantize.dense.float8.enable", "--quantize.dense.float8.recipe", "tensorwise")
TITAN_RATE = 0.02
"""How far torchtitan's printed tokens per second may be from the driver's clock."""
EQUAL_F32 = 1e-5
"""First losses in float32: the same weights, tokens and mathematics, with sums in another order."""
EQUAL_TIMED = 5e-3
"""First losses as timed: a rounding of bfloat16 is up to 0.4 %, of float8 up to 6 %, and the mean averages it out."""
SUSPICIOUS = 1.2
"""Programs that run the same kernels for 80 % of a step differ less: a larger ratio is a mistake until it is found."""


@dataclass(frozen=True)
class Case:
    """A model and a batch.

    Attributes:
        name: in the tables.
        sizes: flags of the model.
        seq_len: tokens of a sequence.
        sequences: of a batch.
    """

    name: str
    sizes: tuple[str, ...]
    seq_len: int
    sequences: int = 1

    def flags(self, this: Round) -> list[str]:
        """Flags of Crius; the peers read what they need of them too."""
        return [
            *(*self.sizes, "--training.seq_len", str(self.seq_len), "--training.mixed_precision_param", "bfloat16"),
            *("--training.global_batch_size", str(self.sequences), "--training.local_batch_size", str(self.sequences)),
            *("--training.steps", "1000000", "--metrics.log_interval", str(REPORT_STEPS), "--optimizer.lr", "3e-4"),
            *("--lr_scheduler.warmup_steps", "0", "--lr_scheduler.min_lr_factor", "1"),
            *("--activation_checkpoint.mode", "none", "--compile.no_enable" if this.is_dry else "--compile.enable"),
            *("--validation.interval", "0", "--metrics.no_enable_progress_bar", "--training.device", this.device),
            *text_flags(this),
        ]


# 4 of the 32 layers of 8B with an eighth of its vocabulary: embedding and output layer then have the share of the
# matmuls and of the optimizer that they have in the whole model
SHAPED_8B = Case(
    "8B, 4 layers", ("--model.flavor", "8b", "--model.num_layers", "4", "--model.vocab_size", "16032"), 8192
)
WHOLE_VOCABULARY = Case("8B, 4 layers, 128,256 rows", ("--model.flavor", "8b", "--model.num_layers", "4"), 8192)
TINY = Case("debug", ("--model.flavor", "debug", "--model.num_layers", "1", "--model.vocab_size", "512"), 64, 2)


@dataclass(frozen=True)
class Entry:
    """A contestant.

    Attributes:
        program: module of ``benchmarks.gpu``; empty: Crius itself.
        options: of the program.
        flags: of Crius, on top of the case's.
        needs: module that must be there.
        dry_options: options in place of ``options`` in a dry run.
    """

    program: str = ""
    options: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    needs: str = ""
    dry_options: tuple[str, ...] = ()


def _titan(*options: str) -> Entry:
    return Entry("titan", options, needs="torchtitan.train", dry_options=(*options, "--eager"))


ENTRIES = {
    "crius": Entry(),
    "crius-document": Entry(flags=("--model.attention_mask", "document")),
    "crius-float8": Entry(flags=FLOAT8),
    # its FSDP over a mesh of one: what it does on several GPUs, and like Crius
    "titan-fsdp": _titan("--mode", "fsdp"),
    # as it ships on one GPU: autocast over float32 weights and its own selective recomputation
    "titan": _titan("--mode", "amp", "--recompute"),
    "titan-amp": _titan("--mode", "amp"),
    "titan-fsdp-float8": _titan("--mode", "fsdp", "--float8", "tensorwise"),
    "hf-liger": Entry("hf", ("--liger",), needs="liger_kernel"),
}


@dataclass(frozen=True)
class Goal:
    """A ratio of speeds that is a claim: ``entry`` over ``base`` in the same rounds.

    Attributes:
        entry, base: names of entries.
        least: goal for the ratio of tokens per second.
        fault: below this ratio the row fails.
        alike: whether both do the same work, so that a large ratio is suspicious.
    """

    entry: str
    base: str
    least: float
    fault: float
    alike: bool = True


GOALS = (
    Goal("crius", "titan-fsdp", 1.02, 1.0),
    Goal("crius", "titan-amp", 1.05, 1.0),
    Goal("crius-float8", "titan-fsdp-float8", 1.0, 1.0),
    Goal("crius-document", "crius", 0.80, 0.80),
    # one recomputes, the other is eager: reported beside the others, not like for like
    Goal("crius", "titan", 1.0, 1.0, alike=False),
    Goal("crius", "hf-liger", 1.0, 1.0, alike=False),
    Goal("crius-float8", "crius", 1.0, 0.0, alike=False),
)
LEAST_MFU = 0.45
"""Of 4 layers of 8B, by the data sheet's 989 TFLOP/s; 48 to 56 % are expected, above 60 % something is miscounted."""
MOST_MFU = 0.60
MOST_MEMORY = 0.9
"""Crius's peak with the whole vocabulary, over that of torchtitan 0.2.2, which keeps all logits in float32."""


@dataclass
class Group:
    """What the contestants of a step showed."""

    case: Case
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def measured(self, name: str) -> Outcome | None:
        """The contestant ``name`` if it finished a turn."""
        found = self.outcomes.get(name)
        return found if found and found.turns else None


def contestant(this: Round, case: Case, name: str, entry: Entry, extra: Sequence[str] = ()) -> Contestant:
    """The process that is ``entry``."""
    warm = ["--warmup", "1" if this.is_dry else str(WARM_STEPS)]
    flags = [*case.flags(this), *entry.flags, *extra]
    if entry.program:
        options = entry.dry_options if this.is_dry else entry.options
        argv = ["-m", f"benchmarks.gpu.{entry.program}", *warm, *options, "--", *flags]
    else:
        folder = str(this.folder("peers", this.step, name) / "run")
        argv = ["-m", "benchmarks.train_job", "--nproc", "1", *warm, *flags, "--job.run_dir", folder]
    return Contestant(name, [this.python, *argv], this.environ)


def present(this: Round, names: Sequence[str], entries: Mapping[str, Entry]) -> list[str]:
    """The names of entries whose modules are there; a row for each other one."""
    found = []
    modules: Mapping[str, str] = this.record.environment["modules"]
    for name in names:
        entry = entries[name]
        version = modules.get(entry.needs, "") if entry.needs else "there"
        if this.is_dry and name == "hf-liger" and ":" not in modules.get("transformers", ":"):
            found.append(name)  # without Liger, whose kernels need a GPU
        elif version and ":" not in version:
            found.append(name)
        else:
            this.cannot(name, f"{entry.needs}: {version or 'not there'}")
    return found


def take(
    this: Round,
    case: Case,
    names: Sequence[str],
    seconds: float,
    *,
    rounds: int = ROUNDS,
    steps: int = STEPS,
    extra: Sequence[str] = (),
    entries: Mapping[str, Entry] = ENTRIES,
) -> Group:
    """Let the entries take turns for ``seconds`` at most; a row for each that failed.

    Args:
        this: the round.
        case: what they train.
        names: of the entries; the others are compared with the first.
        seconds: time of starts, compilations and rounds, on a GPU.
        rounds: turns of each.
        steps: steps of a turn.
        extra: more flags of all.
        entries: by name.
    """
    seconds = this.left() - 10.0 if this.is_dry else min(seconds, this.left() - 10.0)
    taken = present(this, names, entries)
    group = Group(case)
    if not taken:
        return group
    found = take_turns(
        [contestant(this, case, name, entries[name], extra) for name in taken],
        rounds=min(rounds, 2) if this.is_dry else rounds,
        steps=steps,
        start_seconds=START_SHARE * seconds,
        turn_seconds=max(10.0, seconds / 4),
        total_seconds=seconds,
        say=lambda line: print(f"{this.step}: {line.splitlines()[0][:200]}", flush=True),
    )
    for outcome in found:
        group.outcomes[outcome.name] = outcome
        if outcome.failure:
            this.record.log(f"{this.step} {outcome.name}", outcome.failure, 80)
            this.row(outcome.name, False, error_in(outcome.failure))
    return group


def report(this: Round, group: Group) -> None:
    """Rows of a timed group: rates, goals, first losses, torchtitan's own rate."""
    for name in group.outcomes:
        if outcome := group.measured(name):
            rate_row(this, group.case, outcome)
    for goal in GOALS:
        ours = group.measured(goal.entry)
        theirs = group.measured(goal.base)
        if ours and theirs:
            ratio_row(this, goal, ours, theirs)
    judge_first_losses(this, group, EQUAL_TIMED)
    for name, outcome in group.outcomes.items():
        if name.startswith("titan") and outcome.turns:
            judge_printed_rate(this, outcome)


def rate_row(this: Round, case: Case, outcome: Outcome) -> None:
    """Tokens per second, TFLOP/s, MFU and memory of a contestant. MFU is a claim for Crius's plain entry alone."""
    tokens = outcome.tokens_per_second
    tflops = outcome.tflops
    mfu = outcome.mfu
    is_claim = outcome.name == "crius" and case == SHAPED_8B
    ok = not is_claim or (mfu is not None and LEAST_MFU <= mfu <= MOST_MFU)
    shown = f"{tokens:,.0f} tokens/s, {tflops:.0f} TFLOP/s, MFU {mfu:.1%}" if mfu else f"{tokens:,.0f} tokens/s"
    memory = outcome.peak_gib
    spread = outcome.samples().spread
    this.row(
        f"{outcome.name}, {case.name}",
        ok,
        f"{shown}, {memory:.1f} GiB, spread {spread:.1%} of {len(outcome.turns)} rounds",
        tokens_per_second=tokens,
        tflops=tflops,
        mfu=mfu,
        peak_gib=memory,
        spread=spread,
        seconds_per_step=outcome.samples().seconds,
    )


def interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """A confidence interval of the median, from order statistics alone (Conover 1999, section 3.2).

    The number of samples below the median is binomial with probability one half. The interval has the ranks that leave
    out at most 2.5 % on each side; with fewer than 6 samples it is all of them, whose coverage is less than 95 %.

    Returns:
        Low end, high end, coverage.
    """
    ordered = sorted(samples)
    count = len(ordered)
    rank = 1
    while _share_below(count, rank + 1) <= 0.025:
        rank += 1
    return ordered[rank - 1], ordered[count - rank], 1 - 2 * _share_below(count, rank)


def _share_below(count: int, rank: int) -> float:
    """Probability that fewer than ``rank`` of ``count`` samples are below the median."""
    return sum(math.comb(count, below) for below in range(rank)) / 2**count


def ratio_row(this: Round, goal: Goal, ours: Outcome, theirs: Outcome) -> None:
    """How much faster one contestant is than another in the same rounds, with an interval, against its goal."""
    ratio = median_ratio(theirs, ours, "wall_seconds")
    low, high, coverage = interval(ratios(theirs, ours, "wall_seconds").seconds)
    detail = f"{ratio:.3f} x as fast [{low:.3f}, {high:.3f}] at {coverage:.0%}, goal {goal.least:.2f}"
    ok: bool | None = ratio >= goal.fault
    if goal.alike and ratio > SUSPICIOUS:
        ok = False
        detail += ": above what the same kernels allow, look for a mistake first"
    this.row(
        f"{goal.entry} over {goal.base}",
        None if this.is_dry else ok,
        detail,
        ratio=ratio,
        low=low,
        high=high,
        coverage=coverage,
        goal=goal.least,
        reached=ratio >= goal.least,
        rounds=len(ours.turns),
    )


def judge_first_losses(this: Round, group: Group, limit: float) -> None:
    """Whether all start from the same loss: the same weights, tokens and mathematics."""
    base = group.outcomes.get("crius")
    first = base.losses.get(1) if base else None
    for name, outcome in group.outcomes.items():
        loss = outcome.losses.get(1)
        if first is None or loss is None or outcome is base or "document" in name:
            continue  # the document mask is another model
        gap = abs(loss / first - 1)
        shown = f"{loss:.6f} beside {first:.6f}, gap {gap:.1e}, limit {limit:g}"
        this.row(f"first loss of {name}", gap < limit, shown, gap=gap, limit=limit)


def judge_printed_rate(this: Round, outcome: Outcome) -> None:
    """Whether torchtitan prints the rate that the driver's clock shows."""
    printed = [answer["printed_tokens_per_second"] for answer in outcome.turns if "printed_tokens_per_second" in answer]
    if not printed:
        this.cannot(f"rate that {outcome.name} prints", "it printed none within a turn")
        return
    middle = sorted(printed)[len(printed) // 2]
    gap = middle / outcome.tokens_per_second - 1
    shown = f"{middle:,.0f} tokens/s, {gap:+.1%} from the driver's clock"
    ok = abs(gap) <= TITAN_RATE
    this.row(f"rate that {outcome.name} prints", None if this.is_dry else ok, shown, printed=middle, gap=gap)
