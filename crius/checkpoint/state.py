"""``state.json``: everything in a checkpoint that is not a tensor. It is checked as untrusted input. No torch."""

import json
from typing import Any

from crius.checkpoint.disk import Disk
from crius.checkpoint.manifest import MAX_TEXT, Manifest, digest_of
from crius.checkpoint.names import is_plain
from crius.errors import CheckpointError
from crius.strict_json import load_object

MAX_STATE_BYTES = 1 << 25
"""Most bytes of the file. The cursors of a stream of 100,000 shards take 4 MB."""

MAX_WRITTEN = 10**18
"""Largest count of tokens and samples when saving; sums and products of batches with it stay below 2**63."""

MAX_READ = 10**16
"""Largest count when loading: a run that resumes can then still save its later counts."""

MAX_NUMBER = 1e100
"""Largest loss, norm or number of seconds; its square is finite."""


_KEYS = {
    "state": "train lr data stability run ledger init_from imported source source_kind source_digest source_folder",
    "train": "step tokens updates skipped_steps rolled_back_steps",
    "data": "step next_sample source cursors since mixture",
    "stability": "skips_in_a_row rollbacks_in_a_row spikes_in_a_row window",
    "lr": "last next",
    "run": "id threads",
    "ledger": "command seconds",
}
"""Keys of the tables whose keys are fixed. Older checkpoints may lack some."""


def encode_state(state: dict[str, Any], step: int) -> bytes:
    """The bytes of ``state.json``.

    Args:
        state: everything that is not a tensor.
        step: step of the checkpoint.

    Raises:
        ValueError: ``read_state`` would refuse it.
    """
    data = json.dumps(state, indent=1, allow_nan=False).encode()
    _check(load_object(data), step, MAX_WRITTEN)
    return data


def read_state(disk: Disk, folder: str, manifest: Manifest) -> dict[str, Any]:
    """The state of a checkpoint, with every value checked.

    Raises:
        CheckpointError: the state is missing, differs from the written bytes, is not a state that Crius writes, or
            contradicts itself or the manifest.
    """
    name = manifest.state_file
    where = f"{disk.where}/{folder}"
    if name and manifest.files[name].size > MAX_STATE_BYTES:
        raise _refusal(f"{name} of {where} has {manifest.files[name].size:,} bytes, the limit is {MAX_STATE_BYTES:,}")
    data = disk.read(f"{folder}/{name}") if name else b""
    if not name or digest_of(data) != manifest.files[name].digest:
        raise _refusal(f"the state of {where} {'differs from what was written' if name else 'is missing'}")
    try:
        state = load_object(data)
        _check(state, manifest.step, MAX_READ)
        _check_shards(state, manifest.config)
        for table, key, wanted in (("run", "id", manifest.run_id), ("data", "source", manifest.dataset)):
            there = state.get(table, {}).get(key, wanted)
            if there != wanted:
                raise ValueError(f"{table}.{key} is {_shown(there)}, but the manifest has {_shown(wanted)}")
    except ValueError as error:
        raise _refusal(f"{name} of {where} is not a state that Crius writes: {str(error)[:200]}") from None
    return state


def _refusal(what: str) -> CheckpointError:
    return CheckpointError(f"{what}.", fix="resume from another step: --checkpoint.load_step N")


def _check(state: dict[str, Any], step: int, most: int) -> None:
    """Raise ValueError if a run could not resume from ``state`` of ``step``; counts may be up to ``most``."""
    _table({"state": state}, "state")
    if type(state.get("imported", False)) is not bool:
        raise ValueError(f"imported is {_shown(state['imported'])}")
    train = _table(state, "train")
    counts = {name: _count(value, f"train.{name}", most) for name, value in train.items()}
    if counts.get("step") != step:
        raise ValueError(f"train.step is {_shown(train.get('step'))}, but the manifest has step {step}")
    # each step made its update, left it out, or lost it; older checkpoints lack the updates
    others = [counts.get(name, 0) for name in ("skipped_steps", "rolled_back_steps")]
    if sum(others) + counts.get("updates", step - sum(others)) != step or sum(others) > step:
        raise ValueError(f"train.updates is {_shown(train.get('updates'))} in {step} steps, of which {others} had none")
    for name, value in _table({"lr": {}} | state, "lr").items():
        _number(value, f"lr.{name}", least=0)
    if "data" in state:
        _check_data(_table(state, "data"), step, most)
    if "stability" in state:
        # a step in a row was counted; older checkpoints lack the counts
        limits = {"skips": counts.get("skipped_steps", step), "rollbacks": counts.get("rolled_back_steps", step)}
        _check_stability(_table(state, "stability"), {**limits, "spikes": step})
    if "run" in state:
        run = _table(state, "run")
        if "id" in run and not is_plain(_text(run["id"], "run.id")):
            raise ValueError(f"run.id is {_shown(run['id'])}")
        _count(run.get("threads", 1), "run.threads", most)
    for name, value in _table({"init_from": {}} | state, "init_from").items():
        _text(value, f"init_from.{_text(name, 'a name of init_from')}")
    if "ledger" in state:
        ledger = _table(state, "ledger")
        _text(ledger.get("command"), "ledger.command")
        for name, seconds in _table(ledger, "seconds").items():
            _number(seconds, f"ledger.seconds.{_text(name, 'a name of ledger.seconds')}")


