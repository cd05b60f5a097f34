"""Looks at what the optimisations of a run did, when it can be known: at the build, after the first step, later."""

import logging

from crius.config.activation_checkpoint import ActivationCheckpointConfig
from crius.config.run import RunConfig
from crius.parallel.activation_checkpoint import CheckpointedBlocks
from crius.parallel.async_tensor import enable_async_tensor_parallel
from crius.parallel.compile import CompileReport
from crius.parallel.mesh import Mesh
from crius.parallel.runtime import World
from crius.train.build import Built
from crius.train.effects import (
    Effect,
    check,
    of_activation_checkpoint,
    of_async_tensor_parallel,
    of_compile,
    of_low_precision,
    of_save_ops,
    over_ranks,
    over_stages,
)

DEFAULT_SAVE_OPS = ActivationCheckpointConfig().save_ops

log = logging.getLogger("crius.train")

# forward and backward of a feed-forward of dim 4096, pytorch/ao#685: 43.2 ms in float16, 49.3 ms in float8, 26.2 ms in
# float8 compiled
_UNCOMPILED = (
    "low precision without --compile.enable is slower than none: each scale and cast is a kernel of its own; on an "
    "L20 1.14 times the time of float16 and 1.6 times its memory, compiled 0.61 times the time (pytorch/ao#685)"
)


class EffectWatch:
    """Effect counts of one run. Make it before anything is compiled.

    Args:
        config: which optimisations are on.
        mesh: tensor-parallel ranks and pipeline stages.
        ranks: all ranks.
        strict: an optimisation without effect ends the run.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, ranks: World, strict: bool) -> None:
        self._config, self._mesh, self._ranks, self._strict = config, mesh, ranks, strict
        self._report = CompileReport(config.compile) if config.compile.enable else None
        is_async = config.parallelism.enable_async_tensor_parallel and mesh.tp is not None
        self._async = enable_async_tensor_parallel(mesh.tp, ranks.device.type) if is_async and mesh.tp else None
        self._blocks = 0
        self._checkpointed: list[CheckpointedBlocks] = []

    def built(self, built: Built) -> None:
        """Say what is known before the first step.

        Raises:
            EffectError: strict, and something does nothing.
        """
        self._blocks = sum(applied.compiled for applied in built.applied)
        self._checkpointed = [applied.checkpointed for applied in built.applied]
        effects = []
        if built.precision:
            for line in built.precision.lines():
                log.info("%s", line)
            effects += of_low_precision(built.precision, built.converted, self._mesh.dims.fsdp)
            if not self._report and self._ranks.rank == 0:
                log.warning("%s", _UNCOMPILED)
        if self._config.activation_checkpoint.mode != "none":
            effects.append(of_activation_checkpoint(self._checkpointed))
        if self._async and self._async.missing:
            effects.append(of_async_tensor_parallel(self._async))
        self._check(effects)
        if self._report:
            self._report.start()

    @property
    def compile_seconds(self) -> float:
        """Time that torch.compile took so far."""
        return self._report.seconds if self._report else 0.0

    def step(self, number: int) -> None:
        """Call after each step, with how many this process has done.

        Raises:
            EffectError: strict, and after the first step something has done nothing.
        """
        if self._report:
            self._report.step(number)
        if number > 1:
            return
        effects = []
        if self._config.activation_checkpoint.save_ops != DEFAULT_SAVE_OPS:
            kept = over_ranks(of_save_ops(self._checkpointed), self._ranks)
            check(kept, self._strict, rank=self._ranks.rank)
        if self._report:
            for line in self._report.lines():
                if self._report.graphs:  # without any, the effect says all
                    log.info("%s", line)
            effects.append(of_compile(self._blocks, self._report))
        if self._async and not self._async.missing:
            effects.append(of_async_tensor_parallel(self._async))
        self._check(effects)

    def _check(self, effects: list[Effect]) -> None:
        if effects:
            check(over_stages(effects, self._ranks, self._mesh.dims.pp), self._strict, rank=self._ranks.rank)
