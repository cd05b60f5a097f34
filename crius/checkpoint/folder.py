"""A folder of checkpoints: lists them, checks that each is intact, and removes old ones. Torch-free."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from crius.checkpoint.disk import Disk
from crius.checkpoint.manifest import MAX_MANIFEST_BYTES, FileEntry, Hasher, Manifest, blocks_of
from crius.checkpoint.names import MANIFEST, check_name, is_set_aside, parse_folder, parse_step, step_name
from crius.errors import CheckpointError


@dataclass(frozen=True)
class Damage:
    """A difference from the bytes that were written.

    Attributes:
        file: name of the file.
        tensor: tensor whose bytes are wrong; ``header`` or ``gaps`` for bytes outside of tensors; empty: the whole
            file.
        what: description of the damage, with numbers.
    """

    file: str
    tensor: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}{f', {self.tensor}' if self.tensor else ''}: {self.what}"


class _Span(NamedTuple):
    """Bytes of a file with their own hash."""

    begin: int
    end: int
    tensor: str
    digest: str


def read_manifest(disk: Disk, folder: str) -> Manifest:
    """Read the manifest of a checkpoint, which may be set aside.

    Args:
        disk: folder of checkpoints.
        folder: name of a folder, or path of a manifest from ``set_aside``.

    Raises:
        CheckpointError: the manifest is missing, damaged, or belongs to another step.
    """
    name, _, file = folder.partition("/")
    path = f"{name}/{file or MANIFEST}"
    where = f"{disk.where}/{path}"
    if path.rpartition("/")[2] not in disk.files(name):
        raise CheckpointError(
            f"{where} does not exist.",
            why="the manifest was lost: a save gives this name only to a checkpoint with a manifest"
            if disk.is_local
            else "a checkpoint without a manifest was not finished, or was removed in part",
            fix="resume from another step: --checkpoint.load_step N",
        )
    if (size := disk.size(path)) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{where} has {size:,} bytes, but the limit is {MAX_MANIFEST_BYTES:,}.")
    manifest = Manifest.decode(disk.read(path), where)
    found = parse_folder(name)
    if found is None or found.step != manifest.step:
        raise CheckpointError(
            f"{where} is the manifest of step {manifest.step}.",
            where=f"{disk.where}/{name}",
            why="the name of the folder has another step",
            fix="rename the folder back, or resume from another step: --checkpoint.load_step N",
        )
    return manifest


def damages(
    disk: Disk,
    folder: str,
    manifest: Manifest,
    files: Iterable[str] | None = None,
    beat: Callable[[], None] = lambda: None,
) -> list[Damage]:
    """All damages of a checkpoint; empty if every byte is as it was written.

    Args:
        disk: folder of checkpoints.
        folder: folder of the checkpoint.
        manifest: manifest of the checkpoint.
        files: files to check; None: all files, and also look for files that do not belong to the checkpoint.
        beat: called after each block that was read.
    """
    folder = folder.partition("/")[0]
    spans: dict[str, list[_Span]] = defaultdict(list)
    for tensor, parts in manifest.tensors.items():
        for chunk in parts.chunks:
            spans[chunk.file].append(_Span(chunk.begin, chunk.end, tensor, chunk.digest))
    there = set(disk.files(folder))
    found = []
    for name in sorted(manifest.files) if files is None else files:
        entry = manifest.files[name]
        if name in there:
            found += damages_of_file(disk, f"{folder}/{name}", entry, sorted(spans[name]), beat)
        else:
            found.append(Damage(name, "", f"is missing; it has {_of(spans[name])}"))
    return found + (extra_files(disk, folder, manifest) if files is None else [])


def extra_files(disk: Disk, folder: str, manifest: Manifest) -> list[Damage]:
    """Files in a checkpoint's folder that do not belong to it.

    On disks without a commit by rename, files of failed attempts stay there until they are swept. They are not damage.
    """
    if not disk.is_local:
        return []
    extra = [name for name in disk.files(folder) if name != MANIFEST and name not in manifest.files]
    return [Damage(name if name.isprintable() else ascii(name), "", "does not belong here") for name in extra]


def lacks(disk: Disk, folder: str, manifest: Manifest) -> str:
    """The first file that is missing or has the wrong size, without reading files; empty if there is none."""
    folder = folder.partition("/")[0]
    there = set(disk.files(folder))
    for name, entry in manifest.files.items():
        if name not in there:
            return f"{name} is missing"
        if (size := disk.size(f"{folder}/{name}")) != entry.size:
            return f"{name} has {size:,} bytes instead of {entry.size:,}"
    return ""


def damages_of_file(
    disk: Disk, path: str, entry: FileEntry, spans: list[_Span], beat: Callable[[], None] = lambda: None
) -> list[Damage]:
    """Damages of a file that ``entry`` describes, in one pass: of the whole file and of the tensors in it."""
    name = check_name(path.rpartition("/")[2], disk.where)
    try:
        size = disk.size(path)
        if size > entry.size:  # perhaps by far
            return [Damage(name, "", f"is too long: {size:,} bytes instead of {entry.size:,}")]
        size, digest, digests = _hashes(disk, path, spans, beat)
    except CheckpointError as error:
        return [Damage(name, "", error.what.rstrip("."))]
    found = []
    if size < entry.size:
        found.append(Damage(name, "", f"is truncated: {size:,} bytes instead of {entry.size:,}"))
    for span, of_span in zip(spans, digests, strict=True):
        if of_span != span.digest:
            at = f"bytes {span.begin:,} to {span.end:,}"
            found.append(Damage(name, span.tensor, f"{at} have hash {of_span} instead of {span.digest}"))
    if not found and digest != entry.digest:
        found.append(Damage(name, _outside(spans, entry.size), f"has hash {digest} instead of {entry.digest}"))
    return found


def _outside(spans: list[_Span], size: int) -> str:
    """A word for the bytes of a file that are in no tensor."""
    if not spans:
        return ""
    edges = [span.begin for span in spans[1:]] + [size]
    return "gaps" if any(span.end < edge for span, edge in zip(spans, edges, strict=True)) else "header"


def _hashes(disk: Disk, path: str, spans: list[_Span], beat: Callable[[], None]) -> tuple[int, str, list[str]]:
    """Size and hash of a file, and the hash of each of ``spans``, which are sorted and do not overlap."""
    whole = Hasher()
    hashers = [Hasher() for _ in spans]
    at = 0
    first = 0
    with disk.open(path) as file:
        for block in blocks_of(file):
            whole.update(block)
            end = at + len(block)
            while first < len(spans) and spans[first].end <= at:
                first += 1
            for index in range(first, len(spans)):
                span = spans[index]
                if span.begin >= end:
                    break
                hashers[index].update(block[max(span.begin - at, 0) : span.end - at])
            at = end
            beat()
    return at, whole.hexdigest(), [hasher.hexdigest() for hasher in hashers]


def _of(spans: list[_Span]) -> str:
    names = list(dict.fromkeys(span.tensor for span in spans))
    if not names:
        return "no tensors"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")


FEWEST = 2
"""Number of good checkpoints that are always kept: one could turn out to be damaged."""


def expendable(good: Sequence[int], keep_last: int, keep_every: int) -> list[int]:
    """Steps of the checkpoints that may be removed.

    Args:
        good: steps of checkpoints that can be loaded.
        keep_last: number of newest checkpoints to keep; less than 2 counts as 2.
        keep_every: steps that are multiples of this are kept. 0: none.

    Returns:
        Steps, ascending.
    """
    ordered = sorted(set(good))
    kept = {*ordered[-max(keep_last, FEWEST) :]}
    if keep_every > 0:
        kept.update(step for step in ordered if step % keep_every == 0)
    return [step for step in ordered if step not in kept]


class CheckpointFolder:
    """The checkpoints on a disk.

    Attributes:
        disk: the folder of checkpoints.
    """

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending. They are not checked."""
        return self.disk.committed()

    def good(self) -> list[int]:
        """Steps of the checkpoints that can be loaded, ascending; see ``problem``."""
        return [step for step in self.steps() if not self.problem(step)]

    def leftovers(self) -> list[str]:
        """Folders of saves that were not finished or were replaced."""
        committed = self.steps()
        parsed = {name: found for name in self.disk.folders() if (found := parse_folder(name))}
        unfinished = [name for name, found in parsed.items() if found.kind or found.step not in committed]
        return [name for name in unfinished if parsed[name].kind != "aside" and not self._asides(name)]

    def asides(self) -> list[str]:
        """Names of checkpoints that were set aside, as ``Disk.set_aside`` returned them."""
        folders = [name for name in self.disk.folders() if (found := parse_folder(name)) and found.kind == "aside"]
        return folders + [kept for name in self.disk.folders() for kept in self._asides(name)]

    def problem(self, step: int) -> str:
        """Why a checkpoint cannot be loaded; empty if its manifest is intact and all files have the right size."""
        return self._problem(step_name(step))

    def _problem(self, name: str) -> str:
        try:
            return lacks(self.disk, name, read_manifest(self.disk, name))
        except CheckpointError as error:
            return error.what

    def collect(self, attempt: str) -> list[str]:
        """Clean up after killed saves. The caller holds the lock of the run, so no other process saves.

        A checkpoint that a save was replacing is put back, and half-written ones are removed. If two checkpoints of a
        step exist, an intact one is kept, and a damaged one is set aside.

        Args:
            attempt: the caller's own attempt, whose files are kept.

        Returns:
            One line for each action.
        """
        done = []
        for name in self.disk.folders():
            parsed = parse_folder(name)
            if parsed and parsed.kind == "replaced":
                done += self._settle(name, parsed.step)
            elif parsed:
                done += [
                    f"removed {gone}, left over from a save that did not finish"
                    for gone in self.disk.sweep(name, attempt)
                ]
        return done

    def _settle(self, replaced: str, step: int) -> list[str]:
        """Choose between the checkpoint of a step and the one that it replaced. Returns one line for each action."""
        done = []
        if step in self.steps():
            is_whole = not self._problem(replaced)
            if is_whole and not self.problem(step):
                self.disk.remove(replaced)
                return [f"removed {replaced}, left over from a save that did not finish"]
            name = step_name(step) if is_whole else replaced
            done = [f"{name} IS DAMAGED, it is kept as {self.disk.set_aside(name)}"]
            if not is_whole:
                return done
        self.disk.put_back(replaced)
        return [*done, f"put {replaced} back, which a save that did not finish was replacing"]

    def prune(self, keep_last: int, keep_every: int) -> list[int]:
        """Remove checkpoints that need not be kept. Returns their steps.

        Damaged checkpoints are not counted and not removed: they may still be of use.

        Args:
            keep_last, keep_every: see ``expendable``.
        """
        gone = expendable(self.good(), keep_last, keep_every)
        for step in gone:
            self.disk.remove(step_name(step))
        return gone

    def _asides(self, name: str) -> list[str]:
        if parse_step(name) is None:
            return []
        return [f"{name}/{file}" for file in self.disk.files(name) if is_set_aside(file)]
