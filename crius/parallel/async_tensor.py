"""Async tensor parallelism: collectives cut into pieces that hide behind the pieces of a matmul.

Inductor's micro-pipeline pass replaces an all-gather with the matmuls that read it, and a matmul with the
reduce-scatter that reads it, by one op on symmetric memory each. It skips what does not match in silence, so that this
module counts what it did.
"""

import re
import warnings
from pathlib import Path

import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch._inductor.codecache import PyCodeCache
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.device_mesh import DeviceMesh

_FUSED = re.compile(r"torch\.ops\.symm_mem\.fused_\w+\.default\(")
_PLAIN = re.compile(r"torch\.ops\._c10d_functional\.(?:all_gather|reduce_scatter)_\w+\.default\(")


class AsyncTensorParallel:
    """What the micro-pipeline pass made of this rank's compiled graphs.

    The counts come from the generated code, not from the pass: a graph from the cache of compiled kernels has been
    through the pass in an earlier run.

    Attributes:
        missing: what keeps this device from it, such as ``needs CUDA``; empty where it is on.
    """

    def __init__(self, missing: str = "") -> None:
        self.missing = missing
        self._loaded_before = len(PyCodeCache.modules)

    def count(self) -> tuple[int, int]:
        """Fused collectives, and all all-gathers and reduce-scatters of the graphs compiled since it was enabled.

        Each graph counts once, however many blocks share it. Call after the first step: backwards compile then.
        """
        if self.missing:
            return 0, 0
        files = {module.__file__ for module in PyCodeCache.modules[self._loaded_before :]}
        counts = [count_fused(Path(file).read_text(encoding="utf-8")) for file in files if file]
        return sum(fused for fused, _ in counts), sum(candidates for _, candidates in counts)

    def reason(self) -> str:
        """Why nothing, or not all, is fused; empty when all is."""
        if self.missing:
            return self.missing
        fused, candidates = self.count()
        if not candidates:
            return "no compiled graph has an all-gather or reduce-scatter"
        if not fused:
            return "no collective stands next to a matmul that Inductor can fuse it with"
        return "" if fused == candidates else "the others stand next to no matmul that Inductor can fuse them with"


def enable_async_tensor_parallel(tp_mesh: DeviceMesh, device_type: str) -> AsyncTensorParallel:
    """Turn on async tensor parallelism for what is compiled from now on; where the device cannot, change nothing.

    Args:
        tp_mesh: the ranks that share matmuls, one axis.
        device_type: ``cuda``, or a device without symmetric memory.
    """
    if device_type != "cuda":
        return AsyncTensorParallel("needs CUDA")
    if not dist.is_nccl_available():
        return AsyncTensorParallel("needs NCCL")
    group = tp_mesh.get_group().group_name
    # torch says that this call is no longer needed, but up to 2.14 at least the pass asks whether it was made
    # (pytorch/pytorch#193027)
    enable = getattr(symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is not None and not symmetric_memory.is_symm_mem_enabled_for_group(group):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable(group)
    if not symmetric_memory.is_symm_mem_enabled_for_group(group):
        return AsyncTensorParallel("needs symmetric memory, which torch has not for this group of ranks")
    inductor_config._micro_pipeline_tp = True
    return AsyncTensorParallel()


def count_fused(code: str) -> tuple[int, int]:
    """Fused collectives, and all all-gathers and reduce-scatters, in the Python code of a graph."""
    lines = [line for line in code.splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines)
    fused = len(_FUSED.findall(text))
    return fused, fused + len(_PLAIN.findall(text))
