"""Make a newer NCCL small enough to be carried to a GPU: its code for one architecture only, compressed.

    python benchmarks/gpu/pack_nccl.py FOLDER                 # downloads 252 MB, writes FOLDER/libnccl-sm90.so.xz
    python benchmarks/gpu/pack_nccl.py FOLDER --wheel FILE --arch 100

Code of other architectures is overwritten with zeros, which take no room when they are compressed. The file keeps its
length and all addresses; the driver takes the code of its own architecture. Code for linking (``__nv_relfatbin``) goes
too: a process that only loads the library links nothing. How the result is used: docs/gpu.md.
"""

import argparse
import hashlib
import lzma
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

REQUIREMENT = "nvidia-nccl-cu13==2.31.2"
PLATFORM, PYTHON = "manylinux_2_18_x86_64", "3.12"
LIBRARY = "nvidia/nccl/lib/libnccl.so.2"
LOADED, LINKED = ".nv_fatbin", "__nv_relfatbin"
"""Sections of an ELF file: code that the driver loads, and code that a linker takes."""
FATBIN = 0xBA55ED50
"""First four bytes of a fat binary, which holds the same code for several architectures."""
CUBIN = 2
"""Kind of an entry with machine code; others are text that the driver would compile."""
PRESET = 3
"""Level of xz: 9 makes 24.6 MB of it instead of 25.9, in several times the time."""


class Entry(NamedTuple):
    """Code for one architecture in a fat binary."""

    kind: int
    arch: int
    """90 for compute capability 9.0."""
    code: slice
    """Place of the code in the file."""


def sections(library: bytes | bytearray) -> dict[str, range]:
    """Places of the sections of a 64-bit ELF file, by name.

    Raises:
        ValueError: it is another file.
    """
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError("the library is not an ELF file for 64 bits")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    header_bytes, number, index_of_names = struct.unpack_from("<HHH", library, 0x3A)
    # of a header: offset of the name, type, flags, address, offset and length of the section
    headers = [struct.unpack_from("<IIQQQQ", library, table + header_bytes * index) for index in range(number)]
    names = headers[index_of_names][4]
    found = {}
    for name, _, _, _, offset, length in headers:
        end = library.index(b"\0", names + name)
        found[library[names + name : end].decode()] = range(offset, offset + length)
    return found


def entries(library: bytes | bytearray, section: range) -> Iterator[Entry]:
    """The entries of all fat binaries in ``section``."""
    place = section.start
    while place + 16 <= section.stop:
        magic, _, header_bytes, length = struct.unpack_from("<IHHQ", library, place)
        if magic != FATBIN:  # fat binaries begin at multiples of 8
            place += 8
            continue
        entry = place + header_bytes
        end = entry + length
        while entry < end:
            kind, _, entry_header_bytes, code_bytes = struct.unpack_from("<HHIQ", library, entry)
            (arch,) = struct.unpack_from("<I", library, entry + 28)
            code = entry + entry_header_bytes
            yield Entry(kind, arch, slice(code, code + code_bytes))
            entry = code + code_bytes
        place = -(-end // 8) * 8


def prune(library: bytearray, arch: int, keep_relocatable: bool = False) -> int:
    """Overwrite the code of all architectures but ``arch`` with zeros, in place.

    Args:
        library: an ELF file.
        arch: compute capability times 10.
        keep_relocatable: whether code for linking is kept, for this architecture.

    Returns:
        Number of entries that are kept.

    Raises:
        ValueError: it is no ELF file for 64 bits, or has no code for ``arch``.
    """
    places = sections(library)
    kept = 0
    for name in (LOADED, LINKED):
        for entry in entries(library, places.get(name, range(0))):
            if entry.kind == CUBIN and entry.arch == arch and (name == LOADED or keep_relocatable):
                kept += 1
            else:
                library[entry.code] = bytes(entry.code.stop - entry.code.start)
    if not kept:
        raise ValueError(f"the library has no code for sm_{arch}")
    return kept


def download(folder: Path) -> Path:
    """The wheel, which pip puts into ``folder``.

    Raises:
        ValueError: pip cannot get it.
    """
    which = ["--no-deps", "--only-binary=:all:", "--platform", PLATFORM, "--python-version", PYTHON]
    command = [sys.executable, "-m", "pip", "download", *which, "-d", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("nvidia_nccl*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ValueError(f"{' '.join(command)} failed: {last}; --wheel takes a wheel that is here")
    return wheels[-1]


def pack(wheel: Path, folder: Path, arch: int, *, keep_relocatable: bool, whole: bool) -> list[str]:
    """Write the library of ``wheel`` to ``folder``; the lines describe what went in and what came out.

    Raises:
        ValueError: as ``prune``, or the wheel has no such library.
    """
    with zipfile.ZipFile(wheel) as archive:
        if LIBRARY not in archive.namelist():
            raise ValueError(f"{wheel} has no {LIBRARY}")
        library = bytearray(archive.read(LIBRARY))
    lines = [described(wheel.name, wheel.read_bytes()), described(LIBRARY, library)]
    target = folder / "libnccl.so.xz"
    if not whole:
        target = folder / f"libnccl-sm{arch}.so.xz"
        kept = prune(library, arch, keep_relocatable)
        lines.append(described(f"the same with {kept} entries, of sm_{arch}", library))
    packed = lzma.compress(library, preset=PRESET)
    folder.mkdir(parents=True, exist_ok=True)
    target.write_bytes(packed)
    return [*lines, described(str(target), packed)]


def described(name: str, data: bytes | bytearray) -> str:
    """A line with the hash and the size of ``data``."""
    return f"sha256 {hashlib.sha256(data).hexdigest()}  {len(data) / 1e6:6.1f} MB  {name}"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line.

    Raises:
        SystemExit: it failed; the text is the reason.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="gets libnccl-sm90.so.xz")
    parser.add_argument(
        "--wheel", type=Path, help=f"of {REQUIREMENT}, or a folder to download it to; else none is kept"
    )
    parser.add_argument("--arch", type=int, default=90, help="compute capability times 10 (default 90: H100)")
    parser.add_argument("--keep-relocatable", action="store_true", help="keep code for linking too: twice as large")
    parser.add_argument("--whole", action="store_true", help="keep all code: libnccl.so.xz")
    options = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            wheel = options.wheel or Path(scratch)
            if wheel.is_dir():
                wheel = download(wheel)
            lines = pack(
                wheel,
                options.folder,
                options.arch,
                keep_relocatable=options.keep_relocatable,
                whole=options.whole,
            )
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise SystemExit(f"pack_nccl: {error}") from None
    print("\n".join(lines))


if __name__ == "__main__":
    main()
