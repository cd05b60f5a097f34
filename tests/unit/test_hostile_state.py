"""A state.json with a right hash that says what no run would: it is refused, and the checkpoint before it is taken."""

import dataclasses
import json
import logging

import pytest
from checkpoint_samples import local, save

from crius.checkpoint.folder import CheckpointFolder, read_manifest
from crius.checkpoint.load import find
from crius.checkpoint.manifest import FileEntry, digest_of
from crius.checkpoint.names import step_name
from crius.checkpoint.state import MAX_READ, MAX_STATE_BYTES, encode_state, read_state
from crius.cli import main
from crius.config.changes import changes
from crius.data.stream import StreamSource
from crius.errors import CheckpointError
from crius.redact import printable
from crius.train.setup import _Formatter
from crius.train.stability import SpikeMonitor

STEP = 20
GOOD = {
    "train": {"step": STEP, "tokens": 5120, "updates": 19, "skipped_steps": 1, "rolled_back_steps": 0},
    "lr": {"last": 3e-4, "next": 0},
    "data": {
        **{"step": STEP, "next_sample": 156, "source": "text, 3 files", "cursors": {"0": [0, 3, 17]}},
        "since": [2, 12, 8, 0],
    },
    "stability": {
        "window": {"loss": [2.5, 2], "grad_norm": [1.0, 0.5]},
        **{"skips_in_a_row": 1, "rollbacks_in_a_row": 0, "spikes_in_a_row": 0},
    },
    "run": {"id": "abc", "threads": 2},
    "ledger": {"command": "crius-x", "seconds": {"compute": 1.5, "data": 0}},
}
PLACES = {
    "train.step": ("absent", None, True, -1, 0, 19, 21, 10**12, 1e3, "20", [20], {}),
    "train.tokens": (None, False, -1, 10**30, 10**16 + 1, 1.5, "\x1b[2J"),
    "train.updates": (21, "19", -1, 18, 20),
    "train.skipped_steps": (21, None, 0),
    "train.rolled_back_steps": (1,),
    "train": ("absent", None, [], 7, "x"),
    "lr": (None, 0.1, {"last": "0.1"}, {"next": 1.5e100}, {"last": -1e-4}, {"next": -1}),
    "data": (None, [], 0, {}),
    "data.step": ("absent", 3, STEP - 1, STEP + 1, None, 20.0),
    "data.next_sample": ("absent", -1, 10**19, 10**18, True, 1.0, 155, 157, 164),
    "data.since": (None, [2, 12, 8], [2, 12, 0, 0], [2, 12, 8, 150], [2, 13, 8, 0], [21, 164, 8, 0], [2, 12, "8", 0]),
    "data.source": ("absent", None, 7, "a\x1b[2Jb", "a\nb", "x" * 2000, "text, 4 files"),
    "data.cursors": ("absent", [], None, {"x": [0, 0, 0]}, {"-1": [0, 0, 0]}, {"0": [0, 0]}, {"0" * 10: [0] * 3}),
    "data.cursors.0": (
        [0, 0, -1],
        [0, 0, None],
        [0, 0, True],
        [0.0, 0, 0],
        {"a": 1},
        5,
        [10**30, 0, 0],
        [0, 10**18, 0],
    ),
    "data.mixture": (None, [], {"web": [1, 2]}, {"\x1b": [0, 0, 0]}, {"web": [0, -1, 1]}, {"web": [0, 0, 10**30]}),
    "stability": (None, [], {}, 1),
    "stability.skips_in_a_row": ("absent", "1", -1, None, 2),
    "stability.rollbacks_in_a_row": (1,),
    "stability.spikes_in_a_row": (STEP + 1,),
    "stability.window": ("absent", None, [], {"loss": [1.0], "grad_norm": []}),
    "stability.window.loss": (None, "ab", [None, 1], ["1", 2], [True, 1], [1e300, 1], {}),
    "run": (None, [], "x"),
    "run.id": (5, None, "\x07", "../abc", "a..b", "other"),
    "run.threads": ("2", -1, None, 1.5),
    "ledger": (None, [], 3),
    "ledger.command": ("absent", None, 5),
    "ledger.seconds": ("absent", None, [], {"compute": "1"}, {"compute": None}, {"\x1b": 1}, {"compute": 1e200}),
    "imported": ("yes", 1, None, {}),
    **{f"{table}more": (1,) for table in ("", "train.", "lr.", "data.", "stability.", "run.", "ledger.")},
}
BYTES = {
    **{"empty": b"", "list": b"[]", "number": b"7", "no_utf8": b'{"a": "\xff"}', "cut_off": b'{"train": {"step": 20'},
    **{"deep": b"[" * 100_000, "nan": b'{"train": {"step": NaN}}', "infinite": b'{"train": {"step": 1e999}}'},
    **{"digits": b'{"train": {"step": ' + b"9" * 10_000 + b"}}", "twice": b'{"train": {"step": 20}, "train": {}}'},
    **{"surrogate": b'{"train": {"step": 20}, "run": {"id": "\\ud800"}}', "deep_value": b'{"a": ' + b"[" * 100_000},
    "large": b'{"train": {"step": 20}}'.ljust(MAX_STATE_BYTES + 1),
}


