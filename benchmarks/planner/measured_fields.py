"""Fields of a row of published measurements: as people write them, to degrees, hardware and batches. Torch-free."""

import re
from collections.abc import Mapping
from dataclasses import replace

from crius.config.layout import Layout
from crius.tools.plan.hardware import KNOWN, Hardware
from crius.tools.plan.workload import Checkpointing, Precision
from crius.units import GIB

GPUS = (  # by what the column's text begins with; other forms with PCIe or NVL links are not known
    ("a100_40g", "a100-40g"),
    ("a100", "a100-80g"),
    ("h100_grandteton", "h100-96g"),
    ("h100_9", "h100-96g"),
    ("h100_pcie", "h100-pcie"),
    ("h100_nvl", "h100-nvl"),
    ("h100", "h100-80g"),
    ("rtx_4090", "rtx-4090"),
    ("rtx4090", "rtx-4090"),
    *((name, name) for name in ("gb300", "gb200", "gh200", "b300", "b200", "h200", "h800", "mi300x")),
)
PRECISIONS: dict[str, Precision] = {  # by how the column's text begins
    **{"fp32": "float32", "float32": "float32", "fp8": "float8", "float8": "float8", "mxfp8": "mxfp8"},
    **{"nvfp4": "nvfp4", "": "bfloat16"},
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "mixed"), "bfloat16"),
}
YES = ("1", "1.0", "true", "yes")


class RowError(ValueError):
    """A row lacks what a plan needs, or contradicts itself."""


def layout_of(row: Mapping[str, str]) -> Layout:
    """The degrees; 0 is 1, and ``dp_shard`` blank, -1, or counted with or without ``cp`` or ``ep``, is what is left."""
    pp, replicate, cp, tp, ep = (_degree(row, axis) for axis in ("pp", "dp_replicate", "cp", "tp", "ep"))
    stated = row.get("dp_shard", "")
    shard = 0 if stated in ("", "0", "-1") else _degree(row, "dp_shard")
    if pp > count(row, "layers"):
        raise RowError(f"pp is {pp}, more than there are layers")
    others = pp * replicate * cp * tp
    ranks = count(row, "n_gpus", others * max(1, shard))
    if others * shard != ranks:
        left, over = divmod(ranks, others)
        if over or (shard and left * cp != shard and left != shard * ep and left * ep != shard):
            raise RowError(f"the degrees multiply to {others * shard}, but n_gpus is {ranks}")
        shard = left
    return Layout(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep)


def _degree(row: Mapping[str, str], axis: str) -> int:
    return max(1, count(row, axis, 1, least=0))


def hardware_of(row: Mapping[str, str]) -> Hardware:
    """The row's GPU, with the memory, links and power that the row states.

    Raises:
        RowError: it is not known.
    """
    gpu = re.sub(r"[^a-z0-9]+", "_", row["gpu"].lower()).strip("_")
    gpu = re.sub("^(nvidia_|amd_)?(geforce_|instinct_)?", "", gpu)
    memory = number(row, "hbm_gib", None)
    known = _known(gpu, memory or 0.0)
    if known is None:
        raise RowError(f"GPU {row['gpu']!r} is not known")
    if gpu.endswith("power_unstated"):
        known = replace(known, watts=0)
    if gpu.endswith("power_limited"):
        known = replace(known, watts=0.75 * known.full_watts)  # torchao's tables were made at 750 of 1000 W
    per_node = count(row, "intra_node", known.gpus_per_node)
    return replace(
        known,
        gpus_per_node=per_node,
        nic_bandwidth=_nic(row.get("interconnect", ""), per_node) or known.nic_bandwidth,
        memory_bytes=memory * GIB if memory else known.memory_bytes,
    )


def _known(gpu: str, gibibytes: float) -> Hardware | None:
    known = KNOWN.get(gpu.replace("_", "-"))
    if known is not None:
        return known
    if gpu.startswith("a100") and (re.search("40_?g", gpu) or 0 < gibibytes <= 40):
        return KNOWN["a100-40g"]
    if gpu in ("h100", "h100_sxm", "h100_sxm5") and gibibytes > 90:
        return KNOWN["h100-96g"]
    start, name = next(((start, name) for start, name in GPUS if gpu.startswith(start)), ("", ""))
    return None if re.search("pcie|nvl$|nvl_", gpu.removeprefix(start)) else KNOWN.get(name)


def _nic(text: str, per_node: int) -> float:
    """Bytes a second of a GPU that the description of a network states; 0: it states none."""
    found = re.search(r"([\d.]+) ?(?:Gb/s|Gbps)", text)
    if not found:
        return 0.0
    rate = float(found[1]) * 1e9 / 8
    of_node = "node" in text or text.strip() == found[0]
    return rate / per_node if of_node else rate


def precision(row: Mapping[str, str]) -> Precision:
    """Of the blocks' matmuls; half precision is planned as bfloat16.

    Raises:
        RowError: it is not known.
    """
    text = row["precision"].lower()
    names = sorted(PRECISIONS, key=len, reverse=True)
    found = next((PRECISIONS[name] for name in names if (name and text.startswith(name)) or name == text), None)
    if found is None:
        raise RowError(f"precision {row['precision']!r} is none of {', '.join(filter(None, PRECISIONS))}")
    return found


