"""The guard between a step's gradients and the weights: it looks for values that are not finite, and for spikes."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from crius.config.operation import StabilityConfig
from crius.errors import NonFiniteError, SpikeError
from crius.parallel.gradients import Gradients
from crius.parallel.runtime import World
from crius.shards import local_tensor, named_buffers, named_state
from crius.train.sdc import Replicas
from crius.train.stability import IncidentReporter, SpikeMonitor, SpikeScore
from crius.train.state import Snapshot, TrainState
from crius.train.step import Late, StepResult
from crius.units import GIB, counted

ADVICE = "lower --optimizer.lr, lengthen --lr_scheduler.warmup_steps, or look at those samples"
NAMED = 3
"""Number of weights that a message names; it counts the others."""

IN_A_ROW = {"skips": "skipped steps in a row", "rollbacks": "returns to the same weights", "spikes": "spikes in a row"}
"""Kinds of steps that are counted until a step of another kind comes."""

log = logging.getLogger("crius.train")


@dataclass(frozen=True)
class _Unseen:
    """A result whose loss and gradient norm (``totals``) are on their way to the host, and its learning rates."""

    result: StepResult
    lr: dict[str, float]
    totals: Late


@dataclass(frozen=True)
class _KeptState:
    """Values of a snapshot in addition to weights and optimizer state."""

    step: int
    updates: int
    window: dict[str, list[float]]


class UpdateGuard:
    """Applies the update of a step, unless its loss or gradient is not finite or is a spike; then a policy decides.

    Loss and gradient norm are sums over all ranks and the same to the last bit on each, so all ranks decide the same.

    The host need not wait for the device if the optimizer takes ``found_inf`` (on a GPU), nonfinite is stop, and spike
    is warn or off: the optimizer leaves out a non-finite update by itself, and the host looks at the result one step
    later, before the next update. Other policies must know the result before the update, so on a GPU the host waits in
    each step.

    Args:
        config: the policies.
        state: state of the training; its optimizer makes the updates.
        parameters: parameters of this rank, by their names in the whole model.
        gradients: gradients of the parameters.
        all_names: names of all parameters of the model, in order; a pipeline stage has some of them.
        world: all ranks.
        run_dir: folder of the run.
        copies: copies of the weights that two stages share; None if there are none.
        after_update: called after each update.

    Attributes:
        before_change: called before each change of the weights by an update or a rollback.
        passed_step: number of the last step that the guard has let pass; 0 before the first.
    """

    def __init__(
        self,
        config: StabilityConfig,
        state: TrainState,
        parameters: Sequence[tuple[str, nn.Parameter]],
        gradients: Gradients,
        all_names: Sequence[str],
        world: World,
        run_dir: Path,
        copies: Replicas | None = None,
        after_update: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._after_update = after_update
        self._copies = copies
        self._state = state
        self._optimizer = state.optimizer
        self._gradients = gradients
        self._names = [name for name, _ in parameters]
        self._world = world
        norms = gradients.squared_weight_norms
        self._reporter = IncidentReporter(all_names, self._names, norms, world, run_dir / "incidents")
        self._monitor = SpikeMonitor(config.spike_zscore, config.window) if config.spike != "off" else None
        self._buffers = named_buffers(state.parts, persistent=True)
        tensors = [tensor for _, tensor in named_state(state.parts)]
        self._snapshot = Snapshot(tensors, self._optimizer) if config.nonfinite == "rollback" else None
        self._kept: _KeptState | None = None
        self._has_said_size = False
        can_wait = config.nonfinite == "stop" and config.spike in ("warn", "off")
        self._looks_late = self._optimizer.takes_found_inf and can_wait
        self._unseen: _Unseen | None = None
        self.before_change: Callable[[], None] = lambda: None
        self.passed_step = 0
        self._in_a_row = dict.fromkeys(IN_A_ROW, 0)

    def update(self, result: StepResult) -> None:
        """Apply the optimizer to the gradients of ``result``, or do what the policy says.

        Raises:
            NonFiniteError: loss or gradient of this step, or on a GPU of the step before, is not finite.
            SpikeError: loss or gradient norm is a spike, likewise.
        """
        self.check()
        groups = enumerate(self._optimizer.param_groups)
        lr = {str(group.get("name", index)): float(group["lr"]) for index, group in groups}
        self._unseen = _Unseen(result, lr, Late(torch.stack((result.loss, result.grad_norm))))
        if self._snapshot and not self._kept:
            self._keep(result.step - 1)
        if self._looks_late:
            self._optimizer.found_inf = (~result.is_finite()).to(torch.float32)
        if self._looks_late or self.check():
            if self._kept and self._state.updates - self._kept.updates >= self._config.snapshot_interval:
                self._keep(result.step - 1)  # loss and gradient of these weights are finite
            self.before_change()
            self._optimizer.step()
            self._after_update()
            self._state.updates += 1
            self._in_a_row["skips"] = 0
            if self._snapshot and not self._has_said_size:  # the first update made the optimizer's state
                self._has_said_size = True
                log.info(
                    "rollback: weights and optimizer state are kept every %d updates, %.2f GiB of host memory per rank",
                    self._config.snapshot_interval,
                    self._snapshot.num_bytes() / GIB,
                )
        self._optimizer.zero_grad()

    def before_save(self) -> None:
        """Check the last result and the weights, and take the snapshot that a run resumed from this save would take.

        Raises:
            NonFiniteError, SpikeError, CorruptionError: as ``check`` and ``check_weights``.
        """
        self.check()
        self.check_weights()
        if self._snapshot and self._kept and self._kept.step < self._state.step:
            self._keep(self._state.step)

    def check_weights(self) -> None:
        """Check the weights, which the last update may have broken: no loss was computed with them yet. A collective.

        If there is a snapshot, the policy ``rollback`` restores it.

        Raises:
            NonFiniteError: some weights are not finite, and the policy is not ``rollback``.
            CorruptionError: the copies of a weight that two stages share differ.
        """
        if self._copies:
            self._copies.check(self._state.step)
        is_finite = torch.isfinite(self._gradients.squared_weight_norms()).tolist()
        mine = [name for name, is_good in zip(self._names, is_finite, strict=True) if not is_good]
        mine += [name for name, buffer in self._buffers if not torch.isfinite(local_tensor(buffer)).all()]
        broken = sorted({name for of_rank in self._world.gather_json(mine) for name in of_rank})
        if not broken:
            return
        step = self._state.step
        more = len(broken) - NAMED
        what = f"the weights of {', '.join(broken[:NAMED])}{f' and {more} more' if more > 0 else ''} are not finite"
        if self._kept and self._state.updates > self._kept.updates:
            self._roll_back(step, what, is_made=True)
            return
        raise NonFiniteError(
            f"step {step}: {what}.",
            why="the last update broke them; they are not saved",
            fix="lower --optimizer.lr, or lengthen --lr_scheduler.warmup_steps",
        )

    def state(self) -> dict[str, Any]:
        """The guard's record of past steps, as JSON."""
        return {"window": self._window()} | {f"{kind}_in_a_row": count for kind, count in self._in_a_row.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        if self._monitor:
            self._monitor.load(state["window"])
        self._in_a_row = {kind: state[f"{kind}_in_a_row"] for kind in IN_A_ROW}

    def _window(self) -> dict[str, list[float]]:
        return self._monitor.state() if self._monitor else {}

    def check(self) -> bool:
        """Check the last unchecked result; returns whether its update is to be made.

        Raises:
            NonFiniteError: loss or gradient is not finite, and the run must stop.
            SpikeError: loss or gradient norm is a spike, and the run must stop.
        """
        unseen = self._unseen
        self._unseen = None
        if unseen is None:
            return True
        is_made = self._judge(unseen)
        self.passed_step = unseen.result.step
        return is_made

    def _judge(self, unseen: _Unseen) -> bool:
        """Follow the policy; returns whether the update is to be made."""
        loss, grad_norm = unseen.totals.read()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._on_nonfinite(unseen, loss, grad_norm)
            return False
        if self._monitor is None:
            return True
        scores = self._monitor.score(loss, grad_norm)
        if self._monitor.spikes(scores):
            return self._on_spike(unseen, scores, self._monitor)
        self._monitor.accept(loss, grad_norm)
        self._in_a_row["spikes"] = 0
        return True

    def _on_nonfinite(self, unseen: _Unseen, loss: float, grad_norm: float) -> None:
        policy = self._config.nonfinite
        step = unseen.result.step
        too_many = "" if policy == "stop" else self._count({"skip": "skips", "rollback": "rollbacks"}[policy])
        stops = policy == "stop" or bool(too_many)
        action = "skipped" if policy == "skip" else "rolled back"
        if stops:
            action = "stopped"
        facts = self._facts(unseen, "non-finite", action, loss, grad_norm)
        culprit = self._reporter.nonfinite(unseen.result, facts)
        what = f"loss {loss:.6g}, grad_norm {grad_norm:.6g}, {culprit}"
        path = self._reporter.path(step)
        if stops:
            raise NonFiniteError(
                f"step {step}: {what}.",
                where=f"samples {culprit.samples}, full report in {path}",
                why=f"the update was not applied, because it would have spread to every weight{too_many}",
                fix=ADVICE,
            )
        if policy == "skip":
            self._skip(step, "non-finite", what)
        else:
            self._roll_back(step, f"{what}; see {path}", is_made=False)

    def _on_spike(self, unseen: _Unseen, scores: dict[str, SpikeScore], monitor: SpikeMonitor) -> bool:
        """Follow the policy; returns whether the update is to be made."""
        policy = self._config.spike
        step = unseen.result.step
        is_new_level = bool(self._count("spikes"))
        too_many = self._count("skips") if policy == "skip" else ""
        stops = policy == "stop" or bool(too_many)
        action = "skipped" if policy == "skip" else "warned"
        if stops:
            action = "stopped"
        facts = self._facts(unseen, "spike", action, scores["loss"].value, scores["grad_norm"].value)
        self._reporter.spike(unseen.result, scores, facts)
        what = ", ".join(f"{name} {score.value:.4g} (z {score.z:.1f})" for name, score in scores.items())
        path = self._reporter.path(step)
        if stops:
            raise SpikeError(
                f"step {step}: {what} is a spike.",
                where=f"full report in {path}",
                why=f"z reached {self._config.spike_zscore:g}; the update was not applied{too_many}",
                fix=f"{ADVICE}; --stability.spike skip leaves such steps out",
            )
        if policy == "skip":
            self._skip(step, "spike", what)
            return False
        self._warn(f"step {step} is a spike: {what}; the update is made, see {path}")
        if is_new_level:
            self._warn(f"{self._in_a_row['spikes']} spikes in a row are a new level: the window restarts")
            self._in_a_row["spikes"] = 0
            monitor.restart()
        return True

    def _facts(self, unseen: _Unseen, kind: str, action: str, loss: float, grad_norm: float) -> dict[str, Any]:
        if action == "rolled back" and self._kept:
            action = f"rolled back to the weights of step {self._kept.step}"
        values = {"loss": loss, "grad_norm": grad_norm, "lr": unseen.lr}
        return {"step": unseen.result.step, "kind": kind, "action": action, **values}

    def _count(self, kind: str) -> str:
        """Count one more step of a kind of ``IN_A_ROW``; returns the end of the reason to stop, if one is due."""
        self._in_a_row[kind] += 1
        count = self._in_a_row[kind]
        is_limit = count >= self._config.max_consecutive
        return f"; {count} {IN_A_ROW[kind]}, which is --stability.max_consecutive" if is_limit else ""

    def _skip(self, step: int, kind: str, what: str) -> None:
        self._state.skipped_steps += 1
        count = self._state.skipped_steps
        self._warn(f"step {step} skipped ({kind}): {what}; {count} skipped so far, see {self._reporter.path(step)}")

    def _roll_back(self, step: int, what: str, *, is_made: bool) -> None:
        """Restore the snapshot; ``is_made``: whether the update of ``step`` is in the weights."""
        assert self._snapshot and self._kept
        lost = self._state.updates - self._kept.updates + (not is_made)
        self.before_change()
        self._snapshot.restore()
        self._state.updates = self._kept.updates
        self._state.rolled_back_steps += lost
        if self._monitor:
            self._monitor.load(self._kept.window)
        where = f"the weights of step {self._kept.step} ({counted(lost, 'step')} lost)"
        self._warn(f"step {step} rolled back to {where}: {what}")

    def _keep(self, step: int) -> None:
        assert self._snapshot
        self._snapshot.take()
        self._kept = _KeptState(step, self._state.updates, self._window())
        self._in_a_row["rollbacks"] = 0

    def _warn(self, text: str) -> None:
        if self._world.rank == 0:
            log.warning("%s", text)
