"""``--checkpoint.rehearse``: each new checkpoint is restored in a process beside the run, which needs no GPU, and the
loss of one batch is computed again.

Every rank computes the loss of the same batch of the first validation set when it saves. Rank 0 starts the process once
the checkpoint is committed, one at a time; if the run saves faster, the newest waits and those between are left out.
"""

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crius.checkpoint.names import step_name
from crius.config.low_precision import is_enabled
from crius.config.run import RunConfig
from crius.data.loader import Batch
from crius.host import python_path
from crius.launch.environment import Placement
from crius.launch.status import status
from crius.parallel.runtime import World
from crius.run_file import REHEARSALS, RunFile
from crius.train.checkpoints import Checkpoints
from crius.train.inputs import checkpoint_folder
from crius.train.loop import Loop
from crius.untrusted import parse_json

log = logging.getLogger("crius.checkpoint")

TOLERANCE = 1e-4
"""Largest relative difference of the two losses in float32, which other orders of the same sums give."""

LOW_TOLERANCE = 0.03
"""The same if the run computes in bfloat16 or less."""

_POLL_SECONDS = 0.2


class Rehearsals:
    """Rehearsals of one run. Its methods are ``around`` and ``prepare`` of ``crius.train.tools.Tools``.

    Args:
        run_dir: folder of the run.
    """

    _loop: Loop
    _checkpoints: Checkpoints

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._next: dict[str, Any] = {}
        self._running: dict[str, Any] = {}
        self._process: subprocess.Popen[str] | None = None

    @contextlib.contextmanager
    def around(self, config: RunConfig, placement: Placement) -> Iterator[None]:
        """At the end of a run wait for the last rehearsal; a run that is stopped or fails does not wait."""
        try:
            yield
            stop = self._loop.stop
            while (self._process or self._next) and not (stop and stop.number):
                status.update(phase="save")
                self._poll()
                time.sleep(_POLL_SECONDS)
        finally:
            if self._process:
                self._process.kill()
                self._process.wait()

    def prepare(self, loop: Loop) -> Loop:
        """Have each save of ``loop`` rehearsed. Every rank calls this."""
        self._loop = loop
        assert loop.checkpoints
        self._checkpoints = loop.checkpoints
        self._checkpoints.after_save = self._saved
        if loop.world.rank == 0:
            loop.after_step.append(lambda step, done: self._poll())
        return loop

    def _saved(self, step: int) -> None:
        """Compute the loss that a restore must have."""
        loop = self._loop
        assert loop.validation
        own = next(iter(loop.validation.batches(loop.validation.sets[0])))
        batch = _of_first_rank(own, loop.world)
        record = loop.score(loop.validation, [batch])
        if record and loop.world.rank == 0:
            training = loop.config.training
            is_low = training.mixed_precision_param != "float32" or is_enabled(loop.config.quantize.dense)
            self._next = {
                "path": f"{checkpoint_folder(loop.config, self._run_dir)}/{step_name(step)}",
                "step": step,
                "loss": record.val_loss,
                "tolerance": LOW_TOLERANCE if is_low else TOLERANCE,
                "tokens": batch.tokens_BT.tolist(),
                "positions": batch.positions_BT.tolist(),
                "labels": batch.labels_BT.tolist(),
            }

    def _poll(self) -> None:
        """Tell of a rehearsal that has ended, and start the next one once its checkpoint is committed."""
        process = self._process
        if process and process.poll() is not None:
            assert process.stdout
            self._process = None
            self._tell(process.stdout.read(), process.returncode)
        if self._checkpoints.saver.failures:
            self._next = {}
        if self._next and not self._process and self._checkpoints.committed == self._next["step"]:
            self._running = self._next
            self._next = {}
            self._process = _started(self._running)

    def _tell(self, said: str, code: int) -> None:
        asked = self._running
        step = asked["step"]
        result = {"loss": None, "seconds": None, "problem": f"its process ended with code {code}"}
        with contextlib.suppress(ValueError):
            result = parse_json(said)
        if result["problem"] and step not in self._checkpoints.folder.steps():
            log.info("rehearsal: step %d was removed meanwhile", step)
            return
        record = json.dumps({"step": step, "wanted": asked["loss"], **result})
        file = RunFile(self._run_dir / REHEARSALS, log.warning, "crius runs does not show this rehearsal")
        file.append(f"{record}\n")
        file.close()
        if result["problem"]:
            log.warning("rehearsal: step %d CANNOT BE RESTORED: %s (%s)", step, result["problem"], asked["path"])
        else:
            seconds = result["seconds"]
            log.info("rehearsal: step %d restored, loss %.6f as in the run, %.1f s", step, result["loss"], seconds)


def _of_first_rank(batch: Batch, world: World) -> Batch:
    """Rank 0's batch, which may have other widths than this rank's."""
    names = ("tokens_BT", "labels_BT", "positions_BT", *(["ends_BM"] if batch.ends_BM is not None else []))
    sizes = world.gather_json([getattr(batch, name).shape for name in names])[0]
    found: dict[str, Any] = {}
    for name, size in zip(names, sizes, strict=True):
        own: Tensor = getattr(batch, name)
        found[name] = own.contiguous() if world.rank == 0 else torch.empty(size, dtype=own.dtype)
        if world.size > 1:
            dist.broadcast(found[name], src=0)
    return dataclasses.replace(batch, **found)


def _started(asked: Mapping[str, Any]) -> subprocess.Popen[str]:
    """A process of ``restored_loss``, whose input is a file, so that nothing waits for it."""
    with tempfile.TemporaryFile("w+") as file:
        json.dump(asked, file)
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "crius.tools.verify.restored_loss"],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ""},
        )