def checkpointing(text: str) -> tuple[Checkpointing, int | None]:
    """Mode, and every how many layers: 2 where ``selective_layer`` does not say, as torchtitan and fms-fsdp have it."""
    text = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
    if text in ("", "none", "no", "off", "false", "0"):
        return "none", None
    if text.startswith("full"):
        return "full", None
    if text in ("selective", "selective_op", "op", "sac"):
        return "selective", None
    every = text.removeprefix("selective_").removeprefix("layer").strip("_") or "2"
    if not every.isdigit() or int(every) < 1:
        raise RowError(f"ac_mode {text!r} is none of none, full, selective_op and selective_layerN")
    return "selective", int(every)


def stages_per_rank(row: Mapping[str, str], layout: Layout) -> int:
    """Stated; 4 where a schedule is interleaved and its stages are not stated, as Megatron's examples have."""
    if layout.pp == 1:
        return 1
    stages = count(row, "vpp", {"interleave_1f1b": 4, "1f1b": 1, "gpipe": 1}.get(schedule(row), 2))
    if stages > count(row, "layers"):
        raise RowError(f"vpp is {stages}, more than there are layers")
    return stages


def schedule(row: Mapping[str, str]) -> str:
    """Of the pipeline, by the flag's spelling; 1F1B where the row says none or one that is not known."""
    text = re.sub(r"[^a-z0-9]", "", row.get("schedule", "").lower())
    for start, name in _SCHEDULES:
        if text.startswith(start):
            return name
    return "1f1b"


_SCHEDULES = (
    *(("interleavedzero", "interleave_zero_bubble"), ("interleavezero", "interleave_zero_bubble")),
    *(("interleave", "interleave_1f1b"), ("zbv", "zbv_zero_bubble"), ("dualpipe", "dualpipev")),
    *(("gpipe", "gpipe"), ("afab", "gpipe")),
)
_BATCH = ("n_microbatches", "micro_batch", "local_batch", "global_batch")


def microbatches(row: Mapping[str, str], layout: Layout) -> int:
    """Stated; 4 where a row states no batch at all: enough that what happens once a step counts little."""
    if not any(row.get(column) for column in _BATCH):
        return 4
    stated, micro = count(row, "n_microbatches", 0, least=0), count(row, "micro_batch", 0, least=0)
    if stated:
        return stated
    local = _local_batch(row, layout)
    accumulated = count(row, "grad_accum_steps", 0, least=0)
    if micro and local:
        return max(1, local // micro)
    return accumulated or (min(layout.pp, local) if local else layout.pp)


def _local_batch(row: Mapping[str, str], layout: Layout) -> int:
    """Sequences of one data-parallel rank in one step; 0: not stated."""
    return count(row, "local_batch", 0, least=0) or count(row, "global_batch", 0, least=0) // layout.batch


def microbatch(row: Mapping[str, str], layout: Layout) -> int:
    """Sequences of one forward: stated, or what the batch sizes say, or 1."""
    stated = count(row, "micro_batch", 0, least=0)
    if stated:
        return stated
    if not any(row.get(column) for column in _BATCH):
        return 4
    return max(1, _local_batch(row, layout) // microbatches(row, layout))


_BLANK = ("-", "n/a", "na", "nan", "none", "null", "?", "unknown", "oom")
SMALLEST, LARGEST = 1e-9, 1e16
"""What a column can say, if not 0."""

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def number(row: Mapping[str, str], column: str, default: float | None) -> float | None:
    """A column's number, or the one that its text begins with (95 GiB, 8B) or ends with (ZeRO-3), else ``default``.

    Raises:
        RowError: it is negative, or too small or large for anything of a run.
    """
    text = re.sub(r"(?<=\d)[,_ ](?=\d{3}\b)", "", row.get(column, "")).lstrip("~")
    if not text or text.lower() in _BLANK:
        return default
    try:
        value = float(text)
    except ValueError:
        return _within(text) or default
    if value and not SMALLEST <= value <= LARGEST:
        raise RowError(f"{column} is {text}")
    return value or default


def _within(text: str) -> float:
    """The number that a text begins or ends with; 0: neither."""
    first = re.match(r"(\d+(?:\.\d+)?)([kmbt]?)(?![\w.,]|-\d)|(\d+(?:\.\d+)?)(?=[a-z])", text, flags=re.IGNORECASE)
    if first:
        return float(first[1] or first[3]) * _UNITS[(first[2] or "").lower()]
    last = re.search(r"(?<![\d.,])(\d+(?:\.\d+)?)$", text)
    return float(last[1]) if last else 0.0


def count(row: Mapping[str, str], column: str, default: int | None = None, least: int = 1) -> int:
    """A column's whole number; text without one is ``default``, of which a column that is needed has none.

    Raises:
        RowError: there is none, or it is below ``least``.
    """
    text = row.get(column, "")
    value = number(row, column, default) if text != "0" else 0.0
    if value is None:
        raise RowError(f"{column} is {text!r}, not a number" if text else f"{column} is not stated")
    if value != int(value) or value < least:
        raise RowError(f"{column} is {value:g}")
    return int(value)
