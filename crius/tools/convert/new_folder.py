"""The folder that a conversion writes."""

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

from crius import new_folder as whole
from crius.errors import CheckpointError, ConfigError
from crius.hub import hub_name


def check_order(verb: str, source: str, target: str) -> None:
    """Refuse a source that does not exist before a target that is a model: the two were swapped.

    Raises:
        ConfigError: they were swapped; the fix is the other order.
    """
    is_model = any(Path(target, name).is_file() for name in ("config.json", "run.toml"))
    if is_model and not Path(source).exists() and hub_name(source) is None:
        what = f"there is no {source}, and {target} is a model."
        raise ConfigError(what, where="command line", fix=shlex.join(["crius", verb, target, source]))


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
