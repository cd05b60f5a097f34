"""The tokenizer of a checkpoint, and what the source of its weights said: where both are kept and read. No torch.

A run keeps both with its checkpoints (``crius.checkpoint.kept``). Older checkpoints lack them: their tokenizer is where
the run found it. An import has both in the folder ``tokenizer`` of the run.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from crius.cache_lock import locked
from crius.checkpoint.disk import Disk, LocalDisk
from crius.checkpoint.kept import keep, kept_damages, kept_folder
from crius.checkpoint.manifest import FileEntry, Manifest, digest_of
from crius.errors import CriusError
from crius.host import user_cache
from crius.interop.foreign import read_inside
from crius.interop.safetensors_file import json_object
from crius.tokens.files import TOKENIZER, read_file, read_tokenizer_files, tokenizer_file
from crius.tokens.template import END_OF_TURN, folder_of
from crius.tokens.tokenizer import Tokenizer

log = logging.getLogger("crius.interop")

CONFIG = "config.json"
GENERATION = "generation_config.json"
CONTEXT = "max_position_embeddings"
BOS_ID = "bos_token_id"
EOS_ID = "eos_token_id"
TOKENIZER_FOLDER = "tokenizer"
"""Name of the folder in a run folder that an import wrote."""

_LARGEST = 1 << 22

Said: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Contents of ``config.json`` and ``generation_config.json`` of a source, without files that it lacks."""


class Origin(NamedTuple):
    """What belongs to weights.

    Attributes:
        tokenizer: value for ``--tokenizer.path``: ``byte``, a file or a folder; empty: there is none.
        said: what their source said.
    """

    tokenizer: str = ""
    said: Said = MappingProxyType({})


def read_said(folder: Path, names: tuple[str, ...] = (CONFIG, GENERATION)) -> Said:
    """What the files in a folder say about a model.

    Raises:
        CheckpointError: a file is not a regular file with a JSON object, or is too large.
    """
    there = [name for name in names if (folder / name).exists()]
    return {name: json_object(read_inside(folder, name, _LARGEST), f"{folder}/{name}") for name in there}


def origin_of(disk: Disk, manifest: Manifest) -> Origin:
    """The tokenizer of a checkpoint, and what the source of its weights said.

    Raises:
        CheckpointError: a file that describes the source is damaged.
    """
    path = str(manifest.config.get("tokenizer.path", ""))
    kept = manifest.tokenizer
    if place := kept_place(disk, kept):
        return Origin(str(place) if TOKENIZER in kept else path, read_said(place))
    own = Path(disk.where).parent / TOKENIZER_FOLDER
    is_own = disk.is_local and own.is_dir() and Path(path).name in ("", "byte", TOKENIZER_FOLDER)
    if is_own and (own / TOKENIZER).is_file():
        path = str(own)
    if TOKENIZER in kept and not is_kept(path, kept):
        log.warning("tokenizer: %s is not the tokenizer of the run, and is not used", path)
        path = ""
    if is_own:
        return Origin(path, read_said(own))
    if path in ("", "byte") or not Path(path).expanduser().exists():
        return Origin(path)
    # the folder of any other tokenizer may have the config.json of another model
    folder = folder_of(path)
    return Origin(path, read_said(folder) if manifest.config.get("checkpoint.init_from") else _ids_said(folder))


def _ids_said(folder: Path) -> Said:
    """What the folder of a tokenizer says about it; all else there is about the model that it came with."""
    found = read_said(folder, (GENERATION,))
    return {name: {key: one for key, one in said.items() if key.endswith("_token_id")} for name, said in found.items()}


def kept_place(disk: Disk, kept: Mapping[str, FileEntry]) -> Path | None:
    """A local folder with the files that a checkpoint keeps; None if it has none.

    If one is missing or damaged, that is logged, and the result is None. Files behind a URL are copied to the user's
    cache.

    Args:
        disk: folder of checkpoints.
        kept: files in the manifest.
    """
    if not kept:
        return None
    name = kept_folder(kept)
    local = disk
    try:
        if not disk.is_local:
            root = user_cache() / "tokenizers"
            local = LocalDisk(root)
            with locked(root / name, "copies a tokenizer to"):
                if kept_damages(local, kept):
                    keep(local, {file: disk.read(f"{name}/{file}") for file in kept})
        problem = "".join(str(damage) for damage in kept_damages(local, kept)[:1])
    except (CriusError, OSError) as error:
        problem = getattr(error, "what", str(error))
    if not problem:
        return Path(local.where) / name
    log.warning("tokenizer: what the run keeps in %s cannot be used: %s", disk.where, problem)
    return None


def is_kept(path: str, kept: Mapping[str, FileEntry]) -> bool:
    """Whether the tokenizer at ``path`` is the one that a checkpoint keeps."""
    return digest_of(_content(path)) == kept[TOKENIZER].digest


def files_to_keep(path: str, tokenizer: Tokenizer, origin: Origin) -> dict[str, bytes]:
    """Files that a run keeps with its checkpoints: its tokenizer, and what the source of its weights said.

    If the tokenizer is not that of the weights, its ids replace a BOS that differs, and an EOS that ends no text in it.

    Args:
        path: where the tokenizer of the run is.
        tokenizer: this tokenizer.
        origin: what belongs to the weights that the run started from; empty if they were random.

    Raises:
        CriusError: a file cannot be read.
    """
    files = read_tokenizer_files(path)
    said = origin.said
    if not said and files:
        said = _ids_said(folder_of(path))
    elif path != origin.tokenizer and _content(path) != _content(origin.tokenizer):
        said = {name: {**content, **_other_ids(content, tokenizer)} for name, content in said.items()}
    return files | {name: encoded(content) for name, content in said.items()}


def _other_ids(content: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, int]:
    ends = {tokenizer.eos_id, *tokenizer.special_ids(END_OF_TURN)}
    ids = {} if tokenizer.bos_id is None else {BOS_ID: tokenizer.bos_id}
    return ids if ends.intersection(ids_of(content.get(EOS_ID))) else {**ids, EOS_ID: tokenizer.eos_id}


def ids_of(value: object) -> list[int]:
    """The ids in a value of ``eos_token_id``: an id, a list of ids, or nothing."""
    values = value if isinstance(value, list) else [value]
    return [number for number in values if type(number) is int]


def encoded(content: Mapping[str, Any]) -> bytes:
    """The bytes of a JSON file."""
    return (json.dumps(content, indent=2) + "\n").encode()


def _content(path: str) -> bytes:
    """The tokenizer.json of a tokenizer, or the name of one without a file; empty if there is none."""
    try:
        return path.encode() if path in ("", "byte") else read_file(tokenizer_file(path))
    except (CriusError, OSError):
        return b""
