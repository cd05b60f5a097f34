"""The base class of all optimizers here, and their state as tensors by name.

Each tensor is as large as its parameter, so that any layout can load it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from crius.optim.storage import BLOCK, EightBit, code_table
from crius.shards import laid_out, local_shard, local_tensor

SIGNED = {"exp_avg": True, "exp_avg_sq": False, "momentum_buffer": True}
"""Names of moments, and whether their numbers may be negative."""

SCALE = "_scale"


class Optimizer(torch.optim.Optimizer):
    """An optimizer that can skip a step on the device, and whose state keeps its dtypes when it is loaded.

    Each of ``param_groups`` has a ``name`` and an ``lr_factor``. The training loop multiplies ``lr`` by ``lr_factor``.

    Attributes:
        takes_found_inf: whether ``step`` can skip the update if ``found_inf`` is not 0, without the host reading it.
        found_inf: float32 scalar on the device, set before ``step``; None: always update.
    """

    takes_found_inf: bool = False
    found_inf: Tensor | None = None

    def start(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Give a parameter its state before the first update: moments of 0, step 0."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but it keeps dtypes (bfloat16 moments, 8-bit codes); torch's converts to the
        parameter's dtype.
        """
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for parameter, number in zip(parameters, numbers, strict=True):
            state = self.state[parameter]
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    state[name] = value.to(state[name].device, copy=True)


class Joint(Optimizer):
    """Several optimizers with different parameters as one, with one list of groups and one state.

    Args:
        parts: the optimizers.
    """

    def __init__(self, parts: list[Optimizer]) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.takes_found_inf = all(part.takes_found_inf for part in parts)
        self._share()

    def _share(self) -> None:
        """Make the parts use this object's groups and state, which loading replaces."""
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


def scale_key(moment: str, parameter: Tensor) -> str:
    """Key of the scales of an 8-bit moment. They belong to the blocks of one shard, so the key names the shard."""
    local, offset = local_shard(parameter)
    place = "-".join("_".join(map(str, numbers)) for numbers in (offset, local.shape))
    return f"{moment}{SCALE}.{place}"


def to_save(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
    """The state as ``<parameter>.<moment>`` and ``<parameter>.step``. A parameter without state has no entry.

    8-bit moments are given in float32, for any sharding, together with the scales of this rank's shard. So a rank with
    the same shard gets its codes back to the last bit.
    """
    tensors = {}
    for parameter, _ in _members(optimizer):
        state = optimizer.state.get(parameter, {})
        name = names[parameter]
        for key, value in state.items():
            if key.endswith(SCALE):
                continue
            if value.dtype == torch.uint8:
                numbers = _kept(state, key).load(slice(0, local_tensor(parameter).numel()))
                tensors[f"{name}.{key}"] = laid_out(numbers.view(local_tensor(parameter).shape), parameter)
                tensors[f"{name}.{scale_key(key, parameter)}"] = state[f"{key}{SCALE}"]
            else:
                tensors[f"{name}.{key}"] = value
    return tensors


def to_load(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], saved: Collection[str]
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Tensors to fill with a saved state, and a function to call when they are filled.

    Args:
        optimizer: the optimizer, which has no state yet.
        names: names of its parameters.
        saved: saved names. If some names of a parameter are missing, as from another optimizer, it gets no state.
    """
    targets: dict[str, Tensor] = {}
    raised: list[tuple[dict[str, Any], str, nn.Parameter, Tensor]] = []
    for parameter, group in _members(optimizer):
        name = names[parameter]
        if f"{name}.step" not in saved:
            continue
        optimizer.start(parameter, group)
        state = optimizer.state[parameter]
        if any(f"{name}.{key}" not in saved for key in state if not key.endswith(SCALE)):
            del optimizer.state[parameter]  # from another optimizer: its step count does not apply to new moments
            continue
        for key, value in state.items():
            if key.endswith(SCALE):
                place = f"{name}.{scale_key(key.removesuffix(SCALE), parameter)}"
                if place in saved:
                    targets[place] = value
            elif value.dtype == torch.uint8:
                numbers = torch.zeros_like(local_tensor(parameter), dtype=torch.float32)
                targets[f"{name}.{key}"] = laid_out(numbers, parameter)
                raised.append((state, key, parameter, numbers))
            else:
                targets[f"{name}.{key}"] = value

    def finish() -> None:
        for state, key, parameter, numbers in raised:
            has_scale = f"{names[parameter]}.{scale_key(key, parameter)}" in saved
            _lower(_kept(state, key), numbers.view(-1), has_scale)

    return targets, finish


def fill_copies(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    """If two parameters have one name, the last was loaded: copy its numbers and state to the other one."""
    loaded = {name: parameter for parameter, name in names.items()}
    for parameter, name in names.items():
        source = loaded[name]
        if source is not parameter:
            local_tensor(parameter).copy_(local_tensor(source))
            optimizer.state[parameter] = {key: kept.clone() for key, kept in optimizer.state.get(source, {}).items()}


def _members(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    return ((parameter, group) for group in optimizer.param_groups for parameter in group["params"])


def _kept(state: Mapping[str, Tensor], key: str) -> EightBit:
    codes = state[key]
    return EightBit(codes, state[f"{key}{SCALE}"], SIGNED[key], code_table(SIGNED[key], codes.device))


def _lower(kept: EightBit, numbers: Tensor, has_scale: bool) -> None:
    """Convert numbers to codes, with the scales in ``kept`` if ``has_scale``, else with new scales of the blocks."""
    if not has_scale:
        kept.save(slice(0, numbers.numel()), numbers, None, None)
        return
    scale = kept.scale.repeat_interleave(BLOCK)[: numbers.numel()]
    middles = (kept.table[1:] + kept.table[:-1]) / 2
    codes = torch.bucketize(numbers / scale, middles).to(torch.uint8)
    # a scale of 0 makes any code 0: a block that was never written keeps its initial code
    kept.codes[: numbers.numel()] = torch.where(scale > 0, codes, kept.codes[: numbers.numel()])
