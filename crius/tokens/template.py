"""Reads the chat template in a tokenizer's folder, and the special tokens by the names that templates use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from crius.errors import DataError
from crius.tokens.files import TEMPLATE, TOKENIZER_CONFIG
from crius.untrusted import parse_json, read_linked

LARGEST_TEXT = 1 << 20
_LARGEST_CONFIG = 1 << 24  # tokenizer_config.json has a line for each added token: a megabyte for Gemma

END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|return|>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_utterance>",
)
"""Special tokens that end a turn of the assistant, in addition to the tokenizer's end of a document."""

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_template(tokenizer: str) -> str:
    """The chat template in a tokenizer's folder; empty if there is none.

    Args:
        tokenizer: value of ``--tokenizer.path``, a folder or file.

    Raises:
        DataError: a file cannot be read, is too large, or is not JSON.
    """
    folder = folder_of(tokenizer)

    def read(name: str) -> bytes | None:
        try:
            return read_linked(folder, name, LARGEST_TEXT if name == TEMPLATE else _LARGEST_CONFIG)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(
                f"{folder / name} cannot be read: {error.strerror or error}.", where="--tokenizer.path"
            ) from None

    def parse(content: bytes, name: str) -> dict[str, Any]:
        try:
            found = parse_json(content)
        except ValueError as error:
            raise DataError(f"{folder / name} is not JSON: {error}.", where="--tokenizer.path") from None
        return found if isinstance(found, dict) else {}

    return find_template(read, parse)


def find_template(read: Callable[[str], bytes | None], parse: Callable[[bytes, str], dict[str, Any]]) -> str:
    """The chat template from its own file, else from tokenizer_config.json; empty if there is none.

    Args:
        read: function that returns the bytes of a file in the tokenizer's folder, or None if it is missing.
        parse: function that returns the JSON object in the bytes of a file with a given name.

    Raises:
        DataError: the template is not UTF-8.
    """
    if (content := read(TEMPLATE)) is not None:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{TEMPLATE} is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}.",
                where="--tokenizer.path",
                fix="download the model's file again",
            ) from None
    if (content := read(TOKENIZER_CONFIG)) is None:
        return ""
    found = parse(content, TOKENIZER_CONFIG).get("chat_template")
    if isinstance(found, list):  # several templates, by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default", "")
    return found if isinstance(found, str) else ""


def special_tokens(tokenizer: str) -> dict[str, str]:
    """Texts of special tokens by the names that templates use, such as ``bos_token``."""
    config = read_object(tokenizer, TOKENIZER_CONFIG)
    return {name: text for name in _TOKENS if (text := _content(config.get(name)))}


def read_object(tokenizer: str, name: str) -> dict[str, Any]:
    """A JSON file in a tokenizer's folder; empty if it is missing or cannot be used."""
    try:
        found = parse_json(read_linked(folder_of(tokenizer), name, _LARGEST_CONFIG)) if tokenizer else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def folder_of(tokenizer: str) -> Path:
    """The folder that ``--tokenizer.path`` names, or the folder of the file that it names."""
    place = Path(tokenizer).expanduser()
    return place if place.is_dir() else place.parent


def _content(token: Any) -> str:
    """The text of a token in tokenizer_config.json, where it is a text or an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
