"""Steps that ask verbs of Crius, and single changes of one run. No torch here."""

from typing import Any

from benchmarks.gpu import peers
from benchmarks.gpu.peers import FLOAT8, TINY, Case, Entry
from benchmarks.gpu.round import Round, json_in
from benchmarks.turns import median_ratio

# 1B with a quarter of its layers and of its vocabulary: small steps, so that what the host does shows too
SWEPT = Case(
    "1B, 4 layers", ("--model.flavor", "1b", "--model.num_layers", "4", "--model.vocab_size", "32064"), 4096, 2
)
WAVE = 6
"""Changes that are in memory together with the base: about 10 GiB each."""
CHANGES = {
    "cuDNN attention": ("--kernels.attention", "cudnn"),
    "flash attention": ("--kernels.attention", "flash"),
    "efficient attention": ("--kernels.attention", "efficient"),
    "all logits": ("--kernels.linear_cross_entropy", "off"),
    "loss compiled": ("--compile.loss",),
    "all logits, loss compiled": ("--kernels.linear_cross_entropy", "off", "--compile.loss"),
    "recompute by operator": ("--activation_checkpoint.mode", "selective"),
    "recompute all": ("--activation_checkpoint.mode", "full"),
    "eager": ("--compile.no_enable",),
    "foreach AdamW": ("--optimizer.implementation", "foreach"),
    "float8": FLOAT8,
    "CUDA graphs": ("--compile.backend", "cudagraphs", "--training.dtype", "bfloat16"),
}
"""In the order of their priority."""
ON_A_CPU = ("all logits", "recompute all", "foreach AdamW")
LESS_MEMORY = ("recompute all", "recompute by operator", "base")
"""In this order their peaks grow."""


def sweep(this: Round) -> None:
    """Attention, loss, recomputation, compilation, optimizer: one change of a run at a time, with its gain."""
    case = TINY if this.is_dry else SWEPT
    names = [name for name in CHANGES if not this.is_dry or name in ON_A_CPU]
    peaks: dict[str, float] = {}
    for begin in range(0, len(names), WAVE):
        wave = names[begin : begin + WAVE]
        entries = {"base": Entry(), **{name: Entry(flags=CHANGES[name]) for name in wave}}
        found = peers.take(this, case, list(entries), 60.0, rounds=6, entries=entries)
        base = found.measured("base")
        for name in wave:
            outcome = found.measured(name)
            if base is None or outcome is None:
                continue
            gain = median_ratio(base, outcome, "wall_seconds") - 1
            peaks[name] = outcome.peak_gib
            this.row(
                name,
                True,
                f"{gain:+.1%} tokens/s, {peaks[name]:.1f} GiB beside {base.peak_gib:.1f}",
                gain=gain,
                peak_gib=peaks[name],
            )
        if base:
            peaks["base"] = base.peak_gib
    modes = [name for name in LESS_MEMORY if name in peaks]
    for less, more in zip(modes, modes[1:], strict=False):
        # the resident set of a CPU process is not its activations'
        ok = None if this.is_dry else peaks[less] < peaks[more]
        this.row(f"peak of {less} below {more}", ok, f"{peaks[less]:.2f} and {peaks[more]:.2f} GiB")


def answer(this: Round, name: str, arguments: list[str], limit: float) -> dict[str, Any] | None:
    """The JSON that a module prints, called with ``arguments``; a row and None if it fails."""
    done = this.call(name, ["-m", *arguments, "--json"], limit)
    found = json_in(done.output)
    if done.code != 0 or not isinstance(found, dict):
        this.row(name, False, done.why, done.seconds)
        return None
    return found


def calibrate(this: Round) -> None:
    """crius bench calibrate: the planner's own file of this card."""
    target = this.record.folder / "calibrated.toml"
    done = this.call("bench calibrate", ["-m", "crius", "bench", "calibrate", "--out", str(target)], 100.0)
    text = target.read_text(encoding="utf-8") if target.exists() else ""
    this.row("bench calibrate", done.code == 0, text.replace("\n", "; ") if text else done.why, done.seconds)


