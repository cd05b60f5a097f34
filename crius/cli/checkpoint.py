"""``crius checkpoint ls|verify|prune|convert``."""

import contextlib
import dataclasses
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Annotated, Any

from crius.checkpoint.folder import FEWEST, CheckpointFolder, Damage, damages, expendable, lacks, read_manifest
from crius.checkpoint.kept import kept_damages
from crius.checkpoint.manifest import ALGORITHM, Manifest
from crius.checkpoint.names import MANIFEST, parse_folder, parse_step, step_name
from crius.checkpoint.state import read_state
from crius.checkpoint.whereabouts import find_checkpoints
from crius.cli.app import Json, checkpoint_app, emit, emit_result
from crius.config.operation import CheckpointConfig
from crius.errors import CheckpointError, ConfigError
from crius.launch.lock import run_lock

Place = Annotated[str, "A run folder, a folder of checkpoints, one checkpoint, or the URL of one of them."]
_EXPECTED = re.compile(r"xxh3-128:[0-9a-f]{32}|sha256:[0-9a-f]{64}")
_SHOWN = 20
"""Most damages of a checkpoint that are printed; --json has all."""


@dataclasses.dataclass
class _Row:
    """A line of ``ls``."""

    name: str
    step: int
    state: str
    tokens: int | None = None
    bytes: int | None = None
    num_ranks: int | None = None
    layout: str = ""
    age_seconds: float | None = None
    manifest: str = ""


