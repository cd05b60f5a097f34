"""Names on the Hugging Face hub, where a path is expected: which texts are names. Nothing is asked here."""

import difflib
import os
import re
from typing import NamedTuple

DEFAULT = "main"
"""Revision of a name without one."""

_URL = r"(?:(?:https://)?(?:huggingface|hf)\.co/(?:datasets/)?)?"
_NAME = re.compile(_URL + r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?", re.ASCII)
_FILE = re.compile(r"\.(json|jsonl|gz|zst|parquet|csv|tsv|txt|toml|ya?ml|gguf|safetensors|bin|pt|pth|model|tiktoken)")
_SNAPSHOT = re.compile(r".*/(?:models|datasets)--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]+)(?=/|$)", re.ASCII)


class HubName(NamedTuple):
    """The name of a repository.

    Attributes:
        repository: ``owner/name``.
        revision: branch, tag or commit; empty: the newest commit.
    """

    repository: str
    revision: str

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


def parse_name(text: str) -> HubName | None:
    """The name in ``owner/name`` or ``owner/name@revision``, maybe behind the hub's URL; None for another form."""
    found = _NAME.fullmatch(text)
    return HubName(found[1], found[2] or "") if found else None


def hub_name(path: str) -> HubName | None:
    """The name that the value of a path is; None if it is a path, there or not.

    An existing path wins. ``./a/b``, a second slash, the suffix of a file, a first part that is a folder here, and one
    that is nearly the name of a folder with that second part mean a path, so that a mistyped path is not asked of the
    hub. A revision means a name.
    """
    name = parse_name(path)
    if name is None or os.path.exists(path):
        return None
    owner, _, last = name.repository.partition("/")
    is_path = _FILE.fullmatch(os.path.splitext(last)[1].lower()) or os.path.isdir(owner) or _is_near(owner, last)
    return None if is_path and not name.revision else name


def _is_near(owner: str, last: str) -> bool:
    """Whether ``last`` is in a folder here whose name is nearly ``owner``."""
    folders = [entry.name for entry in os.scandir() if os.path.isdir(entry)]
    return any(os.path.exists(os.path.join(folder, last)) for folder in difflib.get_close_matches(owner, folders))


def snapshot_of(path: str) -> HubName | None:
    """Name and commit of the repository whose copy in the hub's cache has ``path``; None if it is elsewhere."""
    found = _SNAPSHOT.match(path)
    return HubName(f"{found[1]}/{found[2]}", found[3]) if found else None
