"""``torch.cuda`` of a GPU that does not exist: its properties, streams, events, and the host's waits for it.

Streams do nothing, for fake tensors have no contents. Events know in which step they were recorded, so that a test sees
which numbers the host waited for.
"""

import contextlib
import ctypes
import itertools
import weakref
from collections import namedtuple
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)
NAME = "NVIDIA H100 80GB HBM3"
_Properties = namedtuple(
    "_Properties", "name major minor total_memory multi_processor_count L2_cache_size gcnArchName uuid"
)
PROPERTIES = _Properties(NAME, 9, 0, 80 << 30, 132, 50 << 20, "", "fake")


@dataclass
class Waits:
    """What the host waits for.

    Attributes:
        step: the present one.
        seen: for each wait the step it was in, and the step of the work that it waited for.
        order: what is queued, with its step and its stream: copies to the host, updates, and waits for another stream.
    """

    step: int = 0
    seen: list[tuple[int, int]] = field(default_factory=list)
    order: list[tuple[int | str, ...]] = field(default_factory=list)

    def queue(self, *what: str) -> None:
        """Note what is queued: a word, and streams."""
        self.order.append((self.step, *what))


WAITS = Waits()


class Stream:
    """A stream on which everything is done at once. Torch 2.15 asks its fields."""

    numbers = itertools.count()
    stream_id = cuda_stream = 0
    device = CUDA
    device_index, device_type = 0, 1

    def __init__(self, *args, **options):
        self.name = f"stream {next(self.numbers)}"

    def wait_stream(self, stream):
        WAITS.queue("wait", self.name, stream.name)

    def wait_event(self, event):
        WAITS.queue("wait", self.name, event.name)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def query(self):
        return True

    def synchronize(self):
        WAITS.seen.append((WAITS.step, WAITS.step))


class Event:
    """An event that has always come."""

    def __init__(self, *args, **options):
        self._step, self.name = WAITS.step, "never"

    def record(self, stream=None):
        self._step, self.name = WAITS.step, (stream or current_stream()).name
        return self

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        WAITS.seen.append((WAITS.step, self._step))


def _synchronize(device=None):
    WAITS.seen.append((WAITS.step, WAITS.step))


_STREAMS = [Stream()]


def current_stream(device=None):
    """The stream that work is queued on."""
    return _STREAMS[-1]


@contextlib.contextmanager
def _stream(stream):
    _STREAMS.append(stream or current_stream())
    try:
        yield
    finally:
        _STREAMS.pop()


_CUDA = {
    "Stream": Stream,
    "Event": Event,
    "stream": _stream,
    "device": contextlib.nullcontext,
    "current_stream": current_stream,
    "default_stream": lambda device=None: _STREAMS[0],
    "set_stream": lambda stream: None,
    "synchronize": _synchronize,
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_current_stream_capturing": lambda: False,
    "device_count": lambda: 8,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "get_device_name": lambda device=None: NAME,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: PROPERTIES,
    "memory_stats": lambda device=None: {},
    "reset_peak_memory_stats": lambda device=None: None,
    "manual_seed": lambda seed: None,
    "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda state, device=None: None,
    "is_bf16_supported": lambda *args, **options: True,
}


CUDNN = 91900
"""Version of cuDNN, 9.19: newer than those that Crius does not take for attention."""


def stand_in(library: str) -> None:
    """Have this process believe in a GPU. ``library``, the shim, was loaded before torch."""
    ctypes.CDLL(library).crius_choose_attention()
    # never called: without a kernel for CUDA autograd takes the operators that it is defined by, and their tensors
    _ATEN.impl("silu_backward", lambda grad, x: torch.empty_like(x), "CUDA")
    for name, value in _CUDA.items():
        setattr(torch.cuda, name, value)
    torch.backends.cudnn.version = lambda: CUDNN
    fake_tensor.init_gpu_context = lambda device: None  # makes a tensor on the GPU, in torch 2.11 for every fake mode
    Tensor.pin_memory = _pin_memory
    Tensor.is_pinned = _is_pinned


_ATEN = torch.library.Library("aten", "IMPL")

_PINNED: dict[int, weakref.ref] = {}
"""Storages that say they are page-locked. Fake tensors have no such memory, nor has a torch without CUDA."""


def _pin_memory(tensor, device=None):
    if tensor.is_pinned():
        return tensor
    pinned = tensor if isinstance(tensor, FakeTensor) else tensor.clone()
    storage = pinned.untyped_storage()
    key = storage._cdata
    _PINNED[key] = weakref.ref(storage, lambda reference: _PINNED.pop(key, None))
    return pinned


def _is_pinned(tensor, device=None):
    return tensor.untyped_storage()._cdata in _PINNED


class FakeMode(FakeTensorMode):
    """The fake mode, which would let ``torch.tensor`` ask for memory of the GPU that this process believes in."""

    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)


class FakeFactories(TorchFunctionMode):
    """Tensors that are made on the GPU outside the fake mode, where there is no memory for them, are made inside it."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda" or _is_fake_mode_on():
            return function(*args, **kwargs)
        with self._fake:
            return function(*args, **kwargs)


def _is_fake_mode_on() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
