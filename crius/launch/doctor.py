"""``crius doctor``: what this machine has, what is missing, and the exact line that installs it."""

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crius
from crius.plugins import REQUIREMENTS, install_line

try:
    import torch
except ImportError:  # then this is what the doctor has to say
    torch = None  # type: ignore[assignment]

# package, whether Crius cannot run without it, what it is for, what is installed
PACKAGES = (
    ("torch", True, "everything", "torch>=2.11"),
    ("numpy", True, "data", "numpy"),
    ("cyclopts", True, "command line", "cyclopts>=5.0"),
    ("rich", True, "progress bar", "rich"),
    ("tomli_w", True, "run.toml", "tomli-w"),
    ("datasets", False, "--data.source huggingface", REQUIREMENTS["datasets"]),
    ("tokenizers", False, "--tokenizer.path tokenizer.json", REQUIREMENTS["tokenizers"]),
    ("gguf", False, "crius import of a GGUF file", REQUIREMENTS["gguf"]),
    ("tensorboard", False, "--metrics.enable_tensorboard", REQUIREMENTS["tensorboard"]),
    ("torchao", False, "float8, MXFP8, 8-bit optimizer states", REQUIREMENTS["torchao"]),
    ("matplotlib", False, "the picture of crius verify precision", REQUIREMENTS["matplotlib"]),
)
OLDEST_TORCH = (2, 11)


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        facts: versions and devices, by name.
        missing: ``what: how to get it`` of what Crius cannot run without, or what makes a GPU useless.
        optional: the same, of what only some flags need.
        gpu_bytes: memory of the first GPU that torch can use; 0 without one.
        command: that starts the run that was asked about.
    """

    facts: dict[str, str]
    missing: list[str]
    optional: list[str]
    gpu_bytes: int = 0
    command: str = "crius train"

    @property
    def ready(self) -> bool:
        """Nothing is missing."""
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


def examine() -> Report:
    """Look at this machine. Imports torch and asks it for its devices; starts nothing."""
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
        facts.update(_ask_torch(missing))
    gpu_bytes = torch.cuda.get_device_properties(0).total_memory if torch and torch.cuda.is_available() else 0
    return Report(facts, missing, optional, gpu_bytes)


def _ask_torch(missing: list[str]) -> dict[str, str]:
    """What torch says of this machine; what makes it unusable is added to ``missing``."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        missing.append(f"torch {torch.__version__} is older than 2.11: {install_line('--upgrade', 'torch>=2.11')}")
    backends = {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}
    return {
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "backends": ", ".join(name for name, there in backends.items() if there),
        "gpus": _gpus(missing),
    }


def _gpus(missing: list[str]) -> str:
    """The GPUs that torch can use, as a phrase; a GPU that it cannot use is added to ``missing``."""
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return ", ".join(f"{device.name} {device.total_memory / 2**30:.0f} GiB" for device in devices)
    present = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if present and torch.version.cuda is None:
        missing.append(
            f"a torch with CUDA (this machine has {', '.join(present)}, torch {torch.__version__} is a CPU build): "
            + install_line("--upgrade", "torch", "--index-url", "https://download.pytorch.org/whl/cu130")
        )
    return "none that torch can use: runs go on the CPU"
