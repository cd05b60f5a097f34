"""Inductor's settings for blocks on a CPU. Imported only by runs that compile: inductor takes 2 seconds and 100 MiB."""

import functools
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._inductor import ir, lowering
from torch._inductor.fx_passes import fuse_attention

from crius.kernels.cpu import linear


def suit_cpu() -> None:
    """Set up this process. The gain of each part is in docs/kernels.md."""
    functorch_config.ban_recompute_materialized_backward = False
    # patterns of attention written as matmuls, which our models lack: they take 6 MiB for the life of the process
    fuse_attention._sfdp_init = functools.cache(lambda *device: None)
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        lowering.add_needs_realized_inputs(linear.OPERATOR)
        lowering.register_lowering(linear.OPERATOR, type_promotion_kind=None)(_onednn)


def _onednn(x: Any, weight: Any) -> Any:
    """PyTorch's operator instead of ours, in the code that inductor writes. Ours is implemented in Python. Within a
    step Python's code is not in the cache, so a call of ours costs a tenth of a millisecond more.

    Inductor's own lowering of PyTorch's operator is for inference and takes only constants as weights.
    """
    call = lowering.fallback_handler(torch.ops.mkldnn._linear_pointwise.default, add_to_fallback_set=False)
    view = lowering.lowerings[torch.ops.aten.view.default]
    *rows, width = x.get_size()
    x.realize()
    x = ir.ExternKernel.require_contiguous(x)
    product = call(view(x, [-1, width]), weight, None, "none", [], "")
    return view(product, [*rows, weight.get_size()[0]])
