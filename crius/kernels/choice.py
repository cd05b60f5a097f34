"""The choice of kernels of this process, resolved once from the config and the machine.

No kernel is timed at the start: the same config on the same machine takes the same kernels in every run, and so gives
the same bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import activate_flash_attention_impl

from crius.errors import ConfigError
from crius.host import is_wide_amd_cpu

Linear = Literal["torch", "onednn"]
Pointwise = Literal["torch", "fused"]
Attention = Literal["cudnn", "flash", "efficient", "math", "varlen", "flex", "blocked"]

_PLAIN = (Tensor, nn.Parameter, FakeTensor)  # not DTensor or another subclass, which redefine operators


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The kernels of a process. By default everything is computed as in PyTorch.

    Attributes:
        linear: kernel of float32 linear layers on a CPU.
        pointwise: kernels of RMSNorm, rotary positions and SwiGLU on a CPU.
        attention: backends of attention, tried in this order; empty: PyTorch's own order.
        flash: version of FlashAttention that ``flash`` and ``varlen`` use on a GPU.
        reasons: reason of each choice, by field; empty where the config names the kernel.
    """

    linear: Linear = "torch"
    pointwise: Pointwise = "torch"
    attention: tuple[Attention, ...] = ()
    flash: int = 2
    reasons: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{name} {text}" for name, text in self.described().items())

    def described(self) -> dict[str, str]:
        """Each kernel and its reason, as a phrase."""
        attention = " > ".join(self.attention) or "torch's own order"
        if self.flash != 2:
            attention += f" with FlashAttention {self.flash}"
        taken = {"linear": self.linear, "pointwise": self.pointwise, "attention": attention}
        why = dict(self.reasons)
        return {name: f"{value} ({why.get(name) or 'as asked'})" for name, value in taken.items()}


_current = Choice()


def current() -> Choice:
    """The choice of this process."""
    return _current


def apply(choice: Choice) -> None:
    """Use ``choice`` in this process from now on."""
    global _current  # as torch.backends' flags are
    _current = choice


@contextmanager
def applied(choice: Choice) -> Iterator[None]:
    """Use ``choice`` while the context is open."""
    before = current()
    apply(choice)
    try:
        yield
    finally:
        apply(before)


def resolve(
    linear: Literal["auto"] | Linear,
    pointwise: Literal["auto"] | Pointwise,
    attention: Literal["auto", "flash3", "flash4"] | Attention,
    *,
    device_type: str,
    capability: tuple[int, int] | None = None,
    cudnn: int | None = None,
    has_mask: bool = False,
    no_varlen: str = "",
    is_split: bool = False,
    keeps_probabilities: bool = False,
    caps_scores: bool = False,
) -> Choice:
    """Resolve ``[kernels]`` for a device.

    Args:
        linear: as in ``[kernels]``.
        pointwise: as in ``[kernels]``.
        attention: as in ``[kernels]``.
        device_type: ``cpu`` or ``cuda``.
        capability: compute capability of the GPU; None if unknown.
        cudnn: version of cuDNN, such as 91501; None if unknown.
        has_mask: whether attention gets the document mask.
        no_varlen: why attention on a GPU cannot use the ends of documents; empty where it can.
        is_split: whether context parallelism splits sequences. cuDNN's causal attention does not take their parts.
        keeps_probabilities: whether attention on a CPU may keep its probabilities, see ``crius.config.resolve``.
        caps_scores: whether attention bounds its scores, which on a GPU flex alone does.

    Raises:
        ConfigError: a kernel that the config names does not run on the device.
    """
    found_linear, why_linear = _linear(linear, device_type)
    found_pointwise, why_pointwise = _pointwise(pointwise, device_type)
    if capability and capability < (8, 0):
        no_varlen = no_varlen or "GPU before Ampere"
    mask = no_varlen if has_mask else None
    versions = (capability, cudnn)
    order, why_attention = _attention(attention, device_type, versions, mask, keeps_probabilities, caps_scores)
    is_main = order[:1] == ("varlen",) or (is_split and not has_mask)
    flash, why_flash = _flash(attention, capability, is_main)
    return Choice(
        linear=found_linear,
        pointwise=found_pointwise,
        attention=order,
        flash=flash,
        reasons=(("linear", why_linear), ("pointwise", why_pointwise), ("attention", f"{why_attention}{why_flash}")),
    )


