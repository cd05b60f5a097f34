"""A copy of the weights, the buffers and the optimizer's state in host memory, to go back to."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_Copies = dict[str, Tensor]


class Snapshot:
    """Copies of this rank's parameter shards and buffers, and of the optimizer's state for them.

    The state is what ``optimizer.state`` holds by parameter: tensors of any kind that says what it is made of (DTensor,
    torchao's 8-bit states), and values that are no tensors. It is restored in place, so that whatever refers to the
    tensors goes on to; an entry that came after the snapshot is removed.

    Args:
        tensors: parameters and buffers of this rank.
        optimizer: that updates the parameters.
    """

    def __init__(self, tensors: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._tensors = list(tensors)
        self._optimizer = optimizer
        self._copied: list[_Copies] = []
        self._state: list[dict[str, Any]] = []

    @torch.no_grad()
    def take(self) -> None:
        """Copy what is there now over what was copied before. Waits for the device."""
        none: list[dict[str, Any]] = [{}] * len(self._tensors)
        self._copied = [_copies(tensor, old) for tensor, old in zip(self._tensors, self._copied or none, strict=True)]
        self._state = [
            {name: _copies(v, old.get(name, {})) if isinstance(v, Tensor) else v for name, v in held.items()}
            for held, old in zip(self._held(), self._state or none, strict=True)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what was copied last."""
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
        """Host memory that a copy of what is there now takes, in bytes."""
        tensors = [*self._tensors, *(value for held in self._held() for value in held.values())]
        found = (leaf for value in tensors if isinstance(value, Tensor) for leaf in leaves(value).values())
        return sum(leaf.numel() * leaf.element_size() for leaf in found)

    def _held(self) -> list[dict[str, Any]]:
        return [self._optimizer.state.get(tensor, {}) for tensor in self._tensors]


def leaves(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors that a tensor of any class is made of, on this rank, by the path of attributes to each."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return {"": tensor.detach()}
    parts = {name: getattr(tensor, name) for name in flatten()[0]}
    return {
        f"{name}.{path}": leaf
        for name, part in parts.items()
        if isinstance(part, Tensor)  # a DTensor counts its mesh among them
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
    # a part that came later, such as a scale that was computed from the weights, is computed anew from them
    now = leaves(tensor)
    for path, copy in copies.items():
        if path in now:
            now[path].copy_(copy)
