"""Parameters and buffers of the stages that this rank holds, by their names in the whole model.

Apart from ``crius.shards``, whose DTensor takes half a second to import.
"""

from collections.abc import Sequence

from torch import Tensor, nn


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether the buffer ``name`` of ``module`` is state."""
    owner, _, attribute = name.rpartition(".")
    return attribute not in module.get_submodule(owner)._non_persistent_buffers_set


def named_buffers(parts: Sequence[nn.Module], *, persistent: bool) -> list[tuple[str, Tensor]]:
    """The buffers of the stages that this rank holds, by their names in the whole model: the state, or the counters."""
    buffers = ((part, name, buffer) for part in parts for name, buffer in part.named_buffers())
    return [(name, buffer) for part, name, buffer in buffers if is_persistent(part, name) == persistent]


def named_state(parts: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    """The trained parameters of the stages that this rank holds, then their buffers that are state, by name."""
    return [*named_parameters(parts), *named_buffers(parts, persistent=True)]


def all_state(parts: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    """As ``named_state``, with the frozen parameters."""
    return [*all_parameters(parts), *named_buffers(parts, persistent=True)]


def named_parameters(parts: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """The trained parameters of the stages that this rank holds, by their names in the whole model."""
    return [(name, parameter) for name, parameter in all_parameters(parts) if parameter.requires_grad]


def all_parameters(parts: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """The parameters of the stages that this rank holds, frozen ones too, by their names in the whole model.

    A stage that has the copy of a tied weight has it under the weight's one name; a rank with both has that name twice.
    """
    return [
        (getattr(part, "ties", {}).get(name, name), parameter)
        for part in parts
        for name, parameter in part.named_parameters()
    ]
