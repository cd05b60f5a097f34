"""Allocates memory for a model that is built on the meta device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def keeping_ties(model: nn.Module) -> Iterator[None]:
    """Keep ties: parameters of ``model`` that are one tensor on entry are one tensor again on exit.

    Functions of torch that convert a model replace its parameters one by one. The first parameter of each tie is kept.
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
    """Allocate uninitialised parameters and buffers for a model on the meta device, in place.

    Args:
        model: the model, which has shapes only.
        device: device of the parameters.
        buffers: device of the buffers; None: as the parameters.
    """
    with keeping_ties(model):
        # as to_empty, but with a fixed memory format: to preserve the format of a meta tensor, torch imports sympy
        model._apply(lambda t: torch.empty_like(t, device=device, memory_format=torch.contiguous_format))
    for name, buffer in list(model.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer.to(buffers or device))
