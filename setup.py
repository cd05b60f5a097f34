"""What pyproject.toml cannot say: the links of README.md, made absolute for the page of the package on an index."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
SOURCE = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["urls"]["Source"]
LINK = re.compile(r"(?P<image>!?)(?P<text>\[[^]]*\]\()(?![a-z]+:|#)(?P<path>[^)\s]+)")


def absolute(link: re.Match[str]) -> str:
    """A link or an image at the repository's host."""
    return f"{link['image']}{link['text']}{SOURCE}/{'raw' if link['image'] else 'blob'}/main/{link['path']}"


setup(
    long_description=LINK.sub(absolute, (HERE / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
