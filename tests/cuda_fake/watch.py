"""A dispatch mode over fake CUDA tensors: what the host reads of them, what crosses devices, which kernels run.

What the host reads it gets, so that the code runs on: 1 for a number, True for a bool.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from cuda_fake.device import WAITS, current_stream

_PLAIN = (Tensor, nn.Parameter, FakeTensor)
_SCALAR = "aten::_local_scalar_dense"
_READS = (_SCALAR, "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2")
_COPIES = ("aten::_to_copy", "aten::copy_")


@dataclass
class Seen:
    """What one step did.

    Attributes:
        reads: operators whose result the host needs, which waits for the GPU, each with where it was called.
        copies: between devices, as ``way dtype shape``, with ``waits`` where the host waits for it, and where it was
            called.
        ops: how often each operator ran on the GPU.
        collectives: kind, mesh axis and bytes of each, in order.
        of_host: likewise, of those over tensors of the host, for which NCCL is none.
        peak: most bytes of tensors on the GPU at once.
    """

    reads: list[tuple[str, str]] = field(default_factory=list)
    copies: list[tuple[str, str]] = field(default_factory=list)
    ops: Counter[str] = field(default_factory=Counter)
    collectives: list[tuple[str, str, int]] = field(default_factory=list)
    of_host: list[tuple[str, str, int]] = field(default_factory=list)
    peak: int = 0


class Watch(TorchDispatchMode):
    """Notes what happens, a ``Seen`` for each step.

    Args:
        timeline: gets each tensor of the GPU by ``see``, and each step by ``segment``.
        collective: kind, axis and bytes of an operator that is a collective; None of others.

    Attributes:
        steps: what each step did; what came before the first one is step 0.
        is_on: whether the mode was entered.
    """

    def __init__(self, timeline, collective) -> None:
        super().__init__()
        self.steps = [Seen()]
        self.is_on = False
        self._timeline, self._collective = timeline, collective

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo may compile what runs below, as below the fake mode."""
        return True

    def next_step(self) -> None:
        """A step begins; what came before the first one is step 0."""
        self._timeline.segment(str(len(self.steps)))
        self.steps.append(Seen())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor, which comes again as its local tensor
        kwargs = kwargs or {}
        name, now = func._schema.name, self.steps[-1]
        on_gpu = any(_is_on_gpu(item) for item in tree_iter((args, kwargs)))
        if name in _READS and on_gpu:
            now.reads.append((name, _caller()))
        result = _answered(func, args, kwargs) if name == _SCALAR else func(*args, **kwargs)
        if name in _COPIES:
            self._note_copy(name, args, kwargs, result)
        if on_gpu or _is_on_gpu(result):
            now.ops[name] += 1
        if name.startswith("aten::_fused_adam"):
            WAITS.queue("update", current_stream().name)
        if found := self._collective(func, args, kwargs, result):
            (now.collectives if on_gpu else now.of_host).append(found)
        for item in tree_iter(result):
            if _is_on_gpu(item) and type(item) in _PLAIN:
                self._timeline.see(item)
        return result

    def _note_copy(self, name, args, kwargs, result):
        source = args[0] if name == "aten::_to_copy" else args[1]
        if source.device.type == result.device.type:
            return
        async_ = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        # to the host torch takes page-locked memory by itself
        is_late = async_ and (source.device.type == "cuda" or source.is_pinned())
        what = f"{source.device.type}->{result.device.type} {str(source.dtype)[6:]} {list(source.shape)}"
        self.steps[-1].copies.append((what if is_late else f"{what} waits", _caller()))
        if result.device.type == "cpu":
            WAITS.queue("copy", current_stream().name)


def _is_on_gpu(item) -> bool:
    return isinstance(item, Tensor) and item.device.type == "cuda"


def _answered(func, args, kwargs):
    """What the host reads: a number that is known, or 1."""
    try:
        return func(*args, **kwargs)
    except DataDependentOutputException:
        dtype = args[0].dtype
        return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _caller() -> str:
    """File and function of Crius, or else of torch, that the present operator comes from, innermost first."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 3:
        file = frame.f_code.co_filename.replace("\\", "/")
        if "/crius/" in file and "/cuda_fake/" not in file:
            found.append(f"{file.rpartition('/crius/')[2]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found)
