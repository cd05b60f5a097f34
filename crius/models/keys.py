"""Keys of a config.json: those that a reader looks at, and those that change nothing that is computed. No torch."""

import fnmatch
from collections.abc import Mapping
from typing import Any

_NEUTRAL = (
    "_*",
    "*_token_id",
    "*dropout*",
    "*_pdrop",
    "*initializer*",
    "output_*",
    "*aux_loss*",
    "*z_loss*",
    "architectures",
    "auto_map",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "is_encoder_decoder",
    "label2id",
    "max_position_embeddings",
    "max_window_layers",
    "model_type",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "router_jitter_noise",
    "torch_dtype",
    "transformers_version",
    "unsloth_*",
    "use_cache",
)
"""Patterns of keys that change at most how a model is trained, stored or called."""


class Noted(dict[str, Any]):
    """A config.json that notes in ``seen`` which keys were looked at."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.seen = set[object]()

    def __contains__(self, key: object) -> bool:
        self.seen.add(key)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of any mapping."""
        self.seen.add(key)
        return super().get(key, default)

    @property
    def unread(self) -> dict[str, Any]:
        """Keys that nobody looked at and that may change the computation: they are on, and not known to be neutral."""
        return {
            key: value
            for key, value in self.items()
            if value and key not in self.seen and not any(fnmatch.fnmatchcase(key, one) for one in _NEUTRAL)
        }
