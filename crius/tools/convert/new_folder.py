"""A folder that is written whole or not at all."""

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from crius.errors import CheckpointError, ConfigError


@contextlib.contextmanager
def new_folder(target: str) -> Iterator[Path]:
    """A folder beside ``target`` to write into, which becomes ``target`` at the end; an exception removes it.

    Args:
        target: not there yet, or an empty folder.

    Raises:
        ConfigError: it is taken, or a URL.
        CheckpointError: the disk does not take it.
    """
    place = Path(target).expanduser()
    if "://" in target or (place.exists() and not (place.is_dir() and not any(place.iterdir()))):
        what = "is a URL" if "://" in target else "is there already"
        raise ConfigError(f"{target} {what}.", where="command line", fix="name a folder that is not there yet")
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
        raise CheckpointError(what, where="command line", fix="make room, or name another folder") from error
