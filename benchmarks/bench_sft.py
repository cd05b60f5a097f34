"""Fine-tuning by Crius and by TRL with PEFT: the same weights, conversations, padding and AdamW, float32, in turns.

    .venv/bin/python -m benchmarks.bench_sft smol qa/train.jsonl [--cases full,lora] [--threads 2] [--out FILE]

``smol`` is what ``crius import`` made of SmolLM2-135M, ``qa/train.jsonl`` what ``benchmarks/fine_tune.py write`` made.
Ends with exit code 1 where tokens, labels or the losses of the first 20 steps differ, or Crius is slower than
0.97 x TRL.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import parser_of, positive, receipt, write_result
from benchmarks.parts import batches
from benchmarks.peers.task import SftTask
from benchmarks.turns import Contestant, Outcome, ratios, row, table, take_turns
from crius.cli.settings import run_of
from crius.table import aligned
from crius.tools.bench.machine import BenchMachine

CASES = {"full": ("smollm2_sft", 5e-5), "lora": ("smollm2_lora", 1e-3)}
"""Recipe and learning rate."""

TOLERANCE, COMPARED = 1e-4, 20
"""Losses of so many steps may be so far apart, in nats."""

LEAST_SPEED = 0.97
WARMUP = 4


def crius(*arguments: str) -> None:
    """Run a command; its output is shown where it fails."""
    done = subprocess.run([sys.executable, "-m", "crius", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"crius {' '.join(arguments)}\n{done.stdout}{done.stderr}")


def flags_of(task: SftTask, recipe: str, model: str) -> list[str]:
    """The run of Crius."""
    given = {
        "recipe": recipe,
        "checkpoint.init_from": model,
        "data.source": "jsonl",
        "data.format": "chat",
        "data.path": task.rows,
        "model.attention_mask": "causal",
        "training.seq_len": task.seq_len,
        "training.global_batch_size": task.batch,
        "training.local_batch_size": task.batch,
        "training.steps": task.steps,
        "training.mixed_precision_param": "float32",
        "training.max_norm": task.max_norm,
        "training.device": "cpu",
        "optimizer.lr": task.lr,
        "optimizer.beta1": task.betas[0],
        "optimizer.beta2": task.betas[1],
        "optimizer.weight_decay": 0.0,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.min_lr_factor": 1.0,
        "validation.interval": 0,
        "validation.fraction": 0.0,
        "metrics.log_interval": 1,
    }
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [*flags, "--data.no_packing", "--data.no_shuffle"]


def first_adapters(flags: list[str], folder: Path) -> str:
    """A folder of PEFT with the adapters that Crius starts with, up to one step at a learning rate of 1e-30."""
    changed = ["--optimizer.lr", "1e-30", "--training.steps", "1", "--job.run_dir", str(folder / "first")]
    crius("train", *flags, *changed)
    crius("export", str(folder / "first"), str(folder / "adapters"))
    return str(folder / "adapters")


def samples(flags: list[str], steps: int) -> list[list[list[int]]]:
    """Tokens and labels ``(sequences, T)`` of each batch of Crius; a label is that of the next token."""
    found = []
    for batch in batches(run_of(*flags), steps):
        found += list(map(list, zip(batch.tokens_BT.tolist(), batch.labels_BT.tolist(), strict=True)))
    return found


def differing(ours: list[list[list[int]]], theirs: list[list[list[int]]]) -> int:
    """Conversations of which tokens or labels differ; those of TRL are not shifted and not padded."""
    number = 0
    for (tokens, labels), (ids, own) in zip(ours, theirs, strict=False):  # behind them the next epoch
        shifted = [*own[1:], *[-100] * (len(labels) - len(own) + 1)]
        number += tokens[: len(ids)] != ids or any(tokens[len(ids) :]) or labels != shifted
    return number


def compare_case(name: str, arguments: argparse.Namespace, folder: Path) -> tuple[list[Outcome], list[str]]:
    """What both contestants showed, and what is wrong."""
    recipe, lr = CASES[name]
    steps = WARMUP + arguments.rounds * arguments.steps
    lines = arguments.rows.read_text(encoding="utf-8").splitlines(keepends=True)[: steps * arguments.batch]
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    task = SftTask(
        model=str(folder.parent / "hf"),
        adapters="",
        rows=str(folder / "rows.jsonl"),
        seq_len=arguments.seq_len,
        batch=arguments.batch,
        steps=steps,
        warmup=WARMUP,
        lr=lr,
        betas=(0.9, 0.999),
        max_norm=1.0,
        prepared=str(folder / "prepared.json"),
    )
    flags = flags_of(task, recipe, arguments.model)
    if name == "lora":
        task = dataclasses.replace(task, adapters=first_adapters(flags, folder))
    (folder / "task.json").write_text(json.dumps(dataclasses.asdict(task)), encoding="utf-8")
    environ = {variable: str(arguments.threads) for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    ours = [sys.executable, "-m", "benchmarks.train_job", *flags, "--warmup", str(WARMUP)]
    theirs = [sys.executable, "-m", "benchmarks.peers.trl_sft", str(folder / "task.json")]
    outcomes = take_turns(
        [
            Contestant("crius", [*ours, "--job.run_dir", str(folder / "run")], environ),
            Contestant("trl", theirs, environ),
        ],
        rounds=arguments.rounds,
        steps=arguments.steps,
    )
    problems = [outcome.failure for outcome in outcomes if outcome.failure]
    if not problems:
        number = differing(samples(flags, steps), json.loads((folder / "prepared.json").read_text()))
        problems += [f"{number} of {steps * arguments.batch} conversations have other tokens or labels"] * (number > 0)
    return outcomes, problems


def losses(outcomes: list[Outcome]) -> tuple[list[str], float]:
    """Losses of the first steps side by side, and how far apart they are at most."""
    ours, theirs = (outcome.losses for outcome in outcomes)
    steps = sorted(step for step in ours.keys() & theirs.keys() if step <= COMPARED)
    rows = [("step", "crius", "trl", "apart")]
    rows += [
        (str(step), f"{ours[step]:.6f}", f"{theirs[step]:.6f}", f"{abs(ours[step] - theirs[step]):.1e}")
        for step in steps
    ]
    apart = max(abs(ours[step] - theirs[step]) for step in steps) if len(steps) == COMPARED else float("inf")
    return aligned(rows, left=()), apart


def main(argv: list[str] | None = None) -> int:
    """Read the command line and compare."""
    parser = parser_of(__doc__, prints_json=False)
    parser.add_argument("model", help="run folder of crius import")
    parser.add_argument("rows", type=Path, help="JSONL with prompt and completion")
    parser.add_argument("--cases", default=",".join(CASES), help="joined by commas")
    parser.add_argument("--rounds", type=positive, default=8, help="turns of each contestant in each case")
    parser.add_argument("--steps", type=positive, default=2, help="of a turn")
    parser.add_argument("--batch", type=int, default=8, help="conversations of a step")
    parser.add_argument("--seq_len", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args(argv)
    if WARMUP + arguments.rounds * arguments.steps < COMPARED:
        parser.error(f"{COMPARED} steps are compared: more --rounds or --steps")
    machine, problems, cases = BenchMachine.of(torch.device("cpu")), list[str](), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="crius-sft-") as scratch:
        crius("export", arguments.model, str(Path(scratch) / "hf"), "--dtype", "float32")
        for name in arguments.cases.split(","):
            (folder := Path(scratch) / name).mkdir()
            outcomes, wrong = compare_case(name, arguments, folder)
            problems += [f"{name}: {line}" for line in wrong]
            if any(outcome.failure for outcome in outcomes):
                continue
            shown, apart = losses(outcomes)
            speed = ratios(outcomes[1], outcomes[0], "wall_seconds")
            if not apart <= TOLERANCE:
                problems.append(f"{name}: losses are {apart:.1e} apart, over {TOLERANCE:g}")
            if speed.median < LEAST_SPEED:
                problems.append(f"{name}: {speed.median:.3f} x TRL's speed, below {LEAST_SPEED}")
            print("\n".join([f"{name}, {arguments.threads} threads:", *table(outcomes), "", *shown]))
            low, high = min(speed.seconds), max(speed.seconds)
            print(f"{name}: {speed.median:.3f} x TRL's speed ({low:.3f} to {high:.3f}), losses {apart:.1e} apart\n")
            cases[name] = {
                "apart": apart,
                "speed": speed.as_dict(),
                "contestants": [row(outcome, outcomes[0]) for outcome in outcomes],
            }
    print("\n".join([*problems, str(machine)]))
    if arguments.out:
        settings = {key: getattr(arguments, key) for key in ("rounds", "steps", "batch", "seq_len", "threads")}
        result = {**receipt("bench_sft"), "machine": machine.as_dict(), **settings, "problems": problems}
        write_result(arguments.out, {**result, "cases": cases})
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
