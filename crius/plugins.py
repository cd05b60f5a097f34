"""Additions of installed packages, loaded when they are named: models, data sources and sinks; versions of packages,
and commands that install one.

A package lists them as entry points of the groups below (https://packaging.python.org/specifications/entry-points);
docs/plugins.md has an example.
"""

import ctypes
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

from crius.errors import ConfigError

MODELS = "crius.models"
DATA = "crius.data"
SINKS = "crius.sinks"
GROUPS = {"model.name": MODELS, "data.source": DATA, "metrics.sinks": SINKS}
"""Groups, by the setting that names their members."""

T = TypeVar("T")


def installed(group: str) -> list[str]:
    """Names of a group in installed packages, sorted; nothing of them is imported."""
    from importlib.metadata import entry_points  # it takes a tenth of the time of a refused flag

    try:
        return sorted(entry_points(group=group).names)
    except Exception:  # one package's list is malformed, so no list can be read
        return []


def load(group: str, name: str, kind: type[T] | None = None) -> T | None:
    """The object that an installed package has under this name, imported; None if no package has it.

    Args:
        group: group of the entry points.
        name: name in the group.
        kind: class that the object must be an instance of.

    Raises:
        ConfigError: two packages have the name, or the object cannot be imported or is of another kind.
    """
    from importlib.metadata import entry_points

    try:
        found = tuple(entry_points(group=group, name=name))
    except Exception as error:  # see installed
        what = f"the entry points of installed packages cannot be read: {type(error).__name__}: {error}"
        raise ConfigError(what, where=f"{group} {name}", fix="correct the malformed entry_points.txt") from None
    if not found:
        return None
    packages = sorted({(entry.dist and entry.dist.name) or entry.value for entry in found})
    where = f"{group} of {' and '.join(packages)}"
    if len({entry.value for entry in found}) > 1:
        raise ConfigError(f"{name} is in several packages.", where=where, fix="uninstall all but one of them")
    loaded = imported(found[0].load, f"{name} ({found[0].value})", where, f"pip install --upgrade {packages[0]}")
    if kind is not None and not isinstance(loaded, kind):
        wanted = f"{kind.__module__}.{kind.__name__}"
        raise ConfigError(f"{name} is not a {wanted}, but {type(loaded).__name__}.", where=where)
    return loaded


def imported(load: Callable[[], T], what: str, where: str, fix: str, *, done: str = "imported") -> T:
    """The object that ``load`` imports or creates from a stranger's code.

    Raises:
        ConfigError: it fails; the message names the line that raised.
    """
    try:
        return load()
    except (Exception, SystemExit) as error:  # anything that a stranger's module raises
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        last = next((frame for frame in reversed(frames) if frame.filename != __file__), None)
        raise ConfigError(
            f"{what} cannot be {done}: {type(error).__name__}: {error}",
            where=where,
            why=f"raised in {last.filename}, line {last.lineno}" if last else "",
            fix=fix,
        ) from None


# optional package to its requirement; pyproject.toml's extras have the same
REQUIREMENTS = {
    "datasets": "datasets>=3.1",
    "tokenizers": "tokenizers>=0.20",
    "tensorboard": "tensorboard>=2.15",
    "wandb": "wandb>=0.31",
    "torchao": "torchao>=0.18",
    "matplotlib": "matplotlib>=3.8",
    "jinja2": "jinja2>=3.1",
    "pyarrow": "pyarrow>=16.0",
    "zstandard": "zstandard>=0.22",
    "gguf": "gguf>=0.17",
    "huggingface_hub": "huggingface_hub>=0.30",
    "transformers": "transformers>=5.0",
    "lm_eval": "lm-eval>=0.4.9",
    "sentencepiece": "sentencepiece>=0.2",
    "protobuf": "protobuf>=5.26",
    "tiktoken": "tiktoken>=0.9",
    "mistral-common": "mistral-common>=1.8",
    "peft": "peft>=0.18",
    "rensa": "rensa>=0.5",
}


def release(version: str) -> tuple[int, ...]:
    """Major and minor number of a version as written: ``(2, 13)`` of 2.13.0+cpu, and of the pre-release 2.13.0a0+git.

    As text 2.9 would be newer than 2.13, and torch's own comparison takes a pre-release for older than its release.
    """
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def installed_torch() -> tuple[tuple[int, ...], str] | None:
    """Major and minor version of the installed torch, and its version as written; torch is not imported."""
    from importlib.metadata import distributions

    torch = next(iter(distributions(name="torch")), None)
    return (release(torch.version), torch.version) if torch else None


def loaded_nccl() -> tuple[int, ...]:
    """Version of the NCCL that torch calls in this process; empty without torch or without a torch for CUDA.

    ``torch.cuda.nccl.version()`` is the version that torch was compiled with, also where ``LD_PRELOAD`` or an installed
    package brings another one.
    """
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libtorch_cuda.so", mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # not loaded; NCCL is a hidden part of it
        return ()
    return of_number(number.value)


def of_number(version: int) -> tuple[int, ...]:
    """Version of a library of NVIDIA from the number that the library returns: ``(2, 31, 2)`` of 23102."""
    return version // 10_000, version // 100 % 100, version % 100


def install_line(*requirements: str) -> str:
    """A shell command that installs ``requirements`` for the present Python; a Python made by uv has no pip."""
    from importlib.metadata import distributions

    python = shlex.quote(sys.executable)
    names = " ".join(map(shlex.quote, requirements))
    # not find_spec("pip"): setuptools' import hook takes it for a run of pip and gives this process the standard
    # library's distutils from then on; then torch.utils.cpp_extension, and so torch.compile, cannot be imported
    if not any(distributions(name="pip")):
        return f"uv pip install --python {python} {names}"
    return f"{python} -m pip install {names}"
