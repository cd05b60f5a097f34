"""Inductor's code for a GPU of compute capability 9.0 that does not exist: generated and kept, its kernels never run.

Needs the package ``triton``, which Inductor asks for what its kernels look like. What the generated code calls runs on
fake tensors; a Triton kernel does nothing.
"""

import functools
from unittest import mock

import torch

from cuda_fake.device import CUDA, NAME

CODE: list[str] = []
"""The generated modules, one for each graph: forward or backward."""

_META = torch.library.Library("aten", "IMPL", "Meta")

_COUNTS = {
    "multi_processor_count": 132,
    "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_block": 1024,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "warp_size": 32,
    "clock_rate": 1980000,
    "L2_cache_size": 50 << 20,
    "total_memory": 80 << 30,
    "is_integrated": 0,
}


class _Kernel:
    """Stands in for a compiled Triton kernel."""

    def run(self, *args, **options):
        pass


def _zero():
    """A function that gives 0; each its own, for Dynamo tells them apart."""
    return lambda *args, **options: 0


def _reinterpret_tensor(tensor, size, stride, offset=0):
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _scaled_mm(*args, out, **options):
    """Which has no fake implementation where it is told to write into a tensor."""
    torch._scaled_mm(*args, **options)
    return out


class _DeviceGuard:
    def __init__(self, index):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *error):
        return False


@functools.cache
def stand_in() -> None:
    """Have Inductor believe in the GPU of ``cuda_fake.device``."""
    import torch._dynamo.device_interface as interface
    import torch._functorch.config as functorch
    import torch._inductor.async_compile as async_compile
    import torch._inductor.config as inductor
    import torch._inductor.graph as graph
    import torch._inductor.kernel.mm
    import torch._inductor.select_algorithm as select_algorithm
    import torch.utils._triton as triton
    from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm

    properties = mock.Mock(name="properties", major=9, minor=0, gcnArchName="", uuid="fake", **_COUNTS)
    properties.name = NAME
    _set(torch.cuda, get_device_properties=lambda device=None: properties, _DeviceGuard=_DeviceGuard)
    _set(torch.cuda, _exchange_device=_zero(), _maybe_exchange_device=_zero())
    _set(torch.distributed, is_nccl_available=lambda: True)  # else nothing is fused with symmetric memory
    _META.impl("_scaled_mm.out", lambda *args, out, **options: out)
    for name in ("getCurrentRawStream", "setDevice", "getDevice", "exchangeDevice", "maybeExchangeDevice"):
        setattr(torch._C, f"_cuda_{name}", _zero())
    torch._C._cuda_isInBadFork = lambda: False
    torch._C._cuda_getArchFlags = lambda: "sm_90"
    torch.version.cuda = "13.0"
    guards = torch._C._dynamo.guards  # whose own would make tensors without the fake mode
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=CUDA)
    guards._reinterpret_tensor = _reinterpret_tensor
    _set(
        interface.CudaInterface,
        static=True,
        **{"is_available": lambda: True, "device_count": lambda: 1, "current_device": _zero(), "synchronize": _zero()},
        **{"get_compute_capability": lambda device=None: 90, "is_triton_capable": lambda device=None: True},
        **{"raise_if_triton_unavailable": lambda device=None: None, "get_raw_stream": _zero()},
        **{"exchange_device": _zero(), "maybe_exchange_device": _zero()},
    )
    async_compile.AsyncCompile.triton = lambda self, name, source, device_str="cuda": _Kernel()
    _set(triton, triton_hash_with_backend=lambda: "none", triton_hash=lambda: "none", triton_backend=lambda: None)
    _set(fuse_attention, _sfdp_init=lambda *args, **options: None)  # these trace patterns on real tensors
    _set(pad_mm, _pad_mm_init=lambda *args, **options: None)
    _set(misc_patterns, _misc_patterns_init=lambda *args, **options: None)
    inductor.compile_threads, inductor.shape_padding, inductor.joint_graph_constant_folding = 1, False, False
    inductor.force_disable_caches = True
    functorch.force_non_lazy_backward_lowering = True
    select_algorithm.extern_kernels._scaled_mm = _scaled_mm
    compiled = graph.GraphLowering.compile_to_module

    def keep(self):
        module = compiled(self)
        with open(module.__file__) as file:
            CODE.append(file.read())
        return module

    graph.GraphLowering.compile_to_module = keep


def _set(owner, *, static: bool = False, **values) -> None:
    for name, value in values.items():
        setattr(owner, name, staticmethod(value) if static else value)
