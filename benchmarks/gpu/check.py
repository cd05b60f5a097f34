"""``make gpu-check``: which paths of Crius are right on this GPU. No torch here."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu import host, trace
from benchmarks.gpu.checks import GROUPS
from benchmarks.gpu.host import ROOT
from benchmarks.gpu.round import Round, Step
from benchmarks.gpu.runs import resume, runs

ALONE = "system"
"""Group of kernel checks whose ceilings need the GPU alone."""


def machine(this: Round) -> None:
    """Versions, card, clocks and memory in use; crius doctor."""
    found = this.record.environment
    for name, version in found["modules"].items():
        is_there = ":" not in version
        if is_there or name in host.NEEDED:
            this.row(name, is_there, version)
        else:
            this.cannot(name, version)
    if smi := found["nvidia_smi"]:
        this.row("nvidia-smi", True, ", ".join(smi.values()))
    else:
        this.cannot("nvidia-smi", "no answer")
    this.row("commit", found["commit"] != "unknown", found["commit"])
    done = this.call("doctor", ["-m", "crius", "doctor"], 90.0)
    this.record.log("crius doctor", done.output, 80)
    this.row("crius doctor", done.code == 0, f"{len(done.output.splitlines())} lines" if done.code == 0 else done.why)


def kernels(this: Round) -> None:
    """Kernels one by one against float64, a process for each group of them."""

    def run_group(name: str) -> None:
        done = this.call(name, ["-m", "benchmarks.gpu.kernels", name, this.device], 110.0)
        found = [json.loads(line) for line in done.output.splitlines() if line.startswith('{"check"')]
        for check in found:
            what = f"{name}: {check['check']}"
            this.row(what, check["ok"], check["detail"], check["seconds"], **check["figures"])
        if done.code != 0 or not found:
            this.row(name, False, f"{done.why}, after {len(found)} checks", done.seconds)

    with ThreadPoolExecutor(1 if this.is_dry else len(GROUPS)) as pool:
        list(pool.map(run_group, [name for name in GROUPS if name != ALONE]))
    run_group(ALONE)


def gpu_tests(this: Round) -> None:
    """The tests marked gpu."""
    results = this.work / "junit.xml"
    arguments = ["-m", "pytest", "-m", "gpu", *files_with_gpu_tests(), "-n", str(max(2, this.parallel - 2))]
    arguments += ["--continue-on-collection-errors", f"--junitxml={results}", f"--basetemp={this.work / 'pytest'}"]
    done = this.call("pytest", arguments, max(30.0, this.left() - 10.0))
    rows = read_junit(results) if results.exists() else []
    for name, ok, seconds, said in rows:
        if ok is not None or not this.is_dry:
            this.row(name, ok, said, seconds)
    if not any(ok is not None for _, ok, _, _ in rows):
        this.cannot("pytest", f"no test ran; {done.why}")
    elif done.code != 0:
        this.row("pytest", False, done.why, done.seconds)


def files_with_gpu_tests() -> list[str]:
    """Those of ``tests/gpu`` first; to import all tests takes longer than some of these run."""
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
    files = sorted(found, key=lambda path: (path.parent.name != "gpu", path))
    return [str(path.relative_to(ROOT)) for path in files]


def read_junit(path: Path) -> list[tuple[str, bool | None, float, str]]:
    """Name, result (None: skipped), seconds, and what went wrong or why it was skipped, of each test."""
    rows = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        ends = {end.tag: end for end in case if end.tag in ("failure", "error", "skipped")}
        said = " ".join(((end.get("message") or "").strip().splitlines() or [""])[0] for end in ends.values())
        ok = None if "skipped" in ends else not ends
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        rows.append((name, ok, float(case.get("time", 0)), said))
    return rows


STEPS = {
    "machine": Step(machine, 20.0),
    "kernels": Step(kernels, 75.0),
    "runs": Step(runs, 120.0),
    "resume": Step(resume, 75.0),
    "profile": Step(trace.profile, 40.0),
    "tests": Step(gpu_tests, 60.0),
}
"""In the order of their priority: what is right comes before what is fast, and tests that start 85 processes last."""
