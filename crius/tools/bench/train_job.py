"""The real train job as a contestant: its loop is held between turns, nothing else of it is changed."""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from crius.config.operation import CheckpointConfig
from crius.config.run import RunConfig
from crius.launch.environment import single_placement
from crius.launch.local import run_single, run_workers
from crius.metrics.device import peak_tflops
from crius.metrics.record import Record, StepMetrics
from crius.parallel.runtime import World
from crius.tools.bench.contestant import Channel, Turns
from crius.tools.bench.machine import Machine
from crius.train import job
from crius.train.inputs import describe_model
from crius.train.loop import Loop
from crius.train.tools import Tools
from crius.units import GIB


def train_job(config: RunConfig, run_dir: Path, num_ranks: int, warmup: int) -> int:
    """Train ``config`` in turns, as ``crius train`` does, but save nothing: one rank in this process, more in workers.

    Args:
        config: the run; its rules have been checked.
        run_dir: folder of the run.
        num_ranks: of the run.
        warmup: steps before the contestant is ready.

    Returns:
        The exit code.
    """
    config = dataclasses.replace(config, checkpoint=CheckpointConfig(enable=False))
    prepare = functools.partial(_held, Channel(), warmup)
    target = functools.partial(job.run, config, run_dir, time.monotonic(), tools=Tools(prepare=prepare))
    if num_ranks > 1:
        return run_workers(target, num_ranks, run_dir)
    return run_single(target, single_placement(), run_dir)


def run_facts(config: RunConfig, device: torch.device, num_ranks: int, tokens_per_step: int) -> dict[str, Any]:
    """What the driver has to know of a run to make rates of its times."""
    facts = describe_model(config)
    return {
        "machine": Machine.of(device).as_dict(),
        "threads_environ": os.environ.get("OMP_NUM_THREADS", ""),
        "num_ranks": num_ranks,
        "tokens_per_step": tokens_per_step,
        "parameters": facts.num_parameters,
        "flops_per_token": facts.flops_per_token((config.training.seq_len + 1) / 2),
        "peak_tflops": config.metrics.peak_tflops or peak_tflops(device),
    }


class _Reports:
    """Collects what the run reports, as a sink of it.

    Args:
        data_seconds: time that the run has waited for data so far.
        device: of this rank.
    """

    def __init__(self, data_seconds: Callable[[], float], device: torch.device) -> None:
        self._data_seconds, self._device = data_seconds, device
        self._losses: list[tuple[int, float]] = []
        self._before = self._peak_gib = 0.0

    def write(self, record: Record) -> None:
        """See ``Sink``."""
        if isinstance(record, StepMetrics):
            self._losses.append((record.step, record.loss))
            self._peak_gib = max(self._peak_gib, record.memory_gib)  # which starts anew with each record

    def close(self) -> None:
        """See ``Sink``."""

    def losses(self) -> list[tuple[int, float]]:
        """Of the reports since the last call."""
        new, self._losses = self._losses, []
        return new

    def turn(self) -> dict[str, float]:
        """Seconds that this rank has waited for data since the last call, and its peak memory on the device so far."""
        waited = self._data_seconds()
        new, self._before = waited - self._before, waited
        if self._device.type == "cuda":
            self._peak_gib = max(self._peak_gib, torch.cuda.max_memory_allocated(self._device) / GIB)
        return {"data_seconds": new, "peak_gib": self._peak_gib}


class _RanksChannel:
    """A ``Channel`` of all ranks: the first one speaks, with the CPU seconds and the memory of all of them."""

    def __init__(self, channel: Channel, ranks: World, reports: _Reports) -> None:
        self._channel, self._ranks, self._reports = channel, ranks, reports

    def answer(self, words: Mapping[str, Any]) -> None:
        """See ``Channel``."""
        own = {key: words.get(key, 0.0) for key in ("cpu_seconds", "peak_rss_mib")} | self._reports.turn()
        parts = self._ranks.gather_json(own)
        together = {
            "cpu_seconds": sum(part["cpu_seconds"] for part in parts),
            "peak_rss_mib": sum(part["peak_rss_mib"] for part in parts),
            "peak_gib": max(part["peak_gib"] for part in parts),
            "data_seconds": max(part["data_seconds"] for part in parts),
        }
        if self._ranks.rank == 0:
            self._channel.answer({**words, **together})

    def order(self) -> int:
        """See ``Channel``."""
        number: int = self._ranks.gather_json(self._channel.order() if self._ranks.rank == 0 else 0)[0]
        return number


def _held(channel: Channel, warmup: int, loop: Loop) -> Loop:
    """``loop``, held between turns after what follows each of its steps anyway."""
    ranks = loop.world
    reports = _Reports(lambda: loop.ledger.seconds.get("data", 0.0), ranks.device)
    if ranks.rank == 0:
        loop.reports.sinks.append(reports)
    batch = loop.loader.global_batch_size
    facts = run_facts(loop.config, ranks.device, ranks.size, batch * loop.config.training.seq_len)

    def settle() -> None:
        loop.reports.finish()  # of a GPU they come a step late
        wait_for(ranks.device)

    turns = Turns(_RanksChannel(channel, ranks, reports), warmup, facts, settle)

    def after_step(step: int, done: int) -> None:
        if not turns.after_step(reports.losses):
            raise SystemExit(0)

    loop.after_step.append(after_step)
    return loop


def wait_for(device: torch.device) -> None:
    """Wait until ``device`` has done what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
