"""``crius doctor``: shows what this machine has, what is missing, and the exact line that installs it."""

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crius
from crius.launch.environment import visible_gpus
from crius.plugins import REQUIREMENTS, install_line, loaded_nccl, of_number, release
from crius.untrusted import text_named

try:
    import torch
except ImportError:  # the doctor reports it
    torch = None  # type: ignore[assignment]

# package, whether Crius needs it to run, its purpose, the requirement to install
PACKAGES = (
    ("torch", True, "everything", "torch>=2.11"),
    ("numpy", True, "data", "numpy"),
    ("rich", True, "progress bar", "rich"),
    ("tomli_w", True, "run.toml", "tomli-w"),
    ("datasets", False, "--data.source huggingface", REQUIREMENTS["datasets"]),
    ("tokenizers", False, "--tokenizer.path tokenizer.json", REQUIREMENTS["tokenizers"]),
    ("tiktoken", False, "--tokenizer.path tekken.json", REQUIREMENTS["tiktoken"]),
    ("gguf", False, "crius import of a GGUF file", REQUIREMENTS["gguf"]),
    ("tensorboard", False, "--metrics.enable_tensorboard", REQUIREMENTS["tensorboard"]),
    ("wandb", False, "--metrics.enable_wandb", REQUIREMENTS["wandb"]),
    ("torchao", False, "float8, MXFP8, 8-bit optimizer states", REQUIREMENTS["torchao"]),
    ("matplotlib", False, "the picture of crius verify precision", REQUIREMENTS["matplotlib"]),
)
OLDEST_TORCH = (2, 11)
_WHEELS = "https://download.pytorch.org/whl"
OLDEST_DRIVER = {12: 525, 13: 580}
"""Oldest driver for all minor versions of a major version of CUDA: docs.nvidia.com/deploy/cuda-compatibility."""


