"""Names of the folders and files of a checkpoint, and the check of names from outside. No torch."""

import re
from typing import NamedTuple

from crius.errors import CheckpointError

MANIFEST = "manifest.json"
MAX_STEP = 10**15
MAX_NAME = 200
"""Most characters of a file name; file systems allow 255 bytes."""

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*")
_FOLDER = re.compile(r"step-([0-9]{8,15})(?:\.(tmp|aside|replaced)-([A-Za-z0-9_.=+-]+))?")
_STATE = re.compile(r"state(-[A-Za-z0-9_.=+-]+)?\.json")
_SET_ASIDE = re.compile(r"manifest-aside-[A-Za-z0-9]+\.json")


class FolderName(NamedTuple):
    """The parsed name of a folder in a folder of checkpoints.

    Attributes:
        step: step of the checkpoint.
        kind: empty: a checkpoint; tmp: a save writes it; aside: kept when a resumed run replaced it; replaced: another
            save of the same step replaced it.
        tag: attempt that writes it, or a word that makes the name unique; empty for a checkpoint.
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
    """The step of a checkpoint's folder; None for any other name, such as ``step-7`` or ``old-step-00000007``."""
    found = parse_folder(name)
    return found.step if found and not found.kind else None


def parse_folder(name: str) -> FolderName | None:
    """Parse the name of a folder of a checkpoint, of a save, or of a kept checkpoint; None for any other name."""
    match = _FOLDER.fullmatch(name)
    if not match or step_name(int(match[1])) != name.partition(".")[0]:
        return None
    return FolderName(int(match[1]), match[2] or "", match[3] or "")


def is_set_aside(file: str) -> bool:
    """Whether a file is the manifest of a checkpoint that was set aside on a disk that cannot rename folders."""
    return bool(_SET_ASIDE.fullmatch(file))


def is_state(file: str) -> bool:
    """Whether a file has the state that is not a tensor: ``state.json``, or the same with the name of an attempt."""
    return bool(_STATE.fullmatch(file))


def is_plain(name: str) -> bool:
    """Whether ``check_name`` accepts a name."""
    return len(name) <= MAX_NAME and ".." not in name and _PLAIN.fullmatch(name) is not None


def check_name(name: object, where: str) -> str:
    """Return the name if it is plain, so that it can only mean an entry of the folder it is used in.

    Args:
        name: name from a manifest, a folder or a caller.
        where: origin of the name, for the message.

    Raises:
        CheckpointError: the name is empty or too long, starts with a dot or a dash, contains ``..``, a separator or a
            control character, or any character other than ASCII letters, digits and ``_.=+-``.
    """
    if isinstance(name, str) and is_plain(name):
        return name
    shown = repr(name)
    raise CheckpointError(
        f"{shown if len(shown) <= MAX_NAME else shown[:MAX_NAME] + '...'} is not a name of a file of a checkpoint.",
        where=where,
        why="only ASCII letters, digits and _.=+- are allowed, no dot or dash at the start and no .., for safety",
        fix="do not use this checkpoint unless you know who wrote it",
    )
