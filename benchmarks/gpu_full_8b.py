"""The section ``full_8b``: the whole model in one run. No torch here."""

from gpu_models import CONTEXT_GIB, GIB, TINY, Case, activation_bytes, judge_mfu, state_bytes
from gpu_sections import Place, Report, Section, train

WHOLE_8B = Case("8B", "8b", 0, 0, 8192, 1)


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
    judge_mfu(report, case.name, case, None if share is None else share / 100, is_gpu=place.device == "cuda")


# 8 billion numbers drawn by 16 threads, one block compiled for all layers, 16 steps of about a second
FULL_8B: dict[str, tuple[Section, float]] = {"full_8b": (full_8b, 80)}
