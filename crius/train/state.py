"""Everything that training changes: the state of a run, its random streams, snapshots of it, and work after an
update."""

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crius.models.description import Buffer
from crius.optim.build import WarmupStableDecay
from crius.optim.state import Optimizer
from crius.parallel.runtime import World
from crius.shards import local_tensor, named_buffers

COUNTERS = ("step", "tokens", "updates", "skipped_steps", "rolled_back_steps")


@dataclass
class TrainState:
    """Everything that training changes, and that a checkpoint must contain.

    Attributes:
        parts: stages of the model on this rank; without pipeline parallelism one, the whole model.
        step: steps that are done, one batch each, with or without an update.
        tokens: tokens of those batches, over all ranks.
        updates: updates of the weights, which the schedule counts; fewer than ``step`` if some were left out.
        skipped_steps: steps whose update was left out.
        rolled_back_steps: steps whose update was lost when a snapshot was restored.
        lr: learning rate of the last step; 0 before the first.
    """

    parts: list[nn.Module]
    optimizer: Optimizer
    schedule: WarmupStableDecay
    step: int = 0
    tokens: int = 0
    updates: int = 0
    skipped_steps: int = 0
    rolled_back_steps: int = 0
    lr: float = 0.0

    def counters(self) -> dict[str, int]:
        """All counters, by name."""
        return {name: getattr(self, name) for name in COUNTERS}

    def restore(self, counters: Mapping[str, int]) -> None:
        """Restore what ``counters`` returned. Missing counters stay 0; missing updates are those of all other steps."""
        for name in COUNTERS:
            setattr(self, name, counters.get(name, 0))
        if "updates" not in counters:
            self.updates = self.step - self.skipped_steps - self.rolled_back_steps

    def next_lr(self, peak: float) -> float:
        """Learning rate of the next update, for a group whose ``lr_factor`` is 1."""
        return peak * self.schedule.factor(self.updates)

    def set_lr(self, peak: float) -> float:
        """Give each parameter group its learning rate for the next update.

        Args:
            peak: peak learning rate, which the schedule's factor multiplies.

        Returns:
            The learning rate of a group whose own factor, ``lr_factor``, is 1.
        """
        self.lr = self.next_lr(peak)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * group.get("lr_factor", 1.0)
        return self.lr


_PYTHON_VERSION = 3  # of random.getstate()


