"""One step of the real code on fake tensors, seen by a ``Recorder``: of the whole model, or of one pipeline stage."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import loss_parallel

from crius.data.loader import Batch
from crius.models.plan import match
from crius.optim.build import build_optimizer
from crius.parallel.allocate import allocate
from crius.parallel.fsdp import GradientSync
from crius.parallel.gradients import Gradients
from crius.shards import local_tensor, named_parameters
from crius.tools.dry_run.memory import Values
from crius.tools.dry_run.recorder import Recorder
from crius.tools.dry_run.splits import foretell
from crius.train.build import Job, LowPrecision, build_gradients, build_part, keep_scales, run_optimizer
from crius.train.setup import most_documents
from crius.train.step import Accumulation, Runner, train_step

STAGE_MICROBATCHES = 3


@dataclass(frozen=True)
class DryJob(Job):
    """Common facts of all measurements of a dry run: the run, and how the simulated device would compute it.

    Attributes:
        precision: how linear layers would be converted.
        imbalance: rows for the experts of this rank, divided by the mean of the ranks that share them.
    """

    precision: LowPrecision | None
    imbalance: float = 1.0

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        """Type of the simulated device."""
        return "cpu" if self.config.training.device == "cpu" else "cuda"


def blocks_of(job: Job, model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model or of a stage."""
    pattern = job.facts.plan.block
    return [module for name, module in model.named_modules() if match(pattern, name)]


