"""The sections of the GPU suite about low precision and optimizers. Needs no torch."""

import json
import re
from typing import Any

from gpu_sections import ROOT, Place, Report, Section, call

TEXT = ["--data.source", "text", "--data.path", str(ROOT / "tests" / "golden" / "tempest.txt")]


def bench_quantize(place: Place, report: Report) -> None:
    """``crius bench quantize`` at the shapes of 8B: which layers gain by which recipe."""
    sizes = ["--model.flavor", "8b", "--tokens", "8192", "--formats", "float8_tensorwise,float8_rowwise"]
    if place.tiny:
        sizes = ["--model.num_layers", "1", "--tokens", "32", "--repeat", "1", "--modes", "eager", "--emulated"]
    found = answer(place, report, "quantize", ["bench", "quantize", "--gpu", "here", *sizes])
    if found is None:
        return
    for row in found["rows"]:
        report.row(
            shape=f"{row['out_features']} x {row['in_features']}",
            layers=", ".join(row["layers"]),
            **{key: row[key] for key in ("format", "mode", "milliseconds", "spread", "speedup", "loses")},
        )
    for total in found["totals"]:
        report.note(json.dumps(total))
    report.note(f"recommended: {' '.join(found['recommended']) or 'bfloat16'}")
    gains = [row for row in found["rows"] if "feed_forward.w1" in row["layers"] and row["format"] != "bfloat16"]
    best = max((row["speedup"] for row in gains), default=0.0)
    is_faster = best > 1 if place.device == "cuda" else None
    report.check("some recipe is faster for the feed-forward layers", is_faster, f"{best:.2f} x")


def bench_optimizer(place: Place, report: Report) -> None:
    """``crius bench optimizer`` at the shapes of 1B and of 4 layers of 8B: step time and peak memory."""
    models = {"1b": ["--model.flavor", "1b"], "8b, 4 layers": ["--model.flavor", "8b", "--model.num_layers", "4"]}
    if place.tiny:
        models = {"debug": ["--model.num_layers", "1"]}
    for name, flags in models.items():
        arguments = ["bench", "optimizer", *flags, "--repeat", "1" if place.tiny else "5"]
        found = answer(place, report, re.sub("[^a-z0-9]+", "-", name), arguments)
        if found is None:
            continue
        rows = {row["optimizer"]: row for row in found["rows"]}
        for row in rows.values():
            report.row(model=name, **{key: value for key, value in row.items() if key != "samples_ms"})
        times = {key: row["milliseconds"] for key, row in rows.items() if "milliseconds" in row}
        is_fastest = times["fused"] < min(times["for-loop"], times["foreach"]) if place.device == "cuda" else None
        shown = ", ".join(f"{key} {value:.2f} ms" for key, value in times.items())
        report.check(f"{name}: fused is the fastest AdamW", is_fastest, shown)
        sizes = {key: row["state_bytes"] for key, row in rows.items() if "state_bytes" in row}
        is_less = sizes.get("8bit", 0) < sizes["bfloat16"] < sizes["fused"]
        report.check(f"{name}: 8-bit states are smaller than bfloat16's, those than float32's", is_less, str(sizes))


def float8_curves(place: Place, report: Report) -> None:
    """``crius verify precision`` with few steps: the curves of the debug model in float8."""
    formats, steps = ("float8_rowwise", 4) if place.tiny else ("float8_tensorwise,float8_rowwise", 60)
    arguments = ["verify", "precision", *TEXT, "--steps", str(steps), "--formats", formats]
    # its layers are too small to gain, so the filter would keep all of them
    arguments += ["--quantize.dense.auto_filter", "off", "--job.run_dir", str(place.work / "float8_curves")]
    arguments += ["--model.num_layers", "1"] if place.tiny else []
    found = answer(place, report, "precision", arguments, codes=(0, 1))
    if found is None:
        return
    for row in found["rows"]:
        report.row(
            format=row["format"], status=row["status"], **row["values"], seconds=row["seconds"], note=row["note"]
        )
        if row["status"] != "reference":
            report.check(f"{row['format']} ends within 2 % of bfloat16", row["status"] == "ok", row["note"])


def answer(
    place: Place, report: Report, name: str, arguments: list[str], codes: tuple[int, ...] = (0,)
) -> dict[str, Any] | None:
    """The JSON that a verb prints; one that fails is added to the failures, and the section goes on with None."""
    command = ["-m", "crius", *arguments, "--training.device", place.device, "--json"]
    code, output = call(place, report, name, command)
    start, end = output.find("{\n"), output.rfind("}") + 1
    if code not in codes or start < 0:
        report.fail(command, f"exit code {code}", output)
        return None
    found: dict[str, Any] = json.loads(output[start:end])  # around it, warnings of libraries
    return found


LOW_PRECISION: dict[str, tuple[Section, float]] = {
    "bench_quantize": (bench_quantize, 80),
    "bench_optimizer": (bench_optimizer, 50),
    "float8_curves": (float8_curves, 50),
}