def _linear(asked: str, device_type: str) -> tuple[Linear, str]:
    missing = _missing_onednn(device_type)
    if not _is_auto(asked, "linear", "onednn", missing):
        return asked, ""  # type: ignore[return-value]
    if missing:
        return "torch", f"auto: {missing}"
    return ("onednn", "auto: AMD CPU with AVX-512") if is_wide_amd_cpu() else ("torch", "auto: no AMD CPU with AVX-512")


def _pointwise(asked: str, device_type: str) -> tuple[Pointwise, str]:
    missing = "" if device_type == "cpu" else "it is for CPUs"
    if not _is_auto(asked, "pointwise", "fused", missing):
        return asked, ""  # type: ignore[return-value]
    return ("torch", f"auto: {missing}") if missing else ("fused", "auto: CPU")


def _is_auto(asked: str, field: str, fast: str, missing: str) -> bool:
    """Whether the process chooses the kernel, because the config says ``auto``.

    Raises:
        ConfigError: the config names ``fast``, which cannot run because of ``missing``.
    """
    if asked == fast and missing:
        raise _impossible(field, fast, missing, "torch")
    return asked == "auto"


def _attention(
    asked: str,
    device_type: str,
    versions: tuple[tuple[int, int] | None, int | None],
    mask: str | None,
    keeps_probabilities: bool,
    caps_scores: bool,
) -> tuple[tuple[Attention, ...], str]:
    """The order of backends, and the reason. ``mask``: why document ends cannot be used; None: there is no mask."""
    if asked in _FLASH and device_type != "cpu":
        return ("flash",) if mask is None else ("varlen",), ""
    if asked != "auto":
        if device_type == "cpu" and asked not in ("flash", "math", "blocked"):
            raise _impossible("attention", asked, "a CPU has flash, math and blocked", "auto")
        if device_type != "cpu" and asked == "blocked":
            raise _impossible("attention", asked, "it is for CPUs", "auto")
        return (asked,), ""  # type: ignore[return-value]
    if device_type == "cpu":
        if keeps_probabilities:
            return ("blocked",), "auto: AMD CPU with AVX-512, short sequences"
        return (), "auto: CPU"
    if caps_scores:
        return ("flex",), "auto: softcap"
    if mask is None:
        return _on_gpu(*versions)
    if mask:
        return ("flash", "efficient", "math"), f"auto: document mask, not varlen: {mask}"
    return ("varlen", "flex"), "auto: document mask"


CUDNN_GENERATIONS = (9, 10)
"""Major compute capabilities whose fastest attention is cuDNN's: Hopper, and Blackwell for data centres."""
CUDNN_ABOVE = 91500
"""cuDNN 9.15.0. Up to this version it reads past its input at some sequence lengths (pytorch/pytorch#169849)."""


def _on_gpu(capability: tuple[int, int] | None, cudnn: int | None) -> tuple[tuple[Attention, ...], str]:
    """The order of backends without a mask, by the same rule as torch's own guard of cuDNN; empty: torch's order."""
    if capability is None:
        return ("flash", "efficient", "math"), "auto: GPU"
    if capability < (9, 0):
        return ("flash", "efficient", "math"), "auto: GPU before Hopper"
    here = f"auto: sm{capability[0]}{capability[1]}, cuDNN {cudnn or 'missing'}"
    if capability[0] in CUDNN_GENERATIONS and (cudnn or 0) > CUDNN_ABOVE:
        return ("cudnn", "flash", "efficient", "math"), here
    return (), here


