"""Names of the folders and files of a checkpoint, and which names from outside are believed. No torch."""

import re
from typing import NamedTuple

from crius.errors import CheckpointError

MANIFEST = "manifest.json"
MAX_STEP = 10**15
MAX_NAME = 200
"""Characters of a file name; file systems take 255 bytes."""

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*")
_FOLDER = re.compile(r"step-([0-9]{8,15})(?:\.(tmp|aside|replaced)-([A-Za-z0-9_.=+-]+))?")
_STATE = re.compile(r"state(-[A-Za-z0-9_.=+-]+)?\.json")
_SET_ASIDE = re.compile(r"manifest-aside-[A-Za-z0-9]+\.json")


class FolderName(NamedTuple):
    """What the name of a folder in a folder of checkpoints says.

    Attributes:
        step: of the checkpoint.
        kind: empty for a checkpoint; tmp: a save writes it; aside: kept beside a resumed run; replaced: another save
            of the same step took its place.
        tag: which attempt writes it, or what tells it from others of its kind; empty for a checkpoint.
    """

    step: int
    kind: str
    tag: str


def step_name(step: int) -> str:
    """The folder of a checkpoint: ``step-00000020``."""
    if not 0 <= step < MAX_STEP:
        raise CheckpointError(f"step {step} is not between 0 and {MAX_STEP:,}.")
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a checkpoint's folder; None for any other name, also for ``step-7`` and ``old-step-00000007``."""
    found = parse_folder(name)
    return found.step if found and not found.kind else None


def parse_folder(name: str) -> FolderName | None:
    """What a folder of a checkpoint, of a save, or of what was kept is called; None for any other name."""
    match = _FOLDER.fullmatch(name)
    if not match or step_name(int(match[1])) != name.partition(".")[0]:
        return None
    return FolderName(int(match[1]), match[2] or "", match[3] or "")


def is_set_aside(file: str) -> bool:
    """Whether a file is the manifest of a checkpoint that was set aside where folders cannot be renamed."""
    return bool(_SET_ASIDE.fullmatch(file))


def is_state(file: str) -> bool:
    """Whether a file holds the state that is no tensor: ``state.json``, or that of an attempt."""
    return bool(_STATE.fullmatch(file))


def is_plain(name: str) -> bool:
    """Whether a name is one that ``check_name`` takes."""
    return len(name) <= MAX_NAME and ".." not in name and _PLAIN.fullmatch(name) is not None


def check_name(name: object, where: str) -> str:
    """The name, if it is a plain one: it can only mean an entry of the folder it is used in.

    Args:
        name: from a manifest, a folder or a caller.
        where: the place it came from, for the message.

    Raises:
        CheckpointError: it is empty, is too long, starts with a dot or a dash, has ``..``, a separator, a control
            character or any other than ASCII letters, digits and ``_.=+-``.
    """
    if isinstance(name, str) and is_plain(name):
        return name
    shown = repr(name)
    raise CheckpointError(
        f"{shown if len(shown) <= MAX_NAME else shown[:MAX_NAME] + '...'} is no name of a file of a checkpoint.",
        where=where,
        why="ASCII letters, digits and _.=+- only, no dot or dash at the start and no .., so that it stays inside",
        fix="leave this checkpoint alone unless you know who wrote it",
    )
