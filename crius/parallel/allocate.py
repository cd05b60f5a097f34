"""Memory for a model that has its shapes only."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def keeping_ties(model: nn.Module) -> Iterator[None]:
    """Parameters of ``model`` that are one tensor before are one tensor, the first of them, after.

    torch's functions over a model's parameters replace them one by one.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    yield
    for first, *others in names.values():
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))


def allocate(model: nn.Module, device: torch.device | str, *, buffers: torch.device | str | None = None) -> None:
    """Memory for the parameters and buffers of a meta-device model, in place, whatever is in it.

    Args:
        model: has its shapes.
        device: of the parameters.
        buffers: device of the buffers, where that is another.
    """
    with keeping_ties(model):
        # to_empty, but for the format: to keep that of a tensor of the meta device, torch imports sympy
        model._apply(lambda t: torch.empty_like(t, device=device, memory_format=torch.contiguous_format))
    for name, buffer in list(model.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer.to(buffers or device))
