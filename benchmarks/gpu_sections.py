"""The sections of the GPU suite: a section is one function and one row of ``SECTIONS``. Needs no torch.

A section starts processes, adds rows, and checks claims. What it adds is on disk at once.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
TAIL_LINES = 40


class TimeLimit(Exception):
    """A section has used up its time."""


@dataclass(frozen=True)
class Place:
    """Where and how the suite runs: tiny sizes test the suite itself, not the device."""

    python: str
    device: str
    tiny: bool
    work: Path
    environ: dict[str, str]
    memory_gib: float


class Report:
    """What a section found: rows of a table, claims that hold or do not, notes, and commands that failed.

    Args:
        name: of the section; the file is ``name.json``.
        out: folder of the results.
        limit: seconds that the section may take.
        environment: written into the file, so that it speaks for itself.
    """

    def __init__(self, name: str, out: Path, limit: float, environment: dict[str, Any]) -> None:
        self.name, self.limit, self.environment = name, limit, environment
        self.status, self.error = "running", ""
        self.rows: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.failures: list[dict[str, str]] = []
        self._path, self._started, self._seconds = out / f"{name}.json", time.monotonic(), 0.0
        self.save()

    def row(self, **values: Any) -> None:
        """Add a row of measurements."""
        self.rows.append(values)
        self.save()

    def check(self, claim: str, passed: bool | None, detail: str = "") -> None:
        """Add a claim; None where this device cannot tell."""
        self.checks.append({"claim": claim, "passed": passed, "detail": detail})
        self.save()

    def note(self, text: str) -> None:
        """Add a line of text."""
        self.notes.append(text)
        self.save()

    def fail(self, command: list[str], why: str, output: str) -> None:
        """Add a command that failed, with the end of its output."""
        tail = "\n".join(output.splitlines()[-TAIL_LINES:])
        self.failures.append({"command": " ".join(command), "why": why, "output": tail})
        self.save()

    def left(self) -> float:
        """Seconds that are left."""
        return self._started + self.limit - time.monotonic()

    def finish(self, error: BaseException | None) -> None:
        """Close the report: the worst of what it holds is its status."""
        self._seconds = round(time.monotonic() - self._started, 1)
        is_bad = self.failures or any(check["passed"] is False for check in self.checks)
        self.status = "FAIL" if is_bad else "pass"
        if error is not None:
            self.status = "TIME LIMIT" if isinstance(error, TimeLimit) else "ERROR"
            self.error = f"{type(error).__name__}: {error}"
        self.save()

    def save(self) -> None:
        """Write the file; a reader never sees half of it."""
        content = {
            "section": self.name,
            "status": self.status,
            "seconds": self._seconds,
            "limit_seconds": self.limit,
            "error": self.error,
            "checks": self.checks,
            "rows": self.rows,
            "notes": self.notes,
            "failures": self.failures,
            "environment": self.environment,
        }
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self._path)


def call(place: Place, report: Report, name: str, arguments: list[str]) -> tuple[int, str]:
    """Run Python with ``arguments`` in the repository root; returns its exit code and output.

    Raises:
        TimeLimit: the section's time was used up; the process and its children are killed.
    """
    log = place.work / f"{report.name}-{name}.log"
    command = [place.python, *arguments]
    print(f"[{report.name}] {name}: {' '.join(arguments)}", flush=True)
    begin = time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=ROOT, env=place.environ, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=max(0.0, report.left()))
        except subprocess.TimeoutExpired:
            report.fail(arguments, f"stopped after {report.limit:.0f} s of the section", _read(log))
            raise TimeLimit(f"{report.limit:.0f} s are over, in {name}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    print(f"[{report.name}] {name}: exit code {code} after {time.monotonic() - begin:.1f} s", flush=True)
    return code, _read(log)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True)
class Run:
    """A finished ``crius train``: its console, and the records of its reported steps."""

    output: str
    records: list[dict[str, Any]]

    def summary(self, warm: int) -> dict[str, Any]:
        """Rates over the reports that begin at step ``warm`` or later, and the loss of the last step."""
        steps = [0, *(record["step"] for record in self.records)]
        kept = [record for begin, record in zip(steps, self.records, strict=False) if begin >= warm]
        rates = [record["tokens_per_second"] for record in kept]
        middle = statistics.median(rates)
        mfu = [record["mfu"] for record in kept if record["mfu"] is not None]
        return {
            "tokens_per_second": round(middle, 1),
            "spread_percent": round(100 * (max(rates) - min(rates)) / middle, 1),
            "mfu_percent": round(100 * statistics.median(mfu), 1) if mfu else None,
            "peak_memory_gib": round(max(record["memory_gib"] for record in kept), 3),
            "last_loss": self.records[-1]["loss"],
            "samples": rates,
        }


def train(place: Place, report: Report, name: str, flags: list[str]) -> Run | None:
    """``crius train``; a run that fails is added to the failures, and the section goes on with None."""
    run_dir = place.work / f"{report.name}-{name}"
    arguments = ["-m", "crius", "train", "--nproc", "1", *flags]
    arguments += ["--training.device", place.device, "--job.run_dir", str(run_dir)]
    code, output = call(place, report, name, arguments)
    if code:
        report.fail(arguments, f"exit code {code}", output)
        return None
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return Run(output, [record for record in map(json.loads, lines) if "loss" in record])


def model_flags(
    place: Place, *, layers: int, seq_len: int, steps: int, interval: int, dtype: str = "bfloat16"
) -> list[str]:
    """Llama 3.2 1B with ``layers`` layers on the committed text, with the batch that the device has memory for.

    The text is bytes, of which any vocabulary has enough rows; the time of a step does not depend on what it says.
    """
    # 4 sequences of 4096 tokens without recomputing: 47 GiB with 8 layers by a dry run, so about 70 with 16
    batch = 4 if place.memory_gib > 100 else 2 if place.memory_gib > 60 else 1
    flavor = "1b"
    if place.tiny:
        flavor, layers, seq_len, batch = "debug", 2, 64, 2
    return [
        *("--model.flavor", flavor, "--model.num_layers", str(layers)),
        *("--training.seq_len", str(seq_len), "--training.mixed_precision_param", dtype),
        *("--training.global_batch_size", str(batch), "--training.local_batch_size", str(batch)),
        *("--training.steps", str(steps), "--metrics.log_interval", str(interval), "--optimizer.lr", "3e-4"),
        *("--data.source", "text", "--data.path", str(ROOT / "tests" / "golden" / "tempest.txt")),
        *("--validation.interval", "0", "--metrics.no_enable_progress_bar"),
    ]


def tests(place: Place, report: Report) -> None:
    """The tests marked ``gpu``."""
    results = place.work / "junit.xml"
    # four at a time where pytest-xdist is there: most of a test is the start of its processes
    parallel = ["-n", "4"] if place.environ.get("CRIUS_SUITE_XDIST") else []
    where = "tests/gpu" if place.tiny else "tests"
    code, output = call(
        place,
        report,
        "pytest",
        [
            *("-m", "pytest", "-m", "gpu", where, "-vv", "-rs", "--continue-on-collection-errors", *parallel),
            *(f"--junitxml={results}", f"--basetemp={place.work / 'pytest'}"),
        ],
    )
    rows = read_junit(results) if results.exists() else []
    for row in rows:
        report.row(**row)
    counts = {result: sum(row["result"] == result for row in rows) for result in ("passed", "failed", "skipped")}
    detail = ", ".join(f"{count} {result}" for result, count in counts.items())
    if code not in (0, 5) or counts["failed"]:  # 5: nothing was collected, which the second check says
        report.fail(["-m", "pytest", "-m", "gpu", where], f"exit code {code}", output)
    report.check("every test that ran passed", not counts["failed"] and code in (0, 5), detail)
    ran = counts["passed"] + counts["failed"]
    report.check("GPU tests ran", ran > 0 if place.device == "cuda" else None, f"{ran} ran")


def read_junit(path: Path) -> list[dict[str, Any]]:
    """One row a test: its name, result, seconds, and the first line of what went wrong or why it was skipped."""
    rows = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        ends = {end.tag: end for end in case if end.tag in ("failure", "error", "skipped")}
        tag = next(iter(ends), "")
        result = {"": "passed", "skipped": "skipped"}.get(tag, "failed")
        said = (ends[tag].get("message") or "").strip().splitlines() if tag else []
        rows.append(
            {
                "test": f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}",
                "result": result,
                "seconds": round(float(case.get("time", 0)), 1),
                "says": said[0] if said else "",
            }
        )
    return rows


def compile_speed(place: Place, report: Report) -> None:
    """Eager and compiled in turn, twice each, so that a device that warms up favours neither."""
    flags = model_flags(place, layers=16, seq_len=4096, steps=24, interval=4)
    warm = 8
    compiled_flags = ["--compile.enable", *(("--compile.backend", "eager") if place.tiny else ())]
    rates: dict[str, list[float]] = {"eager": [], "compiled": []}
    losses: dict[str, float] = {}
    for number, kind in enumerate(("eager", "compiled", "eager", "compiled"), start=1):
        run = train(place, report, f"{number}-{kind}", flags + (compiled_flags if kind == "compiled" else []))
        if run is None:
            continue
        summary = run.summary(warm)
        rates[kind] += summary["samples"]
        losses[kind] = summary["last_loss"]
        lines = compile_lines(run.output)
        report.row(run=number, kind=kind, **summary, compile="; ".join(lines))
        if kind == "compiled":
            count = num_graphs(lines)
            report.check(f"run {number} compiled something", count > 0, f"{count} graphs")
    if not (rates["eager"] and rates["compiled"]):
        report.check("compiled is faster than eager", False, "a run is missing")
        return
    eager, compiled = (statistics.median(rates[kind]) for kind in ("eager", "compiled"))
    spread = {kind: (max(rate) - min(rate)) / statistics.median(rate) for kind, rate in rates.items()}
    report.check(
        "compiled is faster than eager",
        compiled > eager if place.device == "cuda" else None,
        f"medians {compiled:,.0f} and {eager:,.0f} tokens/s, {compiled / eager:.3f} x; "
        f"spread {spread['compiled']:.1%} and {spread['eager']:.1%}",
    )
    difference = abs(losses["compiled"] / losses["eager"] - 1)
    # bfloat16 has 8 significant bits, and a fused kernel rounds once where eager ones round several times
    report.check("the last losses agree within 1 %", difference < 1e-2, f"{difference:.2e} relative")


def compile_lines(output: str) -> list[str]:
    """What a run says about compilation."""
    return [line for line in output.splitlines() if line.startswith("compile: ")]


def num_graphs(lines: list[str]) -> int:
    """Compiled graphs by the run's own account; 0 where it says none."""
    found = (re.match(r"compile: (\d+) graphs?\b", line) for line in lines)
    return next((int(match[1]) for match in found if match), 0)


