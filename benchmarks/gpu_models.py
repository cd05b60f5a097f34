"""The sections ``models`` and ``full_8b``: Crius beside torchtitan's mathematics and Hugging Face's Llama.

No torch here.

The contestants of a group are processes that live at the same time and train in turns, so that a GPU whose clocks
change favours none of them; a contestant that the memory has no room for is left out, with the arithmetic.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_sections import ROOT, Place, Report, Section, TimeLimit, converted_line, train

from crius.models.description import ModelDescription
from crius.models.registry import SPECS
from crius.tools.bench.turns import Contestant, Outcome, largest_difference, median_ratio, take_turns

TEXT = ["--data.source", "text", "--data.path", str(ROOT / "tests" / "golden" / "tempest.txt")]
FLOAT8 = ["--quantize.dense.float8.enable", "--quantize.dense.float8.recipe", "tensorwise"]
LEAST_RATIO, LEAST_MFU = 1.15, 0.60
ROUNDS, STEPS, WARM_STEPS = 8, 6, 4
GROUP_SECONDS = 70.0
"""A group that would have less than this is not begun: so long do starts, compilations and some rounds take."""
GIB = 1 << 30
RESERVE_GIB = 4.0
"""Memory that is no contestant's: the driver's, and what the allocators of several processes lose."""
CONTEXT_GIB = 1.0
"""Of the CUDA context of a process, with the kernels that it has loaded."""


@dataclass(frozen=True)
class Case:
    """A model and a batch.

    Attributes:
        name: in the tables.
        flavor, layers, vocab_size: of the model; 0: the flavor's.
        seq_len: tokens of a sequence.
        sequences: of a batch.
    """

    name: str
    flavor: str
    layers: int
    vocab_size: int
    seq_len: int
    sequences: int

    @property
    def facts(self) -> ModelDescription:
        """Sizes of the model."""
        asked = {"num_layers": self.layers, "vocab_size": self.vocab_size}
        return SPECS["llama3"].describe(self.flavor, **{key: value for key, value in asked.items() if value})

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.seq_len * self.sequences

    def flags(self, place: Place) -> list[str]:
        """Flags of Crius; the other contestants read what they need of them too."""
        compiled = ["--compile.enable", *(("--compile.backend", "eager") if place.tiny else ())]
        sizes = ["--model.flavor", self.flavor]
        sizes += ["--model.num_layers", str(self.layers)] if self.layers else []
        sizes += ["--model.vocab_size", str(self.vocab_size)] if self.vocab_size else []
        return [
            *(*sizes, "--training.seq_len", str(self.seq_len), "--training.mixed_precision_param", "bfloat16"),
            *("--training.global_batch_size", str(self.sequences), "--training.local_batch_size", str(self.sequences)),
            *("--training.steps", "1000000", "--metrics.log_interval", str(STEPS), "--optimizer.lr", "3e-4"),
            *("--lr_scheduler.warmup_steps", "0", "--lr_scheduler.min_lr_factor", "1"),
            *("--activation_checkpoint.mode", "none", *compiled, *TEXT),
            *("--validation.interval", "0", "--metrics.no_enable_progress_bar", "--training.device", place.device),
        ]


# 4 of the 32 layers of 8B with an eighth of its vocabulary: embedding and output layer then have the share of the
# matmuls and of the optimizer that they have in the whole model
SHAPED_8B = Case("8B-shaped, 4 layers", "8b", 4, 128_256 // 8, 8192, 1)
WHOLE_1B = Case("1B", "1b", 0, 0, 4096, 2)
WHOLE_8B = Case("8B", "8b", 0, 0, 8192, 1)
TINY = Case("debug, 1 layer", "debug", 1, 512, 64, 2)


@dataclass(frozen=True)
class Entry:
    """A contestant of a group.

    Attributes:
        name: in the tables.
        kind: crius, titan or hf.
        options: of ``gpu_contestant.py``; not for crius.
        flags: of Crius, on top of the case's.
        needs_gpu: left out of a rehearsal.
        may_fail: a failure is a note.
    """

    name: str
    kind: str
    options: Sequence[str] = ()
    flags: Sequence[str] = ()
    needs_gpu: bool = False
    may_fail: bool = False


CRIUS = Entry("Crius", "crius")
CRIUS_FLOAT8 = Entry("Crius, float8", "crius", flags=FLOAT8)
TITAN = Entry("titan math, SDPA", "titan", ("--recompute",))
TITAN_FLEX = Entry("titan math, flex", "titan", ("--recompute", "--attention", "flex"), needs_gpu=True)
TITAN_KEEP = Entry("titan math, SDPA, no recompute", "titan")
TITAN_FLOAT8 = Entry("titan math, SDPA, float8", "titan", ("--recompute", "--float8", "tensorwise"))
HF = Entry("Hugging Face", "hf")

GROUPS: tuple[tuple[Case, str, tuple[Entry, ...]], ...] = (
    (SHAPED_8B, "bfloat16", (CRIUS, TITAN, HF, TITAN_FLEX, TITAN_KEEP)),
    (WHOLE_1B, "bfloat16", (CRIUS, TITAN, HF)),
    (SHAPED_8B, "float8", (CRIUS, CRIUS_FLOAT8, TITAN_FLOAT8)),
    (WHOLE_1B, "float8", (CRIUS, CRIUS_FLOAT8)),
)
"""In the order of their priority. Of one group all are in memory together."""


def state_bytes(facts: ModelDescription, *, weight: int, moment: int) -> int:
    """Weights, gradients and AdamW's two moments, for ``weight`` and ``moment`` bytes a number."""
    return facts.num_parameters * (2 * weight + 2 * moment)


