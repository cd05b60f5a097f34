"""Runs of the real job inside a test: parse flags, start forked workers, read what they wrote."""

import functools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fork_server
import pytest
import torch

from crius.cli.settings import run_of
from crius.cli.train import run_tools
from crius.config.layout import apply_layout, parse_layout
from crius.config.pipeline import SPLIT_BACKWARD
from crius.config.run import RunConfig
from crius.config.toml_file import differences
from crius.config.training import TrainingConfig
from crius.host import Machine
from crius.launch.crew import Supervision
from crius.launch.environment import Placement
from crius.launch.local import run_workers
from crius.models.config import DecoderConfig
from crius.models.description import ModelDescription
from crius.models.registry import SPECS
from crius.models.spec import described
from crius.parallel.runtime import World
from crius.train import job
from crius.train.inputs import resolve, saved_settings
from crius.train.loop import Loop

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
TEXT = GOLDEN / "tempest.txt"

# 20 steps of the debug model, at half its depth, on the committed text, lr 3e-4 in float32
SMALL = [
    *("--training.steps", "20", "--training.seq_len", "32", "--training.global_batch_size", "16"),
    *("--model.num_layers", "4", "--optimizer.lr", "3e-4", "--data.source", "text", "--data.path", str(TEXT)),
    *("--validation.interval", "20", "--validation.num_samples", "20"),
]


def parse(flags: list[str]) -> RunConfig:
    """The config that ``crius train FLAGS`` would run, but it saves nothing unless a flag or a file asks for that."""
    if not any(flag.startswith(("--checkpoint.", "--config")) for flag in flags):
        flags = [*flags, "--checkpoint.no_enable"]
    return run_of(*flags)


def llama(config: str | DecoderConfig = "debug", **sizes) -> ModelDescription:
    """Llama 3 of a flavor or of a config, with other ``sizes``; those of a flavor that hang on them follow."""
    spec = SPECS["llama3"]
    if isinstance(config, str):
        return spec.describe(config, **sizes)
    config = replace(config, **sizes)
    return described("llama3", config, spec.plan(config), spec.block)


TIED = ("--model.tied_embeddings",)

GPUS = {"llama3_1b": 8, "llama3_8b": 8, "llama3_70b": 64, "llama3_405b": 512}
GPUS |= {"qwen3_0.6b": 8, "qwen3_8b": 8, "qwen3_32b": 32, "qwen3_30b_a3b": 8}
GPUS |= {"smollm2_sft": 1, "smollm2_lora": 1, "qwen3_8b_lora": 1}
"""Recipes of real models, and numbers of 80 GB GPUs that hold them."""


def skip_what_torch_lacks(layout: str) -> None:
    """Skip a test of a layout whose schedule the rules refuse on this torch."""
    if torch.__version__ < "2.13" and any(schedule in layout for schedule in SPLIT_BACKWARD):
        pytest.skip("a split backward needs torch 2.13")


def layout_flags(layout: str, batch: int = 16) -> list[str]:
    """Flags of a layout such as ``hsdp2x2_accum4+full`` for a global batch of ``batch`` sequences."""
    skip_what_torch_lacks(layout)
    base = RunConfig(training=TrainingConfig(global_batch_size=batch))
    changed = differences(base, apply_layout(base, parse_layout(layout)))
    return [part for name, (_, value) in changed.items() for part in (f"--{name}", str(value))]


def num_ranks(config: RunConfig) -> int:
    return config.parallelism.total_ranks(1)


def run_job(
    config: RunConfig,
    run_dir: Path,
    started: float,
    placement: Placement,
    prepare: Callable[[Loop], Loop] = lambda loop: loop,
) -> None:
    """``job.run`` with what the command line decides and hands to it."""
    on_gpu = config.training.device != "cpu" and torch.cuda.is_available()
    machine = Machine(device="cuda" if on_gpu else "cpu", ranks=placement.world_size)
    config = resolve(config, machine, saved=saved_settings(config, run_dir), rows_are_given=True).config
    tools = run_tools(config, run_dir)
    both = replace(tools, prepare=lambda loop: prepare(tools.prepare(loop)))
    job.run(config, run_dir, started, placement, tools=both)


def run(flags: list[str], run_dir: Path, is_supervised: bool = False) -> int:
    """Train; returns the exit code. Supervised, the run starts again after failures as that of ``crius train`` does."""
    config = parse(flags)
    run_dir.mkdir(parents=True, exist_ok=True)
    supervision = Supervision(launch=config.launch, watchdog=config.watchdog) if is_supervised else None
    # one process too is forked: a process group that died here would be collected again, and hang, in later forks
    target = functools.partial(run_job, config, run_dir, time.monotonic())
    return run_workers(target, num_ranks(config), run_dir, supervision=supervision)


def train(flags: list[str], run_dir: Path) -> list[dict]:
    """Train and return the records of ``metrics.jsonl``."""
    code = run(flags, run_dir)
    assert code == 0, f"exit code {code}"
    return read_metrics(run_dir)


def read_metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps_of(records: list[dict]) -> list[dict]:
    return [record for record in records if "loss" in record]


def crius(*arguments: str, timeout: float = 120, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess:
    """The command line in a process of its own, which the fork server starts."""
    return _command([str(fork_server.client()), *arguments], timeout, cwd, environ)


def crius_process(
    *arguments: str, timeout: float = 120, cwd: Path = ROOT, **environ: str
) -> subprocess.CompletedProcess:
    """The command line in a fresh interpreter: seconds slower, for what only a real start shows."""
    return _command([sys.executable, "-m", "crius", *arguments], timeout, cwd, environ)


def _command(command: list[str], timeout: float, cwd: Path, environ: dict[str, str]) -> subprocess.CompletedProcess:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # an empty one would be the current folder
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environ},
        check=False,
    )


class Alone(World):
    """A world of this process without a process group."""

    def sum(self, values):
        return values

    def gather(self, values):
        return values[None].clone()

    def gather_json(self, value):
        return [value]


def commands(text, start):
    """The flags of each command in ``text`` that begins with ``start``."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line)[len(start.split()) :] for line in lines if line.startswith(start)]
