"""A folder of checkpoints: which are there, whether each is whole, and which may go. Torch-free."""

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
    """Something that is not as it was written.

    Attributes:
        file: its name.
        tensor: whose bytes are wrong; ``header`` or ``gaps`` for bytes of a file that belong to none; empty where it is
            the file as a whole.
        what: is wrong, with the numbers.
    """

    file: str
    tensor: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}{f', {self.tensor}' if self.tensor else ''}: {self.what}"


class _Span(NamedTuple):
    """Bytes of a file that have a hash of their own."""

    begin: int
    end: int
    tensor: str
    digest: str


def read_manifest(disk: Disk, folder: str) -> Manifest:
    """The manifest of a checkpoint; ``folder`` may also be of one that was set aside.

    Args:
        disk: folder of checkpoints.
        folder: the name of a folder, or the path of a manifest that ``set_aside`` gave.

    Raises:
        CheckpointError: there is none, it is damaged, or it is that of another step.
    """
    name, _, file = folder.partition("/")
    path = f"{name}/{file or MANIFEST}"
    where = f"{disk.where}/{path}"
    if path.rpartition("/")[2] not in disk.files(name):
        raise CheckpointError(
            f"there is no {where}.",
            why="the manifest was lost, for a save gives this name only to a checkpoint with a manifest"
            if disk.is_local
            else "a checkpoint without a manifest was never finished, or was removed in part",
            fix="resume from another step: --checkpoint.load_step N",
        )
    if (size := disk.size(path)) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{where} has {size:,} bytes, the limit is {MAX_MANIFEST_BYTES:,}.")
    manifest = Manifest.decode(disk.read(path), where)
    found = parse_folder(name)
    if found is None or found.step != manifest.step:
        raise CheckpointError(
            f"{where} is the manifest of step {manifest.step}.",
            where=f"{disk.where}/{name}",
            why="the name of the folder says another step",
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
    """All that is wrong with a checkpoint; nothing where every byte is what was written.

    Args:
        disk: folder of checkpoints.
        folder: of the checkpoint.
        manifest: of it.
        files: those to look at; None for all, and for files that do not belong there.
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
    """Files in a checkpoint's folder that are not of it.

    Where checkpoints are not committed by a rename, files of attempts that failed lie there until they are swept, and
    are no damage.
    """
    if not disk.is_local:
        return []
    extra = [name for name in disk.files(folder) if name != MANIFEST and name not in manifest.files]
    return [Damage(name if name.isprintable() else ascii(name), "", "does not belong here") for name in extra]


def lacks(disk: Disk, folder: str, manifest: Manifest) -> str:
    """Which file is missing or has another size, without reading any; empty where none."""
    folder = folder.partition("/")[0]
    there = set(disk.files(folder))
    for name, entry in manifest.files.items():
        if name not in there:
            return f"{name} is missing"
        if (size := disk.size(f"{folder}/{name}")) != entry.size:
            return f"{name} has {size:,} bytes, {entry.size:,} were written"
    return ""


def damages_of_file(
    disk: Disk, path: str, entry: FileEntry, spans: list[_Span], beat: Callable[[], None] = lambda: None
) -> list[Damage]:
    """What is wrong with a file that ``entry`` describes, in one pass: its hash and those of the tensors in it."""
    name = check_name(path.rpartition("/")[2], disk.where)
    try:
        size, digest, digests = _hashes(disk, path, spans, beat)
    except CheckpointError as error:
        return [Damage(name, "", error.what.rstrip("."))]
    found = []
    if size != entry.size:
        how = "truncated" if size < entry.size else "too long"
        found.append(Damage(name, "", f"is {how}: {size:,} bytes, {entry.size:,} were written"))
    for span, of_span in zip(spans, digests, strict=True):
        if of_span != span.digest:
            at = f"bytes {span.begin:,} to {span.end:,}"
            found.append(Damage(name, span.tensor, f"{at} have hash {of_span}, {span.digest} was written"))
    if not found and digest != entry.digest:
        found.append(Damage(name, _outside(spans, entry.size), f"has hash {digest}, {entry.digest} was written"))
    return found


def _outside(spans: list[_Span], size: int) -> str:
    """What bytes of a file that are in no tensor are."""
    if not spans:
        return ""
    edges = [span.begin for span in spans[1:]] + [size]
    return "gaps" if any(span.end < edge for span, edge in zip(spans, edges, strict=True)) else "header"


def _hashes(disk: Disk, path: str, spans: list[_Span], beat: Callable[[], None]) -> tuple[int, str, list[str]]:
    """Size and hash of a file, and the hash of each of ``spans``, which are sorted and do not overlap."""
    whole, hashers, at, first = Hasher(), [Hasher() for _ in spans], 0, 0
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
    return ", ".join(names[:3]) + (f" and {len(names) - 3} tensors more" if len(names) > 3 else "")


FEWEST = 2
"""Good checkpoints that always stay: one could turn out to be damaged."""


def expendable(good: Sequence[int], keep_last: int, keep_every: int) -> list[int]:
    """Which checkpoints may be removed.

    Args:
        good: steps of checkpoints that can be loaded.
        keep_last: newest ones to keep; fewer than 2 count as 2.
        keep_every: keep the steps that are multiples of this. 0: none.

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
        """Steps of the checkpoints that are committed, ascending; whether they can be loaded is not looked at."""
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
        """Checkpoints that were set aside, as ``Disk.set_aside`` named them."""
        folders = [name for name in self.disk.folders() if (found := parse_folder(name)) and found.kind == "aside"]
        return folders + [kept for name in self.disk.folders() for kept in self._asides(name)]

    def problem(self, step: int) -> str:
        """Why a checkpoint cannot be loaded; empty where its manifest is whole and all files have their sizes."""
        return self._problem(step_name(step))

    def _problem(self, name: str) -> str:
        try:
            return lacks(self.disk, name, read_manifest(self.disk, name))
        except CheckpointError as error:
            return error.what

    def collect(self, attempt: str) -> list[str]:
        """Clear up after saves that were killed; the caller holds the run's lock, so that they are dead.

        A checkpoint that a save was about to replace is put back; half-written ones are removed. Of two checkpoints of
        a step a whole one stays, and one that is not whole is set aside.

        Args:
            attempt: of the caller, whose own saves are left alone.

        Returns:
            What was done, a line each.
        """
        done = []
        for name in self.disk.folders():
            parsed = parse_folder(name)
            if parsed and parsed.kind == "replaced":
                done += self._settle(name, parsed.step)
            elif parsed:
                done += [
                    f"removed {gone}, which a save that never ended left" for gone in self.disk.sweep(name, attempt)
                ]
        return done

    def _settle(self, replaced: str, step: int) -> list[str]:
        """Decide between the checkpoint of a step and one that was replaced by it; lines that say what was done."""
        done = []
        if step in self.steps():
            is_whole = not self._problem(replaced)
            if is_whole and not self.problem(step):
                self.disk.remove(replaced)
                return [f"removed {replaced}, which a save that never ended left"]
            name = step_name(step) if is_whole else replaced
            done = [f"{name} IS DAMAGED, it is kept as {self.disk.set_aside(name)}"]
            if not is_whole:
                return done
        self.disk.put_back(replaced)
        return [*done, f"put {replaced} back, which a save that never ended was to replace"]

    def prune(self, keep_last: int, keep_every: int) -> list[int]:
        """Remove checkpoints that are not to be kept; returns their steps.

        Damaged ones do not count, and stay: nothing is removed that nobody knows the use of.

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
