"""The folder that a conversion writes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from crius import new_folder as whole
from crius.errors import CheckpointError, ConfigError


@contextlib.contextmanager
def new_folder(target: str) -> Iterator[Path]:
    """A folder to write into, which becomes ``target`` at the end; see ``crius.new_folder``.

    Args:
        target: new, or an empty folder.

    Raises:
        ConfigError: it exists, or is a URL.
        CheckpointError: the disk cannot be written.
    """
    place = Path(target).expanduser().absolute()
    if "://" in target or (place.exists() and not (place.is_dir() and not any(place.iterdir()))):
        what = "is a URL" if "://" in target else "already exists"
        raise ConfigError(f"{target} {what}.", where="command line", fix="give a new folder")
    try:
        with whole.new_folder(place) as partial:
            yield partial
    except OSError as error:
        what = f"{target} cannot be written: {error.strerror or error}."
        raise CheckpointError(what, where="command line", fix="make room, or give another folder") from error
