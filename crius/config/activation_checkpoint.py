"""``[activation_checkpoint]``."""

from dataclasses import dataclass
from typing import Literal

SAVE_OPS = ("attention", "matmul", "matmul_every_other", "reduce_scatter")
"""Categories of ops that ``save_ops`` can name."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointConfig:
    """Recompute activations in the backward instead of keeping them. The loss stays the same to the last bit."""

    mode: Literal["none", "full", "selective", "memory_budget", "auto"] = "none"
    """none keeps all activations. full keeps only each block's input and runs its forward again in the backward.
    selective does so for some blocks or some ops (selective_option). memory_budget lets torch.compile choose what to
    recompute so that memory_budget of the activations stay; it needs --compile.enable. auto: the first of none,
    selective by op and full that is estimated to fit into 90 % of the device's memory; the log has the estimates."""

    selective_option: Literal["op"] | int = "op"
    """mode selective. op: in every block the results of save_ops stay, all else is recomputed. An integer n: every
    n-th block is recomputed in full, the others keep everything."""

    save_ops: tuple[str, ...] = ("attention", "matmul_every_other", "reduce_scatter")
    """selective_option op: what stays. attention: outputs of the attention kernel. matmul: outputs of every matmul;
    matmul_every_other: of every second one. reduce_scatter: outputs of tensor parallelism's reduce-scatter, which
    would be communicated again. Or names of ATen ops, such as aten.mm.default."""

    memory_budget: float = 0.5
    """mode memory_budget: share of the activations that may stay, from 0 (as full) to 1 (as none)."""
