"""The sections ``models`` and ``models_1b``: Crius beside torchtitan's mathematics and Hugging Face.

No torch here.

The contestants of a group are processes that live at the same time and train in turns, so that a GPU whose clocks
change favours none of them; a contestant that the memory has no room for is left out, with the arithmetic.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_sections import ROOT, Place, Report, Section, TimeLimit, converted_line

from crius.models.description import ModelDescription
from crius.models.registry import SPECS
from crius.tools.bench.turns import Contestant, Outcome, largest_difference, median_ratio, take_turns

TEXT = ["--data.source", "text", "--data.path", str(ROOT / "tests" / "golden" / "tempest.txt")]
FLOAT8 = ["--quantize.dense.float8.enable", "--quantize.dense.float8.recipe", "tensorwise"]
LEAST_RATIO = 0.97
"""Like for like: the kernels are the same, so 1.00 to 1.03 is expected, less the spread of a GPU's clocks."""
LEAST_MFU, EXPECTED_MFU = 0.34, {"8B": "34-39 %", "8B-shaped, 4 layers": "48-54 %"}
"""By Crius's count of FLOPs. Published runs of torchtitan on 8 GPUs with FSDP show 34 to 39 % for 8B, compiled. The
other is an estimate: 4 layers without FSDP, so nothing is gathered."""
ROUNDS, STEPS, WARM_STEPS = 8, 6, 4
LEAST_SHARE = 0.6
"""A group that would have less than this of its seconds is not begun: starts and compilations take most of them."""
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
TITAN = Entry("titan math, SDPA", "titan")
TITAN_FLEX = Entry("titan math, flex", "titan", ("--attention", "flex"), needs_gpu=True)
TITAN_RECOMPUTE = Entry("titan math, SDPA, recompute", "titan", ("--recompute",))
TITAN_FLOAT8 = Entry("titan math, SDPA, float8", "titan", ("--float8", "tensorwise"))
HF = Entry("Hugging Face", "hf")

Plan = tuple[Case, str, tuple[Entry, ...], float]
"""A model and a batch, the precision, the entries, and the seconds of their group."""

GROUPS: tuple[Plan, ...] = (
    (SHAPED_8B, "bfloat16", (CRIUS, TITAN, HF, TITAN_RECOMPUTE, TITAN_FLEX), 95.0),
    (SHAPED_8B, "float8", (CRIUS, CRIUS_FLOAT8, TITAN_FLOAT8), 70.0),
)
"""In the order of their priority, with their seconds. All entries of a group are in memory together."""

GROUPS_1B: tuple[Plan, ...] = (
    (WHOLE_1B, "bfloat16", (CRIUS, TITAN, HF), 90.0),
    (WHOLE_1B, "float8", (CRIUS, CRIUS_FLOAT8, TITAN_FLOAT8), 70.0),
)


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
    """4 layers of 8B: Crius and torchtitan's mathematics, like for like, and Hugging Face's Llama, in turns."""
    compare(place, report, GROUPS)


def models_1b(place: Place, report: Report) -> None:
    """1B whole: Crius and torchtitan's mathematics, like for like, and Hugging Face's Llama, in turns."""
    compare(place, report, GROUPS_1B)


def compare(place: Place, report: Report, groups: Sequence[Plan]) -> None:
    """Let each group have its seconds, and what those before it left of theirs."""
    if place.tiny:
        groups = [(TINY, "bfloat16", (CRIUS, TITAN, HF), 1.0), (TINY, "float8", (CRIUS_FLOAT8,), 1.0)]
    for number, (case, precision, entries, wanted) in enumerate(groups, start=1):
        title = f"{case.name}, {precision}"
        seconds = max(report.left() - sum(later for *_, later in groups[number:]), min(wanted, report.left()))
        if place.device == "cuda" and seconds < LEAST_SHARE * wanted:
            report.note(f"{title} is not run: {max(0.0, seconds):.0f} s are left for it")
            continue
        taken = [entry for entry in entries if place.device == "cuda" or not entry.needs_gpu]
        if importlib.util.find_spec("transformers") is None and HF in taken:
            taken.remove(HF)
            report.note(f"{title}: {HF.name} is left out: transformers is not installed")
        if place.device == "cuda":
            taken, skipped = that_fit(taken, case, place.memory_gib)
            for line in skipped:
                report.note(f"{title}: {line}")
        group = run_group(place, report, Group(case, precision), taken, seconds)
        rows_of(report, group)
        judge(report, group, is_gpu=place.device == "cuda")


