"""Settings of an evaluation, checked before torch is imported."""

from dataclasses import dataclass
from typing import Literal

from crius.tools.generate.settings import Settings, refuse_out_of_range


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """How tasks are scored."""

    limit: int = 0
    """Score only this many documents, the first ones of each task. 0: all."""

    max_length: int = 0
    """Tokens that the model reads at once; of a longer text only the end is read. 0: the longest context that the model
    or its tokenizer names, as crius export writes it to config.json."""

    batch_tokens: int = 0
    """Tokens per batch, with padding. 0: 256 on a CPU, 16,384 on a GPU."""

    out: str = ""
    """File that gets a line of JSON per scored text. The same command continues from it. Empty: none."""

    chat: bool = False
    """Ask as in a chat: each context is a user's message in the tokenizer's chat template. A continuation is the
    assistant's answer."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of weights and computation. auto: bfloat16 on a GPU, else float32."""

    @property
    def of_source(self) -> Settings:
        """How the model is read."""
        return Settings(device=self.device, dtype=self.dtype, chat=self.chat)

    def check(self) -> None:
        """Compare all settings with their ranges.

        Raises:
            ConfigError: lists all settings that are out of range.
        """
        wrong = [
            ("limit", self.limit, self.limit >= 0, "a number of documents, or 0 for all"),
            ("max_length", self.max_length, self.max_length >= 0, "a number of tokens, or 0 for the model's own"),
            ("batch_tokens", self.batch_tokens, self.batch_tokens >= 0, "a number of tokens, or 0 for the default"),
        ]
        refuse_out_of_range(wrong)