MODES = {
    "none": ["--activation_checkpoint.mode", "none"],
    "selective 2": ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_option", "2"],
    "selective op": ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_option", "op"],
    "full": ["--activation_checkpoint.mode", "full"],
}

# Predicted by crius train --dry_run with the flags below, 4 sequences: none 46.9, selective 2 40.1, selective op 36.8,
# full 33.2 GiB. The logits and their gradient, 15.7 GiB of each, are there in every mode.
LESS_MEMORY = [("full", "selective op"), ("selective op", "selective 2"), ("selective 2", "none")]


def activation_checkpoint(place: Place, report: Report) -> None:
    """Peak memory and speed of each mode, and whether the peaks are in the predicted order."""
    flags = model_flags(place, layers=8, seq_len=4096, steps=16, interval=4)
    found: dict[str, dict[str, Any]] = {}
    for mode, extra in MODES.items():
        run = train(place, report, mode.replace(" ", "-"), flags + extra)
        if run is not None:
            found[mode] = run.summary(warm=4)
            report.row(mode=mode, **found[mode])
    for less, more in LESS_MEMORY:
        claim = f"peak memory of {less} is below that of {more}"
        if less not in found or more not in found:
            report.check(claim, False, "a run is missing")
            continue
        low, high = found[less]["peak_memory_gib"], found[more]["peak_memory_gib"]
        # the resident set of a CPU process is not the activations'
        report.check(claim, low < high if place.device == "cuda" else None, f"{low:.2f} and {high:.2f} GiB")
    if "none" in found and "full" in found:
        fast, slow = found["none"]["tokens_per_second"], found["full"]["tokens_per_second"]
        passed = slow < fast if place.device == "cuda" else None
        report.check("full recomputes, so it is slower than none", passed, f"{slow:,.0f} and {fast:,.0f} tokens/s")


