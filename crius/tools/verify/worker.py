"""Work of the ranks of one layout: training on uneven batches as in ``crius train``, and a comparison of the results.

Labels, documents and weights are uneven so that a wrong sum shows. They depend on sample and name, so no layout changes
them.

B batch, T tokens
"""

import contextlib
import dataclasses
import faulthandler
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crius.config.layout import Layout
from crius.config.low_precision import is_enabled
from crius.config.run import RunConfig
from crius.config.training import ActivationCheckpointConfig
from crius.data.loader import IGNORE_INDEX, Batch
from crius.errors import NonFiniteError
from crius.launch.environment import Placement
from crius.launch.report import log_path
from crius.metrics.device import machine_of
from crius.metrics.ledger import TimeLedger
from crius.metrics.record import Record, StepMetrics
from crius.models.description import ModelDescription
from crius.models.layers import CausalAttention, Linear
from crius.models.moe import MixtureOfExperts, Router
from crius.models.plan import match
from crius.parallel.init import Init, Normal, init_parameters, init_rules
from crius.parallel.mesh import build_mesh
from crius.parallel.runtime import World, world
from crius.run_file import open_log
from crius.shards import local_tensor, named_buffers, named_state
from crius.tools.plan.fit import fit
from crius.tools.verify.parameters import Shards, checksums, compare
from crius.train.build import Job, build_model, low_precision
from crius.train.inputs import describe_model, open_run_corpus
from crius.train.job import assemble, set_up_torch
from crius.train.loop import Loop
from crius.train.setup import decide, start_logging

RESULT = "result.json"

KEPT = ((0.0, 1.0), (0.0, 0.06), (0.5, 1.0), (0.9, 1.0), (0.0, 0.7), (0.25, 0.3))
"""Parts of a row that keep their labels, by turns: from, to."""

GAIN = 1.5
"""Size of a projection's output relative to its input. Attention scores then have a standard deviation of about 2."""
BIASES = (0.03, -0.06, 0.0)
"""Factors of a layer's experts, by turns."""


@dataclass(frozen=True)
class WorkerTask:
    """One layout to run.

    Attributes:
        config: the run on this layout.
        run_dir: folder of its logs and of its result.
        seconds: time after which it counts as hung.
        shards: shards of the reference; the reference writes them, and the others compare with them.
        is_reference: whether this run is the reference.
        strict: whether an optimisation that is on and has no effect fails the run.
        nudge: relative size of random changes of the products in low precision.
    """

    config: RunConfig
    run_dir: Path
    seconds: int
    shards: Shards
    is_reference: bool = False
    strict: bool = False
    nudge: float = 0.0


class WorkerRecorder:
    """A sink that keeps the records."""

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []

    def write(self, record: Record) -> None:
        """Keep the record of a step."""
        if isinstance(record, StepMetrics):
            self.steps.append(record)

    def close(self) -> None:
        """Do nothing, because nothing is open."""


def train(task: WorkerTask, placement: Placement) -> None:
    """Train as one rank of ``task`` from uneven weights; rank 0 writes losses, norms and differences to the result.

    Raises:
        CriusError: any error of the training.
    """
    recorder = WorkerRecorder()
    with _session(task, placement) as (job, stack):
        config = task.config
        facts = job.facts
        ranks = job.ranks
        loop = _loop(task, job, stack, recorder)
        if config.lora.is_on:
            uneven_adapters(loop.state.parts, facts, config.debug.seed)
        if not is_enabled(config.quantize.dense):  # it would amplify roundings to 8 bits as much as a fault
            uneven_weights(loop.state.parts, init_rules(facts))
        if task.nudge:
            nudge_products(loop.state.parts, task.nudge)
        place = functools.partial(_place, config, job.sizes.total, loop.place)
        state = named_state(loop.state.parts)
        if task.is_reference and _writes(task, ranks):
            task.shards.save("start", state, ranks.rank)
        counts: list[Any] = []
        if experts := loop.reports.experts:
            loop.after_step.append(lambda *_: counts.append(experts.counts.tolist()))
        dataclasses.replace(loop, place=place).run()
        own = {name: bias.tolist() for name, bias in named_buffers(loop.state.parts, persistent=True)}
        result: dict[str, Any] = {
            "loss": [record.loss for record in recorder.steps],
            "grad_norm": [record.grad_norm for record in recorder.steps],
            "counts": counts,
            "buffers": {name: values for of_rank in ranks.gather_json(own) for name, values in of_rank.items()},
        }
        if task.is_reference and _writes(task, ranks):
            task.shards.save("end", state, ranks.rank)
        copies = ranks.size // job.mesh.layout.pp
        difference = compare(state, facts.state_names, task.shards, copies, ranks, job.copied)
        _write(task, ranks, result | dataclasses.asdict(difference))


