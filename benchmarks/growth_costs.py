"""What ``growth.py`` measures: the same work at several sizes, each size in processes of its own."""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from survival import silent
from torch.nn import functional as F

from crius.cli.settings import run_of
from crius.config.data import DataConfig, TokenizerConfig
from crius.config.run import RunConfig
from crius.data.cache import open_cached
from crius.data.corpus import boundary_of
from crius.data.loader import BatchLoader
from crius.data.tokens import IndexedSource
from crius.launch.environment import Placement
from crius.launch.local import run_workers
from crius.shards import local_tensor
from crius.tokens.tokenizer import build_tokenizer
from crius.train import job
from crius.train.inputs import describe_model
from crius.train.loop import Loop

TEXT = Path("tests") / "golden" / "tempest.txt"  # run from the repository, so that results name no machine
BASE = [
    *("--model.flavor", "debug", "--validation.interval", "0", "--validation.fraction", "0"),
    *("--metrics.log_interval", "1000000", "--data.source", "text", "--data.path", str(TEXT)),
    "--checkpoint.no_enable",
    *("--activation_checkpoint.mode", "none", "--training.device", "cpu", "--training.dtype", "float32"),
]
STEPS, WARM = 8, 2
SHARD = "--parallelism.data_parallel_shard_degree"

Series = dict[str, list[float]]
"""Values of each measurement, one for each size."""


def watched(config: RunConfig, folder: Path, placement: Placement) -> None:
    """Train as one rank, and write what each step took and what the rank holds after it."""
    steps: list[dict[str, float]] = []
    real = Loop._step

    def step(self: Loop) -> None:
        begin = time.process_time()
        real(self)
        seconds = time.process_time() - begin
        steps.append({"cpu": seconds, "rss": resident(), "state": state_bytes(self)})

    Loop._step = step  # type: ignore[method-assign]  # in a forked worker: nobody else sees it
    job.run(config, folder, time.monotonic(), placement)
    (folder / f"steps-{placement.rank}.json").write_text(json.dumps(steps), encoding="utf-8")


def resident() -> float:
    """Bytes of this process in memory."""
    return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def state_bytes(loop: Loop) -> float:
    """Bytes of the weights and of the optimizer's state that this rank holds."""
    optimizer = loop.state.optimizer
    held = [parameter for part in loop.state.parts for parameter in part.parameters()]
    held += [item for state in optimizer.state.values() for item in state.values() if isinstance(item, torch.Tensor)]
    return float(sum(local_tensor(tensor).numel() * tensor.element_size() for tensor in held))


def train(flags: Sequence[str], folder: Path) -> list[list[dict[str, float]]]:
    """Train in forked processes; what ``watched`` wrote, by rank and step."""
    config = run_of(*BASE, *flags)
    ranks = config.parallelism.total_ranks(1)
    with silent():
        code = run_workers(functools.partial(watched, config, folder), ranks, folder)
    assert code == 0, f"{flags}: exit code {code}; see {folder}/logs"
    return [json.loads((folder / f"steps-{rank}.json").read_text()) for rank in range(ranks)]


def in_turns(runs: Sequence[Sequence[str]], rounds: int) -> list[list[list[dict[str, float]]]]:
    """``train`` of each of ``runs`` with the steps of all rounds after the first ``WARM``, taken in turns."""
    found: list[list[list[dict[str, float]]]] = [[] for _ in runs]
    for _ in range(rounds):
        for known, flags in zip(found, runs, strict=True):
            with tempfile.TemporaryDirectory() as name:
                ranks = train(flags, Path(name))
            known.extend([] for _ in range(len(ranks) - len(known)))
            for steps, new in zip(known, ranks, strict=True):
                steps += new[WARM:]
    return found


def cpu_seconds(ranks: list[list[dict[str, float]]]) -> float:
    """The least CPU seconds of all ranks together that a step took: what other work on the machine adds is noise."""
    return min(sum(step["cpu"] for step in steps) for steps in zip(*ranks, strict=True))


def shape(
    *, layers: int = 2, seq_len: int = 128, batch: int = 8, steps: int = STEPS, flavor: str = "debug"
) -> list[str]:
    """Flags of a model and a batch."""
    sizes = {"num_layers": layers, "seq_len": seq_len, "global_batch_size": batch, "steps": steps}
    names = {"num_layers": "model"}
    flags = [part for key, value in sizes.items() for part in (f"--{names.get(key, 'training')}.{key}", str(value))]
    return [*flags, "--model.flavor", flavor]


def sequence_length(lengths: Sequence[int], rounds: int) -> Series:
    """A step of one sequence, attention by itself, and what is left of the step."""
    layers = 2
    whole = [
        cpu_seconds(found) for found in in_turns([shape(layers=layers, seq_len=t, batch=1) for t in lengths], rounds)
    ]
    inner = [layers * attention_seconds(t, rounds) for t in lengths]
    rest = [step - attention for step, attention in zip(whole, inner, strict=True)]
    return {"step": whole, "attention": inner, "rest": rest}


def attention_seconds(seq_len: int, rounds: int) -> float:
    """CPU seconds of causal attention, forward and backward, at the heads of the debug model."""
    facts = describe_model(run_of(*BASE))
    heads = (facts.num_heads, facts.num_kv_heads, facts.num_kv_heads)
    q, k, v = (torch.randn(1, n, seq_len, facts.head_dim, requires_grad=True) for n in heads)

    def once() -> float:
        begin = time.process_time()
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()
        return time.process_time() - begin

    return min(once() for _ in range(2 + 3 * rounds))


