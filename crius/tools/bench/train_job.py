"""Contestants: the real train job, paused between turns, and a plain PyTorch loop without a framework.

The loop has the same model, weights, batches and optimizer: it shows the cost of a step by itself.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crius.config.resolve import BatchSizes, loss_chunks
from crius.config.run import RunConfig
from crius.data.loader import BatchLoader
from crius.errors import ConfigError
from crius.launch.environment import Placement, single_placement
from crius.launch.local import run_single, run_workers
from crius.metrics.device import peak_tflops
from crius.metrics.record import Record, StepMetrics
from crius.models import registry
from crius.models.moe import MixtureOfExperts
from crius.optim.build import WarmupStableDecay, build_optimizer
from crius.parallel.allocate import allocate
from crius.parallel.compile import compile_blocks
from crius.parallel.init import init_parameters, init_rules
from crius.tools.bench.contestant import Channel, Turns
from crius.tools.bench.machine import Machine, wait_for
from crius.tools.plan.fit import fit
from crius.train import job
from crius.train.build import set_up_balance, set_up_loss
from crius.train.inputs import describe_model, open_run_corpus, run_batch_sizes
from crius.train.job import set_up_torch
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
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, enable=False))
    prepare = functools.partial(_held, Channel(), warmup)
    target = functools.partial(job.run, config, run_dir, time.monotonic(), tools=Tools(fit=fit, prepare=prepare))
    if num_ranks > 1:
        return run_workers(target, num_ranks, run_dir)
    return run_single(target, single_placement(), run_dir)


def run_facts(config: RunConfig, device: torch.device, num_ranks: int, tokens_per_step: int) -> dict[str, Any]:
    """Facts about a run that the driver needs to turn its times into rates."""
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
        self._losses: list[tuple[int, float]] = []
        self._waited = self._peak_gib = 0.0

    def write(self, record: Record) -> None:
        """See ``Sink``."""
        if isinstance(record, StepMetrics):
            self._losses.append((record.step, record.loss))
            self._peak_gib = max(self._peak_gib, record.memory_gib)  # which restarts with each record

    def close(self) -> None:
        """See ``Sink``."""

    def losses(self) -> list[tuple[int, float]]:
        """Losses of the reports since the last call."""
        new = self._losses
        self._losses = []
        return new

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
    batch = loop.loader.global_batch_size
    facts = run_facts(loop.config, ranks.device, ranks.size, batch * loop.config.training.seq_len)

    def settle() -> None:
        loop.reports.finish()  # on a GPU they come a step late
        wait_for(ranks.device)

    turns = Turns(together, warmup, facts, settle)

    def after_step(step: int, done: int) -> None:
        if not turns.after_step(together.losses):
            raise SystemExit(0)

    loop.after_step.append(after_step)
    return loop


def check_bare(config: RunConfig, num_ranks: int) -> None:
    """Raise ConfigError if the plain loop cannot compute what ``config`` asks for."""
    training = config.training
    dense = config.quantize.dense
    asked = {
        f"{num_ranks} ranks": num_ranks > 1,
        f"training.mixed_precision_param {training.mixed_precision_param}": training.mixed_precision_param
        != training.dtype,
        "training.enable_cpu_offload": training.enable_cpu_offload,
        "training.reproducible": training.reproducible,
        f"activation_checkpoint.mode {config.activation_checkpoint.mode}": config.activation_checkpoint.mode != "none",
        f"optimizer.name {config.optimizer.name}": config.optimizer.name != "adamw",
        f"optimizer.state_dtype {config.optimizer.state_dtype}": config.optimizer.state_dtype != "float32",
        "quantize.dense": dense.float8.enable or dense.mxfp8.enable,
        f"model.attention_mask {config.model.attention_mask}": config.model.attention_mask != "causal",
    }
    if found := ", ".join(name for name, is_asked in asked.items() if is_asked):
        raise ConfigError(
            f"the bare loop does not support {found}.",
            where="--overhead",
            why="it has the model and AdamW only, on one device in one precision",
            fix=f"{training.dtype}, --activation_checkpoint.mode none, defaults for the others; or no --overhead",
        )


def bare_loop(config: RunConfig, run_dir: Path, warmup: int) -> int:
    """Train in turns without ``crius.train``'s loop: forward, backward, clipping, AdamW, on prepared batches.

    The model, its kernels and its compilation are those of the run. There is no FSDP, no guard, no report.

    Args:
        config: the run, see ``check_bare``; as many batches as it has steps are read before the first.
        run_dir: folder of the logs.
        warmup: steps before the contestant is ready.

    Returns:
        The exit code.
    """
    return run_single(functools.partial(_run_bare, config, warmup, Channel()), single_placement(), run_dir)


def _run_bare(config: RunConfig, warmup: int, channel: Channel, placement: Placement) -> None:
    device = set_up_torch(config, placement)
    sizes = run_batch_sizes(config, 1)
    batches = _batches(config, sizes, device)
    model = _model(config, device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = _adamw(config, model)
    schedule = WarmupStableDecay(config.lr_scheduler, config.training.steps)
    chunks = loss_chunks(config, describe_model(config).vocab_size, "cuda" if device.type == "cuda" else "cpu")
    set_up_loss(model, chunks, config)
    set_up_balance(model, config, sizes.total)
    experts = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    tokens = sizes.total * config.training.seq_len  # all of them count: only validation is padded
    turns = Turns(channel, warmup, run_facts(config, device, 1, tokens), settle=functools.partial(wait_for, device))
    done: list[Tensor] = []

    def losses() -> list[tuple[int, float]]:
        first = step - len(done) + 1
        found = [(first + index, loss.item()) for index, loss in enumerate(done)]
        done.clear()
        return found

    step = 0
    for step, microbatches in enumerate(batches, start=1):
        total = torch.zeros((), dtype=torch.float64, device=device)
        for inputs, labels in microbatches:
            loss = model(inputs, labels_BT=labels) / tokens
            loss.backward()
            total += loss.detach()
        if config.training.max_norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, config.training.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * schedule.factor(step - 1)
        optimizer.step()
        optimizer.zero_grad()
        for layer in experts:
            layer.after_update()
            layer.load.zero_()
        done.append(total)
        if not turns.after_step(losses):
            return


def _batches(config: RunConfig, sizes: BatchSizes, device: torch.device) -> list[list[tuple[Tensor, Tensor]]]:
    """Tokens and labels ``(B, T)`` of all microbatches of all steps."""
    loader = BatchLoader(
        open_run_corpus(config, 1).train, global_batch_size=sizes.total, rank=0, num_ranks=1, prefetch=0
    )
    steps = [next(loader).to(device) for _ in range(config.training.steps)]
    loader.close()
    return [[(part.tokens_BT, part.labels_BT) for part in batch.microbatches(sizes.local)] for batch in steps]


def _model(config: RunConfig, device: torch.device) -> nn.Module:
    facts = describe_model(config)
    with torch.device("meta"):
        model = registry.build(facts)
    model = model.to(getattr(torch, config.training.dtype))
    allocate(model, device)
    init_parameters(model, init_rules(facts), config.debug.seed)
    if config.compile.enable:
        compile_blocks(model, facts.plan, config.compile)
    return model


def _adamw(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """torch's own, with the groups of the run; ``peak`` of a group is what its learning rate is a share of."""
    plan = describe_model(config).plan
    built = build_optimizer(model.named_parameters(), plan, config.optimizer, seed=config.debug.seed)
    groups = [
        {"params": group["params"], "weight_decay": group["weight_decay"], "peak": group["lr"]}
        for group in built.param_groups
    ]
    how = {"foreach": config.optimizer.implementation == "foreach", "fused": config.optimizer.implementation == "fused"}
    betas = (config.optimizer.beta1, config.optimizer.beta2)
    return torch.optim.AdamW(groups, betas=betas, eps=config.optimizer.eps, **how)
