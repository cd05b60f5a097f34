"""Which operating system Crius is tested on, said once where it is another one."""

import functools
import sys

TESTED = "linux"
_NAMES = {"darwin": "macOS", "win32": "Windows"}


def untested(platform: str) -> str:
    """The warning for ``platform``, a value of ``sys.platform``; empty where Crius is tested."""
    if platform == TESTED:
        return ""
    return f"warning: Crius is tested on Linux; on {_NAMES.get(platform, platform)} it is not"


@functools.cache
def warn_where_untested() -> None:
    """Print the warning for this machine to stderr, once per process."""
    if warning := untested(sys.platform):
        sys.stderr.write(f"{warning}\n")
