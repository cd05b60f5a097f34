"""Communication of a step at 8, 64 and 512 GPUs, from dry runs, and how much of it compute cannot hide: a forecast.

python benchmarks/scaling.py --out benchmarks/results/<date>-<device>/scaling.json

Bytes, FLOPs and peaks are counted on the real code (``crius train --dry_run``); times follow from the assumptions
below. The model of overlap, in one line each:

tp, cp    in the path of every block: all of it is exposed, as are the sends and receives of a pipeline
fsdp      the gathers of a block run while the block before it computes, its reduce-scatter while the next one does:
          exposed is what forward or backward are too short for, and the first gather and the last reduce-scatter
replicas  the all-reduce of a block follows its reduce-scatter in the backward; two kinds of link work at once
not in it latency, stragglers, contention between jobs, async tensor parallelism
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

PEAK_TFLOPS = 989.0  # bfloat16 without sparsity; NVIDIA H100 SXM data sheet
ACHIEVED = 0.5  # assumption: share of the peak at which the FLOPs of a step run, those of recomputation included
NVLINK = 450e9  # bytes/s a GPU and direction; DGX H100 data sheet, 900 GB/s in both
INFINIBAND = 50e9  # bytes/s a GPU and direction; DGX H100 data sheet, one 400 Gbit/s adapter a GPU
NODE = 8  # GPUs that NVLink joins
SEQ_LEN = 8192
AXES = ("tp", "cp", "fsdp", "dp_replicate", "pp", "world")

# (model, degrees pp x dp_replicate x dp_shard x tp, sequences a data-parallel rank and microbatch, microbatches)
# 8192 tokens a GPU and step, but for the pipeline, which has 32 microbatches
CASES: dict[str, tuple[str, tuple[int, int, int, int], int, int]] = {
    "8b/fsdp8": ("8b", (1, 1, 8, 1), 1, 1),
    "8b/fsdp64": ("8b", (1, 1, 64, 1), 1, 1),
    "8b/hsdp8x8": ("8b", (1, 8, 8, 1), 1, 1),
    "70b/fsdp64": ("70b", (1, 1, 64, 1), 1, 1),
    "70b/fsdp8_tp8": ("70b", (1, 1, 8, 8), 8, 1),
    "8b/fsdp512": ("8b", (1, 1, 512, 1), 1, 1),
    "8b/hsdp64x8": ("8b", (1, 64, 8, 1), 1, 1),
    "70b/fsdp64_tp8": ("70b", (1, 1, 64, 8), 8, 1),
    "70b/hsdp8x8_tp8": ("70b", (1, 8, 8, 8), 8, 1),
    "405b/fsdp64_tp8": ("405b", (1, 1, 64, 8), 8, 1),
    "405b/hsdp2x32_tp8": ("405b", (1, 2, 32, 8), 8, 1),
    "405b/pp8_fsdp8_tp8": ("405b", (8, 1, 8, 8), 1, 32),
}


def flags(name: str) -> list[str]:
    """Flags of ``crius train`` of a case."""
    model, (pp, replicate, shard, tp), local, microbatches = CASES[name]
    named = {
        "parallelism.pipeline_parallel_degree": pp,
        "parallelism.data_parallel_replicate_degree": replicate,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.tensor_parallel_degree": tp,
        "model.flavor": model,
        "training.seq_len": SEQ_LEN,
        "training.mixed_precision_param": "bfloat16",
        "training.local_batch_size": local,
        "training.global_batch_size": local * microbatches * replicate * shard,
        "activation_checkpoint.mode": "selective" if model == "8b" else "full",
    }
    return [part for key, value in named.items() for part in (f"--{key}", str(value))]


def bandwidth(size: int, inner: int) -> float:
    """Bytes/s a GPU that a ring over an axis moves.

    A ring over several nodes enters each through the adapters of all its members there (NCCL's rings, one an adapter).

    Args:
        size: ranks of the axis.
        inner: product of the degrees of the axes inside it, which are neighbours.
    """
    if size * inner <= NODE:
        return NVLINK
    return min(NVLINK, max(1, NODE // inner) * INFINIBAND)


def on_the_wire(kind: str, size: int) -> float:
    """Share of a whole message that a GPU sends, in a ring of ``size``. A receive is the other side of a send."""
    if kind == "recv":
        return 0.0
    if kind in ("send", "broadcast"):
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (size - 1) / size


def forecast(report: dict[str, Any], name: str, step_seconds: float | None = None) -> dict[str, Any]:
    """What a dry run and the assumptions say of a step of the slowest pipeline rank.

    Args:
        report: of ``crius train --dry_run --json``.
        name: the case.
        step_seconds: measured seconds of a step without communication; None: FLOPs at ``ACHIEVED`` of the peak.
    """
    _, (pp, replicate, shard, tp), local, microbatches = CASES[name]
    axes = {
        "tp": (tp, 1),
        "cp": (1, 1),
        "fsdp": (shard, tp),
        "dp_replicate": (replicate, tp * shard),
        "pp": (pp, tp * shard * replicate),
        "world": (pp * replicate * shard * tp, 1),
    }
    slowest = max(range(pp), key=lambda rank: sum(s["flops"] for s in report["stages"] if s["pp_rank"] == rank))
    stages = [stage for stage in report["stages"] if stage["pp_rank"] == slowest]
    flops = sum(stage["flops"] for stage in stages)
    compute = flops / (ACHIEVED * PEAK_TFLOPS * 1e12) if step_seconds is None else step_seconds
    messages = dict.fromkeys(AXES, 0.0)  # bytes on the wire
    seconds: dict[tuple[str, str], float] = {}
    counts: dict[tuple[str, str], int] = {}
    for row in (row for stage in stages for row in stage["collectives"]):
        size, inner = axes[row["axis"]]
        nbytes = row["bytes"] * on_the_wire(row["kind"], size)
        messages[row["axis"]] += nbytes
        key = (row["axis"], row["kind"])
        seconds[key] = seconds.get(key, 0.0) + nbytes / bandwidth(size, inner)
        counts[key] = counts.get(key, 0) + row["count"]
    exposed = sum(value for (axis, _), value in seconds.items() if axis in ("tp", "cp", "pp", "world"))
    exposed += exposed_sharding(
        seconds, counts, compute * report["model_flops"] / flops / 3, compute, 1 if pp > 1 else microbatches
    )
    bubble = (pp - 1) / (microbatches + pp - 1)  # of the step, 1F1B; see crius/config/pipeline.py
    step = (compute + exposed) / (1 - bubble)
    num_ranks = math.prod(CASES[name][1])
    tokens = local * microbatches * replicate * shard * SEQ_LEN / num_ranks
    return {
        "case": name,
        "gpus": num_ranks,
        "tokens_per_gpu": tokens,
        "peak_gib": max(rank["peak_bytes"] for rank in report["ranks"]) / 2**30,
        "flops": flops,
        "bytes_on_wire": messages,
        "bandwidth": {axis: bandwidth(*axes[axis]) for axis in AXES if axes[axis][0] > 1},
        "compute_seconds": compute,
        "is_measured": step_seconds is not None,
        "communication_seconds": sum(seconds.values()),
        "exposed_seconds": exposed,
        "exposed_share": exposed / (compute + exposed),
        "bubble": bubble,
        "tokens_per_second_per_gpu": tokens / step,
        "mfu": report["model_flops"] / step / (PEAK_TFLOPS * 1e12),
    }


def exposed_sharding(
    seconds: dict[tuple[str, str], float],
    counts: dict[tuple[str, str], int],
    forward: float,
    compute: float,
    microbatches: int,
) -> float:
    """Seconds of the gathers, reduce-scatters and all-reduces of data parallelism that no compute hides.

    Args:
        seconds: by axis and kind.
        counts: messages, likewise.
        forward: seconds that the forward computes.
        compute: seconds that the step does.
        microbatches: that begin with a gather and end with a reduce-scatter.
    """
    gather, scatter = seconds.get(("fsdp", "all-gather"), 0.0), seconds.get(("fsdp", "reduce-scatter"), 0.0)
    num_gathers, num_scatters = counts.get(("fsdp", "all-gather"), 0), counts.get(("fsdp", "reduce-scatter"), 0)
    replicas = seconds.get(("dp_replicate", "all-reduce"), 0.0)
    others = sum(value for (axis, kind), value in seconds.items() if axis == "fsdp" and kind == "all-reduce")
    again = 0.5 if num_gathers > 1.5 * num_scatters else 0.0  # weights are gathered for the backward too
    hidden_forward = max(0.0, gather * (1 - again) - forward)
    hidden_backward = max(0.0, max(gather * again + scatter, replicas) - (compute - forward))
    ends = sum(total / count for total, count in ((gather, num_gathers), (scatter, num_scatters)) if count)
    last = replicas / max(1, counts.get(("dp_replicate", "all-reduce"), 0))
    return hidden_forward + hidden_backward + microbatches * ends + last + others


def render(record: dict[str, Any]) -> str:
    """The table of ``benchmarks/README.md``."""
    lines = [
        "| GPUs | model, layout | peak GiB | GB on the wire: tp | fsdp | replicas | pp | compute s | communication s "
        "| exposed | bubble | tokens/s/GPU | MFU |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        sizes = (row["bytes_on_wire"][axis] / 1e9 for axis in ("tp", "fsdp", "dp_replicate", "pp"))
        cells = [
            f"{row['gpus']}",
            row["case"].replace("/", ", "),
            f"{row['peak_gib']:.0f}",
            *(f"{size:.1f}" if size else "-" for size in sizes),
            f"{row['compute_seconds']:.2f}" + "*" * row["is_measured"],
            f"{row['communication_seconds']:.2f}",
            f"{row['exposed_share']:.0%}",
            f"{row['bubble']:.0%}" if row["bubble"] else "-",
            f"{row['tokens_per_second_per_gpu']:,.0f}",
            f"{row['mfu']:.0%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def dry_run(name: str) -> dict[str, Any]:
    """The report of a case."""
    command = [sys.executable, "-m", "crius", "train", "--dry_run", "--json", *flags(name)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Count, forecast, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write.")
    parser.add_argument("--render", type=Path, help="JSON to print as a table; nothing is run.")
    parser.add_argument("--cases", default=",".join(CASES), help=f"Of {', '.join(CASES)}; joined by commas.")
    parser.add_argument(
        "--step_seconds",
        action="append",
        default=[],
        metavar="CASE=SECONDS",
        help="Measured seconds of a step of a rank without communication, in place of FLOPs at a rate.",
    )
    options = parser.parse_args()
    if options.render:
        print(render(json.loads(options.render.read_text(encoding="utf-8"))), end="")
        return
    measured = {name: float(value) for name, _, value in (item.partition("=") for item in options.step_seconds)}
    names = options.cases.split(",")
    unknown = [name for name in (*names, *measured) if name not in CASES]
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    record = {
        "command": ["benchmarks/scaling.py", *sys.argv[1:]],
        "assumptions": {
            "peak_tflops": PEAK_TFLOPS,
            "achieved": ACHIEVED,
            "nvlink_bytes_per_second": NVLINK,
            "infiniband_bytes_per_second": INFINIBAND,
            "gpus_per_node": NODE,
        },
        "rows": [forecast(dry_run(name), name, measured.get(name)) for name in names],
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(render(record), end="")


if __name__ == "__main__":
    main()
