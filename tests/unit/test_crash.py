"""``crius verify crash``: every crash of a writer is recovered, and planted faults of writers are found."""

import contextlib
import os
import random
import re
import stat
from pathlib import Path

import pytest

from crius import new_folder as whole
from crius.checkpoint import disk as disks
from crius.checkpoint import save
from crius.checkpoint.disk import LocalDisk
from crius.checkpoint.folder import CheckpointFolder, expendable
from crius.cli import main
from crius.data import prepare
from crius.new_folder import sync
from crius.run_file import write_whole
from crius.tools.convert import exporting, importing
from crius.tools.report import page, sweep
from crius.tools.verify import crash as verb
from crius.tools.verify.crash import crash
from crius.tools.verify.crash_record import Journal, WriteRecord, state_of, tree_of
from crius.tools.verify.crash_states import crashes, in_other_orders
from crius.train.saving import remember


def test_a_journal_tells_writes_renames_and_removals_apart(tmp_path):
    journal = Journal(tmp_path)
    for change in (
        lambda: (tmp_path / "a.new").write_bytes(b"half"),
        lambda: (tmp_path / "a.new").rename(tmp_path / "a"),
        lambda: (tmp_path / "b").mkdir(),
        lambda: (tmp_path / "b").rename(tmp_path / "c"),
        lambda: (tmp_path / "a").write_bytes(b"whole"),
        lambda: (tmp_path / "a").unlink(),
    ):
        change()
        journal.note(0)
    for held in journal.held:
        os.close(held)
    assert [record.what for record in journal.records] == [
        *("make a.new", "write a.new", "rename a", "make b", "rename c", "write a", "remove a")
    ]
    assert tree_of(state_of(tmp_path), journal.root) == {"c": None}
    assert [crash.tree for crash in crashes(journal.records, journal.root) if crash.kind == "prefix"][-1] == {"c": None}


def test_a_crash_loses_what_no_sync_made_durable_and_nothing_else():
    make = WriteRecord("make a", {(1, "a"): 2, 2: b""}, {1})
    write = WriteRecord("write a", {2: b"text"}, {2})
    records = [make, write, WriteRecord("sync file", {}, {2}), WriteRecord("sync folder", {}, {1}, is_list=True)]

    def left(count):
        return {crash.tree.get("a") for crash in crashes(records, 1) if crash.what.startswith(f"record {count}")}

    whole = b"text"
    assert [left(count) for count in (1, 2, 3, 4)] == [{None, b""}, {None, b"", b"te", whole}, {None, whole}, {whole}]


def test_other_orders_keep_that_of_each_rank_and_that_around_a_commit():
    names = ["rank-0", "rank-1", "b", "rename step-1", "c", "rank-1 again"]
    records = [WriteRecord(name, {(1, name): 2, 2: b""}, {1}, rank="rank-1" in name) for name in names]
    found = {tuple(crash.tree) for crash in in_other_orders(records, 1, random.Random(1)) if len(crash.tree) == 6}
    assert len(found) > 3
    for order in found:
        assert order.index("rank-0") < order.index("b") < order.index("rename step-1") == 3


def test_a_run_that_is_stopped_survives_a_kill_after_each_of_its_writes(monkeypatch, capsys):
    monkeypatch.setitem(verb.WRITERS, "signal", verb.WRITERS["signal"]._replace(drawn=2))
    monkeypatch.setattr(verb, "crashes", lambda *words: (state for state in crashes(*words) if state.kind == "prefix"))
    assert crash(main, writers="signal") == 0
    assert capsys.readouterr().out.endswith(": ok\n")


def test_a_report_that_replaces_another_survives_every_crash(capsys):
    assert crash(main, writers="report") == 0, capsys.readouterr().out


class NoSync:
    """``os`` without syncs of files."""

    def __getattr__(self, name):
        return getattr(os, name)

    def fsync(self, file):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            os.fsync(file)


def without_sync(monkeypatch):
    monkeypatch.setattr(disks, "os", NoSync())


def sync_after_rename(monkeypatch):
    commit = LocalDisk.commit

    def late(self, folder, step):
        commit(self, folder, step)
        for file in Path(self.where, f"step-{step:08d}").iterdir():
            sync(file)

    without_sync(monkeypatch)
    monkeypatch.setattr(LocalDisk, "commit", late)


def prune_before_commit(monkeypatch):
    def early(disk, folder, attempt, manifest, state, **named):
        for step in expendable([*CheckpointFolder(disk).good(), manifest.step], 2, 0):
            disk.remove(f"step-{step:08d}")
        return commit(disk, folder, attempt, manifest, state, **named)

    commit = save.commit
    monkeypatch.setattr(save, "commit", early)


def remember_before_commit(monkeypatch):
    def early(disk, folder, attempt, manifest, state, **named):
        remember(Path("out"), CheckpointFolder(disk), manifest)
        return commit(disk, folder, attempt, manifest, state, **named)

    commit = save.commit
    monkeypatch.setattr(save, "commit", early)


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (without_sync, "half of write|without write"),
        (sync_after_rename, "half of write|without write"),
        (prune_before_commit, r"of \['checkpoints/step-00000002'\], committed were .*1', 'checkpoints/step-00000002'"),
        (remember_before_commit, "the next start is refused: the newest checkpoint of the run"),
    ],
)
def test_a_planted_fault_of_a_save_is_found(plant, says, monkeypatch, capsys):
    plant(monkeypatch)
    assert crash(main, writers="train") == 1
    found = capsys.readouterr().out
    assert re.search(says, found), found


@contextlib.contextmanager
def in_place(out):
    """``new_folder`` whose folder has its final name at once."""
    place = Path(out)
    place.mkdir(exist_ok=True)
    yield place


def unsynced(path, text, **named):
    write_whole(path, text)


HALF = "is there, but not all of it"


@pytest.mark.full
@pytest.mark.parametrize(
    ("writer", "module", "name", "plant", "says"),
    [
        ("export", exporting, "new_folder", in_place, HALF),
        ("import", importing, "new_folder", in_place, HALF),
        ("text", prepare, "new_folder", in_place, HALF),
        ("export", whole, "sync", bool, HALF),
        ("report", page, "write_whole", unsynced, HALF),
        (
            "sweep",
            sweep,
            "write_whole",
            unsynced,
            "the next start is refused: out/lr_1e-3 is a run",
        ),
    ],
)
def test_a_planted_fault_of_a_writer_is_found(writer, module, name, plant, says, monkeypatch, capsys):
    monkeypatch.setattr(module, name, plant)
    assert crash(main, writers=writer) == 1
    assert says in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("writer", verb.WRITERS)
def test_every_crash_of_a_writer_is_recovered(writer, capsys):
    assert crash(main, writers=writer) == 0, capsys.readouterr().out
