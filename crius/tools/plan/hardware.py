"""``Hardware``: what one accelerator of a cluster can do. Known ones by name, others from a TOML file."""

import math
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args

from crius.config.load import did_you_mean
from crius.errors import ConfigError, CriusError
from crius.units import GIB

GB = 10**9
TERA = 10**12

Generation = Literal["ampere", "ada", "hopper", "blackwell", "blackwell_ultra", "cdna3", "cpu", "other"]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator and its links. Rates are peaks of the data sheet; what is reached of them is fitted or measured.

    Attributes:
        name: for tables.
        generation: which fitted efficiencies hold; ``other`` takes hopper's.
        bfloat16_flops: dense matmul FLOPs a second, without structured sparsity.
        float8_flops: the same in float8; 0: not supported.
        float4_flops: the same in 4 bits; 0: not supported.
        float32_flops: the same in float32, without TF32.
        memory_bytes: of one accelerator.
        memory_bandwidth: bytes a second between the memory and the processor.
        link_bandwidth: bytes a second that a GPU sends to the others of its node, in one direction.
        nic_bandwidth: bytes a second that a GPU sends to other nodes, in one direction.
        gpus_per_node: GPUs that reach each other at ``link_bandwidth``.
        watts: board power limit; 0: not stated.
        full_watts: limit at which the peaks were stated; 0: not stated.
        matmul_efficiency: share of the peak that a large matmul reaches; None: fitted.
        attention_efficiency: share of the bfloat16 peak (CPU: float32) that attention reaches; None: fitted.
        memory_efficiency: share of ``memory_bandwidth`` that an elementwise operation reaches; None: fitted.
        op_seconds: fixed cost of one operation, however small; None: fitted.
        hop_seconds: fixed cost of a collective, however little it sends; None: fitted.
        resident_bytes: memory of a process before it has a model.
        resident_share: memory that a process takes beside its tensors, as a share of them: gaps in its heap, buffers of
            matmuls.
        measured: calibrated on the machine: when, where and with what; empty for data sheets.
        device: name of the GPU or the CPU that was calibrated; by it a run finds its file.
        threads: of a CPU process that was calibrated; 0: a GPU, or a data sheet.
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
        """Power limit as a share of the full one; 1 where it is not stated."""
        return self.watts / self.full_watts if self.watts and self.full_watts else 1.0

    @property
    def has_mxfp8(self) -> bool:
        """Whether its matmuls take a scale every 32 numbers, as those of GPUs with 4-bit matmuls do."""
        return self.generation in ("blackwell", "blackwell_ultra") or self.float4_flops > 0


A100 = Hardware(  # NVIDIA A100 data sheet, June 2021; DGX A100: one 200 Gb/s HDR NIC a GPU
    name="a100-80g",
    generation="ampere",
    bfloat16_flops=312 * TERA,
    float32_flops=19.5 * TERA,
    memory_bytes=80 * GIB,
    memory_bandwidth=2039 * GB,
    link_bandwidth=300 * GB,
    nic_bandwidth=25 * GB,
)
H100 = Hardware(  # NVIDIA H100 data sheet (SXM5); DGX H100: one 400 Gb/s NDR NIC a GPU
    name="h100-80g",
    generation="hopper",
    bfloat16_flops=989.4 * TERA,
    float8_flops=1978.9 * TERA,
    float32_flops=66.9 * TERA,
    memory_bytes=80 * GIB,
    memory_bandwidth=3350 * GB,
    link_bandwidth=450 * GB,
    nic_bandwidth=50 * GB,
    watts=700,
    full_watts=700,
)
H100_PCIE = replace(  # the same data sheet and NVIDIA's product brief of the PCIe card; PCIe 5.0 x16 to the others
    H100,
    name="h100-pcie",
    bfloat16_flops=756 * TERA,
    float8_flops=1513 * TERA,
    float32_flops=51 * TERA,
    memory_bandwidth=2000 * GB,
    link_bandwidth=64 * GB,
    watts=350,
    full_watts=350,
)
B200 = Hardware(  # NVIDIA HGX B200 data sheet
    name="b200",
    generation="blackwell",
    bfloat16_flops=2250 * TERA,
    float8_flops=4500 * TERA,
    float4_flops=9000 * TERA,
    float32_flops=75 * TERA,
    memory_bytes=178 * GIB,
    memory_bandwidth=7700 * GB,
    link_bandwidth=900 * GB,
    nic_bandwidth=50 * GB,
    watts=1000,
    full_watts=1000,
)
GB200 = replace(  # NVIDIA GB200 NVL72 data sheet: 72 GPUs in one NVLink domain, used as 64
    B200,
    name="gb200",
    bfloat16_flops=2500 * TERA,
    float8_flops=5000 * TERA,
    float4_flops=10_000 * TERA,
    float32_flops=80 * TERA,
    memory_bytes=184 * GIB,
    memory_bandwidth=8000 * GB,
    gpus_per_node=64,
    watts=1200,
    full_watts=1200,
)
RTX_4090 = Hardware(  # NVIDIA Ada architecture white paper v2 (FP32 accumulate); PCIe 4.0 x16, no NVLink
    name="rtx-4090",
    generation="ada",
    bfloat16_flops=165.2 * TERA,
    float8_flops=330.3 * TERA,
    float32_flops=82.6 * TERA,
    memory_bytes=24 * GIB,
    memory_bandwidth=1008 * GB,
    link_bandwidth=20 * GB,
    nic_bandwidth=3 * GB,
)

