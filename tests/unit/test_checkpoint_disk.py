"""Where checkpoints lie: a kill at any moment of a save leaves the last one whole; no name or link leads outside."""

import errno
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from checkpoint_samples import damages, local, problems, read_manifest, save, seed_of
from fsspec.implementations.memory import MemoryFileSystem
from kills import every_kill, patched

from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import CheckpointFolder
from crius.checkpoint.names import check_name, parse_folder, parse_step, step_name
from crius.errors import CheckpointError

PLAIN = ["manifest.json", "rank-00000.safetensors", "step-00000020.tmp-ab12", "a", "A_1=+-.x", "x" * 200]
OUTSIDE = [
    *(
        "",
        ".",
        "..",
        "../x",
        "..\\x",
        "/x",
        "x/",
        "a/b",
        "a\\b",
        ".hidden",
        "-flag",
        "~",
        "~root",
        "a..b",
        "x\x00",
        "x\n",
    ),
    *(
        "\x1b[2J",
        "a b",
        "a*",
        "a?",
        "[a]",
        "é",
        "\u2215x",
        "\udc80",
        "C:",
        "s3://x",
        "%2e%2e",
        "x" * 201,
        None,
        1,
        b"x",
    ),
]


@pytest.fixture
def memory():
    """A URL of its own in memory."""
    yield "memory://bucket/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_name_is_taken(name):
    assert check_name(name, "m") == name


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_could_lead_elsewhere_is_refused(name, tmp_path):
    (tmp_path / "x").write_text("secret")
    disk = open_disk(str(tmp_path / "checkpoints"))
    disk.prepare("step-00000001")
    with pytest.raises(CheckpointError):
        check_name(name, "m")
    if isinstance(name, str):
        for use in (disk.read, disk.size, disk.open):
            with pytest.raises(CheckpointError):
                use(f"step-00000001/{name}")
        for use in (disk.prepare, disk.remove, disk.files):
            with pytest.raises(CheckpointError):
                use(name)


def test_only_the_folder_of_a_step_is_one():
    assert [parse_step(step_name(step)) for step in (0, 7, 10**8, 10**15 - 1)] == [0, 7, 10**8, 10**15 - 1]
    wrong = ["old-step-00000007-x", "step-7", "step-00000007-x", "step-00000007\n", "step-000000007", "step-0000000７"]
    assert [parse_step(name) for name in (*wrong, "step-00000007.tmp-a", "Step-00000007", "step--0000007")] == [
        None
    ] * 9
    assert parse_folder("step-00000007.tmp-a.b") == (7, "tmp", "a.b")
    assert [parse_folder(f"step-00000007.{end}") for end in ("tmp", "tmp-", "other-a", "tmp-a/b")] == [None] * 4
    with pytest.raises(CheckpointError):
        step_name(-1)


@pytest.mark.long
def test_a_save_killed_at_any_moment_leaves_what_was_committed(tmp_path):
    """Over a checkpoint of the same step, which is the worst case: two renames."""
    seeds = []
    for folder in every_kill(
        tmp_path,
        prepare=lambda folder: local(folder, 10, 20),
        work=lambda folder: save(open_disk(str(folder)), 20, "two", seed=1),
    ):
        found = CheckpointFolder(open_disk(str(folder)))
        found.collect("three")
        assert found.steps() == [10, 20]
        assert seed_of(found.disk, 10) == 0
        seeds.append(seed_of(found.disk, 20))
        assert sorted(os.listdir(folder)) == ["step-00000010", "step-00000020"]
        assert found.leftovers() == []
    assert set(seeds) == {0, 1}


def test_a_prune_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path):
    left = set()
    for folder in every_kill(
        tmp_path,
        prepare=lambda folder: local(folder, 10, 20, 30),
        work=lambda folder: CheckpointFolder(open_disk(str(folder))).prune(2, 0),
    ):
        found = CheckpointFolder(open_disk(str(folder)))
        for step in found.steps():
            assert problems(found.disk, step_name(step)) == []
        found.collect("three")
        assert sorted(os.listdir(folder)) == [step_name(step) for step in found.steps()]
        left.add(tuple(found.steps()))
    assert left == {(10, 20, 30), (20, 30)}


def test_everything_is_synced_before_the_rename_and_the_folder_after_it(tmp_path):
    log, opened = [], {}
    real = os.open

    def noted(path, *args, **kwargs):
        opened[(found := real(path, *args, **kwargs))] = Path(path).name
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", noted)
        with patched("fsync", lambda name, args: log.append(opened[args[0]])):
            with patched("rename", lambda name, args: log.append("rename")):
                save(open_disk(str(tmp_path / "checkpoints")), 20)
    assert log[0] == tmp_path.name  # that the folder of checkpoints was made
    files = ["rank-00000.safetensors", "rank-00001.safetensors", "state.json", "manifest.json"]
    assert log[1:] == [*files, "step-00000020.tmp-one", "rename", "checkpoints"]


def test_a_full_disk_is_named_and_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    disk = local(tmp_path, 10)
    disk.prepare("step-00000020.tmp-a")

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match="step-00000020.tmp-a/x cannot be written: No space left") as caught:
        with disk.create("step-00000020.tmp-a/x") as sink:
            sink.write(b"1")
    assert "free some space" in caught.value.fix
    assert disk.files("step-00000020.tmp-a") == []
    assert problems(disk, "step-00000010") == []


