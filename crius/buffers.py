"""The buffers of a model, tensors that no gradient trains: state, and counters of a step.

A persistent buffer is state as a weight is: saved, compared, and put back with the weights. One with
``persistent=False`` is a counter: it starts each step at 0, and a pass that is not of the step leaves it as it was.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from crius.shards import local_tensor, named_parameters


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether the buffer ``name`` of ``module`` is state."""
    owner, _, attribute = name.rpartition(".")
    return attribute not in module.get_submodule(owner)._non_persistent_buffers_set


def named_buffers(parts: Sequence[nn.Module], *, persistent: bool) -> list[tuple[str, Tensor]]:
    """The buffers of the stages that this rank holds, by their names in the whole model: the state, or the counters."""
    found = ((part, name, buffer) for part in parts for name, buffer in part.named_buffers())
    return [(name, buffer) for part, name, buffer in found if is_persistent(part, name) == persistent]


def named_state(parts: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    """The parameters of the stages that this rank holds, then their buffers that are state, by name."""
    return [*named_parameters(parts), *named_buffers(parts, persistent=True)]


def counters(parts: Sequence[nn.Module]) -> list[Tensor]:
    """The counters of the stages that this rank holds, as it has them."""
    return [local_tensor(buffer) for _, buffer in named_buffers(parts, persistent=False)]


def zero(counted: Sequence[Tensor]) -> None:
    """Set ``counted`` to 0."""
    if counted:
        torch._foreach_zero_(list(counted))


@contextmanager
def uncounted(module: nn.Module) -> Iterator[None]:
    """What passes through ``module`` meanwhile is not counted: it passed before, or is of no step."""
    held = counters([module])
    before = [counter.clone() for counter in held]
    try:
        yield
    finally:
        for counter, old in zip(held, before, strict=True):
            counter.copy_(old)