def activation_bytes(facts: ModelDescription, tokens: int) -> int:
    """What the backward of the layers needs without recomputing, in bfloat16.

    Of each layer: input, normed input, queries, keys, values, attention, its sum with the input, that normed, gate, up
    and their product.
    """
    head_dim = facts.dim // facts.num_heads
    width = 6 * facts.dim + 2 * facts.num_kv_heads * head_dim + 3 * facts.ffn_dim
    return 2 * tokens * facts.num_layers * width


def estimate_gib(case: Case, entry: Entry) -> float:
    """Peak memory of a contestant that trains ``case`` from float32 weights, in GiB; a closed form, rounded up."""
    facts, logits = case.facts, case.tokens * case.facts.vocab_size
    # of logits: Crius has a chunk of 1 GiB at most and the weight's gradient in float32, titan one of 8 parts in
    # bfloat16 and float32 with their gradients, Hugging Face all
    chunk = min(2 * logits, GIB) + GIB // 4 + 4 * facts.vocab_size * facts.dim
    loss = {"crius": chunk, "titan": logits * 12 // 8, "hf": logits * 12}[entry.kind]
    # Hugging Face rotates and norms in float32 and keeps that; selective recomputing keeps about half
    share = 0.6 if "--recompute" in entry.options else 2.4 if entry.kind == "hf" else 1.0
    gathered = 2 * facts.num_parameters
    used = state_bytes(facts, weight=4, moment=4) + gathered + share * activation_bytes(facts, case.tokens) + loss
    return 1.1 * used / GIB + CONTEXT_GIB


def that_fit(entries: Sequence[Entry], case: Case, memory_gib: float) -> tuple[list[Entry], list[str]]:
    """The first entries that fit into the memory together, and a line for each that does not."""
    taken: list[Entry] = []
    skipped, used = [], RESERVE_GIB
    for entry in entries:
        need = estimate_gib(case, entry)
        if used + need <= memory_gib:
            taken, used = [*taken, entry], used + need
        else:
            skipped.append(
                f"{entry.name} is left out: {need:.0f} GiB by estimate, beside {used:.0f} GiB of others, are more than "
                f"the {memory_gib:.0f} GiB of this device"
            )
    return taken, skipped


@dataclass
class Group:
    """What the contestants of a group showed."""

    case: Case
    precision: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Of the group in claims."""
        return f"{self.case.name}, {self.precision}"

    def of(self, name: str) -> Outcome | None:
        """The contestant ``name``, where it finished a turn."""
        found = self.outcomes.get(name)
        return found if found and found.turns else None


def models(place: Place, report: Report) -> None:
    """Crius, torchtitan's mathematics and Hugging Face's Llama in turns: 8B-shaped and 1B, bfloat16 and float8."""
    groups = [(TINY, "bfloat16", (CRIUS, TITAN, HF)), (TINY, "float8", (CRIUS_FLOAT8,))] if place.tiny else GROUPS
    for case, precision, entries in groups:
        title = f"{case.name}, {precision}"
        if report.left() < (GROUP_SECONDS if place.device == "cuda" else 0.0):
            report.note(f"{title} is not run: {max(0.0, report.left()):.0f} s of the section are left")
            continue
        taken = [entry for entry in entries if place.device == "cuda" or not entry.needs_gpu]
        if importlib.util.find_spec("transformers") is None and HF in taken:
            taken.remove(HF)
            report.note(f"{title}: {HF.name} is left out: transformers is not installed")
        if place.device == "cuda":
            taken, skipped = that_fit(taken, case, place.memory_gib)
            for line in skipped:
                report.note(f"{title}: {line}")
        group = run_group(place, report, Group(case, precision), taken)
        rows_of(report, group)
        judge(report, group, is_gpu=place.device == "cuda")


def run_group(place: Place, report: Report, group: Group, entries: Sequence[Entry]) -> Group:
    """Let ``entries`` take turns."""
    if report.left() <= 0:
        raise TimeLimit(f"{report.limit:.0f} s are over before {group.title}")
    contestants = [contestant(place, report, group, entry) for entry in entries]
    print(f"[{report.name}] {group.title}: {', '.join(entry.name for entry in entries)}", flush=True)
    rounds, steps = (2, 2) if place.tiny else (ROUNDS, STEPS)
    found = take_turns(
        contestants,
        rounds=rounds,
        steps=steps,
        start_seconds=report.left(),
        turn_seconds=max(10.0, report.left() / 4),
        total_seconds=report.left(),
        say=lambda line: print(f"[{report.name}] {line.splitlines()[0]}", flush=True),
    )
    for outcome, one, entry in zip(found, contestants, entries, strict=True):
        group.outcomes[outcome.name] = outcome
        if outcome.failure and entry.may_fail:
            report.note(f"{group.title}: {outcome.failure}")
        elif outcome.failure:
            report.fail(list(one.argv[1:]), f"{group.title}: {outcome.name} failed", outcome.failure)
        log = run_folder(place, report, group.title, outcome.name) / "logs" / "rank-0.log"
        group.logs[outcome.name] = log.read_text(encoding="utf-8") if log.exists() else ""
    return group


def contestant(place: Place, report: Report, group: Group, entry: Entry) -> Contestant:
    """The process that is ``entry``."""
    warm = ["--warmup", "1" if place.tiny else str(WARM_STEPS)]
    flags = [*group.case.flags(place), *entry.flags]
    if entry.kind == "crius":
        folder = str(run_folder(place, report, group.title, entry.name))
        argv = ["-m", "crius", "bench", "contestant", "--nproc", "1", *warm, *flags, "--job.run_dir", folder]
    else:
        backend = ["--backend", "eager"] if place.tiny and entry.kind == "titan" else []
        argv = ["benchmarks/gpu_contestant.py", entry.kind, *warm, *entry.options, *backend, "--", *flags]
    return Contestant(entry.name, [place.python, *argv], place.environ)


def run_folder(place: Place, report: Report, *names: str) -> Any:
    """A folder below the suite's for the run ``names``."""
    plain = "-".join("".join(c if c.isalnum() else "_" for c in name) for name in names)
    return place.work / f"{report.name}-{plain}"


def rate(outcome: Outcome) -> float:
    """Median tokens/s over the rounds."""
    return float(outcome.facts["tokens_per_step"]) / outcome.samples().median


def mfu(outcome: Outcome) -> float | None:
    """Share of the bfloat16 peak by Crius's count of FLOPs (causal, nothing recomputed); None where it is not known."""
    peak = outcome.facts.get("peak_tflops")
    return rate(outcome) * outcome.facts["flops_per_token"] / (1e12 * peak) if peak else None


def rows_of(report: Report, group: Group) -> None:
    """One row a contestant: its rate, and how much faster Crius is in the same rounds."""
    base = group.of(CRIUS.name)
    for name, outcome in group.outcomes.items():
        if not outcome.turns:
            continue
        share = mfu(outcome)
        peak = max(float(turn.get("peak_gib", 0.0)) for turn in outcome.turns)
        report.row(
            model=group.case.name,
            precision=group.precision,
            contestant=name,
            tokens_per_second=round(rate(outcome), 1),
            spread_percent=round(100 * outcome.samples().spread, 1),
            mfu_percent=round(100 * share, 1) if share is not None else None,
            peak_gib=round(peak, 2),
            crius_is_faster_by=round(median_ratio(outcome, base, "wall_seconds"), 3) if base else None,
            first_loss=outcome.losses.get(1),
            samples=outcome.samples().seconds,
        )


def judge(report: Report, group: Group, *, is_gpu: bool) -> None:
    """The claims of a group. Speeds are claimed on a GPU alone."""
    base = group.of(CRIUS.name)
    if group.precision == "bfloat16":
        titans = [found for entry in (TITAN, TITAN_FLEX) if (found := group.of(entry.name))]
        claim = f"{group.title}: Crius is at least {LEAST_RATIO} x as fast as titan's mathematics"
        if base is None or not titans:
            report.check(claim, False, "a run is missing")
        else:
            best = min(titans, key=lambda outcome: outcome.samples().median)
            ratio = median_ratio(best, base, "wall_seconds")
            report.check(claim, ratio >= LEAST_RATIO if is_gpu else None, f"{ratio:.3f} x of {best.name}")
        not_slower(report, group, base, (TITAN_KEEP, HF), is_gpu=is_gpu)
        share = mfu(base) if base else None
        claim = f"{group.title}: at least {LEAST_MFU:.0%} MFU"
        shown = "no peak is known" if share is None else f"{share:.1%}"
        report.check(claim, (share is not None and share >= LEAST_MFU) if is_gpu else None, shown)
    else:
        judge_float8(report, group, is_gpu=is_gpu)
    judge_losses(report, group)


def not_slower(report: Report, group: Group, base: Outcome | None, entries: Sequence[Entry], *, is_gpu: bool) -> None:
    """Whether ``base`` is at least as fast as each of ``entries`` that ran."""
    for entry in entries:
        if base and (other := group.of(entry.name)):
            ratio = median_ratio(other, base, "wall_seconds")
            claim = f"{group.title}: {base.name} is at least as fast as {entry.name}"
            report.check(claim, ratio >= 1 if is_gpu else None, f"{ratio:.3f} x")


def judge_float8(report: Report, group: Group, *, is_gpu: bool) -> None:
    """Whether float8 is float8, and pays."""
    low, high = group.of(CRIUS_FLOAT8.name), group.of(CRIUS.name)
    claim = f"{group.title}: faster than bfloat16"
    if low and high:
        ratio = median_ratio(high, low, "wall_seconds")
        report.check(claim, ratio > 1 if is_gpu else None, f"{ratio:.3f} x")
    else:
        report.check(claim, False if is_gpu else None, "a run is missing")
    not_slower(report, group, low, (TITAN_FLOAT8,), is_gpu=is_gpu)
    if low:
        line = converted_line(group.logs.get(CRIUS_FLOAT8.name, ""))
        report.check(f"{group.title}: linear layers were converted", bool(line), line or "no line says so")
        report.check(f"{group.title}: multiplies in float8", "emulated" not in line if is_gpu else None, line)


def judge_losses(report: Report, group: Group) -> None:
    """Whether all start from the same loss: the same weights, tokens and mathematics."""
    firsts = {name: outcome.losses[1] for name, outcome in group.outcomes.items() if 1 in outcome.losses}
    base = firsts.get(CRIUS.name)
    for name, loss in firsts.items():
        if base is not None and name != CRIUS.name:
            # a rounding of bfloat16 is up to 0.4 %, of float8 up to 6 %; the mean over the tokens averages it out
            gap = largest_difference({1: loss}, {1: base}) or 0.0
            limit = 0.02 if "float8" in name else 0.01
            report.check(f"{group.title}: {name} starts from Crius's loss", gap < limit, f"{gap:.2e} relative")


def full_8b_gib(*, recompute: bool) -> float:
    """Peak memory of 8B in bfloat16 weights, gradients and moments with one sequence of 8192 tokens, in GiB.

    The gathered weights are counted once more, and with selective recomputing half of the activations stay.
    """
    facts = WHOLE_8B.facts
    kept = activation_bytes(facts, WHOLE_8B.tokens) * (0.5 if recompute else 1.0)
    gathered = 2 * facts.num_parameters
    return (state_bytes(facts, weight=2, moment=2) + gathered + 1.15 * kept) / GIB + 2 * CONTEXT_GIB


def full_8b_mode(memory_gib: float) -> tuple[str, str]:
    """The least recomputing that fits, and the arithmetic; no mode where nothing does."""
    none, selective = full_8b_gib(recompute=False), full_8b_gib(recompute=True)
    words = f"{none:.0f} GiB without recomputing, {selective:.0f} GiB with, of {memory_gib:.0f} GiB"
    room = 0.94 * memory_gib
    return ("none" if none <= room else "selective" if selective <= room else ""), words


def full_8b(place: Place, report: Report) -> None:
    """All of 8B at 8192 tokens, weights and both moments of AdamW in bfloat16: rate, MFU and peak memory."""
    mode, words = full_8b_mode(place.memory_gib)
    report.note(f"estimate: {words}")
    if not mode and not place.tiny:
        report.note("8B is not run: it does not fit")
        return
    case = TINY if place.tiny else WHOLE_8B
    # the last of a flag given twice counts
    extra = ["--training.steps", "8" if place.tiny else "16", "--metrics.log_interval", "2"]
    extra += ["--training.dtype", "bfloat16", "--optimizer.state_dtype", "bfloat16"]
    extra += ["--activation_checkpoint.mode", mode or "none"]
    run = train(place, report, "8b", case.flags(place) + extra)
    if run is None:
        return
    summary = run.summary(warm=4)
    report.row(model=case.name, recompute=mode, **summary)
    share = summary["mfu_percent"]
    passed = share is not None and share >= 100 * LEAST_MFU if place.device == "cuda" else None
    report.check(f"8B: at least {LEAST_MFU:.0%} MFU", passed, f"{share} %")


MODELS: dict[str, tuple[Section, float]] = {"models": (models, 200)}
FULL_8B: dict[str, tuple[Section, float]] = {"full_8b": (full_8b, 130)}