def model_size(models: Sequence[tuple[str, int]], rounds: int) -> tuple[list[float], Series]:
    """FLOPs of a step of each flavor and number of layers, and its CPU seconds."""
    runs = [shape(flavor=flavor, layers=layers, batch=4) for flavor, layers in models]
    flops = []
    for flags in runs:
        config = run_of(*BASE, *flags)
        tokens = config.training.global_batch_size * config.training.seq_len
        flops.append(describe_model(config).flops_per_token((config.training.seq_len + 1) / 2) * tokens)
    return flops, {"step": [cpu_seconds(found) for found in in_turns(runs, rounds)]}


def ranks(counts: Sequence[int], rounds: int) -> Series:
    """The same step on 1, 2, ... ranks of FSDP: its CPU seconds, what ranks add to it, and what a rank holds."""
    found = in_turns([[*shape(layers=4), SHARD, str(count)] for count in counts], rounds)
    total = [cpu_seconds(one) for one in found]
    return {"step": total, "state": [max(steps[-1]["state"] for steps in one) for one in found]}


def dry_runs(counts: Sequence[int]) -> Series:
    """What a dry run of 4 layers of 8B counts of a rank: bytes of weights, and bytes that it sends and receives."""
    found: Series = {"weights": [], "traffic": [], "seconds": []}
    for count in counts:
        command = ["train", "--dry_run", "--json", "--model.flavor", "8b", "--model.num_layers", "4", SHARD, str(count)]
        done = subprocess.run([sys.executable, "-m", "crius", *command], stdout=subprocess.PIPE, check=True)
        report = json.loads(done.stdout)
        [stage] = report["stages"]
        found["weights"].append(stage["parameter_bytes"])
        found["traffic"].append(
            sum(row["bytes"] * (count - 1) / count for row in stage["collectives"] if row["axis"] == "fsdp")
        )
        found["seconds"].append(report["seconds"])
    return found


def corpus_files(counts: Sequence[int], rounds: int) -> Series:
    """CPU seconds to open a corpus of so many files the first time and again, to read a batch of it and to resume."""
    found: Series = {"first": [], "again": [], "batch": [], "resume": []}
    for count in counts:
        with tempfile.TemporaryDirectory() as name:
            for key, seconds in _files_cost(count, Path(name), rounds).items():
                found[key].append(seconds)
    return found


def _files_cost(count: int, folder: Path, rounds: int) -> dict[str, float]:
    text = TEXT.read_text(encoding="utf-8")[:2000]
    (folder / "corpus").mkdir()
    for number in range(count):
        (folder / "corpus" / f"{number:06}.txt").write_text(f"{number}\n{text}", encoding="utf-8")
    time.sleep(2.1)  # a younger file would be hashed again, see crius.data.cache.SETTLED_NS
    tokenizer = build_tokenizer(TokenizerConfig())

    def opened(cache: str) -> IndexedSource:
        data = DataConfig(source="text", path=(str(folder / "corpus" / "*.txt"),), cache_dir=str(folder / cache))
        file = open_cached(data, TokenizerConfig(), tokenizer)
        boundary = boundary_of(data, tokenizer)
        end = file.meta.num_tokens
        return IndexedSource(file, 0, end, boundary=boundary, seq_len=64, vocab_size=257, seed=1, shuffle=True)

    first = [timed(lambda number=number: opened(f"cache-{number}")) for number in range(rounds)]
    again = [timed(lambda: opened("cache-0")) for _ in range(rounds)]
    source = opened("cache-0")
    loader = BatchLoader(source, global_batch_size=8, rank=0, num_ranks=1, prefetch=0)
    batch = [timed(lambda: [next(loader) for _ in range(200)]) / 200 for _ in range(rounds)]
    state = loader.state_dict()

    def resume() -> None:
        for _ in range(50):
            other = BatchLoader(source, global_batch_size=8, rank=0, num_ranks=1, prefetch=0)
            other.load_state_dict(state)
            next(other)

    return {
        "first": min(first),
        "again": min(again),
        "batch": min(batch),
        "resume": min(timed(resume) for _ in range(rounds)) / 50,
    }


def timed(work: Callable[[], object]) -> float:
    """CPU seconds of ``work``."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def step_count(counts: Sequence[int]) -> Series:
    """What one run holds and has written after so many steps: memory, and the logs of steps and samples."""
    flags = shape(layers=1, seq_len=16, batch=2, steps=counts[-1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        often = ["--metrics.log_interval", "1", "--checkpoint.enable", "--checkpoint.interval", str(10 * counts[-1])]
        [steps] = train([*flags, *often], folder)
        lines = {
            "samples": (folder / "data" / "samples-rank-0.jsonl").read_bytes().splitlines(keepends=True),
            "metrics": (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True),
        }
    found: Series = {"memory": [steps[count - 1]["rss"] for count in counts]}
    for key, written in lines.items():
        found[key] = [float(sum(map(len, written[:count]))) for count in counts]
    return found


def checkpoint_size(layers: Sequence[int]) -> tuple[list[float], Series]:
    """Parameters of the debug model with so many layers, and bytes of its checkpoint."""
    parameters, sizes = [], []
    for count in layers:
        flags = [
            *shape(layers=count, seq_len=16, batch=1, steps=1),
            "--checkpoint.enable",
            "--checkpoint.interval",
            "1",
        ]
        with tempfile.TemporaryDirectory() as name:
            train(flags, Path(name))
            files = (Path(name) / "checkpoints").rglob("*")
            sizes.append(float(sum(file.stat().st_size for file in files if file.is_file())))
        parameters.append(float(describe_model(run_of(*BASE, *flags)).num_parameters))
    return parameters, {"bytes": sizes}
