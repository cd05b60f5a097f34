"""``crius train`` with each feature on a few layers, beside the losses of a CPU, and in two parts. No torch here."""

import json
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.host import ROOT
from benchmarks.gpu.round import Done, Round

STEPS = 12
REFUSED = 2
"""Exit code of a run whose settings are refused."""
RUN_SECONDS = 100.0
"""Limit of a run: 10 to 45 s are expected, with those that compile at the upper end."""

BF16 = ("--training.mixed_precision_param", "bfloat16")
F32 = ("--training.mixed_precision_param", "float32")
EAGER = ("--compile.no_enable",)
COMPILED = ("--compile.enable",)
DOCUMENT = ("--model.attention_mask", "document")
EXPERTS = ("--model.name", "qwen3_moe", "--model.flavor", "debug")
RECOMPUTE = "--activation_checkpoint.mode"
BY_OPERATOR = (RECOMPUTE, "selective", "--activation_checkpoint.selective_option", "op")
# its layers are too small to gain, so the filter would keep all of them
FLOAT8 = (
    *BF16,
    "--quantize.dense.auto_filter",
    "off",
    "--quantize.dense.float8.enable",
    "--quantize.dense.float8.recipe",
)

CLOSE_F32 = 1e-3
"""Relative difference of a loss to the CPU's after 12 steps: float32 matmuls in another order, updates add them up."""
CLOSE_BF16 = 1e-2
"""A rounding of bfloat16 is up to 0.4 %; the mean over tokens averages it out, the updates let the curves drift."""
CLOSE_EXPERTS_BF16 = 2e-2
"""Routing is discontinuous: some tokens choose other experts when a rounding differs."""
CLOSE_STATES = 2e-2
"""Moments of 8 bits."""
CLOSE_FLOAT8 = 3e-2
"""A rounding of float8 is up to 6 %. Weights in bfloat16 have the same bound: their updates are rounded."""

GRAPHS = r"compile: [1-9]\d* graph"
CONVERTED = r"float8: [1-9]\d* converted"


@dataclass(frozen=True)
class Run:
    """A run of ``crius train``.

    Attributes:
        name: its name.
        flags: flags on top of those of all runs.
        reference: the run on a CPU that it has to follow; empty: it only has to train.
        limit: largest relative difference of a loss to the reference.
        prints: regular expression of a line that the run must print on a GPU.
    """

    name: str
    flags: Sequence[str]
    reference: str = "cpu"
    limit: float = CLOSE_BF16
    prints: str = ""