KNOWN: dict[str, Hardware] = {
    one.name: one
    for one in (
        replace(A100, name="a100-40g", memory_bytes=40 * GIB, memory_bandwidth=1555 * GB),
        A100,
        H100,
        # torchtitan benchmarks/llama3_h100_202412_torchtitan.md: H100 of 95 GiB HBM2e at 500 W in Grand Teton servers
        replace(H100, name="h100-96g", memory_bytes=95 * GIB, memory_bandwidth=2400 * GB, watts=500),
        H100_PCIE,
        replace(  # NVIDIA H100 NVL data sheet: two are bridged, which counts for nothing beyond the pair
            H100_PCIE,
            name="h100-nvl",
            bfloat16_flops=835 * TERA,
            float8_flops=1671 * TERA,
            float32_flops=60 * TERA,
            memory_bytes=94 * GIB,
            memory_bandwidth=3900 * GB,
            watts=400,
            full_watts=400,
        ),
        replace(H100, name="h800", link_bandwidth=200 * GB),  # H100 with 400 GB/s of NVLink, both directions together
        # NVIDIA GH200 data sheet: an H100 with 96 GB of HBM3; four to a node
        replace(H100, name="gh200", memory_bytes=95 * GIB, memory_bandwidth=4000 * GB, gpus_per_node=4),
        # NVIDIA H200 data sheet (SXM)
        replace(H100, name="h200", memory_bytes=140 * GIB, memory_bandwidth=4800 * GB),
        B200,
        GB200,
        # NVIDIA GB300 NVL72 and HGX B300 data sheets; one 800 Gb/s ConnectX-8 NIC a GPU
        replace(
            GB200,
            name="gb300",
            generation="blackwell_ultra",
            float4_flops=15_000 * TERA,
            memory_bytes=277 * GIB,
            nic_bandwidth=100 * GB,
            watts=1400,
            full_watts=1400,
        ),
        replace(
            B200,
            name="b300",
            generation="blackwell_ultra",
            float4_flops=13_500 * TERA,
            memory_bytes=268 * GIB,
            nic_bandwidth=100 * GB,
            watts=1100,
            full_watts=1100,
        ),
        Hardware(  # AMD Instinct MI300X data sheet: seven 64 GB/s links; one 400 Gb/s NIC a GPU
            name="mi300x",
            generation="cdna3",
            bfloat16_flops=1307.4 * TERA,
            float8_flops=2614.9 * TERA,
            float32_flops=163.4 * TERA,
            memory_bytes=192 * GIB,
            memory_bandwidth=5300 * GB,
            link_bandwidth=448 * GB,
            nic_bandwidth=50 * GB,
        ),
        RTX_4090,
        replace(  # AWS G5: NVIDIA A10G, PCIe 4.0, 100 Gb/s a node of 8
            RTX_4090,
            name="a10g",
            generation="ampere",
            bfloat16_flops=70 * TERA,
            float8_flops=0,
            float32_flops=35 * TERA,
            memory_bandwidth=600 * GB,
            nic_bandwidth=1.5 * GB,
        ),
        replace(  # NVIDIA L4 data sheet
            RTX_4090,
            name="l4",
            bfloat16_flops=121 * TERA,
            float8_flops=242 * TERA,
            float32_flops=30.3 * TERA,
            memory_bandwidth=300 * GB,
            nic_bandwidth=1.5 * GB,
        ),
        # no data sheet: two cores of an x86 server of 2022; crius plan --calibrate measures the machine at hand
        Hardware(
            name="cpu",
            generation="cpu",
            bfloat16_flops=60 * GB,
            float32_flops=150 * GB,
            memory_bytes=16 * GIB,
            memory_bandwidth=20 * GB,
            link_bandwidth=2 * GB,
            nic_bandwidth=1 * GB,
            gpus_per_node=64,
            resident_bytes=0.5 * GIB,
        ),
    )
}
ALIASES = {"a100": "a100-80g", "h100": "h100-80g", "h100-sxm": "h100-80g", "4090": "rtx-4090"}


