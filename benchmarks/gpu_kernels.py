"""The section ``kernels``: the loss, attention and the projections by themselves. No torch here."""

import json
from typing import Any

from gpu_sections import Place, Report, Section, call

QUESTIONS = ("loss", "projections", "attention")
LEAST_SAVING = 8.0
"""Peak memory of the loss of 32k tokens with all logits, over that in chunks, the gradient of the weight in both."""


def kernels(place: Place, report: Report) -> None:
    """The loss of 32k tokens whole and in chunks; one matmul for several projections; the kernels of attention."""
    arguments = ["benchmarks/gpu_probe.py", place.device, *(["tiny"] if place.tiny else []), *QUESTIONS]
    code, output = call(place, report, "probe", arguments)
    if code:
        report.fail(arguments, f"exit code {code}", output)
        return
    for question, answer in json.loads(output.splitlines()[-1]).items():
        if isinstance(answer, str):
            report.fail(arguments, f"{question}: {answer}", "")
            continue
        for row in answer:
            report.row(kernel=question, **row)
    judge_loss(report, report.rows, is_gpu=place.device == "cuda")
    report.note("forward and backward, medians; the peak is what they take on top of inputs")
    report.note("apart, together: one matmul for each projection, or one for all that read the same input")
    report.note("ops: the kernel of attention that PyTorch dispatched to")


def judge_loss(report: Report, rows: list[dict[str, Any]], *, is_gpu: bool) -> None:
    """Whether some size of the chunks is as fast as the whole and takes far less memory."""
    whole = next((row for row in rows if row.get("loss") == "whole"), None)
    chunked = [row for row in rows if str(row.get("loss", "")).startswith("chunks")]
    claim = f"some size of the chunks takes less than 1/{LEAST_SAVING:.0f} of the memory and no more time"
    if whole is None or not chunked:
        report.check(claim, False, "a run is missing")
        return
    if not is_gpu:
        report.check(claim, None, ", ".join(row["loss"] for row in chunked))
        return
    good = [
        row for row in chunked if row["speedup"] >= 1 and whole["peak_mib"] / max(row["peak_mib"], 1.0) > LEAST_SAVING
    ]
    best = max(good or chunked, key=lambda row: row["speedup"])
    sizes = f"{whole['peak_mib']:,.0f} and {best['peak_mib']:,.0f} MiB"
    report.check(claim, bool(good), f"{best['loss']}: {best['speedup']:.3f} x, {sizes}")


KERNELS: dict[str, tuple[Section, float]] = {"kernels": (kernels, 40)}