REFERENCES = {
    "cpu": (*F32, *EAGER),
    "cpu document": (*F32, *DOCUMENT, *EAGER),
    "cpu experts": (*F32, *EXPERTS, *EAGER),
}
RUNS = (
    Run("float32", (*F32, *EAGER), limit=CLOSE_F32),
    Run("bfloat16", (*BF16, *EAGER)),
    Run("document float32", (*F32, *DOCUMENT, *EAGER), "cpu document", CLOSE_F32),
    Run("document varlen", (*BF16, *DOCUMENT, *EAGER), "cpu document"),
    Run("document flex", (*BF16, *DOCUMENT, *EAGER, "--kernels.attention", "flex"), "cpu document"),
    Run("compiled", (*BF16, *COMPILED), prints=GRAPHS),
    Run("document compiled", (*BF16, *DOCUMENT, *COMPILED), "cpu document", prints=GRAPHS),
    Run("compiled with the loss", (*BF16, *COMPILED, "--compile.loss"), prints=GRAPHS),
    Run("all defaults", ()),
    Run("deterministic", (*BF16, *EAGER, "--debug.deterministic")),
    Run("reproducible", (*BF16, "--training.reproducible", "--sdc.recompute_interval", "5")),
    Run("recompute by operator, compiled", (*BF16, *COMPILED, *BY_OPERATOR)),
    Run("recompute all", (*BF16, *EAGER, RECOMPUTE, "full")),
    Run("recompute to a memory budget", (*BF16, *COMPILED, RECOMPUTE, "memory_budget")),
    Run("foreach AdamW", (*BF16, *EAGER, "--optimizer.implementation", "foreach")),
    Run(
        "bfloat16 weights and states",
        (*BF16, *EAGER, "--training.dtype", "bfloat16", "--optimizer.state_dtype", "bfloat16"),
        limit=CLOSE_FLOAT8,
    ),
    Run("8-bit states", (*BF16, *EAGER, "--optimizer.state_dtype", "8bit"), limit=CLOSE_STATES),
    Run("Muon", (*BF16, *EAGER, "--optimizer.name", "muon"), reference=""),
    Run("CPU offload", (*BF16, *EAGER, "--training.enable_cpu_offload")),
    Run(
        "float8 tensorwise",
        (*FLOAT8, "tensorwise", *EAGER),
        limit=CLOSE_FLOAT8,
        prints=CONVERTED,
    ),
    Run(
        "float8 tensorwise, compiled",
        (*FLOAT8, "tensorwise", *COMPILED),
        limit=CLOSE_FLOAT8,
        prints=CONVERTED,
    ),
    Run(
        "float8 rowwise, recompute, compiled",
        (*FLOAT8, "rowwise", *COMPILED, *BY_OPERATOR),
        limit=CLOSE_FLOAT8,
        prints=CONVERTED,
    ),
    Run(
        "float8 rowwise, weight gradients in bfloat16",
        (*FLOAT8, "rowwise_with_gw_hp", *EAGER),
        limit=CLOSE_FLOAT8,
        prints=CONVERTED,
    ),
    Run(
        "float8 gathered",
        (
            *FLOAT8,
            "tensorwise",
            *EAGER,
            "--quantize.dense.float8.enable_fsdp_float8_all_gather",
            "--quantize.dense.float8.precompute_scale",
        ),
        limit=CLOSE_FLOAT8,
        prints=CONVERTED,
    ),
    Run(
        "MXFP8, emulated",
        (*BF16, *EAGER, "--quantize.dense.mxfp8.enable", "--quantize.dense.auto_filter", "off"),
        limit=CLOSE_FLOAT8,
        prints="emulated",
    ),
    Run("experts", (*EXPERTS, *BF16, *EAGER), "cpu experts", CLOSE_EXPERTS_BF16),
    Run("experts float32", (*EXPERTS, *F32, *EAGER), "cpu experts", 2 * CLOSE_F32),
    Run("experts compiled", (*EXPERTS, *BF16, *COMPILED), "cpu experts", CLOSE_EXPERTS_BF16, GRAPHS),
    Run("experts, recompute", (*EXPERTS, *BF16, *EAGER, RECOMPUTE, "selective"), "cpu experts", CLOSE_EXPERTS_BF16),
    Run(
        "profiler, snapshot, NVTX",
        (
            *(*BF16, *COMPILED, "--profiler.enable", "--profiler.memory_snapshot", "--profiler.nvtx"),
            *("--profiler.start_step", "6"),
        ),
        prints="trace: .*json",
    ),
    Run(
        "CUDA graphs",
        (*BF16, *COMPILED, "--compile.backend", "cudagraphs", "--training.dtype", "bfloat16"),
        reference="",
    ),
    Run("accumulation", (*BF16, *EAGER, "--training.local_batch_size", "2")),
    Run("skips steps that are not finite", (*BF16, *EAGER, "--stability.nonfinite", "skip")),
)
RESUMED = {
    "eager": EAGER,
    "8-bit states": (*EAGER, "--optimizer.state_dtype", "8bit"),
    "compiled": COMPILED,
}


def documents(folder: Path) -> Path:
    """The committed text as some hundred documents in ``folder``: a document mask then differs from a causal one."""
    folder.mkdir(parents=True, exist_ok=True)
    paragraphs = (ROOT / "tests/golden/tempest.txt").read_text(encoding="utf-8").split("\n\n")
    for number in range(0, len(paragraphs), 2):
        text = "\n\n".join(paragraphs[number : number + 2])
        (folder / f"{number:05d}.txt").write_text(f"{text}\n", encoding="utf-8")
    return folder


def text_flags(this: Round) -> list[str]:
    """Flags of the corpus of all runs."""
    folder = this.work / "documents"
    if not folder.exists():
        documents(folder)
    return ["--data.source", "text", "--data.path", str(folder)]


def small_flags(this: Round) -> list[str]:
    """Flags of all small runs."""
    return [
        *text_flags(this),
        *("--training.steps", str(STEPS), "--training.seq_len", "128", "--training.global_batch_size", "8"),
        *("--model.num_layers", "2" if this.is_dry else "4", "--optimizer.lr", "3e-4"),
        *("--validation.interval", "0", "--metrics.log_interval", "1", "--metrics.no_enable_progress_bar"),
    ]


@dataclass(frozen=True)
class Trained:
    """A run that has ended, and the records of its steps."""

    done: Done
    records: list[dict[str, Any]]

    @property
    def is_whole(self) -> bool:
        """Whether it ended well, with a record."""
        return self.done.code == 0 and bool(self.records)

    def losses(self) -> dict[int, float]:
        """The losses by step."""
        return {record["step"]: record["loss"] for record in self.records}

    def show(self) -> str:
        """First and last loss, memory and time of a step."""
        last = self.records[-1]
        return (
            f"losses {self.records[0]['loss']:.4f} to {last['loss']:.4f}, {last['memory_gib']:.2f} GiB, "
            f"step {1e3 * last['step_seconds']:.0f} ms"
        )


