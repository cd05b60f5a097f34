"""Finds checkpoints by the path that a user types: a run folder, a folder of checkpoints, or one
checkpoint. No torch.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path

from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import CheckpointFolder
from crius.checkpoint.names import parse_folder
from crius.config.operation import CheckpointConfig
from crius.errors import ConfigError
from crius.untrusted import SMALL, parse_toml, text_below


@dataclass(frozen=True)
class CheckpointPlace:
    """A folder of checkpoints, or one checkpoint in it.

    Attributes:
        folder: folder of checkpoints.
        name: name of the checkpoint; empty: all checkpoints of the folder.
        run_dir: run folder around it, if there is one.
    """

    folder: CheckpointFolder
    name: str
    run_dir: Path | None


def find_checkpoints(path: str, where: str = "command line") -> CheckpointPlace:
    """Find the checkpoints of a path from the command line: a run folder, a folder of checkpoints, or one checkpoint.

    Args:
        path: the path, or an fsspec URL.
        where: origin of the path, for messages.

    Raises:
        ConfigError: the path does not exist.
    """
    parent, _, last = path.rstrip("/").rpartition("/")
    if "://" in path:
        return CheckpointPlace(CheckpointFolder(open_disk(parent if parse_folder(last) else path)), _name(last), None)
    place = Path(path)
    if not place.is_dir():
        raise _no_folder(path, where)
    if parse_folder(name := place.absolute().name):
        parent = str(place.parent if place.name else place.absolute().parent)
        return CheckpointPlace(CheckpointFolder(open_disk(parent)), name, None)
    if (place / "run.toml").is_file() or (place / CheckpointConfig.folder).is_dir():
        within = _folder_of(place)
        where = within if "://" in within else str(place / within)
        return CheckpointPlace(CheckpointFolder(open_disk(where)), "", place)
    run_dir = place.absolute().parent if (place.absolute().parent / "run.toml").is_file() else None
    return CheckpointPlace(CheckpointFolder(open_disk(str(place))), "", run_dir)


def _no_folder(path: str, where: str) -> ConfigError:
    """Error about a path that is not a folder; its fix is the folder that was probably meant."""
    place = Path(path)
    why = ""
    fix = "give a run folder, or a folder of checkpoints"
    if place.is_file():
        why = "a model is a folder with config.json and .safetensors files; .bin, .pt and .pth are pickles, not read"
        near = [str(place.parent)] if place.with_name("config.json").is_file() else []
    else:
        siblings = [other.name for other in place.parent.glob("*") if other.is_dir()]
        near = [str(place.with_name(name)) for name in difflib.get_close_matches(place.name, siblings)]
    if near:
        fix = f"{near[0]} is one"
    return ConfigError(f"{path} is not a folder.", where=where, why=why, fix=fix)


def _name(last: str) -> str:
    return last if parse_folder(last) else ""


def _folder_of(run_dir: Path) -> str:
    """``checkpoint.folder`` in the run.toml of a run."""
    try:
        section = parse_toml(text_below(run_dir, "run.toml", SMALL)).get("checkpoint", {})
    except (OSError, ValueError):
        return CheckpointConfig.folder
    found = section.get("folder") if isinstance(section, dict) else None
    return found if isinstance(found, str) else CheckpointConfig.folder