@checkpoint_app.verb
def ls(path: Place, *, as_json: Json = False) -> int:
    """List checkpoints: step, tokens, size, ranks, layout, age, whether all files are there, hash of the manifest."""
    target = find_checkpoints(path)
    folder = target.folder
    names = [target.name] if target.name else [*map(step_name, folder.steps()), *folder.asides(), *folder.leftovers()]
    rows = [_row(folder, name) for name in names]
    if as_json:
        emit(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return 0
    if not rows:
        emit(f"no checkpoints in {folder.disk.where}")
        return 0
    width = max(len(row.name) for row in rows)
    emit(f"{'checkpoint':<{width}}  {'tokens':>15}  {'size':>10}  {'ranks':>5}  {'layout':<12}  {'age':>7}  state")
    for row in rows:
        tokens = "" if row.tokens is None else f"{row.tokens:,}"
        size = "" if row.bytes is None else _size(row.bytes)
        ranks = "" if row.num_ranks is None else str(row.num_ranks)
        age = "" if row.age_seconds is None else _duration(row.age_seconds)
        state = f"{row.state}  {row.manifest}".rstrip()
        emit(f"{row.name:<{width}}  {tokens:>15}  {size:>10}  {ranks:>5}  {row.layout:<12}  {age:>7}  {state}")
    return 0


@checkpoint_app.verb
def verify(
    path: Place,
    *,
    expect_manifest: Annotated[
        str,
        "Hash that the manifest must have: xxh3-128:HEX as ls prints it, or sha256:HEX of manifest.json.",
    ] = "",
    as_json: Json = False,
) -> int:
    """Read and hash every byte of one checkpoint, or of all of a run; name the file and the tensor of each damage.

    Exit code 1 if any byte differs from what was written.
    """
    target = find_checkpoints(path)
    folder = target.folder
    names = [target.name] if target.name else [step_name(step) for step in folder.steps()]
    if not names:
        raise CheckpointError(f"there are no checkpoints in {folder.disk.where}.")
    if expect_manifest and not _EXPECTED.fullmatch(expect_manifest):
        raise ConfigError(
            f"{expect_manifest!r} is not a hash of a manifest.",
            where="--expect_manifest",
            fix=f"{ALGORITHM}: and 32 hex digits, as crius checkpoint ls prints it, or sha256: and 64",
        )
    if expect_manifest and len(names) > 1:
        raise ConfigError(
            f"--expect_manifest is for one checkpoint, but {path} has {len(names)}.",
            where="command line",
            fix=f"crius checkpoint verify {folder.disk.where}/{names[-1]} --expect_manifest {expect_manifest}",
        )
    reports = [_verified(folder, name, expect_manifest) for name in names]
    num_damaged = sum(bool(report["damages"]) for report in reports)
    if as_json:
        emit(json.dumps({"good": not num_damaged, "checkpoints": reports}, indent=2))
    else:
        for report in reports:
            _print_report(report)
        emit(f"{num_damaged} of {len(reports)} damaged" if num_damaged else "every byte is as it was written")
    return 1 if num_damaged else 0


@checkpoint_app.verb
def prune(
    path: Place,
    *,
    keep_last: Annotated[int, "Newest checkpoints to keep, at least 2."] = CheckpointConfig.keep_last,
    keep_every: Annotated[int, "Keep steps that are multiples of this. 0: none."] = 0,
    dry_run: Annotated[bool, "Remove nothing; print what would be removed."] = False,
    as_json: Json = False,
) -> int:
    """Remove old checkpoints. Only loadable checkpoints count, two of them always stay, and damaged ones stay too."""
    target = find_checkpoints(path)
    if target.name:
        raise ConfigError(f"{path} is one checkpoint.", where="command line", fix="give the folder that contains it")
    if keep_last < FEWEST or keep_every < 0:
        given = f"--keep_last {keep_last}" if keep_last < FEWEST else f"--keep_every {keep_every}"
        raise ConfigError(
            f"{given} is too few.",
            where="command line",
            why="a checkpoint could turn out to be damaged, so two always stay; --keep_every is at least 0",
            fix=f"--keep_last {FEWEST}" if keep_last < FEWEST else "--keep_every 0",
        )
    folder = target.folder
    # a run whose checkpoints are elsewhere has a lock there too
    owned = target.run_dir or (Path(folder.disk.where) if folder.disk.is_local else None)
    held = run_lock(owned, "checkpoint prune") if owned and not dry_run else contextlib.nullcontext()
    with held:
        problems = {step: folder.problem(step) for step in folder.steps()}
        gone = expendable([step for step in problems if not problems[step]], keep_last, keep_every)
        if not dry_run:
            gone = folder.prune(keep_last, keep_every)
    kept = [step for step in problems if step not in gone]
    damaged = {step: problem for step, problem in problems.items() if problem}
    if as_json:
        emit(json.dumps({"removed": gone, "kept": kept, "damaged": damaged, "dry_run": dry_run}, indent=2))
        return 0
    for step in gone:
        emit(f"{'would remove' if dry_run else 'removed'} {step_name(step)}")
    for step, problem in damaged.items():
        emit(f"kept {step_name(step)}, which does not count: {problem}")
    emit(f"{len(gone)} {'would go' if dry_run else 'removed'}, {len(kept)} kept in {folder.disk.where}")
    return 0


@checkpoint_app.verb
def convert(
    source: Annotated[str, "Folder of a torch DCP checkpoint, or safetensors: a file, or a folder of them."],
    target: Annotated[str, "Folder or URL of checkpoints to write to, for --checkpoint.load_path."],
    *,
    rename: Annotated[
        tuple[str, ...],
        "OLD=NEW: name of a parameter in the source and in Crius, * for one part. Repeat it.",
    ] = (),
    skip: Annotated[tuple[str, ...], "Keys to leave out, as a pattern such as ema. Repeat for more."] = (),
    step: Annotated[int, "Step of the checkpoint. -1: the step in the source."] = -1,
    rotary_pairs: Annotated[
        int,
        (
            "Dims of a head, if the rotary embedding of the source turns pairs of dims (torchtitan, Meta): "
            "rows of attention.wq and wk are brought into the order of Crius and Hugging Face. 0: they are in it."
        ),
    ] = 0,
    as_json: Json = False,
) -> int:
    """Import a checkpoint of torch's DCP or of safetensors. No code in it is executed.

    Exit code 1, and nothing is written, if a key has no place in a Crius checkpoint and no --skip names it.
    """
    from crius.tools.convert.convert import convert

    done = convert(source, target, renames=rename, skips=skip, step=step, rotary_pairs=rotary_pairs)
    emit_result(done.as_dict(), done.lines(), as_json=as_json)
    if done.unknown:
        key = done.unknown[0].source
        raise CheckpointError(
            f"{len(done.unknown)} keys of {source} have no place in a Crius checkpoint; nothing was written.",
            where=f"the first is {key}",
            why=done.unknown[0].reason,
            fix=f"--rename '{key}=NAME', or leave it out: --skip '{key}'",
        )
    return 0


def _row(folder: CheckpointFolder, name: str) -> _Row:
    """Row of ``ls`` for a checkpoint, or for the remains of one."""
    base = name.partition("/")[0]
    parsed = parse_folder(base)
    assert parsed is not None, "only folders with such names are listed"
    kind = "aside" if "/" in name else parsed.kind
    row = _Row(name, parsed.step, {"tmp": "leftover", "replaced": "leftover", "aside": "aside"}.get(kind, "ok"))
    path = name if "/" in name else f"{name}/{MANIFEST}"
    try:
        if path.rpartition("/")[2] not in folder.disk.files(base):
            lost = "damaged (the manifest was lost)" if folder.disk.is_local else "no manifest"
            row.state = row.state if kind else lost
            return row
        row.age_seconds = folder.disk.age_seconds(path)
        manifest = read_manifest(folder.disk, name)
    except CheckpointError as error:
        row.state = f"damaged manifest ({error.why or error.what})"
        return row
    row.bytes = sum(entry.size for entry in manifest.files.values())
    row.num_ranks = manifest.num_ranks
    row.layout = manifest.layout
    row.manifest = f"{ALGORITHM}:{manifest.digest}"
    if problem := lacks(folder.disk, name, manifest):
        row.state = f"damaged ({problem})"
        return row
    with contextlib.suppress(CheckpointError):
        train = read_state(folder.disk, base, manifest).get("train")
        tokens = train.get("tokens") if isinstance(train, dict) else None
        row.tokens = tokens if type(tokens) is int else None
    return row


def _verified(folder: CheckpointFolder, name: str, expected: str) -> dict[str, Any]:
    """Report of ``verify`` about a checkpoint."""
    began = time.monotonic()
    report: dict[str, Any] = {"checkpoint": name, "step": parse_step(name)}
    disk = folder.disk
    path = name if "/" in name else f"{name}/{MANIFEST}"
    try:
        manifest = read_manifest(disk, name)
        sha256 = f"sha256:{hashlib.sha256(disk.read(path)).hexdigest()}"
    except CheckpointError as error:
        found = [Damage(MANIFEST, "", f"{error.what.rstrip('.')}{f': {error.why}' if error.why else ''}")]
        return {**report, "damages": [dataclasses.asdict(damage) for damage in found]}
    own = f"{ALGORITHM}:{manifest.digest}"
    if expected not in ("", own, sha256):
        has = sha256 if expected.startswith("sha256") else own
        found = [Damage(MANIFEST, "", f"is not the expected manifest: it has {has}, expected is {expected}")]
    else:
        found = damages(disk, name, manifest) or _refused_state(folder, name, manifest)
        found += kept_damages(disk, manifest.tokenizer)
    return {
        **report,
        "manifest": own,
        "manifest_sha256": sha256,
        "num_files": len(manifest.files) + 1,
        "num_tensors": len(manifest.tensors),
        "bytes": sum(entry.size for entry in manifest.files.values()),
        "seconds": time.monotonic() - began,
        "damages": [dataclasses.asdict(damage) for damage in found],
    }


def _refused_state(folder: CheckpointFolder, name: str, manifest: Manifest) -> list[Damage]:
    """Why a resume would refuse the state of a checkpoint whose bytes are all right."""
    try:
        read_state(folder.disk, name.partition("/")[0], manifest)
    except CheckpointError as error:
        return [Damage(manifest.state_file, "", error.what.rstrip("."))]
    return []


def _print_report(report: dict[str, Any]) -> None:
    found = [Damage(**damage) for damage in report["damages"]]
    if "bytes" in report:
        emit(
            f"{report['checkpoint']}: {report['num_files']} files, {report['num_tensors']} tensors, "
            f"{_size(report['bytes'])} in {report['seconds']:.1f} s, {'DAMAGED' if found else 'good'}"
        )
        emit(f"  manifest {report['manifest']}")
        emit(f"           {report['manifest_sha256']}")
    else:
        emit(f"{report['checkpoint']}: DAMAGED")
    for damage in found[:_SHOWN]:
        emit(f"  {damage}")
    if len(found) > _SHOWN:
        emit(f"  and {len(found) - _SHOWN} more; --json has all")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.2f} MiB"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