_FLASH = {
    "flash3": (3, (9,), "flash_attn_interface", "build hopper of https://github.com/Dao-AILab/flash-attention"),
    "flash4": (4, (9, 10), "flash_attn.cute", "pip install flash-attn-4"),
}
"""Version, major compute capabilities, package, and how to install it."""
_NEWEST = {9: "flash3", 10: "flash4"}
"""Newest FlashAttention, by major compute capability."""


def missing_flash(capability: tuple[int, int]) -> str:
    """The newest FlashAttention for a GPU, and how to install it; empty if it is installed or there is only version 2.

    Args:
        capability: compute capability of the GPU.
    """
    name = _NEWEST.get(capability[0], "")
    if not name or _is_installed(_FLASH[name][2]):
        return ""
    return f"FlashAttention {_FLASH[name][0]} (for --kernels.attention {name}): {_FLASH[name][3]}"


def _flash(asked: str, capability: tuple[int, int] | None, is_main: bool) -> tuple[int, str]:
    """The version of FlashAttention, and a text that is appended to the reason.

    Args:
        asked: as in ``[kernels]``.
        capability: compute capability of the GPU; None if unknown.
        is_main: whether FlashAttention computes most of the attention.

    Raises:
        ConfigError: the config names a version that does not run here.
    """
    newest = _NEWEST.get(capability[0], "") if capability else ""
    name = newest if is_main and asked == "auto" else ""
    if asked in _FLASH:
        name = asked
    if not name:
        return 2, ""
    version, generations, package, get = _FLASH[name]
    missing = "" if not capability or _is_installed(package) else f"{package} cannot be imported ({get})"
    if capability and capability[0] not in generations:
        missing = f"it is for compute capability {' and '.join(f'{major}.0' for major in generations)}"
    if missing and asked != "auto":
        raise _impossible("attention", asked, missing, "auto")
    return (2, f"; FlashAttention 2: {missing}") if missing else (version, "")


def _is_installed(package: str) -> bool:
    try:
        import_module(package)
    except (ImportError, OSError):  # also: built for another torch
        return False
    return True


def activate_flash() -> None:
    """Make torch call the version of FlashAttention that this process chose. Call before the first step."""
    if _current.flash != 2:
        activate_flash_attention_impl(f"FA{_current.flash}")


def _missing_onednn(device_type: str) -> str:
    """Why linear layers cannot use oneDNN; empty where they can."""
    if device_type != "cpu":
        return "oneDNN is for CPUs"
    is_built = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return "" if is_built else f"torch {torch.__version__} was built without oneDNN"


def _impossible(field: str, value: str, why: str, instead: str) -> ConfigError:
    return ConfigError(
        f"kernels.{field} {value} does not run here.",
        where=f"--kernels.{field}",
        why=why,
        fix=f"--kernels.{field} {instead}",
    )


def are_plain(dtypes: tuple[torch.dtype, ...], *tensors: Tensor) -> bool:
    """Whether all ``tensors`` are plain CPU tensors (no subclass such as DTensor) with a dtype of ``dtypes``."""
    return all(type(x) in _PLAIN and x.device.type == "cpu" and x.dtype in dtypes for x in tensors)


def takes_fused(*tensors: Tensor) -> bool:
    """Whether a fused pointwise kernel takes ``tensors``: this process chose fused kernels, and does not compile the
    call.

    float32 and float64 only: in bfloat16 each in-place step would round.
    """
    return not torch.compiler.is_compiling() and _are_for_fused(*tensors)


def takes_traced(*tensors: Tensor) -> bool:
    """Whether the call is compiled and ``takes_fused`` would else take ``tensors``.

    The compiler fuses by itself. It then gets the form that it turns into the fewest passes over memory.
    """
    return torch.compiler.is_compiling() and _are_for_fused(*tensors)


def _are_for_fused(*tensors: Tensor) -> bool:
    return _current.pointwise == "fused" and are_plain((torch.float32, torch.float64), *tensors)
