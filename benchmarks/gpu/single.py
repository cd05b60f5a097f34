"""One run of ``crius train`` at a time on the whole card, beside what ``crius plan`` says of it. No torch here."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu import runs
from benchmarks.gpu.round import Round, Step, json_in

WARM_STEPS = 3
"""Steps that compile, and find the allocator's sizes: they count for no rate."""
PLANNED = {"H100": "h100-80g", "H200": "h200", "H800": "h800", "A100": "a100-80g", "B200": "b200"}
"""Name of a card for ``crius plan``, by a word of torch's name of it."""


@dataclass(frozen=True)
class Single:
    """A run.

    Attributes:
        flags: of ``crius train`` on a GPU; ``crius plan`` gets the same.
        steps: its steps; each is reported.
        dry_flags: flags of its stand-in on a CPU, with the debug model.
        least: goal for tokens per second; 0: none.
        learns: whether the mean of its last four losses has to be below that of its first four.
    """

    flags: Sequence[str]
    steps: int
    dry_flags: Sequence[str] = ()
    least: float = 0.0
    learns: bool = False


COMMON = (*runs.BF16, "--optimizer.lr", "3e-5", *runs.COMPILED)
WHOLE_8B = (
    *("--model.flavor", "8b", "--training.seq_len", "8192", "--training.global_batch_size", "1"),
    *("--training.dtype", "bfloat16", runs.RECOMPUTE, "full"),
)
STATES_8BIT = ("--optimizer.state_dtype", "8bit")
STATES_BF16 = ("--optimizer.state_dtype", "bfloat16")
QWEN3 = ("--model.name", "qwen3", "--model.flavor", "0.6b")
# 4 of its 48 layers: 2.9 of 30.5 billion parameters; the vocabulary is an eighth
QWEN3_EXPERTS = (
    *("--model.name", "qwen3_moe", "--model.flavor", "30b-a3b", "--model.num_layers", "4"),
    *("--model.vocab_size", "18992", "--training.seq_len", "4096", "--training.global_batch_size", "2"),
)

WHOLE = {"whole": Single((*WHOLE_8B, *COMMON, *STATES_8BIT), 16, STATES_8BIT, learns=True)}
SMALL_MODEL = {
    "8,192 tokens": Single(
        (*QWEN3, *COMMON, "--training.seq_len", "8192", "--training.global_batch_size", "4"),
        12,
        # 1.5 x the 26,010 tokens/s that prime-rl published for this model on one H100
        least=39_000.0,
    )
}
LONG = {
    "16,384 tokens": Single((*QWEN3, *COMMON, "--training.seq_len", "16384", "--training.global_batch_size", "2"), 10)
}
# its batch is 64 sequences of 8,192 tokens; the committed text has 11
RECIPE = {"llama3_1b": Single(("--recipe", "llama3_1b", "--training.global_batch_size", "8"), 8)}
LORA = {
    "8B at 4,096 tokens, random weights": Single(
        (
            *("--model.flavor", "8b", "--lora.rank", "16", "--training.seq_len", "4096"),
            *("--training.global_batch_size", "2", *COMMON),
        ),
        10,
        ("--lora.rank", "4"),
    )
}
ADAMW = {
    name: Single(
        (*WHOLE_8B, *COMMON, *STATES_BF16, "--optimizer.implementation", name), 10, ("--optimizer.implementation", name)
    )
    for name in ("fused", "foreach", "for-loop")
}
SEEDS = {
    "eager": Single((*WHOLE_8B, *COMMON, *STATES_8BIT, *runs.EAGER), 10),
    "compiled": Single((*WHOLE_8B, *COMMON, *STATES_8BIT), 10),
    "compiled, float8": Single(
        (
            *(*WHOLE_8B, *COMMON, *STATES_8BIT, "--quantize.dense.float8.enable"),
            *("--quantize.dense.float8.recipe", "tensorwise"),
        ),
        10,
        ("--quantize.dense.float8.enable", "--quantize.dense.auto_filter", "off"),
    ),
}
EXPERTS = {"grouped": Single((*QWEN3_EXPERTS, *COMMON), 10, ("--model.name", "qwen3_moe", "--model.flavor", "debug"))}


def step_of(table: Mapping[str, Single], seconds: float, purpose: str) -> Step:
    """A step that runs each row of ``table``, one after the other."""

    def step(this: Round) -> None:
        for name, single in table.items():
            run_single(this, name, single)

    step.__doc__ = purpose
    return Step(step, seconds)


def run_single(this: Round, name: str, single: Single) -> None:
    """A row: rate, MFU, memory and losses of a run, and the plan's."""
    flags = [*single.flags, *runs.text_flags(this)]
    if this.is_dry:
        flags = [*runs.small_flags(this), *runs.EAGER, *single.dry_flags]
    reported = ["--training.steps", str(single.steps), "--metrics.log_interval", "1", "--validation.interval", "0"]
    trained = runs.train(
        this, name, [*flags, *reported, "--metrics.no_enable_progress_bar"], limit=max(60.0, this.left() - 10.0)
    )
    if not trained.is_whole or len(trained.records) < single.steps:
        this.row(name, False, trained.done.why, trained.done.seconds)
        return
    warm = trained.records[WARM_STEPS:]
    rate = statistics.median(record["tokens_per_second"] for record in warm)
    shares = [record["mfu"] for record in warm if record["mfu"] is not None]
    mfu = statistics.median(shares) if shares else None
    memory = max(record["memory_gib"] for record in trained.records)
    losses = [record["loss"] for record in trained.records]
    faults = []
    first = statistics.mean(losses[:4])
    last = statistics.mean(losses[-4:])
    if single.learns and not last < first:
        faults.append("it does not learn")
    if single.least and not this.is_dry and rate < single.least:
        faults.append(f"below the goal of {single.least:,.0f} tokens/s")
    planned = plan_of(this, single)
    shown = [*faults, f"{rate:,.0f} tokens/s", f"{memory:.1f} GiB", f"losses {first:.3f} to {last:.3f}"]
    if mfu is not None:
        shown.append(f"MFU {mfu:.1%}")
    if planned:
        shown.append(
            f"plan: {planned['planned_tokens_per_second']:,.0f} tokens/s ({planned['planned_mfu']:.1%}), "
            f"{planned['planned_gib']:.1f} GiB"
        )
    this.row(
        name,
        not faults,
        ", ".join(shown),
        trained.done.seconds,
        tokens_per_second=rate,
        mfu=mfu,
        peak_gib=memory,
        losses=losses,
        goal=single.least or None,
        **planned,
    )


def plan_of(this: Round, single: Single) -> dict[str, Any]:
    """What ``crius plan`` says of the run on this card; empty if it does not know the card or the run."""
    device = str(this.record.environment["device"] or "H100")
    card = next((name for word, name in PLANNED.items() if word in device), None)
    if card is None:
        return {}
    arguments = ["-m", "crius", "plan", "--gpus", "1", "--gpu", card, *single.flags, "--json"]
    found = json_in(this.call("plan", arguments, 60.0).output)
    best = (found or {}).get("recommended")
    if not best:
        return {}
    return {
        "planned_tokens_per_second": best["tokens_per_second"],
        "planned_mfu": best["mfu"],
        "planned_gib": best["memory_bytes"] / 2**30,
    }
