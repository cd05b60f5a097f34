"""The line that installs a package into this Python: an environment made by uv has no pip of its own."""

import importlib.metadata
import shlex
import sys

# optional package to what to install; pyproject.toml's extras say the same
REQUIREMENTS = {
    "datasets": "datasets>=3.1",
    "tokenizers": "tokenizers>=0.20",
    "tensorboard": "tensorboard>=2.15",
    "torchao": "torchao>=0.18",
    "matplotlib": "matplotlib>=3.8",
}


def install_line(*requirements: str) -> str:
    """A shell command that installs ``requirements`` for the Python that runs this."""
    python = shlex.quote(sys.executable)
    names = " ".join(map(shlex.quote, requirements))
    # not find_spec("pip"): setuptools' import hook takes that for a run of pip and hands this process the standard
    # library's distutils from then on, after which torch.utils.cpp_extension, and so torch.compile, cannot be imported
    if not any(importlib.metadata.distributions(name="pip")):
        return f"uv pip install --python {python} {names}"
    return f"{python} -m pip install {names}"
