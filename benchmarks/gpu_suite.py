"""The GPU suite: run its sections one after the other, each within its time, and write what they found.

Exit code: 0 when everything passed, 1 when something failed, 2 when the suite cannot run here.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_full_8b import FULL_8B
from gpu_kernels import KERNELS
from gpu_low_precision import LOW_PRECISION
from gpu_models import MODELS, MODELS_1B
from gpu_profile import PROFILE
from gpu_sections import PRECISION, ROOT, TESTS, Place, Report, write_json
from gpu_sweep import SWEEP

# module to distribution: what Crius and its tests import beside torch and numpy, and what those need in turn
NEEDED = {
    "attrs": "attrs",
    "contourpy": "contourpy",
    "cycler": "cycler",
    "cyclopts": "cyclopts",
    "dateutil": "python-dateutil",
    "docstring_parser": "docstring-parser",
    "execnet": "execnet",
    "fontTools": "fonttools",
    "iniconfig": "iniconfig",
    "kiwisolver": "kiwisolver",
    "markdown_it": "markdown-it-py",
    "matplotlib": "matplotlib",
    "mdurl": "mdurl",
    "packaging": "packaging",
    "PIL": "pillow",
    "pluggy": "pluggy",
    "pygments": "pygments",
    "pyparsing": "pyparsing",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "rich": "rich",
    "rich_rst": "rich-rst",
    "tomli_w": "tomli-w",
    "torchao": "torchao",
    "tzdata": "tzdata",
    "xdist": "pytest-xdist",
    "xxhash": "xxhash",
}
SECTIONS = TESTS | MODELS | SWEEP | PROFILE | KERNELS | FULL_8B | MODELS_1B | LOW_PRECISION | PRECISION
"""In the order of their priority: what does not fit into ``TOTAL_SECONDS`` is not run, and said."""

REHEARSED = ("models", "sweep", "profile", "kernels")
"""What ``--rehearse`` runs unless told otherwise, to be quick; the others have less of their own."""

TOTAL_SECONDS = 550.0
"""Of a call, so that it ends within 600: the start and the end of a process that is out of time take the rest."""
LEAST_SHARE = 0.5
"""A section that would have less than this of its time is not begun."""

VERSIONS = ("torch", "torchao", "triton", "numpy", "transformers", "safetensors", "cyclopts", "pytest")
DOWNLOAD = "the line in benchmarks/README.md downloads them"
NO_DEVICE = 2


def main(argv: list[str] | None = None) -> int:
    """Run the suite; returns the exit code."""
    options = _options(argv)
    if options.list:
        for name, (section, limit) in SECTIONS.items():
            print(f"{name:<22} at most {limit:.0f} s   {(section.__doc__ or '').splitlines()[0]}")
        return 0
    # a background job ignores SIGINT, and so would pytest, which is to end by it when its time is over
    signal.signal(signal.SIGINT, signal.default_int_handler)
    work = Path(tempfile.mkdtemp(prefix="crius-gpu-suite-"))
    try:
        return _run(options, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_suite.sh", description="Everything that needs a GPU.")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny sizes on the CPU: tests the suite, its numbers mean nothing"
    )
    parser.add_argument("--sections", default="", help="comma-separated; all of them by default")
    parser.add_argument("--out", default=os.environ.get("OUT", ""), help="folder of the results; default $OUT")
    parser.add_argument("--list", action="store_true", help="list the sections")
    options = parser.parse_args(argv)
    options.device = "cpu" if options.rehearse else "cuda"
    chosen = [name for name in options.sections.split(",") if name]
    options.sections = chosen or list(REHEARSED if options.rehearse else SECTIONS)
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"no such section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    return options


def _run(options: argparse.Namespace, work: Path) -> int:
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(work / "cache")}
    # what one process compiled, the next ones find, whatever contestant they are; several compile at the same time
    environ |= {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), "TRITON_CACHE_DIR": str(work / "triton")}
    environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, min(8, (os.cpu_count() or 1) // 4)))
    if options.device == "cpu":
        environ["OMP_NUM_THREADS"] = "1"  # threads of tiny sizes wait for each other longer than they work
    site = install_missing(NEEDED, wheel_folder(os.environ), work / "site")
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site or ""), str(ROOT), os.environ.get("PYTHONPATH"))))
    missing = [name for module, name in NEEDED.items() if module != "pytest_timeout" and not _has(module, site)]
    if missing:
        print(f"gpu_suite: missing {', '.join(missing)}, and no wheel of them was found; {DOWNLOAD}", file=sys.stderr)
        return NO_DEVICE
    found = ask_torch(environ)
    if options.device == "cuda" and found["device"] is None:
        print(f"gpu_suite: no CUDA device: {found['why']}.", file=sys.stderr)
        print("gpu_suite: --rehearse runs the suite itself on a CPU, to test it", file=sys.stderr)
        return NO_DEVICE
    environment = describe(found, options, environ)
    out = Path(options.out) if options.out else default_folder(found["device"] or "cpu")
    out.mkdir(parents=True, exist_ok=True)
    place = Place(sys.executable, options.device, options.rehearse, work, environ, found.get("memory_gib", 0.0))
    # the limits are those of a GPU; a rehearsal runs on whatever CPU there is, which may be busy
    scale = 6.0 if options.rehearse else 1.0
    reports, dropped = run_sections(options.sections, place, out, environment, scale)
    print(summary(reports, environment, dropped))
    print(f"gpu_suite: results in {out}")
    if dropped:
        print(f"gpu_suite: no time was left for the rest: benchmarks/gpu_suite.sh --sections {','.join(dropped)}")
    return 0 if all(report.status == "pass" for report in reports) else 1


def run_sections(
    names: list[str], place: Place, out: Path, environment: dict[str, Any], scale: float
) -> tuple[list[Report], list[str]]:
    """Run sections in turn, each in its time and all in ``TOTAL_SECONDS``; returns reports, and those not begun.

    What one section leaves of its time, the next ones may use.
    """
    reports: list[Report] = []
    dropped: list[str] = []
    end = time.monotonic()
    last = end + scale * TOTAL_SECONDS
    for name in names:
        limit = scale * SECTIONS[name][1]
        if last - time.monotonic() < LEAST_SHARE * limit:
            dropped.append(name)
            continue
        end = min(end + limit, last)
        reports.append(run_section(name, place, out, environment, end - time.monotonic()))
        write_results(out, reports, environment, dropped)
    return reports, dropped


def write_results(out: Path, reports: list[Report], environment: dict[str, Any], dropped: list[str]) -> None:
    """``summary.md`` and ``results.json``: two files, however many sections."""
    (out / "summary.md").write_text(summary(reports, environment, dropped), encoding="utf-8")
    found = {report.name: report.content for report in reports}
    write_json(out / "results.json", {"environment": environment, "not_run": dropped, "sections": found})
    for report in reports:
        report.remove()


def run_section(name: str, place: Place, out: Path, environment: dict[str, Any], limit: float) -> Report:
    """One section, in ``limit`` seconds; whatever goes wrong in it ends it alone."""
    section, _ = SECTIONS[name]
    report = Report(name, out, round(limit, 1), environment)
    error: BaseException | None = None
    try:
        section(place, report)
    except Exception as raised:
        error = raised
    report.finish(error)
    print(f"[{name}] {report.status}{' ' + report.error if report.error else ''}", flush=True)
    return report


def wheel_folder(environ: dict[str, str] | os._Environ[str]) -> Path | None:
    """The folder of carried wheels: ``CRIUS_WHEELS``, or ``wheels`` in the repository or beside it."""
    if given := environ.get("CRIUS_WHEELS"):
        return Path(given).absolute()
    return next((folder for folder in (ROOT / "wheels", ROOT.parent / "wheels") if folder.is_dir()), None)


def install_missing(needed: dict[str, str], wheels: Path | None, site: Path) -> Path | None:
    """Install what cannot be imported from ``wheels`` into ``site``, for this suite alone; returns it where it is used.

    Unpacked, not installed: an environment made by uv has no pip, and one that a system manages takes none. Without
    what they need in turn: that is in ``needed`` too, and mostly there already.
    """
    missing = [name for module, name in needed.items() if not _has(module, None)]
    found = {name: files[-1] for name in missing if wheels and (files := sorted(_wheels_of(name, wheels)))}
    for wheel in found.values():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    if found:
        print(f"gpu_suite: {', '.join(found)} taken from {wheels}", flush=True)
    return site if found else None


def _wheels_of(name: str, wheels: Path) -> list[Path]:
    """Files such as ``rich_rst-2.2.0-py3-none-any.whl`` that this Python can use; a name has no hyphen there."""
    stem = name.replace("-", "_").lower()
    return [path for path in wheels.glob("*.whl") if path.name.partition("-")[0].lower() == stem and is_usable(path)]


def is_usable(wheel: Path) -> bool:
    """Whether the tags in the name of a wheel, such as ``cp310-abi3-manylinux_2_28_x86_64``, fit this machine's Python.

    The version of the C library is not looked at: a wheel that is too new says so when it is imported.
    """
    python, abi, platforms = wheel.stem.split("-")[-3:]
    minor = sys.version_info.minor
    tags = python.split(".")
    older = [int(tag[3:]) <= minor for tag in tags if tag.startswith("cp3") and abi == "abi3"]
    is_python = "py3" in tags or f"cp3{minor}" in tags or any(older)
    is_platform = any(
        tag == "any" or ("linux" in tag and tag.endswith(f"_{platform.machine()}")) for tag in platforms.split(".")
    )
    return is_python and is_platform


def _has(module: str, site: Path | None) -> bool:
    in_site = site is not None and ((site / module).is_dir() or (site / f"{module}.py").is_file())
    return in_site or importlib.util.find_spec(module) is not None


def ask_torch(environ: dict[str, str]) -> dict[str, Any]:
    """What torch finds here, by a process of its own: this one keeps no memory of the GPU."""
    command = [sys.executable, "benchmarks/gpu_probe.py", "device"]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return {"device": None, "why": "torch did not answer within 120 s"}
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing"]
        return {"device": None, "why": f"torch failed: {said[-1]}"}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def describe(found: dict[str, Any], options: argparse.Namespace, environ: dict[str, str]) -> dict[str, Any]:
    """The environment of the results."""
    versions = {}
    for name in VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "carried" if name in NEEDED.values() else "not installed"
    fields = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,temperature.gpu,power.limit"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": f"benchmarks/gpu_suite.sh {' '.join(sys.argv[1:])}".strip(),
        "commit": _commit(),
        "device": found["device"] or platform.machine(),
        "rehearsal": options.rehearse,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": versions,
        "torch": {key: value for key, value in found.items() if key not in ("device", "why")},
        "nvidia_smi": _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]) or "none",
    }


def _commit() -> str:
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    if not commit:
        return os.environ.get("CRIUS_COMMIT", "unknown")
    return commit + (" with changes" if _output(["git", "-C", str(ROOT), "status", "--porcelain"]) else "")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def default_folder(device: str) -> Path:
    """``benchmarks/results/<date>-<device>``, numbered where there is one already."""
    name = f"{datetime.date.today()}-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}"
    folder = ROOT / "benchmarks" / "results" / name
    number = 2
    while folder.exists():
        folder, number = folder.with_name(f"{name}-{number}"), number + 1
    return folder


def summary(reports: list[Report], environment: dict[str, Any], dropped: Sequence[str] = ()) -> str:
    """All results as Markdown."""
    title = "# GPU suite" + (" (a rehearsal: its numbers mean nothing)" if environment["rehearsal"] else "")
    lines = [title, ""]
    for name, value in environment.items():
        shown = ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else value
        lines.append(f"- {name}: {str(shown).replace(chr(10), ' | ')}")
    sections = [{"section": report.name, "status": report.status, "error": report.error} for report in reports]
    sections += [{"section": name, "status": "not run", "error": "no time was left"} for name in dropped]
    lines += ["", *table(sections)]
    for report in reports:
        lines += ["", f"## {report.name}", ""]
        for check in report.checks:
            verdict = {True: "PASS", False: "FAIL", None: "n/a"}[check["passed"]]
            lines.append(f"- {verdict} {check['claim']}: {check['detail']}")
        lines += ["", *table(report.rows)]
        lines += [*(["", *report.notes] if report.notes else [])]
        for failure in report.failures:
            lines += ["", f"`{failure['command']}`: {failure['why']}", "", "```", failure["output"], "```"]
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows as Markdown tables, a new one where the columns change; lists are left to the JSON files."""
    shown = [{name: value for name, value in row.items() if not isinstance(value, list)} for row in rows]
    lines: list[str] = []
    for names, group in itertools.groupby(filter(None, shown), key=tuple):
        cells = [[_cell(row[name]) for name in names] for row in group]
        lines += ["", *("| " + " | ".join(line) + " |" for line in (names, ["---"] * len(names), *cells))]
    return lines[1:]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return (
        (f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}")
        if isinstance(value, float)
        else (str(value).replace("|", "\\|").replace("\n", " "))
    )


if __name__ == "__main__":
    sys.exit(main())