def quantize(this: Round) -> None:
    """crius bench quantize at the shapes of 8B: which layers gain by which recipe."""
    sizes = ["--model.flavor", "8b", "--tokens", "8192", "--formats", "float8_tensorwise,float8_rowwise"]
    if this.is_dry:
        sizes = ["--model.num_layers", "1", "--tokens", "32", "--repeat", "1", "--modes", "eager", "--emulated"]
    found = answer(this, "quantize", ["crius", "bench", "quantize", "--gpu", "here", *sizes], 100.0)
    if found is None:
        return
    gains = []
    for row in found["rows"]:
        name = f"{row['out_features']} x {row['in_features']}, {row['format']}, {row['mode']}"
        shown = f"{row['milliseconds']:.3f} ms, {row['speedup']:.2f} x bfloat16: {', '.join(row['layers'])}"
        this.row(name, True, shown, milliseconds=row["milliseconds"], speedup=row["speedup"])
        if "feed_forward.w1" in row["layers"] and row["format"] != "bfloat16":
            gains.append(row["speedup"])
    best = max(gains, default=0.0)
    this.row("a recipe is faster for feed-forward", None if this.is_dry else best > 1, f"{best:.2f} x", speedup=best)


def optimizer(this: Round) -> None:
    """benchmarks.optimizer at the shapes of 1B and of 4 layers of 8B: time and peak memory of a step."""
    models = {"1B": ["--model.flavor", "1b"], "8B, 4 layers": ["--model.flavor", "8b", "--model.num_layers", "4"]}
    if this.is_dry:
        models = {"debug": ["--model.num_layers", "1"]}
    for name, flags in models.items():
        repeat = "1" if this.is_dry else "5"
        asked = ["benchmarks.optimizer", *flags, "--repeat", repeat, "--training.device", this.device]
        found = answer(this, name, asked, 60.0)
        if found is None:
            continue
        times = {row["name"]: row["wall"]["milliseconds"] / row["amount"] for row in found["rows"]}
        for key, time in times.items():
            this.row(f"{name}, {key}", True, f"{time:.2f} ms", milliseconds=time)
        is_fastest = times["fused"] < min(times["for-loop"], times["foreach"])
        this.row(f"{name}, fused is the fastest", None if this.is_dry else is_fastest)


LEAST_SAVING = 8.0
"""Peak memory of the loss of 32k tokens with all logits, over that in chunks; both have the weight's gradient."""


def timings(this: Round) -> None:
    """The loss whole and in chunks, projections by one matmul or several, kernels of attention: time and memory."""
    words = ["tiny"] if this.is_dry else []
    done = this.call("timings", ["-m", "benchmarks.gpu.timings", this.device, *words], 90.0)
    found = json_in("{\n" + done.output.splitlines()[-1][1:]) if done.code == 0 else None
    if found is None:
        this.row("timings", False, done.why, done.seconds)
        return
    for question, rows in found.items():
        if isinstance(rows, str):
            this.row(question, False, rows)
            continue
        for row in rows:
            name = " ".join(str(value) for value in list(row.values())[:2])
            this.row(f"{question} {name}", "error" not in row, ", ".join(f"{k} {v}" for k, v in row.items()), **row)
    if isinstance(found["loss"], list):
        judge_chunks(this, found["loss"])


def judge_chunks(this: Round, rows: list[dict[str, Any]]) -> None:
    """Whether some size of the chunks is as fast as the whole loss and takes far less memory."""
    whole, *chunked = rows
    good = [
        row
        for row in chunked
        if not this.is_dry and row["speedup"] >= 1 and whole["peak_mib"] > LEAST_SAVING * max(row["peak_mib"], 1.0)
    ]
    best = max(good or chunked, key=lambda row: row["speedup"])
    ok = None if this.is_dry else bool(good)
    shown = f"{best['loss']}: {best['speedup']} x, {best['peak_mib']} beside {whole['peak_mib']} MiB"
    this.row(f"chunks take less than 1/{LEAST_SAVING:.0f} of the memory and no more time", ok, shown)
