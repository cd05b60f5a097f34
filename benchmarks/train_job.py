"""Crius as a contestant: the real train job, paused between turns, or a plain PyTorch loop without a framework.

    python -m benchmarks.train_job [--warmup N] [--bare] [flags of crius train]

It trains as the process that started it asks on stdin, see ``benchmarks.contestant``, and saves nothing. The loop has
the model, weights, batches and optimizer of the run: it shows the cost of a step by itself.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.command import end_with, facts_from, parse, positive
from benchmarks.contestant import Channel, Turns
from benchmarks.parts import batches, first_model, run_facts
from crius.cli.app import run_dir
from crius.config.facts import Facts
from crius.config.resolve import loss_chunks
from crius.config.run import RunConfig
from crius.config.toml_file import flatten
from crius.errors import ConfigError
from crius.launch.environment import Placement, single_placement
from crius.launch.local import run_single, run_workers
from crius.metrics.record import Record, StepMetrics
from crius.models.moe import MixtureOfExperts
from crius.optim.build import WarmupStableDecay, build_optimizer
from crius.parallel.compile import compile_blocks
from crius.tools.bench.machine import wait_for
from crius.tools.plan.fit import fit
from crius.train import job
from crius.train.build import set_up_balance, set_up_loss
from crius.train.inputs import describe_model, run_batch_sizes
from crius.train.loop import Loop
from crius.train.tools import Tools
from crius.units import GIB


class _AllRanks:
    """The ranks of a run as one contestant: a sink of its reports, and a ``Driver`` whose first rank speaks for all.

    Args:
        channel: to the driver.
        loop: of this rank.
    """

    def __init__(self, channel: Channel, loop: Loop) -> None:
        self._channel = channel
        self._loop = loop
        self._ranks = loop.world
        self._waited = self._peak_gib = 0.0
        self.turns: Turns

    def write(self, record: Record) -> None:
        """See ``Sink``."""
        if isinstance(record, StepMetrics):
            self.turns.losses.append((record.step, record.loss))
            self._peak_gib = max(self._peak_gib, record.memory_gib)  # which restarts with each record

    def close(self) -> None:
        """See ``Sink``."""

    def answer(self, words: Mapping[str, Any]) -> None:
        """See ``Driver``: with CPU seconds and memory of all ranks, and the longest wait for data since the last."""
        waited = self._loop.ledger.seconds.get("data", 0.0)
        device = self._ranks.device
        if device.type == "cuda":
            self._peak_gib = max(self._peak_gib, torch.cuda.max_memory_allocated(device) / GIB)
        own = {key: words.get(key, 0.0) for key in ("cpu_seconds", "peak_rss_mib")}
        own |= {"peak_gib": self._peak_gib, "data_seconds": waited - self._waited}
        self._waited = waited
        parts = self._ranks.gather_json(own)
        if self._ranks.rank == 0:
            sums = {key: sum(part[key] for part in parts) for key in ("cpu_seconds", "peak_rss_mib")}
            largest = {key: max(part[key] for part in parts) for key in ("peak_gib", "data_seconds")}
            self._channel.answer({**words, **sums, **largest})

    def order(self) -> int:
        """See ``Driver``."""
        number: int = self._ranks.gather_json(self._channel.order() if self._ranks.rank == 0 else 0)[0]
        return number


def _held(channel: Channel, warmup: int, loop: Loop) -> Loop:
    """``loop``, paused between turns, after the usual work at the end of a step."""
    ranks = loop.world
    together = _AllRanks(channel, loop)
    if ranks.rank == 0:
        loop.reports.sinks.append(together)
    tokens = loop.loader.global_batch_size * loop.config.training.seq_len

    def settle() -> None:
        loop.reports.finish()  # on a GPU they come a step late
        wait_for(ranks.device)

    turns = Turns(together, warmup, run_facts(loop.config, ranks.device, ranks.size, tokens), settle)
    together.turns = turns

    def after_step(step: int, done: int) -> None:
        if not turns.after_step():
            raise SystemExit(0)

    loop.after_step.append(after_step)
    return loop


def check_bare(facts: Facts) -> None:
    """Raise ConfigError if the plain loop cannot compute what the run asks for."""
    values = flatten(facts.config)
    wanted = {
        "training.mixed_precision_param": values["training.dtype"],
        "training.enable_cpu_offload": False,
        "training.reproducible": False,
        "activation_checkpoint.mode": "none",
        "optimizer.name": "adamw",
        "optimizer.state_dtype": "float32",
        "quantize.dense.float8.enable": False,
        "quantize.dense.mxfp8.enable": False,
        "model.attention_mask": "causal",
    }
    asked = [f"{name} {values[name]}" for name, value in wanted.items() if values[name] != value]
    asked += [f"{facts.num_ranks} ranks"] if facts.num_ranks > 1 else []
    if asked:
        raise ConfigError(
            f"the bare loop does not support {', '.join(asked)}.",
            where="--overhead",
            why="it has the model and AdamW only, on one device in one precision",
            fix="leave out --overhead, or these flags",
        )


def _run_bare(config: RunConfig, warmup: int, channel: Channel, placement: Placement) -> None:
    """Forward, backward, clipping and AdamW, on prepared batches: no FSDP, no guard, no report.

    The model, its kernels and its compilation are those of the run.
    """
    device = job.set_up_torch(config, placement)
    facts = describe_model(config)
    sizes = run_batch_sizes(config, 1)
    prepared = [
        [(part.tokens_BT, part.labels_BT) for part in batch.to(device).microbatches(sizes.local)]
        for batch in batches(config, config.training.steps)
    ]
    model = first_model(config, device, getattr(torch, config.training.dtype))
    if config.compile.enable:
        compile_blocks(model, facts.plan, config.compile)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    built = build_optimizer(model.named_parameters(), facts.plan, config.optimizer, seed=config.debug.seed)
    # torch's own, with the groups of the run; a learning rate is a share of the group's peak
    groups = [
        {"params": group["params"], "weight_decay": group["weight_decay"], "peak": group["lr"]}
        for group in built.param_groups
    ]
    optimizer = torch.optim.AdamW(
        groups,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.eps,
        foreach=config.optimizer.implementation == "foreach",
        fused=config.optimizer.implementation == "fused",
    )
    schedule = WarmupStableDecay(config.lr_scheduler, config.training.steps)
    set_up_loss(model, loss_chunks(config, facts.vocab_size, "cuda" if device.type == "cuda" else "cpu"), config)
    set_up_balance(model, config, sizes.total)
    experts = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    tokens = sizes.total * config.training.seq_len  # all of them count: only validation is padded
    turns = Turns(channel, warmup, run_facts(config, device, 1, tokens), functools.partial(wait_for, device))
    for step, microbatches in enumerate(prepared):
        total = torch.zeros((), dtype=torch.float64, device=device)
        for inputs, labels in microbatches:
            loss = model(inputs, labels_BT=labels) / tokens
            loss.backward()
            total += loss.detach()
        if config.training.max_norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, config.training.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * schedule.factor(step)
        optimizer.step()
        optimizer.zero_grad()
        for layer in experts:
            layer.after_update()
            layer.load.zero_()
        if not turns.after_step(total):
            return


def main(argv: Sequence[str] | None = None) -> int:
    """Take part: one rank in this process, more in workers."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--warmup", type=positive, default=5, help="steps before it is ready")
    parser.add_argument("--bare", action="store_true", help="the plain loop")
    options, flags = parse(parser, argv)
    facts = facts_from(flags)
    config = facts.config
    folder = run_dir(config, None)
    channel = Channel()
    if options.bare:
        return run_single(functools.partial(_run_bare, config, options.warmup, channel), single_placement(), folder)
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, enable=False))
    tools = Tools(fit=fit, prepare=functools.partial(_held, channel, options.warmup))
    target = functools.partial(job.run, config, folder, time.monotonic(), tools=tools)
    if facts.num_ranks > 1:
        return run_workers(target, facts.num_ranks, folder)
    return run_single(target, single_placement(), folder)


if __name__ == "__main__":
    end_with(main)