def run_group(place: Place, report: Report, group: Group, entries: Sequence[Entry], seconds: float = 1e9) -> Group:
    """Let ``entries`` take turns for ``seconds`` at most, of those that the section has left."""
    if report.left() <= 0:
        raise TimeLimit(f"{report.limit:.0f} s are over before {group.title}")
    seconds = min(seconds, report.left())
    contestants = [contestant(place, report, group, entry) for entry in entries]
    print(f"[{report.name}] {group.title}: {', '.join(entry.name for entry in entries)}", flush=True)
    rounds, steps = (2, 2) if place.tiny else (ROUNDS, STEPS)
    found = take_turns(
        contestants,
        rounds=rounds,
        steps=steps,
        start_seconds=seconds,
        turn_seconds=max(10.0, seconds / 4),
        total_seconds=seconds,
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
        like_for_like(report, group, CRIUS, TITAN, is_gpu=is_gpu)
        if base and (other := group.of(HF.name)):
            ratio = median_ratio(other, base, "wall_seconds")
            claim = f"{group.title}: {base.name} is at least as fast as {HF.name}"
            report.check(claim, ratio >= 1 if is_gpu else None, f"{ratio:.3f} x")
        judge_mfu(report, group.title, group.case, mfu(base) if base else None, is_gpu=is_gpu)
    else:
        judge_float8(report, group, is_gpu=is_gpu)
    judge_losses(report, group)


def like_for_like(report: Report, group: Group, ours: Entry, theirs: Entry, *, is_gpu: bool) -> None:
    """Whether Crius is as fast as torchtitan's mathematics, which computes with the same kernels and as little anew."""
    claim = f"{group.title}: {ours.name} is at least {LEAST_RATIO} x as fast as {theirs.name}, like for like"
    base, other = group.of(ours.name), group.of(theirs.name)
    if base is None or other is None:
        is_left_out = not {ours.name, theirs.name} <= set(group.outcomes)
        report.check(claim, None if is_left_out else False, "left out" if is_left_out else "a run is missing")
        return
    ratio = median_ratio(other, base, "wall_seconds")
    report.check(claim, ratio >= LEAST_RATIO if is_gpu else None, f"{ratio:.3f} x")


def judge_mfu(report: Report, title: str, case: Case, share: float | None, *, is_gpu: bool) -> None:
    """Whether 8B, or some layers of it, reach what is published; what is expected stands beside it."""
    if expected := EXPECTED_MFU.get(case.name):
        shown = "no peak is known" if share is None else f"{share:.1%}"
        passed = (share is not None and share >= LEAST_MFU) if is_gpu else None
        report.check(f"{title}: at least {LEAST_MFU:.0%} MFU", passed, f"{shown}; expected: {expected}")


def judge_float8(report: Report, group: Group, *, is_gpu: bool) -> None:
    """Whether float8 is float8, and pays."""
    low, high = group.of(CRIUS_FLOAT8.name), group.of(CRIUS.name)
    claim = f"{group.title}: faster than bfloat16"
    if low and high:
        ratio = median_ratio(high, low, "wall_seconds")
        report.check(claim, ratio > 1 if is_gpu else None, f"{ratio:.3f} x")
    else:
        report.check(claim, False if is_gpu else None, "a run is missing")
    if is_gpu:
        like_for_like(report, group, CRIUS_FLOAT8, TITAN_FLOAT8, is_gpu=is_gpu)
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


MODELS: dict[str, tuple[Section, float]] = {"models": (models, sum(seconds for *_, seconds in GROUPS))}
MODELS_1B: dict[str, tuple[Section, float]] = {"models_1b": (models_1b, sum(seconds for *_, seconds in GROUPS_1B))}
