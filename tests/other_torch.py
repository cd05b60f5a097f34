"""The tests that torch can break, on another torch: ``make test-torch VERSION=2.15.0``.

Makes an environment in ``build/``, installs that torch with what the tests need, runs the golden curves, the parity of
layouts, the unit tests that import torch and the steps on a fake GPU, and prints a row of the table in
docs/decisions/002-dependencies.md. pip's own variables, such as ``PIP_INDEX_URL``, choose the build of
``torch==VERSION``. A build for CUDA brings triton, without which the tests of generated code are skipped.
"""

import argparse
import datetime
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
IMPORTS_TORCH = re.compile(r"^\s*(import|from) torch\b", re.MULTILINE)
BUILD = "import torch; print(torch.__version__)"


def parts(root: Path = ROOT) -> dict[str, list[str]]:
    """Arguments of pytest by the name of the column."""
    unit = [path for path in sorted((root / "tests/unit").glob("test_*.py")) if IMPORTS_TORCH.search(path.read_text())]
    return {
        "golden": ["tests/golden"],
        "parity": ["tests/parity"],
        "unit": [str(path) for path in unit],
        "cuda_fake": ["tests/cuda_fake", "-m", "slow or not slow"],  # generated code is slow
    }


def counts(junit: Path) -> str:
    """``N passed, N failed, N skipped`` of a session of pytest, without the zeros."""
    if not junit.exists():
        return "no result"
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    total, failures, errors, skipped = (sum(int(suite.get(name, 0)) for suite in suites) for name in names)
    shown = {"passed": total - failures - errors - skipped, "failed": failures + errors, "skipped": skipped}
    return ", ".join(f"{count} {word}" for word, count in shown.items() if count or word == "passed")


def run(python: Path, folder: Path, seconds: float) -> tuple[dict[str, str], bool]:
    """The cells of the row, and whether all that ran passed within ``seconds``."""
    cells, is_good, end = {}, True, time.monotonic() + seconds
    for name, arguments in parts().items():
        junit = folder / f"{name}.xml"
        junit.unlink(missing_ok=True)
        # pytest that is interrupted writes what it has
        limit = ["timeout", "--signal", "INT", "--kill-after", "20", str(max(1, round(end - time.monotonic())))]
        command = [*limit, str(python), "-m", "pytest", "-n", "2", "-rfE", f"--junitxml={junit}", *arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        cells[name] = counts(junit) + (", out of time" if code in (124, 137) else "")
        is_good = is_good and code == 0
    return cells, is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="of torch, such as 2.15.0")
    parser.add_argument("--seconds", type=float, default=2700.0, help="of all tests together")
    parser.add_argument("--keep", action="store_true", help="leave the environment, and take one that was left")
    options = parser.parse_args()
    folder = ROOT / "build" / f"torch-{options.version}"
    python = folder / "bin/python"
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", f"torch=={options.version}", "-e", ".[test,peers]"]
        subprocess.run(install, cwd=ROOT, check=True)
        build = subprocess.run([python, "-c", BUILD], capture_output=True, text=True, check=True).stdout.strip()
        cells, is_good = run(python, folder, options.seconds)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"| {build} | {' | '.join(cells.values())} | {datetime.date.today()} |")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