@pytest.mark.parametrize("url", ["{tmp}", "file://{tmp}", "memory://bucket/run"])
def test_an_exception_while_a_file_is_written_removes_it(url, tmp_path, memory):
    disk = open_disk(url.format(tmp=tmp_path))
    disk.prepare("step-00000001")
    for name in ("x.safetensors", "manifest.json"):
        with pytest.raises(KeyboardInterrupt):
            with disk.create(f"step-00000001/{name}") as sink:
                sink.write(b"12")
                raise KeyboardInterrupt
        assert disk.files("step-00000001") == []


@pytest.mark.parametrize("url", ["{tmp}", "file://{tmp}", "memory://bucket/run"])
def test_a_file_is_never_written_twice(url, tmp_path, memory):
    disk = open_disk(url.format(tmp=tmp_path))
    disk.prepare("step-00000001")
    with disk.create("step-00000001/x") as sink:
        sink.write(b"first")
    with pytest.raises(CheckpointError):
        with disk.create("step-00000001/x") as sink:
            sink.write(b"2")
    assert disk.read("step-00000001/x") == b"first"


@pytest.mark.parametrize("url", ["{tmp}", "file://{tmp}", "memory://bucket/run"])
def test_ranges_of_a_file_are_read_whole_or_refused(url, tmp_path, memory):
    disk = open_disk(url.format(tmp=tmp_path))
    disk.prepare("step-00000001")
    with disk.create("step-00000001/x") as sink:
        sink.write(memoryview(b"0123456789"))
        sink.write(b"")
    assert disk.read("step-00000001/x", 2, 5) == b"234"
    assert disk.read("step-00000001/x", 7) == b"789"
    assert disk.read("step-00000001/x", 10, 10) == b""
    assert disk.size("step-00000001/x") == 10
    with disk.open("step-00000001/x") as file:
        assert file.read() == b"0123456789"
        assert (file.seek(4), file.read(3), file.tell(), file.seek(-1, os.SEEK_END)) == (4, b"456", 7, 9)
        buffer = bytearray(4)
        assert (file.readinto(buffer), buffer[:1], file.seek(20), file.read()) == (1, b"9", 20, b"")
    with pytest.raises(CheckpointError):
        disk.read("step-00000001/x", 5, 11)
    with pytest.raises(CheckpointError):
        disk.read("step-00000001/y")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_no_link_out_of_the_folder_is_followed(scheme, tmp_path):
    outside = tmp_path / "outside"
    save(open_disk(str(outside)), 30)
    root = tmp_path / "checkpoints"
    local(root, 20)
    (root / "step-00000030").symlink_to(outside / "step-00000030")
    (root / "step-00000020" / "rank-00000.safetensors").unlink()
    (root / "step-00000020" / "rank-00000.safetensors").symlink_to(outside / "step-00000030" / "rank-00000.safetensors")
    (root / "step-00000020" / "x").symlink_to(tmp_path / "made")
    disk = open_disk(f"{scheme}{root}")
    assert disk.folders() == ["step-00000020"]
    assert len(problems(disk, "step-00000030")) == 1
    assert "rank-00000.safetensors" in problems(disk, "step-00000020")[0]
    with pytest.raises(CheckpointError):
        with disk.create("step-00000020/x") as sink:
            sink.write(b"1")
    assert not (tmp_path / "made").exists()
    disk.remove("step-00000020")
    assert problems(open_disk(str(outside)), "step-00000030") == []


def test_what_is_no_plain_file_is_not_waited_for(tmp_path):
    disk = local(tmp_path, 20)
    (tmp_path / "step-00000020" / "rank-00000.safetensors").unlink()
    os.mkfifo(tmp_path / "step-00000020" / "rank-00000.safetensors")
    (tmp_path / "step-00000020" / "state.json").unlink()
    (tmp_path / "step-00000020" / "state.json").mkdir()
    found = problems(disk, "step-00000020")
    assert [line.split(":")[0] for line in found] == ["rank-00000.safetensors", "state.json"]
    assert all("not a regular file" in line for line in found)


def test_free_space_is_known_before_the_folder_is_there(tmp_path):
    disk = open_disk(str(tmp_path / "a" / "b"))
    assert disk.free_bytes() == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    assert open_disk("memory://x").free_bytes() is None
    disk.prepare("step-00000001")
    assert disk.folders() == ["step-00000001"]


@pytest.mark.parametrize(("code", "is_fine"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_file_system_may_be_unable_to_sync_folders(code, is_fine, tmp_path):
    def fail(name, args):
        if Path(f"/proc/self/fd/{args[0]}").is_dir():
            raise OSError(code, os.strerror(code))

    with patched("fsync", fail):
        with nullcontext() if is_fine else pytest.raises(CheckpointError, match="cannot be created: Input/output"):
            local(tmp_path, 20)
    assert open_disk(str(tmp_path)).committed() == [20] * is_fine


@pytest.mark.parametrize("url", ["{tmp}", "file://{tmp}", "memory://bucket/run"])
def test_a_checkpoint_that_is_set_aside_outlives_a_save_of_its_step(url, tmp_path, memory):
    folder = CheckpointFolder(disk := open_disk(url.format(tmp=tmp_path)))
    save(disk, 20)
    kept = disk.set_aside("step-00000020")
    assert (folder.steps(), folder.asides(), folder.leftovers()) == ([], [kept], [])
    assert folder.collect("two") == []
    assert damages(disk, kept, read_manifest(disk, kept)) == []
    save(disk, 20, "two", seed=1)
    folder.collect("three")
    assert folder.asides() == [kept]
    assert seed_of(disk, 20) == 1
    assert problems(disk, kept) == []
    with pytest.raises(CheckpointError):
        disk.put_back(kept)
    disk.remove("step-00000020")
    assert (folder.steps(), folder.asides()) == ([], [kept])
    disk.put_back(kept)
    assert seed_of(disk, 20) == 0
