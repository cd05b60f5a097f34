"""A folder that is written completely or not at all."""

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from crius.errors import CheckpointError, ConfigError


@contextlib.contextmanager
def new_folder(target: str) -> Iterator[Path]:
    """A folder next to ``target`` to write into, which becomes ``target`` at the end; an exception removes it.

    Args:
        target: new, or an empty folder.

    Raises:
        ConfigError: it exists, or is a URL.
        CheckpointError: the disk cannot be written.
    """
    place = Path(target).expanduser()
    if "://" in target or (place.exists() and not (place.is_dir() and not any(place.iterdir()))):
        what = "is a URL" if "://" in target else "already exists"
        raise ConfigError(f"{target} {what}.", where="command line", fix="give a new folder")
    partial = place.absolute().with_name(f"{place.absolute().name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(place)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        what = f"{target} cannot be written: {error.strerror or error}."
        raise CheckpointError(what, where="command line", fix="make room, or give another folder") from error
