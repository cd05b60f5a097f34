"""``make gpu-ranks``: several ranks on one GPU, and every layout equal to one device. No torch here."""

import functools
import lzma
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu import check, host, runs
from benchmarks.gpu.round import Round, Step

LAYOUTS = (
    *("fsdp2", "ddp2", "tp2", "pp2", "cp2", "hsdp2x2", "fsdp2_tp2", "pp2_fsdp2_accum3", "fsdp4", "fsdp2_cp2"),
    "pp2_tp2",
)
DRY_LAYOUTS = ("fsdp2", "tp2")
AT_ONCE = 3
"""Layouts that are compared at the same time."""
DEGREE = "--parallelism.data_parallel_shard_degree"
TRAINED = {
    "experts, fsdp2_ep2": (*runs.EXPERTS, DEGREE, "2", "--parallelism.expert_parallel_degree", "2"),
    "float8 compiled, fsdp2": (
        *runs.FLOAT8,
        "tensorwise",
        *runs.COMPILED,
        DEGREE,
        "2",
    ),
    "compiled, tp2": (*runs.BF16, *runs.COMPILED, "--parallelism.tensor_parallel_degree", "2"),
    "asynchronous saves, fsdp2": (*runs.BF16, *runs.EAGER, DEGREE, "2", "--checkpoint.interval", "4"),
}
"""Runs of two ranks, with what a comparison in float32 does not reach."""


def library(this: Round) -> Path | None:
    """The carried NCCL that lets ranks share a GPU, unpacked; None if none is carried."""
    packed = next((host.ROOT / host.CARRIED).glob("libnccl*.so.xz"), None)
    if packed is None or this.is_dry:
        return None
    target = this.work / "libnccl.so.2"
    if not target.exists():
        with lzma.open(packed) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 24)
    return target


def sharing(this: Round, backend: str) -> dict[str, str]:
    """Variables of programs whose ranks share the GPU."""
    if this.is_dry:
        return {}
    shared = {"CRIUS_SHARE_GPU": backend}
    if backend == "nccl":
        # its versions before 2.30 refuse it; the preload wins over the library that torch names
        shared |= {"LD_PRELOAD": str(library(this)), "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
        shared |= {"NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "WARN"}
    return shared


def backends(this: Round) -> list[str]:
    """What can be tried here, the best first."""
    return ["nccl", "gloo"] if library(this) else ["gloo"]


def ping(this: Round) -> None:
    """Collectives between 2 and 4 ranks, by NCCL and by Gloo."""
    if not this.is_dry and library(this) is None:
        this.cannot("nccl", f"no libnccl*.so.xz in {host.CARRIED}: benchmarks/gpu/pack_nccl.py makes it")
    for backend in backends(this):
        for ranks in (2,) if this.is_dry else (2, 4):
            arguments = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "-m", "benchmarks.gpu.ping"]
            done = this.call(f"{backend} {ranks}", [*arguments, backend, this.device], 40.0, sharing(this, backend))
            shown = "all answers are right" if done.code == 0 else done.why
            this.row(f"{backend}, {ranks} ranks", done.code == 0, shown, done.seconds)


def works(this: Round) -> str:
    """The backend whose pings of this call were right; else the first that can be tried."""
    right = {row["check"].partition(",")[0] for row in this.record.rows if row["step"] == "ping" and row["ok"]}
    return next((backend for backend in backends(this) if backend in right), backends(this)[0])


def layouts(this: Round) -> None:
    """crius verify parity: 11 layouts beside one device."""
    backend = works(this)

    def compare(name: str) -> None:
        if backend == "gloo" and not this.is_dry and "pp" in name:
            this.cannot(f"{name} by {backend}", "Gloo sends and receives host memory only")
            return
        arguments = ["-m", "crius", "verify", "parity", "--layouts", name, "--training.device", this.device]
        arguments += ["--steps", "3", "--job.run_dir", str(this.folder("layouts", name))]
        done = this.call(name, arguments, 130.0, sharing(this, backend))
        found = re.search(r"largest differences: .*", done.output)
        shown = found[0] if done.code == 0 and found else done.why
        this.row(f"{name} by {backend}", done.code == 0, shown, done.seconds)

    with ThreadPoolExecutor(1 if this.is_dry else AT_ONCE) as pool:
        list(pool.map(compare, DRY_LAYOUTS if this.is_dry else LAYOUTS))


def trained(this: Round) -> None:
    """Runs of two ranks: experts, float8, compiled tensor parallelism, asynchronous saves; beside one rank."""
    backend = works(this)
    small = runs.small_flags(this)
    start = functools.partial(runs.train, this, environ=sharing(this, backend))
    for name, flags in TRAINED.items():
        alone = start(f"{name}, one rank", [*small, *_alone(flags)])
        both = start(name, [*small, *flags], num_ranks=2)
        if not (alone.is_whole and both.is_whole):
            failed = alone if not alone.is_whole else both
            this.row(f"{name} by {backend}", False, failed.done.why, failed.done.seconds)
            continue
        gap = runs.largest_gap(both.losses(), alone.losses())
        limit = runs.CLOSE_FLOAT8 if "float8" in name else runs.CLOSE_EXPERTS_BF16
        ok = gap is not None and gap <= limit and len(both.records) == runs.STEPS
        detail = f"gap {gap:.1e} to one rank, {both.show()}"
        this.row(f"{name} by {backend}", ok, detail, both.done.seconds, gap=gap, limit=limit)


def _alone(flags: tuple[str, ...]) -> list[str]:
    """The flags without those of the layout, each of which has a value."""
    kept = []
    names = iter(flags)
    for flag in names:
        if flag.startswith("--parallelism."):
            next(names)
        else:
            kept.append(flag)
    return kept


STEPS = {
    "machine": Step(check.machine, 15.0),
    "ping": Step(ping, 60.0),
    "layouts": Step(layouts, 220.0),
    "trained": Step(trained, 160.0),
}
"""In the order of their priority."""