def _check_data(data: dict[str, Any], step: int, most: int) -> None:
    sample = _count(data.get("next_sample"), "data.next_sample", most)
    if _count(data.get("step"), "data.step", most) != step:  # one batch per step, even if the update was skipped
        raise ValueError(f"data.step is {_shown(data['step'])}, but the manifest has step {step}")
    _text(data.get("source"), "data.source")
    if "since" in data:  # older checkpoints lack it
        first, begin, batch, end = _counts(data["since"], 4, "data.since", most)
        expected = begin + (step - first) * batch
        if end:
            expected = min(expected, max(begin, end))
        if sample != expected or first > step:
            raise ValueError(f"data.next_sample is {sample} at step {step}, not {expected} as data.since says")
    for shard, cursor in _table(data, "cursors").items():
        if not (shard.isascii() and shard.isdecimal() and len(shard) <= 9):
            raise ValueError(f"data.cursors has a shard {_shown(shard)}")
        _counts(cursor, 3, f"data.cursors of shard {shard}", most)

    for name, counts in _table({"mixture": {}} | data, "mixture").items():
        _counts(counts, 3, f"data.mixture of {_text(name, 'a name of data.mixture')}", most)


def _check_shards(state: dict[str, Any], config: dict[str, Any]) -> None:
    """Raise ValueError if the cursors do not match the shards in the settings of the checkpoint."""
    source = config.get("data.source")
    number = config.get("data.virtual_shards")
    if "data" not in state or type(source) is not str or type(number) is not int:
        return
    wanted = number if source == "huggingface" else 0
    shards = {int(shard) for shard in state["data"]["cursors"]}
    if len(shards) != wanted or any(shard >= wanted for shard in shards):
        raise ValueError(f"data.cursors has {len(shards)} shards, but the data of the checkpoint has {wanted}")


def _check_stability(stability: dict[str, Any], limits: dict[str, int]) -> None:
    for kind, most in limits.items():
        _count(stability.get(f"{kind}_in_a_row"), f"stability.{kind}_in_a_row", most)
    window = _table(stability, "window")
    for name, values in window.items():
        if type(values) is not list:
            raise ValueError(f"stability.window has {_shown(values)} for {_shown(name)}")
        for value in values:
            _number(value, "a value of stability.window")
    if len({len(values) for values in window.values()}) > 1:
        raise ValueError("the lists of stability.window differ in length")


def _table(state: dict[str, Any], name: str) -> dict[str, Any]:
    found = state.get(name)
    if type(found) is not dict:
        raise ValueError(f"{name} is {_shown(found)}" if name in state else f"it has no {name}")
    if name in _KEYS and (unknown := found.keys() - _KEYS[name].split()):
        raise ValueError(f"{name} has the unknown key {_shown(min(unknown))}")
    return found


def _count(value: Any, what: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:  # True is an int in Python, but not allowed here
        raise ValueError(f"{ascii(what)[1:-1][:60]} is {_shown(value)}")
    return value


def _counts(value: Any, length: int, what: str, most: int) -> list[int]:
    if type(value) is not list or len(value) != length:
        raise ValueError(f"{what} is {_shown(value)}")
    return [_count(one, what, most) for one in value]


def _number(value: Any, what: str, least: float = -MAX_NUMBER) -> None:
    if type(value) not in (int, float) or not least <= value <= MAX_NUMBER:
        raise ValueError(f"{what} is {_shown(value)}")


def _text(value: Any, what: str) -> str:
    """Check text that will be printed: no control characters, which could control a terminal."""
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise ValueError(f"{what} is {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
