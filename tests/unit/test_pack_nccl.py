"""The NCCL that is carried to a GPU: its code for one architecture, from a library made here."""

import hashlib
import lzma
import struct
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import pack_nccl

TEXT, MACHINE = 1, 2


def code(kind, arch):
    """Code that differs between kinds and architectures, of a length that is no multiple of 8."""
    return bytes([kind, arch]) * 21


def fat_binary(*held):
    """The same code for several architectures, with headers longer than the parts that are read."""
    body = b"".join(
        struct.pack("<HHIQ12xI32x", kind, 0x101, 64, len(code(kind, arch)), arch) + code(kind, arch)
        for kind, arch in held
    )
    return struct.pack("<IHHQ", pack_nccl.FATBIN, 1, 16, len(body)) + body


def elf(**contents):
    """A 64-bit ELF file with these sections, each at a multiple of 8."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in [*contents, ".shstrtab"])
    data, headers = bytearray(64), [bytes(64)]
    for name, content in {**contents, ".shstrtab": names}.items():
        data += bytes(-len(data) % 8)
        place = names.index(b"\0" + name.encode() + b"\0") + 1
        headers.append(struct.pack("<IIQQQQ24x", place, 1, 0, 0, len(data), len(content)))
        data += content
    table = len(data)
    data[:16] = b"\x7fELF\x02\x01".ljust(16, b"\0")
    struct.pack_into("<Q", data, 0x28, table)
    struct.pack_into("<HHH", data, 0x3A, 64, len(headers), len(headers) - 1)
    return bytes(data + b"".join(headers))


ALL = [(TEXT, 90), (MACHINE, 80), (MACHINE, 90), (MACHINE, 100)]
PAIR = fat_binary((MACHINE, 90), (MACHINE, 120))
LOADED = PAIR + bytes(-len(PAIR) % 8 + 16) + fat_binary(*ALL)  # each begins at a multiple of 8
LIBRARY = elf(**{".text": b"host" * 10, "__nv_relfatbin": fat_binary(*ALL), ".nv_fatbin": LOADED, ".data": code(2, 80)})


def codes(library):
    """Kind and architecture of the entries whose code is whole, by section; other code is zeros."""
    found = {}
    for name in (".nv_fatbin", "__nv_relfatbin"):
        entries = list(pack_nccl.entries(library, pack_nccl.sections(library)[name]))
        found[name] = [(e.kind, e.arch) for e in entries if library[e.code] == code(e.kind, e.arch)]
        assert all(not any(library[e.code]) for e in entries if (e.kind, e.arch) not in found[name])
    return found


def test_a_library_made_here_has_what_is_put_in():
    assert codes(LIBRARY) == {".nv_fatbin": [(MACHINE, 90), (MACHINE, 120), *ALL], "__nv_relfatbin": ALL}


@pytest.mark.parametrize(
    ("arch", "keeps", "loaded", "linked"),
    [
        (90, False, [(MACHINE, 90)] * 2, []),
        (90, True, [(MACHINE, 90)] * 2, [(MACHINE, 90)]),
        (120, False, [(MACHINE, 120)], []),
    ],
)
def test_code_of_one_architecture_is_kept_and_nothing_else_changes(arch, keeps, loaded, linked):
    library = bytearray(LIBRARY)
    assert pack_nccl.prune(library, arch, keeps) == len(loaded) + len(linked)
    assert codes(library) == {".nv_fatbin": loaded, "__nv_relfatbin": linked}
    before = bytearray(LIBRARY)
    for name in (".nv_fatbin", "__nv_relfatbin"):
        for entry in pack_nccl.entries(before, pack_nccl.sections(before)[name]):
            before[entry.code] = library[entry.code]
    assert library == before


@pytest.mark.parametrize(
    ("library", "arch", "why"),
    [
        (LIBRARY, 75, "no code for sm_75"),
        (elf(**{".text": b"host"}), 90, "no code for sm_90"),
        (b"MZ", 90, "not an ELF"),
    ],
)
def test_a_library_without_the_code_is_refused(library, arch, why):
    with pytest.raises(ValueError, match=why):
        pack_nccl.prune(bytearray(library), arch)


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "nvidia_nccl_cu13-2.31.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(pack_nccl.LIBRARY, LIBRARY)
    return path


def test_a_wheel_becomes_a_packed_library_with_its_hashes(wheel, tmp_path, capsys):
    pack_nccl.main([str(tmp_path / "out"), "--wheel", str(wheel)])
    [packed] = (tmp_path / "out").iterdir()
    assert packed.name == "libnccl-sm90.so.xz"
    want = bytearray(LIBRARY)
    pack_nccl.prune(want, 90)
    assert lzma.decompress(packed.read_bytes()) == want
    hashes = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    files = (wheel.read_bytes(), LIBRARY, want, packed.read_bytes())
    assert hashes == [hashlib.sha256(data).hexdigest() for data in files]


def test_the_whole_library_can_be_packed(wheel, tmp_path):
    pack_nccl.main([str(tmp_path / "out"), "--wheel", str(wheel), "--whole"])
    assert lzma.decompress((tmp_path / "out" / "libnccl.so.xz").read_bytes()) == LIBRARY


def test_the_wheel_is_downloaded_and_not_kept(wheel, tmp_path, monkeypatch):
    commands = []

    def pip(command, **options):
        commands.append(command)
        target = Path(command[command.index("-d") + 1], wheel.name)
        target.write_bytes(wheel.read_bytes())
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    pack_nccl.main([str(tmp_path / "out")])
    assert commands[0][-1] == "nvidia-nccl-cu13==2.31.2"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["libnccl-sm90.so.xz"]
    pack_nccl.main([str(tmp_path / "out"), "--wheel", str(tmp_path)])
    assert commands[1][-2] == str(tmp_path)


@pytest.mark.parametrize(
    ("made", "why"), [("none", "No such file"), ("text", "not a zip file"), ("empty", "has no nvidia/nccl/lib")]
)
def test_what_is_no_such_wheel_is_said_in_one_line(made, why, tmp_path):
    path = tmp_path / "a.whl"
    if made == "text":
        path.write_text("no wheel")
    if made == "empty":
        zipfile.ZipFile(path, "w").close()
    with pytest.raises(SystemExit, match=f"^pack_nccl: .*{why}"):
        pack_nccl.main([str(tmp_path), "--wheel", str(path)])


def test_a_failed_download_names_the_command_and_the_way_without_it(tmp_path, monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="WARNING: slow\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: failed)
    with pytest.raises(
        SystemExit, match=r"pip download .* failed: ERROR: No matching distribution found; --wheel takes"
    ):
        pack_nccl.main([str(tmp_path)])
