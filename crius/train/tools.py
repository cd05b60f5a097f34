"""Functions around a run that the command line passes in. A run is complete without them."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from crius.config.run import RunConfig
from crius.data.corpus import Corpus
from crius.errors import CriusError, OutOfMemoryError
from crius.host import Machine, free_host_bytes
from crius.launch.environment import Placement
from crius.launch.status import status
from crius.metrics.ledger import TimeLedger
from crius.metrics.record import PlanSink
from crius.models.description import ModelDescription
from crius.redact import redact
from crius.train.loop import Loop
from crius.train.setup import Fit, write_memory_snapshot

_CPU_WORDS = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|Cannot allocate memory|std::bad_alloc"
)
_GPU_WORDS = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED")
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ([KMG]iB|bytes)")
_UNITS = {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}


@dataclass
class Story:
    """Facts about a run for the case that its memory runs out; filled in as they become known.

    Attributes:
        run_dir: gets ``incidents/out-of-memory-rank-R.json``.
        rank: rank of this process.
        device: its device; None until it is chosen.
        capacity: bytes that this rank can have.
        config: the run, with its decisions.
        facts: description of its model.
        machine: machine of the run.
    """

    run_dir: Path
    rank: int
    device: torch.device | None = None
    capacity: float = 0.0
    config: RunConfig | None = None
    facts: ModelDescription | None = None
    machine: Machine | None = None

    def begin(self, device: torch.device, machine: Machine, config: RunConfig, facts: ModelDescription) -> None:
        """Record the facts that are known before the run takes memory."""
        self.device = device
        self.machine = machine
        self.config = config
        self.facts = facts
        if machine.on_gpu:
            self.capacity = float(torch.cuda.get_device_properties(device).total_memory)
        else:
            self.capacity = free_host_bytes() / machine.local_ranks


Explain = Callable[[Story, str, str], OutOfMemoryError]


@contextlib.contextmanager
def explained(run_dir: Path, rank: int, explain: Explain | None) -> Iterator[Story]:
    """Turn an out-of-memory error in this context into an error with the phase and with remedies.

    Args:
        run_dir: folder of the run.
        rank: rank of this process.
        explain: makes such an error from the facts about the run, the event, and the words of the error.

    Raises:
        OutOfMemoryError: memory ran out in this context.
    """
    story = Story(run_dir, rank)
    try:
        yield story
    except CriusError:
        raise
    except Exception as error:
        cause = next(filter(is_out_of_memory, _causes(error)), None)
        if cause is None:
            raise
        if story.config and story.config.profiler.memory_snapshot and story.device and story.device.type == "cuda":
            write_memory_snapshot(run_dir / "incidents" / f"out-of-memory-rank-{rank}.pickle")
        where = f"{status.phase} of step {status.step}" if status.step is not None else f"{status.phase}, before step 1"
        words = redact(str(cause)).strip().splitlines()
        said = words[0][:300] if words else type(cause).__name__
        asked = _ASKED.search(said)
        more = f": {float(asked[1]) * _UNITS[asked[2]]:,.2f} GiB more were requested." if asked else "."
        what = f"out of memory on rank {rank} in {where}{more}"
        if explain and story.config:
            raise explain(story, what, said) from error
        fix = "a smaller model, or --training.local_batch_size 1"
        raise OutOfMemoryError(what, where=said, fix=fix) from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """``error`` and its causes: a pipeline's stage wraps the error of its model."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had too little memory for a request."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return bool(_CPU_WORDS.search(text) or (re.search("CUDA|CUBLAS|CUDNN|NCCL|HIP", text) and _GPU_WORDS.search(text)))


Around = Callable[[RunConfig, Placement], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Tools:
    """Functions that the command line passes to a run.

    Attributes:
        fit: decides what is left to the memory of the ranks; None: nothing is recomputed.
        watch: plans the decided run on rank 0 and compares it with the outcome; arguments: config, model, machine,
            ledger and folder of the run.
        explain: explains the memory of a run that ran out of it.
        around: context in which a rank trains; arguments: config and place of the rank.
        prepare: returns the loop to run, given the loop that is ready.
        texts: returns the loop with its ``texts``, given the loop, its corpus and the folder of the run.
    """

    fit: Fit | None = None
    watch: Callable[[RunConfig, ModelDescription, Machine, TimeLedger, Path], PlanSink] | None = None
    explain: Explain | None = None
    around: Around = lambda config, placement: contextlib.nullcontext()
    prepare: Callable[[Loop], Loop] = lambda loop: loop
    texts: Callable[[Loop, Corpus, Path], Loop] = lambda loop, corpus, run_dir: loop

    def joined(self, around: Around, prepare: Callable[[Loop], Loop]) -> "Tools":
        """These tools with a further context and a further preparation, which comes after the own one."""

        @contextlib.contextmanager
        def both(config: RunConfig, placement: Placement) -> Iterator[None]:
            with self.around(config, placement), around(config, placement):
                yield

        return replace(self, around=both, prepare=lambda loop: prepare(self.prepare(loop)))