def seed_streams(device: torch.device, *words: int | str) -> None:
    """Start all streams from ``words``: a seed, a rank and other words that tell streams apart."""
    seed = zlib.crc32(repr(words).encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def streams(device: torch.device) -> dict[str, Tensor]:
    """The state of each stream by name, as a tensor on the host."""
    version, words, gauss = random.getstate()
    assert version == _PYTHON_VERSION
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor([*words, gauss is not None], dtype=torch.int64),
        "python_gauss": torch.tensor(gauss or 0.0, dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore_streams(found: dict[str, Tensor], device: torch.device) -> None:
    """Restore what ``streams`` returned."""
    torch.set_rng_state(found["cpu"])
    *words, has_gauss = found["python"].tolist()
    random.setstate((_PYTHON_VERSION, tuple(words), found["python_gauss"].item() if has_gauss else None))
    *keys, position, has_cached = found["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_cached, found["numpy_gauss"].item()))
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)


_Copies = dict[str, Tensor]


class Snapshot:
    """Copies of this rank's parameter shards and buffers, and of the optimizer's state for them.

    The state is what ``optimizer.state`` has per parameter: tensors, also of classes that list their parts (DTensor,
    torchao's 8-bit states), and values that are not tensors. It is restored in place, so that references to the tensors
    stay valid; an entry that came after the snapshot is removed.

    Args:
        tensors: parameters and buffers of this rank.
        optimizer: optimizer of the parameters.
    """

    def __init__(self, tensors: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._tensors = list(tensors)
        self._optimizer = optimizer
        self._copied: list[_Copies] = []
        self._state: list[dict[str, Any]] = []

    @torch.no_grad()
    def take(self) -> None:
        """Copy the present state over the last copy. Waits for the device."""
        none: list[dict[str, Any]] = [{}] * len(self._tensors)
        self._copied = [_copies(tensor, old) for tensor, old in zip(self._tensors, self._copied or none, strict=True)]
        self._state = [
            {name: _copies(v, old.get(name, {})) if isinstance(v, Tensor) else v for name, v in held.items()}
            for held, old in zip(self._held(), self._state or none, strict=True)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the last copy."""
        for tensor, copies in zip(self._tensors, self._copied, strict=True):
            _put_back(tensor, copies)
        for held, copied in zip(self._held(), self._state, strict=True):
            for name in list(held):
                if name not in copied:
                    del held[name]
                elif isinstance(held[name], Tensor):
                    _put_back(held[name], copied[name])
                else:
                    held[name] = copied[name]

    def num_bytes(self) -> int:
        """Bytes of host memory that a copy of the present state takes."""
        tensors = [*self._tensors, *(value for held in self._held() for value in held.values())]
        found = (leaf for value in tensors if isinstance(value, Tensor) for leaf in leaves(value).values())
        return sum(leaf.numel() * leaf.element_size() for leaf in found)

    def _held(self) -> list[dict[str, Any]]:
        return [self._optimizer.state.get(tensor, {}) for tensor in self._tensors]


def leaves(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors on this rank that a tensor of any class consists of, by the path of attributes to each."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return {"": tensor.detach()}
    parts = {name: getattr(tensor, name) for name in flatten()[0]}
    return {
        f"{name}.{path}": leaf
        for name, part in parts.items()
        if isinstance(part, Tensor)  # a DTensor lists its mesh as a part too
        for path, leaf in leaves(part).items()
    }


def _copies(tensor: Tensor, old: _Copies) -> _Copies:
    now = leaves(tensor)
    if {path: leaf.shape for path, leaf in now.items()} != {path: copy.shape for path, copy in old.items()}:
        return {path: leaf.to("cpu", copy=True) for path, leaf in now.items()}
    for path, copy in old.items():
        copy.copy_(now[path])
    return old


def _put_back(tensor: Tensor, copies: _Copies) -> None:
    # a part that came after the copy, such as a scale of the weights, is computed from them again
    now = leaves(tensor)
    for path, copy in copies.items():
        if path in now:
            now[path].copy_(copy)


class AfterUpdate:
    """Sums the counters of the step over all ranks, then calls ``after_update()`` of each module that has it.

    Each rank with a layer counts its part of the layer's tokens, in int64, so that every rank has the same sums to the
    last bit under any layout. All layers share one collective; without counters there is none.

    Args:
        parts: this rank's stages of the model, materialised.
        buffers: buffers of the whole model.
        world: all ranks.
    """

    def __init__(self, parts: Sequence[nn.Module], buffers: Sequence[Buffer], world: World) -> None:
        self._world = world
        # not hasattr of the module: a wrapper may have the attributes of its module
        modules = (module for part in parts for module in part.modules() if hasattr(type(module), "after_update"))
        self._modules = list(modules)
        counted = [buffer for buffer in buffers if not buffer.persistent]
        *starts, self._total = accumulate((buffer.numel for buffer in counted), initial=0)
        start_of = {buffer.name: start for buffer, start in zip(counted, starts, strict=True)}
        held = named_buffers(parts, persistent=False)
        self._counters = [local_tensor(counter).view(-1) for _, counter in held]
        places = [range(start_of[name], start_of[name] + counter.numel()) for name, counter in held]
        self._places = torch.tensor([place for of_one in places for place in of_one], device=world.device)
        self._totals: Tensor | None = None

    def take_totals(self) -> Tensor | None:
        """Counts of all ranks in the step of the last call, int64, flat in the order of the buffers. None if there was
        no call since these were last taken, or nothing is counted.
        """
        totals = self._totals
        self._totals = None
        return totals

    @torch.no_grad()
    def __call__(self) -> None:
        """Call once after each update, on every rank."""
        if self._total:
            totals = torch.zeros(self._total, dtype=torch.int64, device=self._world.device)
            if self._counters:  # a stage of a pipeline may have no counters
                totals[self._places] = torch.cat(self._counters)
            self._totals = self._world.sum(totals)
            if self._counters:
                own = totals[self._places].split([counter.numel() for counter in self._counters])
                torch._foreach_copy_(self._counters, list(own))
        for module in self._modules:
            module.after_update()  # type: ignore[operator]
