"""What checkpoints, kills and reproducible sums cost on this machine: measured in turns, written as one JSON.

python benchmarks/survival.py --out benchmarks/results/<date>-<device>/survival.json
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from crius.cli.settings import run_of
from crius.config.run import RunConfig
from crius.launch.environment import Placement
from crius.launch.local import run_workers
from crius.tools.bench.machine import BenchMachine
from crius.train import job
from crius.train.loop import Loop

TEXT = Path("tests") / "golden" / "tempest.txt"  # run from the repository, so that results name no machine
STEPS, WARM = 8, 2
RUN = [
    *("--training.steps", str(STEPS), "--training.seq_len", "128", "--training.global_batch_size", "8"),
    *("--validation.interval", "0", "--metrics.log_interval", "100", "--data.source", "text", "--data.path", str(TEXT)),
    "--checkpoint.no_enable",
]
SHARD = "--parallelism.data_parallel_shard_degree"
LAYOUTS = {"1": [], "fsdp2": [SHARD, "2"], "fsdp4": [SHARD, "4"]}
VARIANTS = {
    "default": [],
    "checkpoints on, none saved": ["--checkpoint.enable", "--checkpoint.interval", "1000"],
    "8 microbatches, foreach": ["--training.local_batch_size", "1", "--optimizer.implementation", "foreach"],
    "reproducible, 8 virtual shards": ["--training.reproducible"],
    "sdc recompute every step": ["--sdc.recompute_interval", "1"],
}
SMALL = [
    *("--model.num_layers", "2", "--training.seq_len", "32", "--training.global_batch_size", "16"),
    *("--validation.interval", "0", "--data.source", "text", "--data.path", str(TEXT)),
]
CHAOS = {
    "fsdp2": [*SMALL, SHARD, "2"],
    "reproducible, 1, 2 or 4 ranks": [*SMALL, "--reproducible", "--world-sizes", "1,2,4"],
}


def timed(config: RunConfig, folder: Path, placement: Placement) -> None:
    """Train as one rank, and write the CPU seconds of each step."""
    seconds: list[float] = []
    real = Loop._step

    def step(self: Loop) -> None:
        begin = time.process_time()
        real(self)
        seconds.append(time.process_time() - begin)

    Loop._step = step  # type: ignore[method-assign]  # in a forked worker: nobody else sees it
    job.run(config, folder, time.monotonic(), placement)
    (folder / f"cpu-{placement.rank}.json").write_text(json.dumps(seconds), encoding="utf-8")


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Nothing on standard output, not from forked workers either."""
    kept, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)


def step_costs(rounds: int) -> dict[str, dict[str, Any]]:
    """CPU seconds a step, of all ranks together, of each variant on each layout, in turns."""
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for layout, degrees in LAYOUTS.items():
            for variant, flags in VARIANTS.items():
                config = run_of(*RUN, *degrees, *flags)
                ranks = config.parallelism.total_ranks(1)
                with tempfile.TemporaryDirectory() as name:
                    folder = Path(name)
                    with silent():
                        code = run_workers(functools.partial(timed, config, folder), ranks, folder)
                    assert code == 0, f"{layout}, {variant}: exit code {code}"
                    rows = [json.loads((folder / f"cpu-{rank}.json").read_text()) for rank in range(ranks)]
                found.setdefault((layout, variant), []).extend(
                    sum(step) for step in list(zip(*rows, strict=True))[WARM:]
                )
    costs: dict[str, dict[str, Any]] = {}
    for (layout, variant), values in found.items():
        low, middle, high = statistics.quantiles(values, n=4)
        costs.setdefault(layout, {})[variant] = {"cpu_seconds": middle, "quartiles": [low, high]}
    for of_layout in costs.values():
        for cost in of_layout.values():
            cost["ratio"] = cost["cpu_seconds"] / of_layout["default"]["cpu_seconds"]
    return costs


def said(*arguments: str) -> dict[str, Any]:
    """What a module prints as JSON, called with arguments."""
    done = subprocess.run([sys.executable, "-m", *arguments, "--json"], stdout=subprocess.PIPE, check=True)
    return {"argv": list(arguments), **json.loads(done.stdout)}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--kills", type=int, default=25)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    record: dict[str, Any] = {"command": ["benchmarks/survival.py", *sys.argv[1:]]}
    with tempfile.TemporaryDirectory() as folder:
        record["checkpoint"] = said("benchmarks.checkpoint", "--folder", folder, "--gib", str(options.gib))
        record["chaos"] = {
            name: said(
                *("crius", "verify", "chaos", "--kills", str(options.kills), "--seed", "1", *flags),
                *("--job.run_dir", f"{folder}/chaos-{number}"),
            )
            for number, (name, flags) in enumerate(CHAOS.items())
        }
    record["step"] = step_costs(options.rounds)
    record["machine"] = BenchMachine.of(torch.device("cpu")).as_dict()  # after the last fork: it runs torch
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
