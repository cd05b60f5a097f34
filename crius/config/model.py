"""``[model]``: which architecture, at which size."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained."""

    name: str = "llama3"
    """Architecture, a folder of ``crius/models``."""

    flavor: str = "debug"
    """Size: one of the flavors of the architecture, for llama3 debug, 1b, 8b, 70b or 405b."""

    vocab_size: int = -1
    """Rows of the embedding and of the output layer. -1: the flavor's. It may be larger than the tokenizer's."""

    num_layers: int = -1
    """Number of decoder layers. -1: the flavor's. Fewer layers make a small model of the same shape."""

    num_kv_heads: int = -1
    """Key/value heads of each layer. -1: the flavor's. It must divide the query heads."""

    attention_mask: Literal["causal", "document"] = "causal"
    """What a token attends to. causal: all earlier tokens of its sequence. document: the earlier tokens of its
    own document, with positions that restart at each document (block-causal, as in the Llama 3 paper).
    document is slower: it needs an explicit mask."""
