"""``[compile]``."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """torch.compile of each block."""

    enable: bool = False
    """Compile the blocks of the model: they share one graph. Faster on a GPU; a CPU gains little."""

    loss: bool = False
    """Also compile the loss, so that no logits are copied to float32. Needs enable."""

    backend: Literal["inductor", "aot_eager", "eager", "cudagraphs"] = "inductor"
    """Backend of torch.compile. inductor generates kernels; cudagraphs replays eager ones; aot_eager and eager
    only trace, to find bugs."""

    cache_dir: str = ""
    """Folder of compiled kernels. Empty: crius/compile under the user's cache folder. A second run starts faster."""

    max_recompiles: int = 4
    """More recompilations than this after step 3 end in a warning that names the guard that failed most."""
