"""Files that only their owner may read: reports with stacks, settings and samples of a run. No torch."""

import os
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Write ``text`` with mode 0600, so that a reader sees all of it or nothing.

    Raises:
        OSError: the disk does not take it.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.touch(mode=0o600)
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
