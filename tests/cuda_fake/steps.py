"""Some steps of the real training loop on fake tensors of device cuda. All that these tests know of Crius is here.

The job is assembled as ``crius train`` does it, with three things in other places: the ranks are a fake process group,
weights are allocated and not drawn, and an oracle tells how many rows go to which experts, which is noted.
"""

import contextlib
import functools
import importlib
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import num_ranks, parse

from crius.checkpoint.tensors import StagedPlanner
from crius.config.layout import Layout
from crius.config.run import RunConfig
from crius.host import Machine
from crius.kernels import choice
from crius.metrics.ledger import TimeLedger
from crius.parallel.allocate import allocate
from crius.parallel.expert import AllToAllDispatch
from crius.parallel.mesh import build_mesh
from crius.parallel.runtime import World, fake_world
from crius.quantize.convert import usable_torchao
from crius.tools.dry_run.memory import MemoryTimeline
from crius.tools.dry_run.recorder import collective
from crius.tools.dry_run.run import _axes, dry_run
from crius.tools.dry_run.splits import foretell
from crius.train import build, job
from crius.train.checkpoints import Parts
from crius.train.inputs import describe_model, open_run_corpus, resolve
from crius.train.setup import decide, run_kernels
from cuda_fake.device import CUDA, WAITS, FakeFactories, FakeMode
from cuda_fake.watch import Watch

STEPS = 3
STEADY = 2
"""The step that tests look at: the first one makes state, the last one reports."""

_SETTINGS = {
    **{"model.num_layers": 2, "training.seq_len": 128, "training.global_batch_size": 8, "training.steps": STEPS},
    **{"training.mixed_precision_param": "bfloat16", "validation.interval": 0, "training.device": "cuda"},
    "activation_checkpoint.mode": "none",
}


@dataclass(frozen=True)
class _Ranks(World):
    """All of them say the same words."""

    def gather_json(self, value: Any) -> list[Any]:
        return [value] * self.size


def preload() -> None:
    """Import what the cases need, so that their forks have it."""
    importlib.import_module("torch._dynamo")
    with usable_torchao():
        importlib.import_module("crius.quantize.backend")
    with FakeMode():
        torch.empty(2, device=CUDA) + 1


def dry_run_peak(flags: list[str]) -> int:
    """Bytes of rank 0 at the peak of a step, as ``crius train --dry_run`` counts them."""
    config = _config(flags)
    report = dry_run(config, num_ranks(config), 0, time.monotonic(), extrapolate=False)
    return report.ranks[0].peak.total()


def _config(flags: list[str]) -> RunConfig:
    given = {flag.removeprefix("--") for flag in flags}
    small = [part for name, value in _SETTINGS.items() if name not in given for part in (f"--{name}", str(value))]
    return parse([*([] if "compile.enable" in given else ["--compile.no_enable"]), *small, *flags])


def run(flags: list[str], rank: int, folder: str, *, stages: bool = False) -> dict[str, Any]:
    """Train for ``STEPS`` steps as ``rank`` of the layout that ``flags`` ask for; what the steady step did.

    Args:
        flags: of ``crius train``.
        rank: from 0.
        folder: of the run.
        stages: what a checkpoint has is copied to the host at the beginning of the steady step.
    """
    config = resolve(_config(flags), Machine(device="cuda"), rows_are_given=True).config
    torch.use_deterministic_algorithms(bool(config.debug.deterministic))
    logging.getLogger("crius").setLevel(logging.WARNING)
    with contextlib.ExitStack() as stack:
        alone = stack.enter_context(fake_world(rank, num_ranks(config)))
        ranks = _Ranks(alone.rank, alone.size, CUDA)
        layout = Layout.of(config.parallelism, ranks.size)
        stack.enter_context(choice.applied(run_kernels(config, CUDA)))
        facts = describe_model(config)
        mesh = build_mesh(layout, "cuda", has_experts=facts.num_experts > 0)
        config = decide(config, facts, Machine(device="cuda"), ranks, None)
        part = job.Job(config, facts, mesh, ranks, is_loaded=True)  # weights are allocated alone
        timeline = MemoryTimeline()
        axes = _axes(mesh)
        watch = Watch(timeline, functools.partial(_on_axis, axes))
        fake = FakeMode()
        stack.enter_context(_weights_are_fake(fake, watch, timeline, stack))
        corpus = open_run_corpus(config, layout.batch)
        WAITS.step, WAITS.seen, WAITS.order = 1, [], []
        with FakeFactories(fake):
            loop = job.assemble(part, corpus, Path(folder), TimeLedger(time.monotonic()), stack)
        if loop.reports.experts:  # the counts have no numbers, which would not add up
            loop.reports.experts.taken = lambda found: {name: found[name] for name in ("loss", "grad_norm")}
        asked = Counter[int]()
        for stage in loop.state.parts:
            foretell(stage, 1.0)
            for module in stage.modules():
                if isinstance(module, AllToAllDispatch):
                    module.read_splits = functools.partial(_noted, asked, module.read_splits)

        def after_step(step: int, done: int) -> None:
            watch.next_step()
            WAITS.step = step + 1
            if stages and WAITS.step == STEADY:
                parts = Parts(loop.state, loop.guard, loop.loader, "", loop.ledger, corpus.tokenizer)
                planner.set_up_planner(parts.tensors())
                planner._plan = planner.create_local_plan()  # of all ranks together there is none: the others are fake
                planner.stage()
                loop.guard.before_change = planner.before_change

        planner = StagedPlanner()
        watch.next_step()
        loop.after_step.append(after_step)
        loop.run()
    seen = watch.steps[STEADY]
    peaks = [sum(peak.values()) for label, _, peak in timeline.peaks() if label == (str(STEADY),)]
    return {
        **vars(seen),
        "peak": max(peaks),
        "splits": asked[STEADY],
        "waits": [step for when, step in WAITS.seen if when == STEADY],
        "order": [what for when, *what in WAITS.order if when == STEADY],
    }


def _noted(asked: Counter[int], answer: Any, splits: torch.Tensor, rows: int) -> Any:
    asked[WAITS.step] += 1
    return answer(splits, rows)


def _on_axis(axes: dict[str, str], *operator: Any) -> tuple[str, str, int] | None:
    found = collective(*operator)
    return found and (found[0], axes.get(found[1], found[1]), found[2])


@contextlib.contextmanager
def _weights_are_fake(
    fake: FakeMode, watch: Watch, timeline: MemoryTimeline, stack: contextlib.ExitStack
) -> Iterator[None]:
    """Enter the fake mode when the first part is laid out: the mesh and ``fully_shard`` do not work inside it."""

    def materialize(part: torch.nn.Module, rules: Any, world: World, config: Any, *, draws: bool) -> None:
        if not watch.is_on:
            watch.is_on = True
            for mode in (fake, watch, timeline.watching_resizes()):
                stack.enter_context(mode)
        allocate(part, "cpu" if config.training.enable_cpu_offload else world.device, buffers=world.device)

    original, build.materialize = build.materialize, materialize
    try:
        yield
    finally:
        build.materialize = original
