"""A Qwen3 with experts on a CPU: Crius beside transformers' experts, and expert parallelism beside one process.

    python -m benchmarks.experts [--rounds N] [--steps N] [--only NAMES] [--out FILE] [flags of crius train]

The same model of 10.5 million parameters (16 experts, of which a token visits 4), the same weights, tokens and AdamW,
in turns, one thread a process. transformers' model runs in a plain loop, without its Trainer, with each way that it has
to compute experts on a CPU; ``batched_mm`` is left out, which took 75 times as long. Exit code 1 where losses disagree
or a contestant failed.
"""

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.bench_cpu import disagreements, first_weights, write_task
from benchmarks.command import parser_of, positive, receipt, write_result
from benchmarks.turns import Contestant, Outcome, median_ratio, row, table, take_turns
from crius.config.run import RunConfig
from crius.models import registry
from crius.models.huggingface import config_of
from crius.tools.bench.machine import BenchMachine
from crius.train.inputs import describe_model

PEERS = Path(__file__).parent / "peers"
MODEL = {
    **{"model.name": "qwen3_moe", "model.flavor": "debug", "model.dim": 256, "model.num_layers": 4},
    **{"model.num_heads": 8, "model.num_kv_heads": 4, "model.head_dim": 32, "model.ffn_dim": -1},
    **{"model.num_experts": 16, "model.top_k": 4, "model.expert_ffn_dim": 192},
    "moe.aux_loss": "none",  # as the model of transformers is trained
}
WAYS = ("grouped_mm", "eager")
SHARD, EXPERT = "--parallelism.data_parallel_shard_degree", "--parallelism.expert_parallel_degree"
LAYOUTS = {"crius": (1, 1), "crius fsdp2_ep2": (2, 2), "crius fsdp2": (2, 1)}
"""Shard and expert degree."""
WARMUP = 5


def write_model(config: RunConfig, folder: Path) -> None:
    """The weights that Crius starts with, as a folder of Hugging Face."""
    facts, family = describe_model(config), registry.families()[config.model.name]
    tensors = {name: weight.contiguous() for name, weight in first_weights(config).items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {**dataclasses.asdict(config.model), **dataclasses.asdict(facts.config), "rope_scaling": "none"}
    (folder / "config.json").write_text(json.dumps(config_of(family, sizes)), encoding="utf-8")


def contestants(folder: Path, flags: list[str]) -> list[Contestant]:
    """Crius on each layout, and transformers in each way, one thread a process."""
    environ = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} | {"HF_HUB_OFFLINE": "1"}
    ours = [sys.executable, "-m", "benchmarks.train_job", *flags, "--warmup", str(WARMUP)]
    theirs = [sys.executable, "-m", "benchmarks.peers.hf_experts", str(folder / "task.json")]
    layouts = {
        name: ["--training.local_batch_size", "-1", SHARD, str(shards), EXPERT, str(experts)]
        for name, (shards, experts) in LAYOUTS.items()
    }
    return [
        *(
            Contestant(name, [*ours, *degrees, "--job.run_dir", str(folder / name.replace(" ", "-"))], environ)
            for name, degrees in layouts.items()
        ),
        *(Contestant(f"transformers {way}", [*theirs, way], environ) for way in WAYS),
    ]


def ratios(outcomes: list[Outcome]) -> dict[str, float]:
    """Times of the others over Crius's, medians of the ratios of the rounds."""
    alone, *others = outcomes
    return {
        f"{other.name}, {key}": round(median_ratio(other, alone, name), 3)
        for other in others
        for key, name in (("CPU seconds", "cpu_seconds"), ("wall", "wall_seconds"))
    }


def main(argv: list[str] | None = None) -> int:
    """Read the command line and compare."""
    parser = parser_of(__doc__, prints_json=False)
    parser.add_argument("--rounds", type=positive, default=10, help="turns of each contestant")
    parser.add_argument("--steps", type=positive, default=2, help="of a turn")
    parser.add_argument("--only", default="", help="names of contestants beside the first, joined by commas")
    arguments, flags = parser.parse_known_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sizes = [part for name, value in MODEL.items() for part in (f"--{name}", str(value)) if value != -1]
    flags = ["--config", str(PEERS / "crius.toml"), *sizes, *flags]
    with tempfile.TemporaryDirectory(prefix="crius-experts-") as scratch:
        folder = Path(scratch)
        flags = write_task(folder, flags, WARMUP + arguments.rounds * arguments.steps, WARMUP, write_model)
        first, *others = contestants(folder, flags)
        wanted = [one for one in others if not arguments.only or one.name in arguments.only.split(",")]
        outcomes = take_turns([first, *wanted], rounds=arguments.rounds, steps=arguments.steps, say=lambda line: None)
    problems = [f"{outcome.name}: {outcome.failure}" for outcome in outcomes if outcome.failure]
    if not problems:
        problems = disagreements(outcomes)
        print("\n".join(table(outcomes)))
    machine = BenchMachine.of(torch.device("cpu"))
    print("\n".join([*problems, str(machine)]))
    found: dict[str, Any] = {} if problems else ratios(outcomes)
    print(json.dumps(found))
    if arguments.out:
        result = {**receipt("experts"), "machine": machine.as_dict(), "rounds": arguments.rounds, "ratios": found}
        write_result(
            arguments.out, {**result, "problems": problems, "contestants": [row(one, outcomes[0]) for one in outcomes]}
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