def train(
    this: Round,
    name: str,
    flags: Sequence[str],
    *,
    device: str = "",
    limit: float = RUN_SECONDS,
    folder: Path | None = None,
    num_ranks: int = 1,
    environ: dict[str, str] | None = None,
) -> Trained:
    """``crius train`` with ``flags``; its checkpoints are off unless a flag is about them."""
    run_dir = folder or this.folder("runs", this.step) / re.sub(r"\W+", "-", name)
    saves = any(flag.startswith("--checkpoint.") for flag in flags)
    arguments = ["-m", "crius", "train", "--training.device", device or this.device, *flags]
    arguments += ["--job.run_dir", str(run_dir), "--nproc", str(num_ranks)]
    arguments += [] if saves else ["--checkpoint.no_enable"]
    done = this.call(name, arguments, limit, environ)
    try:
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
    except (OSError, ValueError):
        records = []
    return Trained(done, [record for record in records if "loss" in record])


def runs(this: Round) -> None:
    """crius train with each feature on 4 layers, beside the losses of a CPU."""
    small = small_flags(this)
    with ThreadPoolExecutor(this.parallel) as pool:
        bases = {
            name: pool.submit(train, this, name, [*small, *flags], device="cpu") for name, flags in REFERENCES.items()
        }
        others = {run: pool.submit(train, this, run.name, [*small, *run.flags]) for run in RUNS}
        for name, base in bases.items():
            trained = base.result()
            shown = trained.show() if trained.is_whole else trained.done.why
            this.row(name, trained.is_whole, shown, trained.done.seconds)
        for run, other in others.items():
            judge(this, run, other.result(), bases[run.reference].result() if run.reference else None)


def judge(this: Round, run: Run, trained: Trained, base: Trained | None) -> None:
    """A row: whether ``run`` trained all steps, follows ``base``, and printed what it must."""
    if not trained.is_whole:
        # a CPU refuses some settings, and says so; that a GPU takes all of them is tested by the rules
        ok = None if this.is_dry and trained.done.code == REFUSED else False
        this.row(run.name, ok, trained.done.why, trained.done.seconds)
        return
    faults = []
    if len(trained.records) < STEPS:
        faults.append(f"{len(trained.records)} of {STEPS} steps")
    gap = None
    if base is not None:
        gap = largest_gap(trained.losses(), base.losses())
        if gap is None or not gap <= run.limit:
            faults.append(f"more than {run.limit:g} from {run.reference}")
    if run.prints and not this.is_dry and not re.search(run.prints, trained.done.output):
        faults.append(f"does not print {run.prints}")
    shown = trained.show() if gap is None else f"gap {gap:.1e}, {trained.show()}"
    graphs = re.search(r"^compile: .*", trained.done.output, re.MULTILINE)
    details = [*faults, shown, *([graphs[0]] if graphs else [])]
    last = trained.records[-1]
    this.row(
        run.name,
        not faults,
        ", ".join(details),
        trained.done.seconds,
        gap=gap,
        limit=run.limit if base else None,
        last_loss=last["loss"],
        memory_gib=last["memory_gib"],
        step_seconds=last["step_seconds"],
    )


def largest_gap(losses: dict[int, float], base: dict[int, float]) -> float | None:
    """Largest relative difference of a loss to that of ``base`` at the same step; None without a common step."""
    gaps = [abs(loss / base[step] - 1) for step, loss in losses.items() if step in base]
    if any(gap != gap for gap in gaps):
        return float("nan")
    return max(gaps, default=None)


def resume(this: Round) -> None:
    """A run in two parts has the bits of the run in one, with asynchronous saves."""
    common = [*small_flags(this), *BF16, "--debug.deterministic", "--checkpoint.interval", "4"]
    common += ["--checkpoint.mode", "async"]
    for name, more in RESUMED.items():
        flags = [*common, *more]
        folder = this.folder("runs") / f"resume-{name}"
        whole = train(this, f"{name} whole", flags, folder=folder)
        if not whole.is_whole:
            this.row(name, False, whole.done.why, whole.done.seconds)
            continue
        shutil.rmtree(max((folder / "checkpoints").glob("step-*")))  # so that the last steps are trained again
        again = train(this, f"{name} again", [*flags, "--checkpoint.restart"], folder=folder)
        seconds = whole.done.seconds + again.done.seconds
        if not again.is_whole:
            this.row(name, False, again.done.why, seconds)
            continue
        has_resumed = "resume: step" in again.done.output
        is_same = has_resumed and again.losses() == whole.losses()
        waits = re.findall(r"training waited ([0-9.]+) s", whole.done.output)
        what = "losses of both" if has_resumed else "it did not resume; losses of both"
        detail = f"{what} are {'the same' if is_same else 'not the same'}, training waited {', '.join(waits)} s"
        this.row(name, is_same, detail, seconds)
