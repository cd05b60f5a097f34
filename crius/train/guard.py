"""Non-finite loss or gradients stop the run before they reach the weights."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from crius.errors import NonFiniteError
from crius.parallel.local import local_tensor
from crius.parallel.runtime import World
from crius.train.step import StepResult


class UpdateGuard:
    """Applies the update of a step only if its loss and gradients are finite.

    On a GPU the fused optimizer skips the update by itself (``found_inf``), and the host looks at the result one step
    later, before the next update, so that it never waits for the device. Elsewhere it looks at once.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        all_names: Sequence[str],
        optimizer: torch.optim.Optimizer,
        world: World,
        run_dir: Path,
    ) -> None:
        self._names = list(all_names)  # of the whole model: a pipeline stage has some of them
        self._places = [self._names.index(name) for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._optimizer = optimizer
        self._world = world
        self._folder = run_dir / "incidents"
        on_gpu = local_tensor(self._parameters[0]).device.type == "cuda"  # not so under CPU offload
        self._skips_on_device = on_gpu and bool(optimizer.defaults.get("fused"))
        self._unchecked: StepResult | None = None

    def update(self, result: StepResult) -> None:
        """Apply the optimizer to the gradients that ``result`` is about.

        Raises:
            NonFiniteError: this step's, or on a GPU the step before's, loss or gradient is not finite.
        """
        self.check()
        self._unchecked = result
        if self._skips_on_device:
            self._optimizer.found_inf = (~result.is_finite()).to(torch.float32)  # type: ignore[attr-defined]
        else:
            self.check()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def check(self) -> None:
        """Look at the last result that was not looked at yet."""
        result, self._unchecked = self._unchecked, None
        if result is not None and not bool(result.is_finite()):
            self._report(result)

    def _report(self, result: StepResult) -> NoReturn:
        """Write ``incidents/step-N.json`` and stop; every rank gets here, since the totals are the same on all."""
        world = self._world
        bad_losses = _not_finite(world.gather(result.local_losses))  # (ranks, microbatches)
        bad_grads = _not_finite(world.gather(self._spread(result.squared_norms)))  # (ranks, parameters)
        ids = world.gather(torch.tensor(result.sample_ids, device=world.device))
        sums = torch.stack([local_tensor(p).sum(dtype=torch.float64).to(world.device) for p in self._parameters])
        bad_weights = _not_finite(world.gather(self._spread(sums)))
        guilty = bad_losses.any(dim=1) if bad_losses.any() else bad_grads.any(dim=1)
        rank = int(guilty.nonzero()[0]) if guilty.any() else 0
        # backward runs from the output to the embedding, so the first bad gradient is the last by name
        grads = [name for name, bad in zip(self._names, bad_grads.any(dim=0).tolist(), strict=True) if bad][::-1]
        # a bad gradient was summed over ranks before it was seen: any sample of the step may have caused it
        samples = ids[rank].reshape(bad_losses.shape[1], -1)[bad_losses[rank]] if bad_losses.any() else ids
        weights = [name for name, bad in zip(self._names, bad_weights.any(dim=0).tolist(), strict=True) if bad]
        loss, norm = result.loss.item(), result.grad_norm.item()
        report = {
            "step": result.step,
            "loss": loss if math.isfinite(loss) else str(loss),
            "grad_norm": norm if math.isfinite(norm) else str(norm),
            "rank": rank,
            "found_in": "loss" if bad_losses.any() else "gradient",
            "ranks_with_bad_loss": bad_losses.any(dim=1).nonzero().flatten().tolist(),
            "first_bad_parameter": grads[0] if grads else None,
            "bad_parameters": grads,
            "bad_weights": weights,
            "sample_ids": sorted(samples.flatten().tolist()),
        }
        path = self._folder / f"step-{result.step}.json"
        if world.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(report, indent=2) + "\n")
            os.replace(temporary, path)
        where = f", first in the gradient of {grads[0]}" if grads else ""
        if weights:
            where = f"; already in the weights of {', '.join(weights)}"
        raise NonFiniteError(
            f"step {result.step}: loss {loss}, grad_norm {norm}, found on rank {rank}{where}.",
            where=f"samples {report['sample_ids']}, full report in {path}",
            why="the update was not applied: it would have spread to every weight",
            fix="lower --optimizer.lr, lengthen --lr_scheduler.warmup_steps, or look at those samples",
        )

    def _spread(self, values: Tensor) -> Tensor:
        """Values of this rank's parameters at their places among all parameters of the model, 0 elsewhere."""
        spread = values.new_zeros(len(self._names))
        spread[self._places] = values
        return spread


def _not_finite(values: Tensor) -> Tensor:
    return (~torch.isfinite(values)).cpu()
