"""Rotary positions as data: ``Rope`` and its scalings, and their text in ``model.rope_scaling``. Torch-free."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from crius.strict_json import load_object


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All rotary frequencies are divided by ``factor`` (position interpolation, arXiv:2306.15595)."""

    kind: ClassVar[str] = "linear"
    keys: ClassVar[dict[str, str]] = {"factor": "factor"}

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the low rotary frequencies for longer contexts (arXiv:2407.21783 and its code).

    Attributes:
        factor: divisor of the low frequencies.
        low_freq_factor: wavelengths above ``original_context / low_freq_factor`` tokens are stretched by ``factor``.
        high_freq_factor: wavelengths below ``original_context / high_freq_factor`` tokens stay unchanged.
        original_context: context length in tokens that the base model was trained with.
    """

    kind: ClassVar[str] = "llama3"
    keys: ClassVar[dict[str, str]] = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_context",
    }

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN's stretching of the low rotary frequencies, and its factor of attention (arXiv:2309.00071).

    Attributes:
        factor: divisor of the low frequencies.
        original_context: context length in tokens that the base model was trained with.
        beta_fast: frequencies with more turns than this in the original context stay unchanged.
        beta_slow: frequencies with fewer turns than this are divided by ``factor``.
        truncate: the range of frequencies between the two is rounded to whole numbers.
        attention_factor: factor of cos and sin; 0: it follows from ``factor`` and the next two.
        mscale: coefficient of the logarithm of ``factor`` in the numerator of ``attention_factor``; 0: 1.
        mscale_all_dim: the same in the denominator; 0: no denominator.
    """

    kind: ClassVar[str] = "yarn"
    keys: ClassVar[dict[str, str]] = {
        "factor": "factor",
        "original_max_position_embeddings": "original_context",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    }

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    @property
    def magnitude(self) -> float:
        """The factor of cos and sin."""
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._grown(self.mscale) / self._grown(self.mscale_all_dim)
        return self._grown(1.0)

    def _grown(self, coefficient: float) -> float:
        return 0.1 * coefficient * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling
_SCALINGS: dict[str, type[Scaling]] = {one.kind: one for one in (LinearScaling, Llama3Scaling, YarnScaling)}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions of a layer (arXiv:2104.09864).

    Attributes:
        theta: base of the frequencies.
        dim: leading dims of a head that are rotated.
        scaling: how the frequencies are stretched for longer contexts.
        is_float32: frequencies are computed in float32 as transformers does, not in float64.
    """

    theta: float
    dim: int
    scaling: Scaling | None = None
    is_float32: bool = False


_PRECISION = "frequencies"
"""Key of ``model.rope_scaling`` beside Hugging Face's: ``float32`` is ``DecoderConfig.rope_float32``."""


def parse_rope_scaling(text: str) -> tuple[Scaling | None, bool]:
    """Parse ``model.rope_scaling``: ``none``, or JSON as ``rope_scaling_of`` takes it, perhaps with ``frequencies``.

    Returns:
        ``rope_scaling`` and ``rope_float32`` of ``DecoderConfig``.

    Raises:
        ValueError: the text is not valid; the message says why.
    """
    if text == "none":
        return None, False
    section = load_object(text.encode())
    precision = section.get(_PRECISION, "float64")
    if precision not in ("float32", "float64"):
        raise ValueError(f"{_PRECISION} {json.dumps(precision)[:100]} is not supported, only float32 and float64 are")
    return rope_scaling_of(section), precision == "float32"


def rope_scaling_text(scaling: Scaling | None, *, is_float32: bool = False) -> str:
    """The text that ``parse_rope_scaling`` parses to ``scaling`` and ``is_float32``."""
    if scaling is None and not is_float32:
        return "none"
    section = scaling_section(scaling)
    if is_float32:
        section[_PRECISION] = "float32"
    return json.dumps(section)


def scaling_section(scaling: Scaling | None) -> dict[str, Any]:
    """``rope_scaling`` of a config.json, which ``rope_scaling_of`` reads. A number that is 0 is left out."""
    if scaling is None:
        return {"rope_type": "default"}
    numbers = {key: getattr(scaling, name) for key, name in scaling.keys.items()}
    return {"rope_type": scaling.kind, **{key: value for key, value in numbers.items() if value or value is False}}


def rope_scaling_of(section: Mapping[str, Any]) -> Scaling | None:
    """Parse ``rope_scaling`` of a config.json. None: frequencies are not stretched. Unknown keys are ignored.

    Raises:
        ValueError: the section is not valid; the message says why.
    """
    kind = section.get("rope_type", section.get("type", "default"))
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise ValueError(f"rope_type {json.dumps(kind)[:100]} is not supported, only {known} and default are")
    made = _SCALINGS[kind]
    defaults = vars(made)
    given: dict[str, Any] = {}
    for key, name in made.keys.items():
        number = section.get(key)
        may_lack = kind == "yarn" and name in defaults
        if may_lack and number is None:
            continue
        if name == "truncate":
            if not isinstance(number, bool):
                raise ValueError(f"rope_type {kind} needs {key}, true or false, not {json.dumps(number)[:100]}")
        else:
            _check_number(kind, key, number, is_given=key in section)
        given[name] = number
    scaling = made(**given)
    _check_order(scaling)
    return scaling


def _check_number(kind: str, key: str, number: object, *, is_given: bool) -> None:
    kinds = int if key.startswith("original") else int | float
    if not isinstance(number, kinds) or isinstance(number, bool) or not 0 < number < 2**63:
        said = f", not {json.dumps(number)[:100]}" if is_given else ""
        noun = "whole number" if kinds is int else "number"
        raise ValueError(f"rope_type {kind} needs {key}, a positive {noun}{said}")


def _check_order(scaling: Scaling) -> None:
    order = ""
    is_ordered = True
    if isinstance(scaling, Llama3Scaling):
        order = ", and low_freq_factor below high_freq_factor"
        is_ordered = scaling.low_freq_factor < scaling.high_freq_factor
    elif isinstance(scaling, YarnScaling):
        order = ", and beta_slow below beta_fast"
        is_ordered = scaling.beta_slow < scaling.beta_fast
    if scaling.factor < 1 or not is_ordered:
        raise ValueError(f"rope_type {scaling.kind} needs a factor of at least 1{order}")
