"""Checkpoints behind fsspec URLs: whatever operation fails, what was committed is there, and no secret is shown."""

import contextlib
import os
from types import SimpleNamespace

import fsspec
import pytest
from checkpoint_samples import problems, save, seed_of, write
from fsspec.implementations.memory import MemoryFileSystem

from crius.checkpoint import remote_disk
from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import CheckpointFolder
from crius.checkpoint.kept import keep, kept_damages, kept_folder
from crius.checkpoint.names import step_name
from crius.errors import CheckpointError, ConfigError, EnvironmentError


@pytest.fixture
def memory():
    """A URL of its own in memory."""
    yield "memory://bucket/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("url", ["file://{tmp}", "memory://bucket/run"])
def test_a_url_has_a_checkpoint_once_its_manifest_is_there(url, tmp_path, memory):
    folder = CheckpointFolder(disk := open_disk(url.format(tmp=tmp_path)))
    assert folder.steps() == []
    name, _ = write(disk, 20, "one")
    disk.commit(name, 20)
    assert folder.steps() == [20]
    assert seed_of(disk, 20) == 0
    assert "rank-00000-one.safetensors" in disk.files("step-00000020")
    save(disk, 20, "two", seed=1)  # over it: other files, then the manifest, then the old files go
    assert seed_of(disk, 20) == 1
    assert len(disk.files("step-00000020")) == 4
    disk.remove("step-00000020")
    assert (disk.folders(), folder.steps()) == ([], [])


@pytest.mark.parametrize("url", ["{tmp}", "file://{tmp}", "memory://bucket/run"])
def test_files_that_all_checkpoints_share_are_written_once_and_again_if_damaged(url, tmp_path, memory, monkeypatch):
    disk = open_disk(url.format(tmp=tmp_path))
    files = {"tokenizer.json": b"{}", "merges.txt": b"a b"}
    kept = keep(disk, files)
    folder = kept_folder(kept)
    with monkeypatch.context() as patch:
        patch.setattr(type(disk), "create", None)  # nothing is written
        assert keep(disk, files) == kept
    disk.remove(folder)
    disk.prepare(folder)
    with disk.create(f"{folder}/merges.txt") as sink:  # and a kill
        sink.write(b"a")
    assert [damage.file for damage in kept_damages(disk, kept)] == ["tokenizer.json", "merges.txt"]
    assert keep(disk, files) == kept and kept_damages(disk, kept) == []
    assert (CheckpointFolder(disk).steps(), CheckpointFolder(disk).leftovers()) == ([], [])


@pytest.mark.parametrize("url", ["file://{tmp}", "memory://bucket/run"])
def test_a_save_to_a_url_that_fails_anywhere_leaves_what_was_committed(url, tmp_path, memory, monkeypatch):
    """Each operation of a save over a checkpoint fails once, for good, as if the process had died there."""
    url = url.format(tmp=tmp_path)
    fs, _ = fsspec.core.url_to_fs(url)
    count, seeds = 0, []
    while True:
        CheckpointFolder(disk := open_disk(url)).collect("none")
        for step in disk.folders():
            disk.remove(step)
        save(disk, 10)
        save(disk, 20)
        with pytest.MonkeyPatch.context() as patch:
            calls = failing(patch, type(fs), count)
            try:
                save(open_disk(url), 20, "two", seed=1)
                is_done = True
            except Dead:
                is_done = False
        folder = CheckpointFolder(open_disk(url))
        assert (folder.steps(), seed_of(disk, 10)) == ([10, 20], 0)
        seeds.append(seed_of(disk, 20))  # also before anything is collected
        folder.collect("three")
        assert seed_of(disk, 20) == seeds[-1]
        assert len(disk.files("step-00000020")) == 4
        if is_done:
            break
        count += 1
    assert (len(calls), seeds[0], seeds[-1]) == (count, 0, 1)
    assert count > 8


@pytest.mark.parametrize("url", ["file://{tmp}", "memory://bucket/run"])
def test_a_removal_at_a_url_that_fails_anywhere_leaves_only_whole_checkpoints(url, tmp_path, memory):
    for point in range(8):
        disk = open_disk(url.format(tmp=tmp_path))
        CheckpointFolder(disk).collect("none")
        save(disk, 20)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Dead):
            failing(patch, type(fsspec.core.url_to_fs(url.format(tmp=tmp_path))[0]), point)
            disk.remove("step-00000020")
        for step in CheckpointFolder(disk).steps():
            assert problems(disk, step_name(step)) == []
            disk.remove(step_name(step))
    assert disk.folders() == []


