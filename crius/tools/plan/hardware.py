"""``Hardware``: the abilities of one accelerator of a cluster. Torch-free.

Known ones come by name (``crius/metrics/gpus.toml``), others from a TOML file, and the present machine's from its
calibration.
"""

import math
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w

from crius.config.load import did_you_mean
from crius.errors import ConfigError, CriusError, EnvironmentError
from crius.host import user_cache
from crius.metrics.gpus import ALIASES, GPUS, find_gpu
from crius.run_file import write_whole
from crius.untrusted import parse_toml, text_named

Generation = Literal["ampere", "ada", "hopper", "blackwell", "blackwell_ultra", "cdna3", "cpu", "other"]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator and its links. Rates are peaks of the data sheet; the reached share is fitted or measured.

    Attributes:
        name: name for tables.
        generation: generation whose fitted efficiencies hold; ``other`` uses hopper's.
        bfloat16_flops: dense matmul FLOP/s, without structured sparsity.
        float8_flops: the same in float8; 0: not supported.
        float4_flops: the same in 4 bits; 0: not supported.
        float32_flops: the same in float32, without TF32.
        memory_bytes: memory of one accelerator.
        memory_bandwidth: bytes per second between the memory and the processor.
        link_bandwidth: bytes per second that a GPU sends to the others of its node, in one direction.
        nic_bandwidth: bytes per second that a GPU sends to other nodes, in one direction.
        gpus_per_node: GPUs that reach each other at ``link_bandwidth``.
        watts: board power limit; 0: not stated.
        full_watts: limit at which the peaks were stated; 0: not stated.
        matmul_efficiency: share of the peak that a large matmul reaches; None: fitted.
        attention_efficiency: share of the bfloat16 peak (CPU: float32) that attention reaches; None: fitted.
        memory_efficiency: share of ``memory_bandwidth`` that an elementwise operation reaches; None: fitted.
        op_seconds: fixed cost of one operation of any size; None: fitted.
        hop_seconds: fixed cost of a collective of any size; None: fitted.
        resident_bytes: memory of a process before it has a model.
        resident_share: memory that a process takes on top of its tensors, as a share of them: gaps in its heap, buffers
            of matmuls.
        measured: when, where and with what the machine was calibrated; empty for data sheets.
        device: name of the GPU or the CPU that was calibrated, by which a run finds its file.
        threads: threads of the CPU process that was calibrated; 0: a GPU, or a data sheet.
    """

    name: str
    generation: Generation = "other"
    bfloat16_flops: float
    float8_flops: float = 0
    float4_flops: float = 0
    float32_flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    nic_bandwidth: float
    gpus_per_node: int = 8
    watts: float = 0
    full_watts: float = 0
    matmul_efficiency: float | None = None
    attention_efficiency: float | None = None
    memory_efficiency: float | None = None
    op_seconds: float | None = None
    hop_seconds: float | None = None
    resident_bytes: float = 0
    resident_share: float = 0
    measured: str = ""
    device: str = ""
    threads: int = 0

    @property
    def power(self) -> float:
        """Power limit as a share of the full limit; 1 if it is not stated."""
        return self.watts / self.full_watts if self.watts and self.full_watts else 1.0

    @property
    def has_mxfp8(self) -> bool:
        """Whether its matmuls take a scale per 32 numbers, as on all GPUs with 4-bit matmuls."""
        return self.generation in ("blackwell", "blackwell_ultra") or self.float4_flops > 0


KNOWN = {name: Hardware(name=name, **fields) for name, fields in GPUS.items() if "memory_bytes" in fields}


def known_gpu(device: str) -> Hardware | None:
    """The known GPU that a driver calls ``device``; None if its links or its speed are not known."""
    return KNOWN.get(find_gpu(device) or "")


def card_taken(name: str) -> str:
    """The card that a short name such as ``h100`` stands for, and its other forms; empty if there is one form."""
    name = name.lower()
    others = [known for known in KNOWN if known.startswith(name.partition("-")[0] + "-") and known != ALIASES.get(name)]
    return (
        f"{name} is planned as {ALIASES[name]}; other cards: {', '.join(others)}" if name in ALIASES and others else ""
    )


def hardware(name_or_path: str) -> Hardware:
    """A known accelerator by name, or the one in a TOML file.

    The file has the fields of ``Hardware`` at its top level; ``like = "h100-80g"`` takes missing ones from a known one.

    Raises:
        ConfigError: there is no such name or file, or the file has problems, which are all listed.
    """
    name = ALIASES.get(name_or_path.lower(), name_or_path.lower())
    if name in KNOWN:
        return KNOWN[name]
    path = Path(name_or_path).expanduser()
    if path.suffix == ".toml" or path.exists():
        return _from_file(path)
    raise ConfigError(
        f"GPU {name_or_path!r} is not known, and there is no such file{did_you_mean(name, [*KNOWN, *ALIASES]) or '.'}",
        why=f"known GPUs are {', '.join(KNOWN)}",
        fix="use one of them, or write a TOML file with its peaks: docs/planner.md",
    )


def _from_file(path: Path) -> Hardware:
    where = str(path)
    try:
        table = parse_toml(text_named(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"hardware file {path} cannot be read: {error}.", fix="correct it, or give a known GPU: --gpu h100-80g"
        ) from error
    problems: list[CriusError] = []
    like = table.pop("like", None)
    known = ALIASES.get(like.lower(), like.lower()) if isinstance(like, str) else ""
    if like is not None and known not in KNOWN:
        meant = did_you_mean(known, [*KNOWN, *ALIASES]) or "."
        problems.append(
            ConfigError(f"like = {like!r} is not known{meant}", where=where, fix=f"one of {', '.join(KNOWN)}")
        )
    kinds = {field.name: field for field in fields(Hardware)}
    for key, value in table.items():
        problem = _problem(kinds[key], value) if key in kinds else f"hardware has no field {key!r}."
        if problem:
            problems.append(ConfigError(problem, where=where, fix=f"the fields are {', '.join(kinds)}"))
    needed = [name for name, field in kinds.items() if field.default is MISSING and name not in table]
    if needed and like is None:
        problems.append(
            ConfigError(
                f"hardware lacks {', '.join(needed)}.",
                where=where,
                fix='add them, or take them from a known one with like = "h100-80g"',
            )
        )
    if problems:
        raise ConfigError.together(problems)
    if like is not None:
        return replace(KNOWN[known], **{"name": path.stem, **table})
    return Hardware(**table)


_BOUNDS = {"flops": (1e6, 1e18), "bandwidth": (1e6, 1e18), "bytes": (1e6, 1e15), "seconds": (0, 1)}
_BOUNDS |= {"watts": (1, 1e6), "efficiency": (1e-4, 2), "share": (0, 1), "threads": (0, 1e6), "node": (1, 1e6)}
"""Ranges by the last word of a field. A value outside them has another unit."""
_UNITS = {"bytes": "bytes", "bandwidth": "bytes per second", "flops": "FLOP/s", "seconds": "seconds"}


def _problem(field: Field[Any], value: object) -> str:
    """Error in a field's value; empty if there is none."""
    key = field.name
    word = field.name.rpartition("_")[2]
    if key in ("name", "measured", "device"):
        if key == "name" and value == "":
            return "name is empty."
        return "" if isinstance(value, str) else f"{key} = {value!r} is not a text."
    if key == "generation":
        known = get_args(Generation)
        return "" if value in known else f"generation = {value!r} is not one of {', '.join(known)}."
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        return f"{key} = {value!r} is not a number."
    if key in ("gpus_per_node", "threads") and (not isinstance(value, int) or value < (key == "gpus_per_node")):
        return f"{key} = {value!r} is not a count."
    if value < 0 or (value == 0 and field.default != 0 and word != "seconds"):
        return f"{key} = {value!r} is not above 0."
    if word == "efficiency" and value > 2:
        return f"{key} = {value!r} is a share of the peak, not a percentage."
    least, most = (0, 1e15) if key == "resident_bytes" else _BOUNDS[word]
    if value and not least <= value <= most:
        unit = f": the unit is {_UNITS[word]}" if word in _UNITS else ""
        return f"{key} = {value!r} is not between {least:g} and {most:g}{unit}."
    return ""


def user_file() -> Path:
    """File that ``crius bench calibrate`` writes: ``crius/hardware.toml`` in ``XDG_CACHE_HOME``, else in ~/.cache."""
    return user_cache() / "hardware.toml"


def of_machine(device: str) -> Hardware | None:
    """The hardware of a machine whose GPU or CPU is called ``device``: as calibrated, or else as known.

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
    """Share of one of ``processes`` ranks of a host in a CPU that was calibrated as a whole; a GPU is not shared."""
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
    values = {name: value for name, value in asdict(found).items() if value is not None}
    try:
        write_whole(file, tomli_w.dumps(values))
    except OSError as error:
        raise EnvironmentError(
            f"the hardware file {file} cannot be written: {error.strerror}.",
            where="--out",
            fix="give a file in a writable folder: --out FILE.toml",
        ) from None