def changed(place, value):
    """``GOOD`` with another value at a place, as JSON."""
    state = json.loads(json.dumps(GOOD))
    *parents, name = place.split(".")
    inner = state
    for parent in parents:
        inner = inner[parent]
    inner.pop(name, None)
    if value != "absent":
        inner[name] = value
    return json.dumps(state).encode()


HOSTILE = {
    f"{place}={str(value)[:20]!a}": changed(place, value) for place, values in PLACES.items() for value in values
}
HOSTILE |= BYTES


def put(folder, data, **config):
    """Give the checkpoint of ``STEP`` another state, and settings, with a manifest that agrees."""
    name = step_name(STEP)
    manifest = read_manifest(folder.disk, name)
    place = folder.disk._root / name
    (place / "state.json").write_bytes(data)
    files = {**manifest.files, "state.json": FileEntry(len(data), digest_of(data))}
    changed = dataclasses.replace(
        manifest, digest="", files=files, config=config, run_id="abc", dataset="text, 3 files"
    )
    (place / "manifest.json").write_bytes(changed.encode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return CheckpointFolder(local(tmp_path_factory.mktemp("run"), 10, STEP))


def found_in(folder):
    return find(folder, -1, rank=0, size=1, gather=lambda value: [value], verify=True)


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_state_is_refused_and_the_checkpoint_before_it_is_taken(data, folder):
    put(folder, data)
    with pytest.raises(CheckpointError):
        read_state(folder.disk, step_name(STEP), read_manifest(folder.disk, step_name(STEP)))
    assert found_in(folder).manifest.step == 10


@pytest.mark.parametrize(
    ("source", "shards", "step"),
    [("text", ["0"], 10), ("huggingface", [], 10), ("huggingface", ["0"], 10), ("huggingface", ["0", "2"], 10)]
    + [("huggingface", ["0", "00"], 10), ("huggingface", ["1", "0"], STEP), ("text", [], STEP)],
)
def test_cursors_of_other_shards_than_the_settings_ask_for_are_damage(folder, source, shards, step):
    state = GOOD | {"data": GOOD["data"] | {"cursors": dict.fromkeys(shards, [0, 3, 17])}}
    put(folder, encode_state(state, STEP), **{"data.source": source, "data.virtual_shards": 2})
    assert found_in(folder).manifest.step == step


def test_what_a_run_counts_on_from_a_state_that_was_read_can_be_saved():
    put_off = {"next_sample": MAX_READ + 10**12, "since": [STEP, MAX_READ + 10**12, 8, 0]}
    state = GOOD | {"train": GOOD["train"] | {"tokens": MAX_READ + 10**15}, "data": GOOD["data"] | put_off}
    assert encode_state(state, STEP)


def test_a_state_that_a_run_writes_is_taken_whole(folder):
    at_the_end = {"next_sample": 150, "since": [2, 12, 8, 150]}
    older = {key: value for key, value in GOOD["data"].items() if key != "since"}
    shard = {"cursors": {"9" * 9: [0, 0, 0]}}
    states = [GOOD, *(GOOD | {"data": data} for data in (GOOD["data"] | at_the_end, older, GOOD["data"] | shard))]
    states += [
        GOOD | {"run": {"threads": 2}},
        {"train": {"step": STEP}, "ledger": {"command": "x" * 1024, "seconds": {}}},
    ]
    skipped = [{}, {"updates": STEP}, {"skipped_steps": 1}, {"skipped_steps": STEP, "updates": 0}, {"tokens": 10**16}]
    for state in (*states, *({"train": {"step": STEP} | counts} for counts in skipped)):
        put(folder, encode_state(state, STEP))
        assert found_in(folder).state == state


@pytest.mark.parametrize("name", ["d\u3000x/jl", "a\xa0b", "a\nb", "\x1b[2J", "\ud800", "x" * 2000])
def test_data_of_any_name_can_be_saved_and_resumed(folder, name):
    source, other = (
        StreamSource(lambda shard: pytest.fail("read"), num_shards=1, seq_len=4, identity=text)
        for text in (f"{name} as 1", f"{name} as 2")
    )
    state = GOOD | {"data": GOOD["data"] | {"source": source.identity}}
    put(folder, encode_state(state, STEP))
    manifest = dataclasses.replace(read_manifest(folder.disk, step_name(STEP)), dataset=source.identity, digest="")
    (folder.disk._root / step_name(STEP) / "manifest.json").write_bytes(manifest.encode())
    found = found_in(folder)
    assert found.state == state and found.manifest.dataset == source.identity != other.identity


def test_no_state_is_saved_that_a_resume_would_refuse():
    encode_state({"train": {"step": STEP, "tokens": 10**18}}, STEP)
    tables = ({}, {"step": 19}, {"step": STEP, "tokens": 10**18 + 1})
    unknown = {"ledger": {"command": "", "seconds": {"x": float("nan")}}}
    for state in ({}, GOOD | unknown, *({"train": table} for table in tables)):
        with pytest.raises(ValueError):
            encode_state(state, STEP)


@pytest.mark.parametrize(("length", "shown"), [(58, f"'{'x' * 58}'"), (59, f"'{'x' * 59}...")])
def test_a_value_is_shown_up_to_60_characters(length, shown):
    with pytest.raises(ValueError) as refused:
        encode_state(GOOD | {"train": GOOD["train"] | {"x" * length: 1}}, STEP)
    assert str(refused.value).endswith(f" {shown}")


def test_verify_reports_a_state_that_a_resume_would_refuse(folder, capsys):
    put(folder, changed("train.step", 10**12))
    assert main(["checkpoint", "verify", str(folder.disk._root)]) == 1
    assert "train.step is 1000000000000, but the manifest has step 20" in capsys.readouterr().out


def test_a_window_of_other_values_starts_anew():
    monitor = SpikeMonitor(6.0, 10)
    monitor.load({"loss": [1.0] * 9, "x": [1.0] * 9})
    assert monitor.state() == {"loss": [], "grad_norm": []} and monitor.score(1.0, 1.0) == {}


def test_text_of_a_stranger_acts_on_no_terminal(tmp_path, capsys):
    evil = "a\x1b[2J\x9b\u202e\r"
    assert printable(f"{evil}\n\té") == "a\\x1b[2J\\x9b\\u202e\\r\n\té"
    assert printable("\u2028\u2029\ud800") == "\\u2028\\u2029\\ud800"
    assert printable("a\u3000b\xa0c\x1b") == "a\u3000b\xa0c\\x1b"  # in a path, and in a command to paste
    line = logging.LogRecord("crius", logging.INFO, "", 0, "settings of %s", (evil,), None)
    assert "\x1b" not in _Formatter("%(message)s").format(line)
    change = str(changes({f"{evil}\nresume: all is well": f"{evil}\nstep 9"}, {})[-1])
    assert change.isprintable() and "\\x1b[2J" in change
    (tmp_path / "run.toml").write_text('[model]\n"\\u001b[2Jx" = 1\nname = "\\u001b[2J"\n')
    assert main(["train", "--config", str(tmp_path / "run.toml")]) == 2
    assert "\x1b" not in capsys.readouterr().err
    place = tmp_path / "checkpoints"
    save(CheckpointFolder(local(place)).disk, 10)
    (place / step_name(10) / "x\x1b[2J").touch()
    assert main(["checkpoint", "verify", str(place)]) == 1
    assert "\x1b" not in capsys.readouterr().out
