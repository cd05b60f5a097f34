"""What the closed form of memory does not derive: what losses and an allocator add. Torch-free.

Written by ``benchmarks/fit_planner_memory.py``.
"""

from dataclasses import dataclass

from crius.units import GIB


@dataclass(frozen=True, kw_only=True)
class MemoryConstants:
    """Fitted.

    Attributes:
        compiled_logit_bytes: of one logit, all that exists of it in a compiled loss.
        chunked_logit_bytes: the same, of all logits, in a loss that other implementations cut by themselves.
        fused_logit_bytes: the same in a fused kernel over a split vocabulary.
        reserved_share: what an allocator reserves beyond what is allocated, as a share of it.
        reserved_eager_share: the same where blocks are not compiled, and more tensors come and go.
        reserved_bytes: what it reserves beside that.
        allocated_bytes: what libraries allocate that is no tensor of the model: workspaces.
        cdna3_bytes: what AMD's libraries reserve more.
        nvfp4_kept: share of the activations that a layer with 4-bit matmuls keeps.
    """

    compiled_logit_bytes: float = 3.74
    chunked_logit_bytes: float = 2.19
    fused_logit_bytes: float = 4.2
    reserved_share: float = 0.0677
    reserved_eager_share: float = 0.0847
    reserved_bytes: float = 1.11 * GIB
    allocated_bytes: float = 0.569 * GIB
    cdna3_bytes: float = 3.21 * GIB
    nvfp4_kept: float = 0.506


MEMORY = MemoryConstants()
