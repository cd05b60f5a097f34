"""The hardware of the machine at hand: its calibrated file, or the known GPU of its name. Torch-free."""

import dataclasses
import os
import re
from dataclasses import replace
from pathlib import Path

import tomli_w

from crius.errors import EnvironmentError
from crius.tools.plan.hardware import KNOWN, Hardware, hardware

FILE = "hardware.toml"

# Names as the driver says them, and what they are. The first that fits counts; forms with other links are not known.
_DEVICE_NAMES = (
    (r"A100.*40GB", "a100-40g"),
    (r"A100.*80GB", "a100-80g"),
    (r"H100.*PCIe", "h100-pcie"),
    (r"H100.*NVL", "h100-nvl"),
    (r"H800(?!.*(PCIe|NVL))", "h800"),
    (r"GH200", "gh200"),
    (r"H100.*80GB", "h100-80g"),
    (r"H100", "h100-96g"),
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"B300", "b300"),
    (r"B200", "b200"),
    (r"H200(?!.*NVL)", "h200"),
    (r"MI300X", "mi300x"),
    (r"RTX 4090(?! [DL])", "rtx-4090"),
    (r"A10G", "a10g"),
    (r"\bL4\b", "l4"),
)


def user_file() -> Path:
    """Where ``crius plan --calibrate`` writes: ``crius/hardware.toml`` below ``XDG_CACHE_HOME``, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "crius" / FILE


def known_gpu(device: str) -> Hardware | None:
    """The known GPU that a driver calls ``device``; None where its links or its speed are not known."""
    name = next((name for pattern, name in _DEVICE_NAMES if re.search(pattern, device)), "")
    return KNOWN.get(name)


def of_machine(device: str) -> Hardware | None:
    """The hardware of a machine whose GPU or CPU is called ``device``: as calibrated, else as known.

    Raises:
        ConfigError: the calibrated file is damaged.
    """
    file = user_file()
    if file.exists():
        found = hardware(str(file))
        if found.device == device:
            return found
    return known_gpu(device)


def shared(found: Hardware, processes: int) -> Hardware:
    """What one of ``processes`` ranks of a host has of a CPU that was calibrated as a whole; a GPU is a rank's own."""
    if found.generation != "cpu" or processes == 1:
        return found
    return replace(
        found,
        bfloat16_flops=found.bfloat16_flops / processes,
        float32_flops=found.float32_flops / processes,
        memory_bandwidth=found.memory_bandwidth / processes,
        memory_bytes=found.memory_bytes / processes,
        op_seconds=None if found.op_seconds is None else found.op_seconds * max(1.0, processes / max(1, found.threads)),
    )


def write_hardware(found: Hardware, file: Path) -> None:
    """Write ``found`` as TOML that ``--gpu FILE`` reads back.

    Raises:
        EnvironmentError: the file cannot be written.
    """
    values = {name: value for name, value in dataclasses.asdict(found).items() if value is not None}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
        partial.write_text(tomli_w.dumps(values), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise EnvironmentError(
            f"the hardware file {file} cannot be written: {error.strerror}.",
            where="--out",
            fix="name a file in a folder that you may write: --out FILE.toml",
        ) from None
