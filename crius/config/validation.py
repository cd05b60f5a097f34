"""``[validation]``."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Loss on data that is never trained on."""

    interval: int = 500
    """Steps between validations; the last step always validates. 0 turns validation off."""

    num_samples: int = 128
    """Sequences that are scored, the same ones every time and under every layout. At most what is held out."""

    fraction: float = 0.02
    """Share of the corpus that is never trained on: its end, or for huggingface one document in 1 / fraction. It is
    held out also where ``interval`` is 0, so that validation has no effect on training. Unused where ``path`` is
    given. 0 trains on everything."""

    path: tuple[str, ...] = ()
    """Validate on this data, of the same kind as ``data.source``, instead of holding out a part of the training data.
    huggingface: a split of the dataset, for example validation."""