class Dead(BaseException):
    """What no code of a save may catch and live on."""


def failing(patch, kind, point):
    """Let the call number ``point`` of those that change something fail."""
    calls = []
    for name in ("open", "pipe_file", "rm_file", "makedirs", "exists", "ls"):
        real = getattr(kind, name)

        def call(self, *args, real=real, **kwargs):
            if len(calls) >= point:
                raise Dead
            calls.append(1)
            return real(self, *args, **kwargs)

        patch.setattr(kind, name, call)
    return calls


@pytest.mark.parametrize("failures", [1, 3, 4])
def test_an_operation_on_a_url_is_tried_four_times(failures, memory, monkeypatch):
    monkeypatch.setattr(remote_disk, "PAUSES", (0.0,) * 3)
    disk = open_disk(memory)
    save(disk, 20)
    left = {}
    for name in ("ls", "cat_file", "info"):
        real = getattr(MemoryFileSystem, name)

        def flaky(self, path, *args, name=name, real=real, **kwargs):
            left[name, path] = left.get((name, path), failures) - 1
            if left[name, path] >= 0:
                raise ConnectionResetError("peer went away")
            return real(self, path, *args, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, name, flaky)
    found = problems(disk, "step-00000020")
    if failures < 4:
        assert found == []
    else:
        assert "cannot be listed: ConnectionResetError: peer went away" in found[0]


def test_a_file_behind_a_url_is_read_in_ranges(monkeypatch):
    monkeypatch.setattr(remote_disk, "_RANGE_BYTES", 4)
    data = bytes(range(10))
    disk = SimpleNamespace(size=lambda path: len(data), read=lambda path, begin, end: data[begin:end])
    reader = remote_disk._RemoteReader(disk, "f")

    def take(size):
        buffer = bytearray(size)
        return bytes(buffer[: reader.readinto(buffer)])

    assert [take(size) for size in (3, 9, 9, 9)] == [data[:3], data[3:7], data[7:], b""]
    assert (reader.seek(-2, os.SEEK_END), take(1)) == (8, data[8:9])
    assert (reader.seek(-99), take(1)) == (0, data[:1])
    assert (reader.seek(3, os.SEEK_CUR), take(1)) == (4, data[4:5])
    assert (reader.seek(12), take(1)) == (12, b"")


def test_what_cannot_pass_is_not_tried_again(memory, monkeypatch):
    pauses = []
    monkeypatch.setattr(remote_disk.time, "sleep", pauses.append)
    with pytest.raises(CheckpointError, match="FileNotFoundError"):
        open_disk(memory).size("step-00000020/x")
    assert pauses == []


def test_a_folder_holds_files_alone(memory):
    with pytest.raises(CheckpointError, match="'step/a/b' is neither a folder nor a file in a folder"):
        open_disk(memory).files("step/a/b")


def test_secrets_of_a_url_are_not_shown(monkeypatch):
    disk = open_disk("memory://user:pass@host/run?sig=key")
    assert disk.where == "memory://host/run"

    def refused(*args, **kwargs):
        raise PermissionError("no entry to memory://user:pass@host/run?sig=key for you")

    monkeypatch.setattr(MemoryFileSystem, "ls", refused)
    with pytest.raises(CheckpointError) as caught:
        disk.folders()
    assert "pass" not in str(caught.value) and "key" not in str(caught.value)


def test_a_url_that_nobody_knows_is_refused_with_the_reason(monkeypatch):
    with pytest.raises(ConfigError, match="does not know the URL scheme foo://"):
        open_disk("foo://bucket/run")


@pytest.mark.parametrize(
    ("kind", "packages"),
    [
        *[("s3", "s3fs"), ("gs", "gcsfs"), ("abfs", "adlfs"), ("http", "aiohttp requests"), ("hdfs", "pyarrow")],
        *[("smb", "smbprotocol"), ("sftp", "paramiko"), ("ssh", "paramiko"), ("hf", "huggingface_hub"), ("box", "")],
    ],
)
def test_a_kind_of_url_without_its_package_names_that_package_or_none(kind, packages, monkeypatch):
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (_ for _ in ()).throw(ImportError("Install x")))
    with pytest.raises(EnvironmentError, match=f"{kind}:// needs a package") as caught:
        open_disk(f"{kind}://bucket/run")
    assert caught.value.fix.endswith(f" {packages}") if packages else caught.value.fix == ""