def precision(place: Place, report: Report) -> None:
    """20 steps in float32 and in bfloat16 from the same weights on the same data."""
    losses: dict[str, list[float]] = {}
    for dtype in ("float32", "bfloat16"):
        flags = model_flags(place, layers=4, seq_len=1024, steps=20, interval=1, dtype=dtype)
        run = train(place, report, dtype, flags)
        if run is not None:
            losses[dtype] = [record["loss"] for record in run.records]
            report.row(dtype=dtype, **run.summary(warm=4), first_loss=losses[dtype][0], losses=losses[dtype])
    if len(losses) < 2:
        report.check("bfloat16 follows float32", False, "a run is missing")
        return
    pairs = list(zip(losses["float32"], losses["bfloat16"], strict=True))
    worst = max(abs(low / full - 1) for full, low in pairs)
    # a rounding of bfloat16 is up to 0.2 %; the mean over tokens averages it out, the updates let the curves drift
    report.check("the losses of all steps agree within 1 %", worst < 1e-2, f"largest difference {worst:.2e} relative")
    for dtype, curve in losses.items():
        report.check(f"{dtype} learns", curve[-1] < curve[0], f"{curve[0]:.4f} to {curve[-1]:.4f}")


def attention(place: Place, report: Report) -> None:
    """Which attention kernel runs for grouped queries and a document mask; nothing is claimed."""
    tokens = 64 if place.tiny else 4096
    code, output = call(place, report, "probe", ["benchmarks/gpu_probe.py", "attention", place.device, str(tokens)])
    if code:
        report.fail(["benchmarks/gpu_probe.py", "attention"], f"exit code {code}", output)
        return
    for row in json.loads(output.splitlines()[-1]):
        report.row(**row)
    report.note("forward and backward of one attention, median of 10; ops are those that PyTorch dispatched to")


Section = Callable[[Place, Report], None]

# seconds that a section may take
SECTIONS: dict[str, tuple[Section, float]] = {
    "tests": (tests, 160),
    "compile": (compile_speed, 170),
    "activation_checkpoint": (activation_checkpoint, 110),
    "precision": (precision, 50),
    "attention": (attention, 30),
}
