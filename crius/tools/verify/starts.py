"""Starts of the attempts of ``crius verify resume`` and ``chaos``: with the ranks of the run, with other numbers of
ranks, or on other layouts."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crius.config import rules
from crius.config.facts import Facts
from crius.config.layout import parse_layout
from crius.config.run import RunConfig, replace_fields
from crius.errors import ConfigError
from crius.launch.environment import FAULTS
from crius.tools.faults.fault import ProcessFault, read_faults
from crius.tools.verify import matrix
from crius.tools.verify.compare import tolerances
from crius.train.inputs import open_run_corpus

INTERVAL = 3
"""Steps between checkpoints if neither the run nor the verb has an interval."""
DATA_PARALLEL = ("parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree")

SET_BY_VERB = (
    "training.steps",
    "training.epochs",
    "metrics.log_interval",
    "launch.max_restarts",
    "launch.max_failures_at_step",
    "checkpoint.folder",
    "checkpoint.load_path",
    "checkpoint.load_step",
)
"""Settings that both verbs set."""


@dataclass(frozen=True)
class Start:
    """One way to start an attempt.

    Attributes:
        config: the run on this number of ranks.
        num_ranks: its number of ranks.
        layout: name of the layout; empty if no layout is requested.
    """

    config: RunConfig
    num_ranks: int
    layout: str = ""

    @property
    def name(self) -> str:
        """The layout or the number of ranks."""
        return self.layout or f"{self.num_ranks} ranks"

    @property
    def compiles(self) -> bool:
        """Whether the start compiles kernels."""
        return bool(self.config.compile.enable) and self.config.compile.backend == "inductor"

    def with_own_cache(self, cache: Path) -> "Start":
        """This start with its compiled kernels in the folder ``cache``, which chaos may remove."""
        if not self.compiles:
            return self
        config = replace_fields(self.config, {"compile.cache_dir": str(cache.absolute())})
        return dataclasses.replace(self, config=config)


def all_starts(
    facts: Facts, steps: int, *, world_sizes: str = "", layouts: str = "", interval: int = INTERVAL
) -> list[Start]:
    """All ways to start an attempt; the first is that of the undisturbed run.

    Args:
        facts: facts about the run on this machine.
        steps: steps of training.
        world_sizes: see ``chaos``.
        layouts: see ``chaos``.
        interval: see ``settled``.

    Raises:
        CriusError: a start is refused, or the data is bad.
    """
    if world_sizes and layouts:
        raise ConfigError(
            f"--world_sizes {world_sizes} excludes --layouts {layouts}.",
            where="command line",
            why="both set the number of ranks of an attempt",
            fix="leave out one of them: --layouts ddp2,fsdp4 has 2 and 4 ranks",
        )
    if layouts:
        return _of_layouts(facts, steps, layouts, interval)
    if world_sizes:
        return _of_world_sizes(facts, steps, world_sizes, interval)
    return [Start(settled_config(facts, steps, interval), facts.num_ranks)]


def num_threads(facts: Facts, starts: Sequence[Start]) -> int:
    """Threads of a rank, in every attempt: the order of a CPU's sums depends on them."""
    most = max(start.num_ranks for start in starts)
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, facts.num_cores // most))


def tolerance_of(starts: Sequence[Start]) -> float:
    """Relative tolerance of the losses, as in ``verify parity`` for these layouts; 0: all losses have the same bits."""
    configs = [start.config for start in starts]
    degrees = {(one.parallelism.tensor_parallel_degree, one.parallelism.context_parallel_degree) for one in configs}
    has_same_sums = configs[0].training.reproducible and len(degrees) == 1
    if has_same_sums or len({start.layout for start in starts}) == 1:
        return 0.0
    return max(tolerances(start.config)["loss"].bound for start in starts)


