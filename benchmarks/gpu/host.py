"""The machine of a round: carried wheels, the environment of its programs, and what it is made of. No torch here."""

import datetime
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
CARRIED = ".gpu"
"""Folder in the checkout, which git ignores, of what a machine without a registry gets: ``wheels/``, ``COMMIT``, and
NCCL for several ranks on one GPU. ``benchmarks/gpu/pack.py`` fills it."""

NEEDED = ("torch", "numpy", "rich", "tomli_w", "xxhash", "torchao")
"""Modules without which Crius, or a check, does not run."""
OPTIONAL = ("triton", "transformers", "torchtitan.train", "liger_kernel", "pytest", "xdist")
"""Modules of peers and of the tests: without one its rows cannot run."""

FACTS = """
import importlib, json, sys
import torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": None, "modules": {}}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        package = sys.modules[name.partition(".")[0]]
        found["modules"][name] = str(getattr(package, "__version__", "there"))
    except BaseException as error:
        found["modules"][name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
if torch.cuda.is_available():
    card = torch.cuda.get_device_properties(0)
    found |= {"device": card.name, "capability": f"{card.major}.{card.minor}", "gpus": torch.cuda.device_count()}
    found |= {"memory_gib": round(card.total_memory / 2**30, 1), "cudnn": torch.backends.cudnn.version()}
print(json.dumps(found))
"""
SMI = (
    *("name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm", "clocks.mem"),
    *("power.limit", "power.draw", "temperature.gpu"),
)


def unpack_wheels(folder: Path, site: Path) -> list[str]:
    """Unpack the wheels of ``folder`` that this Python can use and whose modules are missing; returns their names.

    Nothing is installed: an environment may have no pip, and one that a system manages takes no packages.
    """
    taken = []
    for wheel in sorted(folder.glob("*.whl")):
        if not is_usable(wheel):
            continue
        with zipfile.ZipFile(wheel) as archive:
            if all(map(_is_there, modules_of(archive.namelist()))):
                continue
            archive.extractall(site)
        taken.append(wheel.name.partition("-")[0])
    return taken


def modules_of(files: Iterable[str]) -> set[str]:
    """Top-level modules among the files of a wheel; a package without any, such as stubs, has an empty set."""
    found = set()
    for file in files:
        first, _, rest = file.partition("/")
        if rest and first.isidentifier():
            found.add(first)
        elif not rest and first.endswith(".py"):
            found.add(first.removesuffix(".py"))
    return found


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def is_usable(wheel: Path) -> bool:
    """Whether the tags in the name of a wheel, such as ``cp310-abi3-manylinux_2_28_x86_64``, fit this Python.

    The version of the C library is not looked at: a wheel that is too new says so when it is imported.
    """
    python, abi, platforms = wheel.stem.split("-")[-3:]
    minor = sys.version_info.minor
    tags = python.split(".")
    older = [int(tag[3:]) <= minor for tag in tags if tag.startswith("cp3") and abi == "abi3"]
    is_python = any(tag in ("py3", f"py3{minor}", f"cp3{minor}") for tag in tags) or any(older)
    machine = f"_{platform.machine()}"
    is_platform = any(tag == "any" or ("linux" in tag and tag.endswith(machine)) for tag in platforms.split("."))
    return is_python and is_platform


def environment_of(work: Path, site: Path, *, is_dry: bool) -> dict[str, str]:
    """Variables of the programs of a round, whose caches lie below ``work``: two rounds share none."""
    cores = os.cpu_count() or 1
    paths = [str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]
    own = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(work / "cache"),
        # what one program compiled, the next ones find
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "TRITON_CACHE_DIR": str(work / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, min(8, cores // 4))),
        # threads of tiny sizes wait for each other longer than they work
        "OMP_NUM_THREADS": "1" if is_dry else "4",
        # the same for all contestants, whose peaks are compared; Crius sets it where nothing is set
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    return {**os.environ, **own}


def ask(python: str, environ: dict[str, str]) -> dict[str, Any]:
    """What torch and the modules say of themselves, from a process of its own: this one keeps no memory of the GPU.

    Raises:
        RuntimeError: torch cannot be imported.
    """
    command = [python, "-c", FACTS, *NEEDED, *OPTIONAL]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing"]
        raise RuntimeError(f"torch failed: {said[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def describe(found: dict[str, Any], command: str, *, is_dry: bool) -> dict[str, Any]:
    """The environment of the results: the first line of the rows."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "commit": commit(),
        "dry": is_dry,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **found,
        "nvidia_smi": nvidia_smi(),
    }


def nvidia_smi() -> dict[str, str]:
    """Card, driver, clocks and power limit as the driver says them; empty without one."""
    answer = output_of(["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader", "--id=0"])
    return dict(zip(SMI, (part.strip() for part in answer.split(",")), strict=False)) if answer else {}


def commit() -> str:
    """The commit that runs, from git or, in a copy without ``.git``, from the carried folder."""
    found = output_of(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    if found:
        is_changed = bool(output_of(["git", "-C", str(ROOT), "status", "--porcelain"]))
        return f"{found} with changes" if is_changed else found
    carried = ROOT / CARRIED / "COMMIT"
    return carried.read_text(encoding="utf-8").strip() if carried.exists() else "unknown"


def output_of(command: list[str]) -> str:
    """What a command prints; empty if it fails or is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def results_folder(device: str | None, *, is_dry: bool) -> Path:
    """``$OUT``, else ``benchmarks/results/<date>-<card>``; a dry run writes below ``build``, which git ignores."""
    if given := os.environ.get("OUT"):
        return Path(given)
    if is_dry:
        return ROOT / "build" / "gpu-dry"
    words = re.findall(r"[a-z]*\d+\w*", (device or "cpu").lower())
    return ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-{words[0] if words else 'gpu'}"
