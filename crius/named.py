"""Parameters and buffers of this rank's stages, by their names in the whole model.

Separate from ``crius.shards``, whose DTensor takes half a second to import.
"""

from collections.abc import Sequence

from torch import Tensor, nn


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether the buffer ``name`` of ``module`` belongs to its state."""
    owner, _, attribute = name.rpartition(".")
    return attribute not in module.get_submodule(owner)._non_persistent_buffers_set


def named_buffers(parts: Sequence[nn.Module], *, persistent: bool) -> list[tuple[str, Tensor]]:
    """The buffers of this rank's stages, by their names in the whole model: the state, or the counters."""
    buffers = ((part, name, buffer) for part in parts for name, buffer in part.named_buffers())
    return [(name, buffer) for part, name, buffer in buffers if is_persistent(part, name) == persistent]


def named_state(parts: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    """The trained parameters of this rank's stages, then their buffers that belong to the state, by name."""
    return [*named_parameters(parts), *named_buffers(parts, persistent=True)]


def all_state(parts: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    """Like ``named_state``, with the frozen parameters."""
    return [*all_parameters(parts), *named_buffers(parts, persistent=True)]


def named_parameters(parts: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """The trained parameters of this rank's stages, by their names in the whole model."""
    return [(name, parameter) for name, parameter in all_parameters(parts) if parameter.requires_grad]


def all_parameters(parts: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """The parameters of this rank's stages, with frozen ones, by their names in the whole model.

    A stage with a copy of a tied weight has it under the weight's one name. A rank with both copies has that name
    twice.
    """
    return [
        (getattr(part, "ties", {}).get(name, name), parameter)
        for part in parts
        for name, parameter in part.named_parameters()
    ]
