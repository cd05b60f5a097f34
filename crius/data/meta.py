"""``meta.json`` of a token folder."""

import json
import re
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_origin

import numpy as np

from crius.errors import DataError, MissingPathError
from crius.strict_json import load_object
from crius.untrusted import read_below

FORMAT_VERSION = 1
CHAT_VERSION = 3
"""Versions of a folder of documents, and of a folder of samples. Older Crius refuses the latter and its targets.bin.
Targets of version 2 are refused: they ignored marks such as ``"train": false``."""

META = "meta.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

MAX_COUNT = 1 << 60
"""Largest number of tokens, documents, ids and bytes in meta.json."""

PREPARE = "crius data prepare writes a new folder"


@dataclass(frozen=True, kw_only=True)
class TokenMeta:
    """The contents of meta.json of a token folder. Numbers of tokens include the end-of-document ids.

    ``block_bytes``: bytes per block of hashes.bin. ``hashes_xxh3``: 128-bit xxh3 of hashes.bin. Older folders lack
    both. ``encoder``: fingerprint of the encoder of conversations; empty for documents.
    """

    version: int
    dtype: str
    num_tokens: int
    num_documents: int
    max_token_id: int
    tokenizer_name: str
    tokenizer_fingerprint: str
    vocab_size: int
    eos_id: int
    source: str
    sha256: dict[str, str]
    block_bytes: int = 0
    hashes_xxh3: str = ""
    encoder: str = ""

    @property
    def is_chat(self) -> bool:
        """Whether the folder holds samples of conversations."""
        return self.version == CHAT_VERSION

    def to_json(self) -> str:
        """The text of meta.json."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_file(cls, path: Path) -> "TokenMeta":
        """Read meta.json.

        Raises:
            DataError: the file does not exist, is not JSON, has another version, or lacks a key or has a wrong value.
        """
        folder = path.parent
        try:
            record = load_object(read_below(folder, path.name))
        except FileNotFoundError as error:
            kind = "has no meta.json" if folder.is_dir() else "does not exist"
            raise MissingPathError(f"token folder {folder} {kind}.", where=str(folder), fix=PREPARE) from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}.", where=str(path)) from error
        except ValueError as error:
            raise DataError(f"{path} is not JSON: {_shown(error)}.", where=str(path), fix=PREPARE) from error
        if (version := record.get("version")) not in (FORMAT_VERSION, CHAT_VERSION):
            raise DataError(
                f"{path} has format version {_shown(version)}; this Crius reads versions {FORMAT_VERSION} and "
                f"{CHAT_VERSION}.",
                where=str(path),
                fix=PREPARE,
            )
        for field in fields(cls):
            if field.default is not MISSING:
                record.setdefault(field.name, field.default)
            expected: Any = get_origin(field.type) or field.type
            value: Any = record.get(field.name)
            if type(value) is not expected:  # True is an int in Python, but not allowed here
                raise _refusal(path, field.name, value, f"it must be of type {expected.__name__}")
            if expected is int and not 0 <= value <= MAX_COUNT:
                raise _refusal(path, field.name, value, f"it must be 0 to {MAX_COUNT:,}")
        if record["dtype"] not in DTYPES:
            raise _refusal(path, "dtype", record["dtype"], f"it must be one of {', '.join(DTYPES)}")
        if record["eos_id"] >= record["vocab_size"]:
            raise _refusal(path, "eos_id", record["eos_id"], f"there are {record['vocab_size']} ids")
        for name, digest in record["sha256"].items():
            if type(digest) is not str or not re.fullmatch("[0-9a-f]{64}", digest):
                raise _refusal(path, f"the sha256 of {_shown(name)}", digest, "it must have 64 hexadecimal digits")
        return cls(**{field.name: record[field.name] for field in fields(cls)})


def _refusal(path: Path, name: str, value: object, why: str) -> DataError:
    return DataError(f"{path} has {_shown(value)} as {name}.", where=str(path), why=why, fix=PREPARE)


def _shown(value: object) -> str:
    text = str(value) if isinstance(value, ValueError) else ascii(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