def card_taken(name: str) -> str:
    """The card that a short name such as ``h100`` stands for, and its other forms; empty where there is one form."""
    name = name.lower()
    others = [known for known in KNOWN if known.startswith(name.partition("-")[0] + "-") and known != ALIASES.get(name)]
    return (
        f"{name} is planned as {ALIASES[name]}; other cards: {', '.join(others)}" if name in ALIASES and others else ""
    )


def hardware(name_or_path: str) -> Hardware:
    """A known accelerator by name, or what a TOML file says.

    The file has the fields of ``Hardware`` at its top level; ``like = "h100-80g"`` takes the others from a known one.

    Raises:
        ConfigError: no such name or file, or the file's problems, all of them.
    """
    name = ALIASES.get(name_or_path.lower(), name_or_path.lower())
    if name in KNOWN:
        return KNOWN[name]
    path = Path(name_or_path).expanduser()
    if path.suffix == ".toml" or path.exists():
        return _from_file(path)
    raise ConfigError(
        f"GPU {name_or_path!r} is not known, and there is no such file{did_you_mean(name, [*KNOWN, *ALIASES]) or '.'}",
        why=f"known are {', '.join(KNOWN)}",
        fix="take one of them, or write a TOML file with its peaks: docs/planner.md",
    )


def _from_file(path: Path) -> Hardware:
    where = str(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"hardware file {path} cannot be read: {error}.", fix="correct it, or name a known GPU: --gpu h100-80g"
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
        problem = _problem(key, value) if key in kinds else f"hardware has no field {key!r}."
        if problem:
            problems.append(ConfigError(problem, where=where, fix=f"the fields are {', '.join(kinds)}"))
    needed = [name for name in _NEEDED if name not in table] if like is None else []
    if needed:
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


_NEEDED: tuple[str, ...] = (
    "name",
    "bfloat16_flops",
    "float32_flops",
    "memory_bytes",
    "memory_bandwidth",
    "link_bandwidth",
)
_NEEDED += ("nic_bandwidth",)
_MAY_BE_ZERO = (
    "threads",
    "hop_seconds",
    "float8_flops",
    "float4_flops",
    "watts",
    "full_watts",
    "op_seconds",
    "resident_bytes",
    "resident_share",
)
_BOUNDS = {"flops": (1e6, 1e18), "bandwidth": (1e6, 1e18), "bytes": (1e6, 1e15), "seconds": (0, 1)}
_BOUNDS |= {"watts": (1, 1e6), "efficiency": (1e-4, 2), "share": (0, 1), "threads": (0, 1e6), "node": (1, 1e6)}
"""By the last word of a field. Beyond them its unit is another one."""
_UNITS = {"bytes": "bytes", "bandwidth": "bytes a second", "flops": "FLOPs a second", "seconds": "seconds"}
_SHARES = ("matmul_efficiency", "attention_efficiency", "memory_efficiency")


def _problem(key: str, value: object) -> str:
    """What is wrong with a field's value; empty: nothing."""
    if key in ("name", "measured", "device"):
        if key == "name" and value == "":
            return "name is empty."
        return "" if isinstance(value, str) else f"{key} = {value!r} is not a text."
    if key == "generation":
        known = get_args(Generation)
        return "" if value in known else f"generation = {value!r} is none of {', '.join(known)}."
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        return f"{key} = {value!r} is not a number."
    if key in ("gpus_per_node", "threads") and (not isinstance(value, int) or value < (key == "gpus_per_node")):
        return f"{key} = {value!r} is not a count."
    if value < 0 or (value == 0 and key not in _MAY_BE_ZERO):
        return f"{key} = {value!r} is not above 0."
    if key in _SHARES and value > 2:
        return f"{key} = {value!r} is a share of the peak, not a percentage."
    word = key.rpartition("_")[2]
    least, most = (0, 1e15) if key == "resident_bytes" else _BOUNDS[word]
    if value and not least <= value <= most:
        unit = f": the unit is {_UNITS[word]}" if word in _UNITS else ""
        return f"{key} = {value!r} is not between {least:g} and {most:g}{unit}."
    return ""
