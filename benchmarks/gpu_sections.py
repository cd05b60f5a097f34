"""What the sections of the GPU suite have in common, and two of them: ``tests`` and ``precision``. No torch here.

A section starts processes, adds rows, and checks claims. What it adds is on disk at once.
"""

import contextlib
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
LAST_SECONDS = 10.0
"""What a process that is out of time has to write what it found; then it is killed."""


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
        name: of the section; the file, while it runs, is ``name.json``.
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

    @property
    def content(self) -> dict[str, Any]:
        """All of it but the environment, for JSON."""
        return {
            "section": self.name,
            "status": self.status,
            "seconds": self._seconds,
            "limit_seconds": self.limit,
            "error": self.error,
            "checks": self.checks,
            "rows": self.rows,
            "notes": self.notes,
            "failures": self.failures,
        }

    def save(self) -> None:
        """Write the file."""
        write_json(self._path, {**self.content, "environment": self.environment})

    def remove(self) -> None:
        """Delete the file; for when another one has what it says."""
        self._path.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file of which a reader never sees half."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def call(place: Place, report: Report, name: str, arguments: list[str]) -> tuple[int, str]:
    """Run Python with ``arguments`` in the repository root; returns its exit code and output.

    Raises:
        TimeLimit: the section's time was used up; the process and its children were interrupted, and killed where that
            did not end them.
    """
    log = place.work / f"{report.name}-{name}.log"
    command = [place.python, *arguments]
    print(f"[{report.name}] {name}: {' '.join(arguments)}", flush=True)
    begin = time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=place.environ,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # ignored where this was started in the background of a script, as with nohup: pytest has to hear it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            code = process.wait(timeout=max(0.0, report.left()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=LAST_SECONDS)
            report.fail(arguments, f"stopped after {report.limit:.0f} s of the section", _read(log))
            raise TimeLimit(f"{report.limit:.0f} s are over, in {name}") from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # what it started may outlive it
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
    arguments += ["--training.device", place.device, "--job.run_dir", str(run_dir), "--checkpoint.no_enable"]
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


def converted_line(output: str) -> str:
    """What a run says about float8 where it converted some layers; empty where it converted none."""
    found = (line for line in output.splitlines() if re.match(r"float8: [1-9]\d* converted", line))
    return next(found, "")


def tests(place: Place, report: Report) -> None:
    """The tests marked ``gpu``."""
    results = place.work / "junit.xml"
    # some at a time: most of a test is the start of its two to five processes, 8 to 12 s each
    parallel = str(max(2, min(6, (os.cpu_count() or 1) // 3)))
    arguments = ["-m", "pytest", "-m", "gpu", *files_with_gpu_tests(), "-vv", "-rs", "-n", parallel]
    arguments += ["--continue-on-collection-errors", f"--junitxml={results}", f"--basetemp={place.work / 'pytest'}"]
    rows: list[dict[str, Any]] = []
    try:
        code, output = call(place, report, "pytest", arguments)
    finally:  # pytest that is interrupted, because its time is over, writes what it has
        with contextlib.suppress(OSError, ElementTree.ParseError):
            rows = read_junit(results)
        for row in rows:
            report.row(**row)
    counts = {result: sum(row["result"] == result for row in rows) for result in ("passed", "failed", "skipped")}
    detail = ", ".join(f"{count} {result}" for result, count in counts.items())
    if code not in (0, 5) or counts["failed"]:  # 5: nothing was collected, which the second check says
        report.fail(arguments, f"exit code {code}", output)
    report.check("every test that ran passed", not counts["failed"] and code in (0, 5), detail)
    ran = counts["passed"] + counts["failed"]
    report.check("GPU tests ran", ran > 0 if place.device == "cuda" else None, f"{ran} ran")


def files_with_gpu_tests() -> list[str]:
    """Those of ``tests/gpu`` first; to import all tests takes longer than some of these run."""
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
    files = sorted(found, key=lambda path: (path.parent.name != "gpu", path))
    return [str(path.relative_to(ROOT)) for path in files]


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


Section = Callable[[Place, Report], None]

# seconds that a section may take
TESTS: dict[str, tuple[Section, float]] = {"tests": (tests, 100)}
PRECISION: dict[str, tuple[Section, float]] = {"precision": (precision, 30)}
