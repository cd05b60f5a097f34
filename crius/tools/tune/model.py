"""The model that ``crius tune`` is given: a folder, a name of the hub, or a GGUF file. No torch."""

import hashlib
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from crius.errors import ConfigError
from crius.tools.convert.gguf_file import SUFFIX
from crius.tools.convert.importing import import_model, place_of


def path_of_model(model: str, data: str) -> str:
    """The path of a model, which the hub may have to return first.

    Raises:
        ConfigError: there is no ``model``, or it is a file of another kind, perhaps in the place of ``data``.
        EnvironmentError: see ``place_of``.
    """
    place = place_of(model)
    if Path(place).is_file() and not place.endswith(SUFFIX):
        words = ["MODEL", model]
        if Path(data).is_dir() or data.endswith(SUFFIX):
            words = [data, model]
        elif Path(place).with_name("config.json").is_file():
            words = [str(Path(model).parent), data]
        raise ConfigError(
            f"{model} is a file, but no {SUFFIX} file.",
            where="command line",
            why="the model comes first, then the conversations",
            fix=shlex.join(["crius", "tune", *words]),
        )
    return place


def opened(place: str, folder: Path, say: Callable[[str], None]) -> str:
    """The path of the model for ``checkpoint.init_from``; a GGUF file is imported into the run folder first.

    Raises:
        CriusError: see ``import_model``.
    """
    if not place.endswith(SUFFIX):
        return place
    about = os.stat(place)
    key = hashlib.sha256(f"{os.path.realpath(place)} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:8]
    imported = folder / f"imported-{key}"  # another file has another place
    if not imported.exists():
        say("\n".join(import_model(place, str(imported)).lines()))
    return str(imported)
