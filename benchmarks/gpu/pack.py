"""Fill ``.gpu`` with what a GPU machine without a registry needs: ``make gpu-carry``, where there is a registry.

    python3 benchmarks/gpu/pack.py [--python 3.12] [--nccl]

Wheels of Crius and of its peers that such a machine with torch, numpy and transformers lacks (7 MB), the commit, and
with ``--nccl`` the NCCL that lets ranks share a GPU (26 MB). The folder travels with the checkout; git ignores it.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.host import CARRIED, commit  # noqa: E402  without the packages of Crius

FOLDER = ROOT / CARRIED
CRIUS = (
    *("torchao==0.18.0", "tomli-w==1.2.0"),
    *("xxhash==4.1.0", "pytest-xdist==3.8.0", "execnet==2.1.2"),
)
PEERS = (
    *("torchtitan==0.2.2", "torchdata==0.11.0", "tyro==1.0.16", "typeguard==4.6.1", "datasets==4.7.0", "dill==0.4.0"),
    *("multiprocess==0.70.18", "liger-kernel==0.8.5"),
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def download(python: str, requirement: str, folder: Path) -> None:
    """One wheel without what it needs in turn: that is listed here too, or there already."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, requirement], check=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the folder."""
    parser = argparse.ArgumentParser(description="Fill .gpu for a GPU machine without a package registry.")
    parser.add_argument("--python", default="3.12", help="of that machine")
    parser.add_argument("--nccl", action="store_true", help="also the NCCL for several ranks on one GPU")
    options = parser.parse_args(argv)
    wheels = FOLDER / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for requirement in (*CRIUS, *PEERS):
        download(options.python, requirement, wheels)
    (FOLDER / "COMMIT").write_text(commit() + "\n", encoding="utf-8")
    if options.nccl:
        subprocess.run([sys.executable, str(Path(__file__).with_name("pack_nccl.py")), str(FOLDER)], check=True)
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    sys.stdout.write(f"{FOLDER}: {size / 1e6:.1f} MB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