def _of_world_sizes(facts: Facts, steps: int, world_sizes: str, interval: int) -> list[Start]:
    """Starts for each number of ranks, as shards, replicas, or both."""
    if not facts.config.training.reproducible:
        raise ConfigError(
            f"--world_sizes {world_sizes} needs training.reproducible.",
            where="command line",
            why="on another number of ranks gradients are summed in another order, and the last bits differ",
            fix="add --training.reproducible, or leave out --world_sizes",
        )
    words = world_sizes.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        what = f"--world_sizes {world_sizes!r} is not a list of numbers."
        raise ConfigError(what, where="command line", fix="e.g. 1,2,4")
    parallelism = facts.config.parallelism
    beside = parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    found = []
    for size in map(int, words):
        if size % beside:
            raise ConfigError(
                f"--world_sizes {size} is not a multiple of the {beside} ranks of tensor and context parallelism.",
                where="command line",
                fix=f"multiples of {beside}",
            )
        ranks = size // beside
        for replicas in (1, *(n for n in range(2, ranks + 1) if ranks % n == 0)):
            degrees = {DATA_PARALLEL[0]: replicas, DATA_PARALLEL[1]: ranks // replicas}
            placed = replace_fields(facts.config, degrees)
            here = dataclasses.replace(
                facts, config=placed, num_ranks=size, local_ranks=size, asked_ranks=0, asked_by=""
            )
            found.append(Start(settled_config(here, steps, interval), size))
    return found


def _of_layouts(facts: Facts, steps: int, layouts: str, interval: int) -> list[Start]:
    """One start for each named layout, repeats included. All layouts split the same global batch."""
    wanted = [parse_layout(text) for text in layouts.split(",")]
    losses = {matrix.reference_of(layout): layout for layout in wanted}
    if len(losses) > 1:
        options = "".join(f"+{option}" for option in max((one.options for one in losses), key=len))
        raise ConfigError(
            f"{' and '.join(map(str, losses.values()))} of --layouts have different losses.",
            where="command line",
            why="a document mask, low precision and adapters change the loss of a run",
            fix=f"give {options} to all of them, or to none",
        )
    config = settled(facts.config, steps, interval)
    config = replace_fields(config, {"training.global_batch_size": matrix.shared_batch(config, wanted)})
    cases = {layout: matrix.case(facts, config, layout) for layout in wanted}
    if problems := [problem for case in cases.values() for problem in case.problems]:
        raise ConfigError.together(problems)
    for layout, case in cases.items():
        case.check(with_data=True)
        refuse_own_kills(steps, layout.num_ranks)
    placed = {layout: case.config for layout, case in cases.items() if case.config}
    return [Start(placed[layout], layout.num_ranks, str(layout)) for layout in wanted]


def settled_config(facts: Facts, steps: int, interval: int) -> RunConfig:
    """The run of a verb. The run and its data are checked.

    Args:
        facts: facts about the requested run.
        steps: steps of training.
        interval: see ``settled``.

    Raises:
        ConfigError: the run is refused, or the user plants a fault that ends it.
    """
    config = settled(facts.config, steps, interval)
    rules.check(dataclasses.replace(facts, config=config))
    refuse_own_kills(steps, facts.num_ranks)
    if config.data.source != "huggingface":  # a stream's threads cannot be forked
        open_run_corpus(config, facts.data_parallel_ranks)
    return config


def settled(config: RunConfig, steps: int, interval: int) -> RunConfig:
    """``config`` with ``steps`` steps, a record of each, and checkpoints in its own folder.

    Args:
        config: config of the requested run.
        steps: steps of training.
        interval: steps between checkpoints if the run has no interval of its own, in steps or in minutes.
    """
    checkpoint = config.checkpoint
    has_own = checkpoint.interval > 0 or checkpoint.interval_minutes > 0
    changes = {
        "training.steps": steps,
        "training.epochs": -1,
        "metrics.log_interval": 1,
        "checkpoint.enable": True,
        "checkpoint.interval": checkpoint.interval if has_own else interval,
        "checkpoint.folder": "checkpoints",
        "checkpoint.load_path": "",
        "checkpoint.load_step": -1,
    }
    return replace_fields(config, changes)


def refuse_own_kills(steps: int, num_ranks: int) -> None:
    """Raise ConfigError if the user plants a fault that ends a run of this many steps and ranks."""
    for fault in read_faults(os.environ, steps, num_ranks):
        if isinstance(fault, ProcessFault):
            raise ConfigError(
                f"{FAULTS} has the fault: {fault}.",
                where=f"environment variable {FAULTS}",
                why="this verb kills one run and not the other; only faults of numbers and dropout affect both",
                fix=f"unset {FAULTS}",
            )
