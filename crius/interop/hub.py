"""Models, tokenizers and data sets by their names on the Hugging Face hub, fetched into the cache of its own library.

Only data is fetched: no code, no pickles. Login, endpoint and place of the cache are the library's own.
"""

import contextlib
import fnmatch
import glob
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crius.errors import ConfigError, CriusError, EnvironmentError
from crius.hub import DEFAULT, HubName, hub_name
from crius.interop.safetensors_file import SUFFIX, said
from crius.plugins import REQUIREMENTS, install_line
from crius.units import GIB
from crius.untrusted import text_named

SETTINGS = ("config.json",)
TOKENIZER = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")
WEIGHTS = (f"*{SUFFIX}", *TOKENIZER)
"""Files of a model that are read, as patterns. Files in folders are not."""

DATA = {
    "text": ("*.txt",),
    "jsonl": ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.json"),
    "parquet": ("*.parquet",),
    "csv": ("*.csv", "*.tsv"),
}
DATA[""] = tuple(pattern for patterns in DATA.values() for pattern in patterns)
"""Files of a data set that are read, by ``data.source``; empty: open."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


def located(path: str, where: str = "command line", wanted: Sequence[str] = WEIGHTS) -> str:
    """The path of a model or a tokenizer, which is ``path`` itself, or the folder in the hub's cache for a name.

    Args:
        path: path of any kind, or ``owner/name[@revision]``: see ``crius.hub.hub_name``.
        where: origin of the path, for messages.
        wanted: patterns of the files that are needed.

    Raises:
        ConfigError: the hub has no such name or revision, or may not be asked.
        EnvironmentError: the hub does not return the files, or ``huggingface_hub`` is missing.
    """
    name = hub_name(path)
    return _fetched(name, "model", wanted, where) if name else path


def located_data(path: str, source: str, where: str = "--data.path") -> str:
    """The path of data, which is ``path`` itself, or for a name the files for training in the hub's cache.

    If files are called ``train``, only they are for training.

    Args:
        path: path of any kind, or ``owner/name[@revision]``.
        source: ``data.source``; the hub is asked only for its files, a stream stays a name.
        where: origin of the path, for messages.

    Raises:
        CriusError: see ``located``.
    """
    name = hub_name(path)
    if name is None or source not in DATA:
        return path
    folder = _fetched(name, "dataset", DATA[source], where)
    for pattern in DATA[source]:
        of_training = f"{glob.escape(folder)}/**/*train{pattern}"
        if glob.glob(of_training, recursive=True):
            return of_training
    return folder


def library(name: object, where: str) -> Any:
    """The module ``huggingface_hub``.

    Raises:
        EnvironmentError: it is not installed.
    """
    try:
        import huggingface_hub  # noqa: PLC0415  optional package
        import huggingface_hub.constants  # noqa: PLC0415  optional package
    except ImportError:
        raise EnvironmentError(
            f"there is no path {name} here, and the hub needs the huggingface_hub package.",
            where=where,
            fix=install_line(REQUIREMENTS["huggingface_hub"]),
        ) from None
    return huggingface_hub


def _fetched(name: HubName, kind: str, wanted: Sequence[str], where: str) -> str:
    """The folder of a repository in the cache, with all of its wanted files."""
    hub = library(name, where)
    storage = Path(hub.constants.HF_HUB_CACHE) / f"{kind}s--{name.repository.replace('/', '--')}"
    options = {"repo_id": name.repository, "repo_type": kind, "revision": name.revision or DEFAULT}
    patterns: dict[str, Any] = {"allow_patterns": list(wanted)}
    if kind == "model":
        patterns["ignore_patterns"] = ["*/*"]
    is_offline = hub.constants.HF_HUB_OFFLINE
    if storage.exists() and (is_offline or _COMMIT.fullmatch(name.revision)):
        with contextlib.suppress(Exception):  # it is not there, or only a part of it
            folder = str(hub.snapshot_download(**options, **patterns, local_files_only=True))
            said(f"hub: {name}, in {folder}")
            return folder
    if is_offline:
        raise _not_here(name, storage)
    try:
        found = hub.HfApi().repo_info(**options, files_metadata=True)
        _say(name, found, storage, patterns)
        return str(hub.snapshot_download(**options, **patterns))
    except CriusError:
        raise
    except Exception as error:  # of the library and of its dependencies
        raise _refused(name, error, hub, where) from None


def _say(name: HubName, found: Any, storage: Path, patterns: dict[str, Any]) -> None:
    """Log what is fetched, and that a name stands for another commit than before.

    Raises:
        EnvironmentError: the disk has no room for it.
    """
    new = {
        file.rfilename: file.size or 0
        for file in found.siblings
        if any(fnmatch.fnmatchcase(file.rfilename, pattern) for pattern in patterns["allow_patterns"])
        and not ("ignore_patterns" in patterns and "/" in file.rfilename)
        and not os.path.exists(storage / "snapshots" / found.sha / file.rfilename)
    }
    before = storage / "refs" / (name.revision or DEFAULT)
    old = text_named(before).strip() if before.is_file() else found.sha
    if old != found.sha:
        said(
            f"hub: {name} is another commit than before: {found.sha} in place of {old}, "
            f"which {name.repository}@{old} gives again"
        )
    needed = sum(new.values())
    size = f"{len(new)} files, {needed / GIB:.2f} GiB" if new else "all of it is there"
    said(f"hub: {name.repository}@{found.sha}, {size}, in {storage}")
    place = next(folder for folder in (storage, *storage.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise EnvironmentError(
            f"{name} has {needed / GIB:,.1f} GiB of files, but {free / GIB:,.1f} GiB are free in {place}.",
            where="HF_HOME",
            fix="HF_HOME=DIR on a larger disk; a data set is streamed by --data.source huggingface",
        )


def _not_here(name: HubName, storage: Path) -> ConfigError:
    kind = "--repo-type dataset " if storage.name.startswith("datasets--") else ""
    return ConfigError(
        f"there is no path {name}, the hub's cache has no whole copy of it, and HF_HUB_OFFLINE forbids a download.",
        where="HF_HUB_OFFLINE",
        why=f"the copy would be in {storage}",
        fix=f"HF_HUB_OFFLINE=0; or hf download {kind}{name.repository} where there is a network, and copy that folder",
    )


def _refused(name: HubName, error: Exception, hub: Any, where: str) -> CriusError:
    errors = hub.errors
    page = f"{hub.constants.ENDPOINT}/{name.repository}"
    if isinstance(error, errors.GatedRepoError):
        what = f"{name} is gated, and the login of this machine may not read it."
        return EnvironmentError(what, where=where, fix=f"ask for access on {page}, then hf auth login")
    if isinstance(error, errors.RevisionNotFoundError):
        what = f"{name.repository} has no revision {name.revision}."
        return ConfigError(what, where=where, fix=f"give {name.repository}, or a branch, tag or commit of it: {page}")
    if isinstance(error, errors.RepositoryNotFoundError):
        fix = f"give a path that exists, or a name of the hub; hf auth login if {name.repository} is private"
        return ConfigError(f"there is no path {name} here, and no such name on the hub.", where=where, fix=fix)
    text = " ".join(str(error).split())[:300]
    return EnvironmentError(
        f"there is no path {name} here, and the hub does not return it: {type(error).__name__}: {text}",
        where=where,
        fix="the same command again, which keeps the files that are complete; HF_HUB_OFFLINE=1 takes a whole copy",
    )
