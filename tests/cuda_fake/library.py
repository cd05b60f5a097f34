"""The shim's shared library, compiled once for a torch and a source and kept in ``build/``. Imports no torch."""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "shim.cpp"
CACHE = Path(__file__).parents[2] / "build" / "cuda_fake"
_FLAGS = ("-O0", "-std=c++20", "-shared", "-fPIC")  # O0: nothing in it takes time, and it compiles in half of it


class NoCompiler(Exception):
    """Why the shim cannot be made here."""


def shim_library(cache: Path = CACHE, source: Path = SOURCE) -> Path:
    """The library, compiled unless it is there. Several processes may ask at once; one of them compiles.

    Raises:
        NoCompiler: there is no C++ compiler, or torch has no headers.
        RuntimeError: the source does not compile with this torch.
    """
    torch = _torch_folder()
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise NoCompiler("no C++ compiler: install g++, or name one in CXX")
    if not (torch / "include" / "ATen").is_dir():
        raise NoCompiler(f"torch has no headers in {torch / 'include'}")
    key = hashlib.sha256(b"\0".join([source.read_bytes(), compiler.encode(), *map(str.encode, _FLAGS), bytes(torch)]))
    library = cache / f"shim-{importlib.metadata.version('torch')}-{key.hexdigest()[:16]}.so"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(f".{os.getpid()}")
            lib = torch / "lib"
            links = [f"-I{torch / 'include'}", f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}"]
            command = [compiler, *_FLAGS, str(source), *links, "-o", str(unfinished)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")
            unfinished.rename(library)
    return library


def _torch_folder() -> Path:
    """Where torch is installed; found without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
