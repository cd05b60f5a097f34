"""``make gpu-bench``: how fast Crius is on this GPU, beside its peers and its plan. No torch here."""

import dataclasses
from collections.abc import Sequence

from benchmarks.gpu import check, peers, single, verbs
from benchmarks.gpu.peers import SHAPED_8B, TINY, WHOLE_VOCABULARY, Case
from benchmarks.gpu.round import Round, Step

MATH = ("crius", "titan-fsdp", "titan-amp")
"""Entries whose mathematics has to be equal in float32."""


def group(names: Sequence[str], case: Case, seconds: float, purpose: str) -> Step:
    """A step in which ``names`` train ``case`` in turns."""

    def step(this: Round) -> None:
        peers.report(this, peers.take(this, TINY if this.is_dry else case, names, seconds))

    step.__doc__ = purpose
    return Step(step, seconds)


def equal(this: Round) -> None:
    """First losses in float32, eager, one step: equal to 1e-5."""
    # in float32 torchtitan has no fused attention, and keeps 32 x 8,192^2 scores a layer at the timed length
    case = TINY if this.is_dry else dataclasses.replace(SHAPED_8B, seq_len=2048)
    plain = ["--training.mixed_precision_param", "float32", "--compile.no_enable"]
    eager = {name: dataclasses.replace(entry, options=entry.dry_options) for name, entry in peers.ENTRIES.items()}
    for name in MATH[1:]:
        pair = peers.take(this, case, ("crius", name), 60.0, rounds=0, extra=plain, entries=eager)
        peers.judge_first_losses(this, pair, peers.EQUAL_F32)


def vocabulary(this: Round) -> None:
    """All 128,256 rows of the vocabulary, one contestant after the other: peak memory."""
    case = TINY if this.is_dry else WHOLE_VOCABULARY
    peaks = {}
    for name in ("titan-fsdp", "crius"):
        found = peers.take(this, case, (name,), 60.0, rounds=1, steps=5).measured(name)
        if found is None:
            return
        peers.rate_row(this, case, found)
        peaks[name] = found.peak_gib
    if this.is_dry:
        return
    share = peaks["crius"] / peaks["titan-fsdp"]
    shown = f"{peaks['crius']:.1f} and {peaks['titan-fsdp']:.1f} GiB, {share:.3f}, limit {peers.MOST_MEMORY}"
    this.row("peak of crius over titan-fsdp", share <= peers.MOST_MEMORY, shown, share=share, limit=peers.MOST_MEMORY)


STEPS = {
    "machine": Step(check.machine, 15.0),
    "equal": Step(equal, 120.0),
    # three of about 25 GiB fit together on 80 GB
    "bf16": group(MATH, SHAPED_8B, 125.0, "Crius and torchtitan with its FSDP, and without it, in bfloat16."),
    "float8": group(
        ("crius", "crius-float8", "titan-fsdp-float8"), SHAPED_8B, 125.0, "Crius and torchtitan in float8 tensorwise."
    ),
    "whole8b": single.step_of(single.WHOLE, 120.0, "All of Llama 3.1 8B on one card: 8-bit states, all recomputed."),
    "vocabulary": Step(vocabulary, 75.0),
    "masks": group(("crius", "crius-document"), SHAPED_8B, 75.0, "The document mask beside the causal one."),
    "shipped": group(
        ("crius", "titan", "hf-liger"), SHAPED_8B, 105.0, "Crius, torchtitan as it ships, Hugging Face with Liger."
    ),
    "qwen3": single.step_of(single.SMALL_MODEL, 60.0, "Qwen3-0.6B at 8,192 tokens."),
    "recipe": single.step_of(single.RECIPE, 90.0, "--recipe llama3_1b on one card beside its plan."),
    "long": single.step_of(single.LONG, 60.0, "Qwen3-0.6B at 16,384 tokens."),
    "lora": single.step_of(single.LORA, 75.0, "LoRA of 8B at 4,096 tokens: real shapes, random weights."),
    "adamw": single.step_of(single.ADAMW, 180.0, "Fused, foreach and for-loop AdamW on the whole 8B."),
    "seeds": single.step_of(single.SEEDS, 180.0, "The whole 8B eager, compiled, and in float8."),
    "experts": single.step_of(single.EXPERTS, 75.0, "4 layers of Qwen3-30B-A3B."),
    "calibrate": Step(verbs.calibrate, 60.0),
    "sweep": Step(verbs.sweep, 100.0),
    "timings": Step(verbs.timings, 45.0),
    "quantize": Step(verbs.quantize, 80.0),
    "optimizer": Step(verbs.optimizer, 50.0),
}
"""In the order of their priority: what does not fit into a call is named, as the command that runs it."""
