"""What stands around a run and is no part of it: the command line hands it over, and a run without it is whole."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from crius.config.run import RunConfig
from crius.launch.environment import Placement
from crius.machine import Machine
from crius.metrics.ledger import TimeLedger
from crius.metrics.sinks.base import Sink
from crius.models.description import ModelDescription
from crius.train.choices import Recomputation
from crius.train.loop import Loop
from crius.train.out_of_memory import Explain


class Watch(Sink, Protocol):
    """A sink that holds the records of a run against its plan."""

    def line(self) -> str:
        """How the plan did, for the log; empty where there is nothing to say."""

    def as_dict(self) -> dict[str, Any] | None:
        """The same for ``summary.json``."""


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What the command line hands to a run.

    Attributes:
        recomputation: decides ``activation_checkpoint.mode auto``; None: nothing is recomputed.
        watch: plans the decided run, on rank 0, and watches what comes of it; of its config, its model, where it is,
            its ledger and its folder.
        explain: says where the memory of a run that ran out of it went.
        around: the context in which a rank trains; of its config and its place.
        prepare: gives the loop that runs in place of the one that is ready to.
    """

    recomputation: Recomputation | None = None
    watch: Callable[[RunConfig, ModelDescription, Machine, TimeLedger, Path], Watch] | None = None
    explain: Explain | None = None
    around: Callable[[RunConfig, Placement], contextlib.AbstractContextManager[None]] = lambda config, placement: (
        contextlib.nullcontext()
    )
    prepare: Callable[[Loop], Loop] = lambda loop: loop