def curve(task: WorkerTask, placement: Placement) -> None:
    """Train as one rank of ``task`` as in ``crius train``; rank 0 writes the loss of each step to the result.

    The result also has the numbers of linear layers of the trained model that are and are not in low precision, and the
    planned number. A loss or gradient that is not finite ends the curve, with its error in the result.

    Raises:
        CriusError: any other error of the training.
    """
    recorder = WorkerRecorder()
    ended = ""
    with _session(task, placement) as (job, stack):
        loop = _loop(task, job, stack, recorder)
        ranks = job.ranks
        precision = low_precision(task.config, job.facts, ranks.device.type)
        modules = [module for part in loop.state.parts for module in part.modules() if isinstance(module, Linear)]
        low = list(filter(is_low, modules))
        # ranks with the same part of the model count the same
        counts = ranks.sum(torch.tensor([len(low), len(modules) - len(low)], device=ranks.device))
        converted, kept = (counts // (ranks.size // job.mesh.layout.pp)).tolist()
        try:
            loop.run()
        except NonFiniteError as error:
            ended = error.what
        result = {
            "loss": [record.loss for record in recorder.steps],
            "ended": ended,
            "layers": sorted({type(module).__name__ for module in low}),
            "converted": converted,
            "kept": kept,
            "planned": sum(choice.is_converted for choice in precision.choices) if precision else 0,
            "how": precision.how if precision else task.config.training.mixed_precision_param,
            "device": ranks.device.type,
        }
        _write(task, ranks, result)


def start(task: WorkerTask, placement: Placement) -> None:
    """Draw the weights as one rank of ``task``; rank 0 writes the checksum of each parameter to the result.

    Raises:
        CriusError: any error of building a model.
    """
    with _session(task, placement) as (job, _):
        config = job.config
        if config.activation_checkpoint.mode == "auto":  # it is decided for a batch, but there is none
            config = dataclasses.replace(config, activation_checkpoint=ActivationCheckpointConfig(mode="none"))
        built = build_model(dataclasses.replace(job, config=config))
        names = job.facts.state_names
        _write(task, job.ranks, {"checksums": checksums(named_state(built.parts), names, job.ranks)})


def is_low(linear: Linear) -> bool:
    """Whether a layer multiplies in low precision."""
    return type(linear).multiply is not Linear.multiply


def nudge_products(parts: Sequence[nn.Module], size: float) -> None:
    """Change each number that a layer in low precision gives by a random share of standard deviation ``size``.

    So numbers that lie between two of 8 bits round to the other one, as they do on another layout.
    """
    generator = torch.Generator().manual_seed(0)

    def nudge(_: nn.Module, __: Any, y: Tensor) -> Tensor:
        noise = torch.randn(y.shape, generator=generator)
        return y * (1 + size * noise.to(y))

    for part in parts:
        for module in part.modules():
            if isinstance(module, Linear) and is_low(module):
                module.register_forward_hook(nudge)


def _loop(task: WorkerTask, job: Job, stack: contextlib.ExitStack, recorder: WorkerRecorder) -> Loop:
    corpus = open_run_corpus(job.config, job.mesh.layout.batch)
    machine = machine_of(job.ranks.device, job.ranks.size, job.ranks.size)
    decided = dataclasses.replace(job, config=decide(job.config, job.facts, machine, job.ranks, fit))
    loop = assemble(decided, corpus, task.run_dir, TimeLedger(time.monotonic()), stack, strict=task.strict)
    loop.reports.sinks.append(recorder)
    return loop


@contextlib.contextmanager
def _session(task: WorkerTask, placement: Placement) -> Iterator[tuple[Job, contextlib.ExitStack]]:
    """The connected ranks of a task; all their output goes to their logs, also rank 0's."""
    if placement.rank == 0:  # until now its output went to the console, which has the table
        assert placement.log_dir is not None
        speak_to(log_path(placement.log_dir, 0))
    faulthandler.dump_traceback_later(task.seconds, exit=True, file=2)
    start_logging(placement.rank, task.run_dir, is_own_file=True)
    config = task.config
    device = set_up_torch(config, placement)
    layout = Layout.of(config.parallelism, placement.world_size)
    with contextlib.ExitStack() as stack:
        stack.callback(faulthandler.cancel_dump_traceback_later)
        ranks = stack.enter_context(
            world(placement.rank, placement.world_size, device, placement.rendezvous, task.seconds)
        )
        facts = describe_model(config)
        mesh = build_mesh(layout, device.type, has_experts=facts.num_experts > 0)
        yield Job(config, facts, mesh, ranks), stack


def speak_to(path: Path) -> None:
    """Send all later output of this process, also of C code, to the end of ``path``."""
    log = open_log(path)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log


def _place(config: RunConfig, total: int, place: Callable[[Batch], Batch], batch: Batch) -> Batch:
    uneven = uneven_labels(batch, total)
    return place(uneven_documents(uneven) if config.model.attention_mask == "document" else uneven)


def _writes(task: WorkerTask, ranks: World) -> bool:
    return ranks.rank == 0 or not task.shards.is_whole


def _write(task: WorkerTask, ranks: World, result: dict[str, Any]) -> None:
    if ranks.rank == 0:
        (task.run_dir / RESULT).write_text(json.dumps(result), encoding="utf-8")


def uneven_labels(batch: Batch, global_batch_size: int) -> Batch:
    """``batch`` with most labels masked, unevenly over ranks, microbatches, parts of a sequence and steps.

    In odd steps the second quarter of the global batch has no labels: with accumulation a whole microbatch. In even
    steps every odd sample has none: with an even number of data-parallel ranks half of the ranks.

    Args:
        batch: any rows of one step.
        global_batch_size: sequences per step, over all ranks.
    """
    labels = batch.labels_BT.clone()
    length = batch.labels_BT.shape[1]
    for row, sample in enumerate(batch.sample_ids):
        step, place = divmod(sample, global_batch_size)
        start, stop = (round(share * length) for share in KEPT[sample % len(KEPT)])
        stop = max(stop, start + 1)  # every step has some label
        is_empty = place % 2 == 1 if step % 2 else global_batch_size // 4 <= place < global_batch_size // 2
        if is_empty:
            start = stop = 0
        labels[row, :start] = IGNORE_INDEX
        labels[row, stop:] = IGNORE_INDEX
    return replace(batch, labels_BT=labels)


def uneven_documents(batch: Batch) -> Batch:
    """``batch`` with positions that restart once or twice in each row, at places that differ between rows.

    It has the ends of documents if ``batch`` has them.
    """
    length = batch.tokens_BT.shape[1]
    positions = torch.arange(length, device=batch.tokens_BT.device).repeat(len(batch), 1)
    for row, sample in enumerate(batch.sample_ids):
        for start in sorted({1 + 7 * sample % max(1, length - 1), length // 2 + sample % 2}):
            positions[row, start:] = torch.arange(length - start, device=positions.device)
    moved = replace(batch, positions_BT=positions)
    return moved if batch.ends_BM is None else moved.with_ends(length)


def uneven_adapters(parts: Sequence[nn.Module], facts: ModelDescription, seed: int) -> None:
    """Draw the second factor of each adapter too, so that adapters have an effect, and both factors have gradients.

    Args:
        parts: stages of this rank; all weights except quantized codes are drawn again, with the same values.
        facts: description of the whole model.
        seed: seed of the run.
    """
    drawn = [("layers.*.*.*.lora_B", Normal(facts.dim**-0.5))]
    for part in parts:
        init_parameters(part, [*drawn, *init_rules(facts)], seed)


@torch.no_grad()
def uneven_weights(parts: Sequence[nn.Module], rules: Sequence[tuple[str, Init]]) -> None:
    """Enlarge the weights of attention and of experts in place, and give routers a bias, so that all of them matter.

    A small model starts with attention scores near 0. Every token then sees all earlier tokens alike, and wrong rotary
    positions change the loss by less than the tolerance. The same holds for a token that its experts never see, or for
    a bias in their weights, because their output is small.

    Args:
        parts: stages of this rank, with the weights that ``rules`` drew.
        rules: name patterns and the first values of those weights.
    """
    for part in parts:
        for prefix, module in part.named_modules():
            if isinstance(module, MixtureOfExperts) or any(isinstance(c, CausalAttention) for c in module.children()):
                for name, weight in module.named_parameters(prefix):
                    rule = next((rule for pattern, rule in rules if match(pattern, name)), None)
                    if isinstance(rule, Normal):
                        local_tensor(weight).mul_(max(1.0, GAIN / (rule.std * weight.shape[-1] ** 0.5)))
            if isinstance(module, Router) and hasattr(module, "bias"):
                turns = itertools.islice(itertools.cycle(BIASES), len(module.bias))
                module.bias.copy_(torch.tensor([*turns]))
