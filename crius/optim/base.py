"""What every optimizer here is beside a ``torch.optim.Optimizer``."""

from typing import Any

import torch
from torch import Tensor, nn


class Optimizer(torch.optim.Optimizer):
    """An optimizer that can skip a step on the device, and whose state keeps its dtypes when it is loaded.

    Each of ``param_groups`` has a ``name`` and an ``lr_factor``, by which the training loop multiplies its ``lr``.

    Attributes:
        takes_found_inf: ``step`` changes nothing where ``found_inf`` is not 0, without the host knowing.
        found_inf: float32 scalar on the device, set before ``step``; None updates in any case.
    """

    takes_found_inf: bool = False
    found_inf: Tensor | None = None

    def start(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Give a parameter the state that it has before its first update: moments of 0, step 0."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would give every tensor the dtype of its parameter: bfloat16 moments, 8-bit codes."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for parameter, number in zip(parameters, numbers, strict=True):
            held = self.state[parameter]
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    held[name] = value.to(held[name].device, copy=True)


class Joint(Optimizer):
    """Optimizers of different parameters as one: one list of groups, one state.

    Args:
        parts: the optimizers.
    """

    def __init__(self, parts: list[Optimizer]) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.takes_found_inf = all(part.takes_found_inf for part in parts)
        self._share()

    def _share(self) -> None:
        """Have the parts work on these groups and this state, which loading replaces."""
        start = 0
        for part in self._parts:
            part.state = self.state
            part.param_groups = self.param_groups[start : start + len(part.param_groups)]
            start += len(part.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See ``Optimizer``."""
        super().load_state_dict(state_dict)
        self._share()

    def start(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """See ``Optimizer``."""
        owner = next(part for part in self._parts if any(own is group for own in part.param_groups))
        owner.start(parameter, group)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for part in self._parts:
            part.found_inf = self.found_inf
            part.step()
