"""``crius export --push_to``: uploads an export to the Hugging Face hub, after a question."""

import os
import shlex
import sys
from pathlib import Path

from crius.errors import ConfigError, EnvironmentError
from crius.hub import parse_name
from crius.interop.hub import library
from crius.redact import printable
from crius.units import GIB

FLAG = "--push_to"


def check_push(name: str, *, is_answered: bool) -> None:
    """Check what an upload needs, before the export.

    Args:
        name: ``owner/name`` on the hub.
        is_answered: whether nothing is asked.

    Raises:
        ConfigError: it is not a name, or nobody could answer the question.
        EnvironmentError: the package or a login is missing, or ``HF_HUB_OFFLINE`` is set.
    """
    parsed = parse_name(name)
    if parsed is None or parsed.revision:
        raise ConfigError(f"{name or ascii(name)} is not a name on the hub.", where=FLAG, fix=f"{FLAG} OWNER/NAME")
    if not is_answered and not sys.stdin.isatty():
        what = "an upload is asked for, and nobody is at a terminal to answer."
        raise ConfigError(what, where=FLAG, fix=f"{FLAG} {name} --yes")
    hub = library(name, FLAG)
    if hub.constants.HF_HUB_OFFLINE:
        what = f"HF_HUB_OFFLINE forbids an upload to {name}."
        raise EnvironmentError(what, where="HF_HUB_OFFLINE", fix="HF_HUB_OFFLINE=0")
    if not hub.get_token():
        raise EnvironmentError(f"this machine has no login for {name}.", where=FLAG, fix="hf auth login")


def push(folder: str, name: str, *, is_answered: bool) -> None:
    """List the files of a folder, ask, and upload them as one commit. A new repository is private.

    Args:
        folder: a complete export.
        name: ``owner/name`` on the hub.
        is_answered: whether nothing is asked.

    Raises:
        EnvironmentError: the hub refuses the upload, or cannot be reached; the folder stays.
    """
    place = Path(folder).expanduser()
    hub = library(name, FLAG)
    sizes = {str(file.relative_to(place)): file.stat().st_size for file in sorted(place.rglob("*")) if file.is_file()}
    for file, size in sizes.items():
        _tell(f"{size:>15,}  {file}")
    _tell(f"{len(sizes)} files, {sum(sizes.values()) / GIB:.2f} GiB, to {hub.constants.ENDPOINT}/{name}")
    later = f"hf upload {name} {shlex.quote(folder)}"
    if not is_answered:
        _tell("upload them? [y/N]")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            _tell(f"not uploaded; later: {later}")
            return
    try:
        api = hub.HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        done = api.upload_folder(repo_id=name, folder_path=os.fspath(place), commit_message="crius export")
    except Exception as error:  # of the library and of its dependencies
        text = " ".join(str(error).split())[:300]
        what = f"{folder} is written, but {name} does not take it: {type(error).__name__}: {text}"
        fix = f"{later}, after hf auth login with a token that may write"
        raise EnvironmentError(what, where=FLAG, fix=fix) from None
    _tell(f"uploaded: {done.commit_url}")


def _tell(text: str) -> None:
    sys.stderr.write(printable(text) + "\n")
