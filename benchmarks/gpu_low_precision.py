"""The sections of the GPU suite about low precision and optimizers. Needs no torch."""

import json
import re
import statistics
from typing import Any

from gpu_sections import ROOT, Place, Report, Section, call, train

TEXT = ["--data.source", "text", "--data.path", str(ROOT / "tests" / "golden" / "tempest.txt")]

# 4 of the 32 layers of 8B, and an eighth of its vocabulary: the output layer, which stays in bfloat16, then has the
# share of the matmuls that it has in the whole model
LAYERS, VOCABULARY = 4, 128_256 // 8

_FLOAT8 = ["--quantize.dense.float8.enable", "--quantize.dense.float8.recipe"]
KINDS: dict[str, list[str]] = {
    "bfloat16": [],
    "float8 tensorwise": [*_FLOAT8, "tensorwise"],
    "float8 rowwise": [*_FLOAT8, "rowwise"],
    "float8 tensorwise, float8 all-gather": [
        *(*_FLOAT8, "tensorwise"),
        *("--quantize.dense.float8.enable_fsdp_float8_all_gather", "--quantize.dense.float8.precompute_scale"),
    ],
}
ORDER = ("bfloat16", "float8 tensorwise", "float8 rowwise", "bfloat16", "float8 tensorwise, float8 all-gather")
FASTER = "float8 tensorwise"


def float8(place: Place, report: Report) -> None:
    """The shapes of 8B at 8192 tokens, compiled: bfloat16 and float8 in turn, with tokens/s and peak memory."""
    flags, warm = float8_flags(place), 8
    rates: dict[str, list[float]] = {}
    losses: dict[str, float] = {}
    for number, kind in enumerate(ORDER, start=1):
        name = f"{number}-{re.sub('[^a-z0-9]+', '-', kind)}"
        run = train(place, report, name, flags + KINDS[kind])
        if run is None:
            continue
        summary = run.summary(warm)
        rates.setdefault(kind, []).extend(summary["samples"])
        losses[kind] = summary["last_loss"]
        line = next((line for line in run.output.splitlines() if re.match(r"float8: \d+ converted", line)), "")
        report.row(run=number, kind=kind, **summary, effect=line)
        if KINDS[kind]:
            converted = re.match(r"float8: (\d+)", line)
            count = int(converted[1]) if converted else 0
            report.check(f"run {number} ({kind}) converted linear layers", count > 0, line or "no line says so")
            is_real = "emulated" not in line if place.device == "cuda" else None
            report.check(f"run {number} ({kind}) multiplies in float8", is_real, line)
    compare_float8(place, report, rates, losses)


def compare_float8(place: Place, report: Report, rates: dict[str, list[float]], losses: dict[str, float]) -> None:
    """Whether float8 pays, and whether the losses stay together."""
    if not (rates.get("bfloat16") and rates.get(FASTER)):
        report.check(f"{FASTER} is faster than bfloat16", False, "a run is missing")
        return
    medians = {kind: statistics.median(found) for kind, found in rates.items()}
    high, low = medians["bfloat16"], medians[FASTER]
    report.check(
        f"{FASTER} is faster than bfloat16",
        low > high if place.device == "cuda" else None,
        "; ".join(f"{kind} {rate:,.0f} tokens/s, {rate / high:.3f} x" for kind, rate in medians.items()),
    )
    for kind, loss in losses.items():
        if kind != "bfloat16":
            gap = loss / losses["bfloat16"] - 1
            # float8 rounds by up to 2**-4, a mean over 8192 tokens by far less; the curves of 200 steps stay within 2 %
            report.check(f"the last loss of {kind} is within 2 % of bfloat16's", abs(gap) < 0.02, f"{gap:+.2%}")


def float8_flags(place: Place) -> list[str]:
    """Flags of all runs of the section."""
    batch = 2 if place.memory_gib > 100 else 1
    flavor, layers, seq_len, vocabulary = "8b", LAYERS, 8192, VOCABULARY
    if place.tiny:
        flavor, layers, seq_len, vocabulary, batch = "debug", 1, 64, 512, 1
    return [
        *("--model.flavor", flavor, "--model.num_layers", str(layers), "--model.vocab_size", str(vocabulary)),
        *("--training.seq_len", str(seq_len), "--training.mixed_precision_param", "bfloat16"),
        *("--training.global_batch_size", str(batch), "--training.local_batch_size", str(batch)),
        *("--training.steps", "24", "--metrics.log_interval", "4", "--optimizer.lr", "3e-4"),
        *("--compile.enable", *(("--compile.backend", "eager") if place.tiny else ())),
        *(*TEXT, "--validation.interval", "0", "--metrics.no_enable_progress_bar"),
    ]


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
    """``crius verify precision`` with few steps: the curves of the debug model in float8 and MXFP8."""
    formats, steps = ("float8_rowwise", 4) if place.tiny else ("float8_tensorwise,float8_rowwise,mxfp8", 60)
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
    "float8": (float8, 160),
    "bench_quantize": (bench_quantize, 90),
    "bench_optimizer": (bench_optimizer, 50),
    "float8_curves": (float8_curves, 60),
}
