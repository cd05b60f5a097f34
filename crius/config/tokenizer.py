"""``[tokenizer]``."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Text to token ids."""

    path: str = "byte"
    """byte: one token a byte and one for the end of a document, 257 in all. Else a Hugging Face tokenizer.json, or a
    folder that holds one (needs ``pip install crius[huggingface]``)."""

    eos_token: str = ""
    """Token that ends a document. Empty: the first of the usual names that the tokenizer has."""