@dataclass(frozen=True)
class Report:
    """Findings about this machine.

    Attributes:
        facts: versions and devices, by name.
        missing: ``what: how to get it`` for each part that Crius needs to run, or to use the GPU.
        optional: the same for each part that only some flags need.
        gpu_bytes: memory of the first GPU that torch can use; 0 without one.
        command: command that starts the run that was asked about.
    """

    facts: dict[str, str]
    missing: list[str]
    optional: list[str]
    gpu_bytes: int = 0
    command: str = "crius train"

    @property
    def ready(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {"ready": self.ready}

    def render(self) -> str:
        """The report as aligned lines."""
        width = max(map(len, self.facts))
        lines = [f"{name:<{width}}  {value}" for name, value in self.facts.items()]
        lines += [f"missing   {line}" for line in self.missing] + [f"optional  {line}" for line in self.optional]
        verdict = f"ready: {self.command}" if self.ready else "not ready: see the lines above"
        return "\n".join([*lines, verdict])


def examine(root: Path = Path("/")) -> Report:
    """Examine this machine. Imports torch and asks it for its devices; starts nothing.

    Args:
        root: folder of ``dev`` and ``proc``; tests give a fake one.
    """
    facts = {"crius": crius.__version__, "python": platform.python_version(), "platform": platform.platform()}
    missing: list[str] = []
    optional: list[str] = []
    for package, required, purpose, requirement in PACKAGES:
        if importlib.util.find_spec(package) is None:
            (missing if required else optional).append(f"{package} (for {purpose}): {install_line(requirement)}")
        else:
            facts[package] = importlib.metadata.version(package.replace("_", "-"))
    facts["cpu"] = f"{os.cpu_count()} cores"
    facts["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    facts["free disk"] = f"{shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB in this folder"
    if torch is not None:
        facts.update(_ask_torch(root, missing, optional))
    gpu_bytes = torch.cuda.get_device_properties(0).total_memory if torch and torch.cuda.is_available() else 0
    return Report(facts, missing, optional, gpu_bytes)


def _ask_torch(root: Path, missing: list[str], optional: list[str]) -> dict[str, str]:
    """Facts that torch reports about this machine; reasons why it cannot be used are added to ``missing``."""
    if release(torch.__version__) < OLDEST_TORCH:
        missing.append(f"torch {torch.__version__} is older than 2.11: {install_line('--upgrade', 'torch>=2.11')}")
    backends = {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}
    driver = _driver(root)
    return {
        "torch": f"{torch.__version__}, {_build()}",
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "backends": ", ".join(name for name, there in backends.items() if there),
        **({"driver": driver} if driver else {}),
        "gpus": _gpus(root, driver, missing, optional),
        **(_libraries() if torch.cuda.is_available() else {}),
    }


def _libraries() -> dict[str, str]:
    """Versions of the libraries that this process has loaded for its GPU."""
    versions = {"cudnn": of_number(torch.backends.cudnn.version() or 0), "nccl": loaded_nccl()}
    return {name: ".".join(map(str, version)) for name, version in versions.items() if any(version)}


def _build() -> str:
    """Device that torch was built for, as a phrase."""
    if torch.version.cuda:
        return f"built for CUDA {torch.version.cuda}"
    return f"built for ROCm {torch.version.hip}" if torch.version.hip else "a CPU build"


def _driver(root: Path) -> str:
    """Version of NVIDIA's driver; empty if none is loaded."""
    try:
        text = text_named(root / "proc/driver/nvidia/version")
    except OSError:
        return ""
    match = re.search(r"\s(\d{3,}\.[\d.]+)", text)
    return match[1] if match else ""


def _gpus(root: Path, driver: str, missing: list[str], optional: list[str]) -> str:
    """The GPUs that torch can use, as a phrase; a GPU that it cannot use is added to ``missing``."""
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return ", ".join(f"{device.name} {device.total_memory / 2**30:.0f} GiB" for device in devices)
    there = ", ".join(sorted(path.name for path in (root / "dev").glob("nvidia[0-9]*")))
    built = torch.version.cuda
    if there and not built:
        what = f"a torch with CUDA (this machine has {there}, torch {torch.__version__} is {_build()})"
        missing.append(f"{what}: {_for_driver(driver)}")
    elif there and built and visible_gpus(os.environ, root=root, torch_version=f"cuda = {built!r}"):
        missing.append(_mismatch(there, driver, built))
    elif built and not there:
        line = install_line("torch", "--index-url", f"{_WHEELS}/cpu")
        optional.append(
            f"a smaller torch (this one, {_build()}, is 4.5 GB larger than a CPU build, and there is no NVIDIA GPU): "
            f"in a new environment, {line}"
        )
    return "none that torch can use: runs use the CPU"


def _mismatch(there: str, driver: str, built: str) -> str:
    """Why a torch for CUDA ``built`` cannot use the GPUs ``there``, and the remedy."""
    needed = OLDEST_DRIVER.get(int(built.partition(".")[0]), 0)
    here = f"{there}, driver {driver or 'not loaded'}; torch {torch.__version__} is {_build()}"
    if driver and int(driver.partition(".")[0]) < needed:
        return f"a driver for this torch ({here}, which needs {needed} or newer): update it, or {_for_driver(driver)}"
    try:
        torch.cuda.init()
        why = "nothing"
    except (AssertionError, RuntimeError) as error:
        why = str(error).strip().splitlines()[0]
    return f"a GPU that torch can use ({here} and says: {why}): nvidia-smi shows whether the driver works"


def _for_driver(driver: str) -> str:
    """The command that installs a torch that ``driver`` can run; without a driver, a torch for a current driver."""
    major = int(driver.partition(".")[0]) if driver else OLDEST_DRIVER[13]
    if major < OLDEST_DRIVER[12]:
        return f"update the driver to {OLDEST_DRIVER[13]} or newer; there is no torch for this driver"
    index = () if major >= OLDEST_DRIVER[13] else ("--index-url", f"{_WHEELS}/cu126")
    return install_line("--upgrade", "--force-reinstall", "torch>=2.11", *index)