@dataclass
class _Bench:
    """A model with its optimizer, its shards allocated and their state in place, under the recorder."""

    job: Job
    model: nn.Module
    recorder: Recorder
    parameters: list[tuple[str, nn.Parameter]]
    gradients: Gradients
    optimizer: torch.optim.Optimizer

    def step(self, batch: Batch, runner: Runner) -> Values:
        """Records of a step of ``runner``, with the update as the guard of the real run makes it."""
        self.recorder.phase("begin")
        layout = self.job.mesh.layout
        max_norm = self.job.config.training.max_norm
        train_step(1, batch, runner, self.gradients, self.job.ranks, layout, max_norm)
        self.recorder.phase("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad()
        keep_scales(self.job, [self.model])
        self.recorder.phase("end")
        return self._values()

    def _values(self) -> Values:
        found: Values = Counter()
        found["parameters",] = sum(local_tensor(p).numel() for _, p in self.parameters)
        copied = [p for name, p in self.parameters if name in self.job.copied]
        found["copied",] = sum(local_tensor(p).numel() * p.element_size() for p in copied)
        starts, peaks = self.recorder.peaks()
        for name, group in (("start", starts), ("peak", peaks)):
            found.update({(name, *key, kind): size for key, sizes in group.items() for kind, size in sizes.items()})
        found.update({("flops", *key): count for key, count in self.recorder.flops.items()})
        for phase, counts in self.recorder.collectives.items():
            found.update({("collective", *phase, *key): count for key, count in counts.items()})
        return found


@contextlib.contextmanager
def _bench(job: DryJob, names: Sequence[str], groups: dict[str, str], *, fake: bool = True) -> Iterator[_Bench]:
    """Build, then enter the fake mode: the mesh and ``fully_shard`` do not work inside it."""
    model, *_ = build_part(job, names, job.precision)
    recorder = Recorder(groups)
    recorder.watch(blocks_of(job, model))
    with contextlib.ExitStack() as stack:
        if fake:
            foretell(model, job.imbalance)
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(recorder.running())
        if job.mesh.tp:
            stack.enter_context(loss_parallel())
        allocate(model, "cpu")
        parameters = named_parameters([model])
        recorder.timeline.mark((local_tensor(held) for held in (*model.parameters(), *model.buffers())), "parameters")
        plan = job.facts.plan
        optimizer = build_optimizer(parameters, plan, run_optimizer(job), seed=job.config.debug.seed)
        _fill_state(optimizer, parameters)
        keep_scales(job, [model])  # as the step before leaves them; the collective belongs to it
        recorder.collectives.clear()
        state = (item for held in optimizer.state.values() for item in held.values() if isinstance(item, Tensor))
        recorder.timeline.mark(map(local_tensor, state), "optimizer")
        gradients = build_gradients(job, parameters)
        yield _Bench(job, model, recorder, parameters, gradients, optimizer)


def _fill_state(optimizer: torch.optim.Optimizer, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Make the optimizer create its state, which it does in its first step; the second step is like all others."""
    for _, parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _batch(job: Job, rows: int, recorder: Recorder) -> Batch:
    """A batch with the most documents that attention by documents allows."""
    tokens, labels, positions = (torch.zeros((rows, job.num_tokens), dtype=torch.int64) for _ in range(3))
    recorder.timeline.mark((tokens, labels, positions), "buffers")
    most = most_documents(job.config)
    ends = torch.zeros((rows, most), dtype=torch.int32) if most else None
    return Batch(tokens, labels, positions, tuple(range(rows)), ends)


class _WatchedSync(GradientSync):
    """The real gradient sync, which tells the recorder of each microbatch."""

    def __init__(self, bench: _Bench, num_microbatches: int) -> None:
        super().__init__(bench.model, bench.job.config.parallelism, bench.job.config.training, bench.job.mesh)
        self._recorder = bench.recorder
        self._count = num_microbatches
        self._started = 0

    def start_microbatch(self, is_last: bool) -> None:
        self._recorder.phase("forward", self._started, self._count)
        self._started += 1
        super().start_microbatch(is_last)

    def watch(self, loss: Tensor) -> None:
        """Tell the recorder when the backward of ``loss`` begins."""
        microbatch = self._started - 1
        loss.register_hook(lambda grad: self._recorder.phase("backward", microbatch, self._count))


class _WatchedAccumulation(Accumulation):
    """The real accumulation, which tells the recorder when a backward begins and when the gradients are complete."""

    recorder: Recorder
    sync: _WatchedSync

    def score(self, batch: Batch) -> Tensor:
        loss = super().score(batch)
        self.sync.watch(loss)
        return loss

    def forward_backward(self, batch: Batch, valid_tokens: Tensor) -> Tensor:
        losses = super().forward_backward(batch, valid_tokens)
        self.recorder.timeline.mark([losses], "temporaries")
        self.recorder.phase("clip")
        return losses


def measure_whole(
    job: DryJob, names: Sequence[str], num_microbatches: int, groups: dict[str, str], *, fake: bool = True
) -> Values:
    """One ``train_step`` and update of the modules ``names``: the whole model, or the model without some of its blocks.

    Args:
        job: the run.
        names: modules to keep.
        num_microbatches: microbatches to accumulate over.
        groups: name of each process group to its axis.
        fake: whether to use fake tensors; False uses real ones, with real collectives.
    """
    with _bench(job, names, groups, fake=fake) as bench:
        batch = _batch(job, num_microbatches * job.sizes.local, bench.recorder)
        sync = _WatchedSync(bench, num_microbatches)
        runner = _WatchedAccumulation(bench.model, sync, job.sizes.local)
        runner.recorder = bench.recorder
        runner.sync = sync
        return bench.step(batch, runner)


class _StageRunner:
    """One stage of a pipeline over its microbatches: each forward with its backward, then the gradient sync."""

    def __init__(self, stage: PipelineStage, job: Job, recorder: Recorder, *, splits: bool) -> None:
        self._stage = stage
        self._job = job
        self._recorder = recorder
        self._splits = splits

    def forward_backward(self, batch: Batch, valid_tokens: Tensor) -> Tensor:
        """See ``crius.train.step.Runner``."""
        parts = list(batch.microbatches(self._job.sizes.local))
        self._stage.has_backward = True  # as a schedule sets it; torch 2.15 needs it, and the next line
        finalize: Any = getattr(self._stage.submod, "set_manual_backward_finalization", None)
        if finalize:
            finalize(True)
        for number, part in enumerate(parts):
            self._microbatch(part, valid_tokens, number, len(parts))
        self._recorder.phase("sync")
        self._stage.perform_reduce_grad(1)
        self._recorder.phase("clip")
        return torch.zeros(len(parts), dtype=torch.float64)

    def _microbatch(self, part: Batch, valid_tokens: Tensor, number: int, count: int) -> None:
        stage = self._stage
        timeline = self._recorder.timeline
        source = part.tokens_BT
        if not stage.is_first:
            dtype = getattr(torch, self._job.config.training.mixed_precision_param)
            source = torch.empty(hidden_shape(self._job), dtype=dtype, requires_grad=True)
            timeline.mark([source], "buffers")
        self._recorder.phase("forward", number, count)
        batch = {"positions_BT": part.positions_BT, "labels_BT": part.labels_BT, "ends_BM": part.ends_BM}
        output = stage.forward_maybe_with_nosync(source, **batch)  # kept, as in the schedules
        final = output / valid_tokens if stage.is_last else (output,)
        received = None if stage.is_last else (torch.empty_like(output),)
        timeline.mark(received or (), "buffers")
        arguments: dict[str, Any] = {"stage_output": final, "output_grads": received, "input_values": [source]}
        if not self._splits:
            self._recorder.phase("backward", number, count)
            stage.backward_maybe_with_nosync("full", arguments)
            return
        self._recorder.phase("input", number, count)
        if not stage.is_first:
            arguments["stage_output"] = (final,) if stage.is_last else final
            arguments["param_groups"] = stage.backward_maybe_with_nosync("input", arguments)[1]
        self._recorder.phase("weight", number, count)
        stage.backward_maybe_with_nosync("full" if stage.is_first else "weight", arguments)


def measure_stage(
    job: DryJob, names: Sequence[str], index: int, num_stages: int, groups: dict[str, str], *, splits: bool
) -> Values:
    """A ``train_step`` of three microbatches and update of one stage of a pipeline, as PyTorch's schedules make them.

    The first microbatch gathers the weights, which then stay, and creates gradients; in the second FSDP may begin to
    sum them in another dtype; the third stands for all others.

    Args:
        job: the run.
        names: modules of the stage.
        index: index of the stage.
        num_stages: stages of the pipeline.
        groups: name of each process group to its axis.
        splits: whether the backward is split into the phases ``input`` and ``weight``.
    """
    assert job.mesh.pp is not None
    with _bench(job, names, groups) as bench:
        stage = PipelineStage(bench.model, index, num_stages, job.ranks.device, group=job.mesh.pp.get_group())
        batch = _batch(job, STAGE_MICROBATCHES * job.sizes.local, bench.recorder)
        runner = _StageRunner(stage, job, bench.recorder, splits=splits)
        return bench.step(batch, cast(Runner, runner))


def hidden_shape(job: Job) -> tuple[int, int, int]:
    """Shape of a stage's input: ``(B, T / (cp * tp), D)``."""
    return job.sizes.local, job.num_tokens // job.mesh.layout.tp, job.facts.dim
