"""Layouts that a verb runs, and the config of each."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from crius.config.facts import Facts
from crius.config.layout import OTHER_LOSS, Layout, apply_layout, batch_unit, parse_layout
from crius.config.operation import CheckpointConfig
from crius.config.rules import RULES
from crius.config.run import RunConfig, replace_fields
from crius.errors import ConfigError, CriusError
from crius.host import Machine
from crius.tools.verify.options import OnLayouts
from crius.train.inputs import open_run_corpus, resolve

LEAST_GLOBAL_BATCH = 16

SCHEDULES = ("gpipe", "1f1b", "interleave_1f1b", "interleave_zero_bubble", "zbv_zero_bubble", "dualpipev")

PARITY = (
    "accum4",
    "ddp4",
    "fsdp2",
    "fsdp8",
    "hsdp2x4",
    "fsdp2_accum4+immediate",
    "hsdp2x2_accum4+deferred",
    "fsdp2_accum2+never",
    "fsdp4+reshard2",
    "fsdp2+offload",
    "fsdp2+document",
    "tp2",
    "tp4",
    "tp8",
    "tp2_accum4",
    "fsdp2_tp2",
    "hsdp2x2_tp2",
    "tp2+document",
    *(f"pp{degree}+{schedule}" for degree in (2, 4) for schedule in SCHEDULES),
    "pp2_accum4",
    "pp2_fsdp2",
    "pp2_tp2",
    "pp2_fsdp2_tp2",
    "pp2_fsdp2_tp2+interleave_zero_bubble",
    "pp2+document",
    "cp2",
    "cp4",
    "cp2+ulysses",
    "cp4+ulysses",
    "cp2_accum4",
    "fsdp2_cp2",
    "cp2_tp2",
    "pp2_cp2",
    "cp2+document",
    "1+full",
    "1+selective",
    "1+selective2",
    "fsdp2+full",
    "tp2+selective",
    "cp2+full",
    "pp2+full",
    "1+compile",
    "fsdp2+compile",
    "tp2+compile",
    "pp2+compile",
    "fsdp2+compile+full",
    "1+memory_budget+compile",
    "fsdp4+float8",
    "pp2_tp2+float8",
    "fsdp2_tp2+float8+float8_all_gather",
    "cp2+float8",
    "fsdp4+float8_rowwise",
    "tp2+float8_rowwise",
    "pp2_tp2+mxfp8",
    "ddp2+lora",
    "fsdp2_tp2+lora",
    "hsdp2x2_accum4+lora+deferred",
    "tp8+lora",
    "pp2+lora",
    "pp2+zbv_zero_bubble+lora",
    "cp2+lora",
    "fsdp2+lora+full",
    "fsdp2+lora+compile",
    "fsdp3+nf4",
    "pp2+nf4",
    "fsdp2+int8",
    "cp2+int8",
)
EXPERTS = (
    "accum4",
    "ddp2",
    "fsdp2",
    "fsdp2_ep2",
    "fsdp2_ep2_accum2",
    "fsdp2_ep2_accum2+deferred",
    "fsdp4_ep2",
    "fsdp4_ep4",
    "hsdp2x2",
    "hsdp2x2_ep2",
    "tp2",
    "tp2_ep2",
    "fsdp2_tp2_ep4",
    "cp2",
    "cp2_ep2",
    "cp2_ep2+ulysses",
    "fsdp2_cp2_ep4",
    "pp2",
    "pp2_fsdp2_ep2",
    "pp2_tp2_ep2",
    "pp2_cp2_ep2",
    "pp2_fsdp2_ep2_accum2",
    *(f"pp2_fsdp2_ep2+{schedule}" for schedule in SCHEDULES),
    "1+full",
    "fsdp2_ep2+full",
    "fsdp2_ep2+selective",
    "tp2_ep2+full",
    "pp2_fsdp2_ep2+full",
    "1+compile",
    "fsdp2_ep2+compile",
    "fsdp2_ep2+compile+full",
    "tp2_ep2+compile",
    "pp2_fsdp2_ep2+compile",
    "fsdp2_ep2+document",
    "cp2_ep2+document",
    "fsdp2_ep2+never",
    "fsdp2_ep2+offload",
    "fsdp4_ep2+float8",
    "tp2_ep2+mxfp8",
)
"""Layouts for a model with experts, instead of ``PARITY``."""
INIT = (
    "1",
    "ddp2",
    "fsdp2",
    "fsdp3",
    "fsdp8",
    "hsdp2x2",
    "hsdp2x4",
    "tp2",
    "tp4",
    "tp8",
    "fsdp2_tp2",
    "hsdp2x2_tp2",
    "pp2",
    "pp4",
    "pp4+interleave_1f1b",
    "pp4+zbv_zero_bubble",
    "pp2_fsdp2_tp2",
    "cp2",
    "fsdp2_cp2",
    "cp2_tp2",
    "pp2_cp2",
)
EXPERTS_INIT = (
    "1",
    "ddp2",
    "fsdp2",
    "fsdp3",
    "fsdp2_ep2",
    "fsdp4_ep2",
    "fsdp4_ep4",
    "hsdp2x2_ep2",
    "tp2",
    "tp2_ep2",
    "fsdp2_tp2_ep4",
    "cp2_ep2",
    "pp2",
    "pp2_fsdp2_ep2",
)
COMPILE = ("1", "fsdp2", "tp2", "fsdp2+full")

_MEANINGLESS_ALONE = {
    "parallelism.reshard_after_forward_mode": "default",
    "parallelism.enable_async_tensor_parallel": False,
}


@dataclass(frozen=True)
class LayoutCase:
    """One row of a verb.

    Attributes:
        layout: layout of the row.
        config: the run on it; None if the rules refuse it.
        problems: reasons of the refusal.
    """

    layout: Layout
    config: RunConfig | None
    problems: tuple[CriusError, ...] = ()

    @property
    def refusal(self) -> str:
        """The problems in one line."""
        return " ".join(problem.what for problem in self.problems)

    def check(self, *, with_data: bool = False) -> None:
        """Raise CriusError if the rules refuse it, or with ``with_data`` if the available data does not suffice."""
        if self.config is None:
            raise ConfigError.together(self.problems)
        if with_data and self.config.data.source != "huggingface":  # a stream's threads cannot be forked
            open_run_corpus(self.config, self.layout.batch)


def chosen(options: OnLayouts, default: Sequence[str]) -> list[Layout]:
    """The layouts of ``--layouts a,b,c``, each once; without it the layouts of ``default`` with at most ``--nproc``
    ranks.

    Raises:
        ConfigError: no layout is left.
    """
    if options.layouts:
        return list(dict.fromkeys(parse_layout(text) for text in options.layouts.split(",")))
    found = [layout for layout in map(parse_layout, default) if layout.num_ranks <= options.nproc]
    if not found:
        raise ConfigError(f"--nproc {options.nproc} leaves no layout.", where="command line", fix="--nproc 1 or more")
    return found


def reference_of(layout: Layout) -> Layout:
    """One device with the options of ``layout`` that change the computation."""
    return Layout(options=tuple(option for option in layout.options if option in OTHER_LOSS))


def fixed(config: RunConfig, layouts: Sequence[Layout], steps: int) -> RunConfig:
    """``config`` for a few steps at a fixed learning rate, with one global batch that all ``layouts`` split.

    Raises:
        LayoutError: the schedule file cannot be read.
    """
    changes = {"lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": 0.0}
    return replace_fields(bare(config, layouts, steps), changes)


def bare(config: RunConfig, layouts: Sequence[Layout], steps: int) -> RunConfig:
    """``config`` for ``steps`` of training and nothing else, with one global batch that all ``layouts`` split.

    Raises:
        LayoutError: the schedule file cannot be read.
    """
    changes = {
        "training.steps": steps,
        "training.epochs": -1,
        "training.global_batch_size": shared_batch(config, layouts),
        "validation.interval": 0,
        "metrics.log_interval": 1,
        "metrics.enable_tensorboard": False,
        "metrics.enable_wandb": False,
        "profiler.enable": False,
        "checkpoint": CheckpointConfig(enable=False),
    }
    return replace_fields(config, changes)


def shared_batch(config: RunConfig, layouts: Sequence[Layout]) -> int:
    """Sequences of a global batch that all ``layouts`` split: the batch of ``config``, or else a small one.

    Raises:
        LayoutError: the schedule file cannot be read.
    """
    if config.training.global_batch_size != -1:
        return config.training.global_batch_size
    unit = math.lcm(*(batch_unit(config, layout) for layout in layouts))
    return -(-LEAST_GLOBAL_BATCH // unit) * unit


def case(facts: Facts, config: RunConfig, layout: Layout) -> LayoutCase:
    """``config`` on ``layout``, or why it is refused.

    Args:
        facts: facts about this machine, from any run.
        config: from ``fixed`` or ``bare``.
        layout: requested layout.
    """
    if layout.num_ranks == 1:  # a setting without effect on one device does not refuse the reference
        config = replace_fields(config, _MEANINGLESS_ALONE)
    if facts.asked.compile.enable is None:  # only rows with +compile compile, as the tolerances assume
        config = replace_fields(config, {"compile.enable": None})
    try:
        resolved = resolve(apply_layout(config, layout), Machine(device="cpu"), rows_are_given=True)
    except ConfigError as error:
        return LayoutCase(layout, None, (error,))
    looked_at = dataclasses.replace(
        facts,
        **vars(resolved),
        origin=lambda name: f"layout {layout}",
        num_ranks=layout.num_ranks,
        asked_ranks=0,
        asked_by="",
        local_ranks=layout.num_ranks,
    )
    problems = tuple(problem for rule in RULES for problem in rule(looked_at))
    return LayoutCase(layout, None if problems else resolved.config, problems)
