"""The last line of a terminal names what takes long, and counts its seconds. No torch."""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator

_SECONDS = 0.8
"""What is shorter is not named."""


class _Line:
    """A line on standard output that a thread rewrites while something takes long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._doing: list[tuple[str, float]] = []  # what, and when it began; the last one is named
        self._is_shown = False

    @contextlib.contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """See ``waiting``."""
        ended = threading.Event()
        thread = None if self._doing else threading.Thread(target=self._run, args=[ended], daemon=True)
        self._doing.append((what, time.monotonic()))
        if thread:
            thread.start()
        try:
            yield
        finally:
            self._doing.pop()
            if thread:
                ended.set()
                thread.join()
            self.erase()

    def erase(self) -> None:
        """Remove the line, so that another one can be printed; it comes back."""
        with self._lock, contextlib.suppress(OSError):  # the terminal may be gone
            if self._is_shown:
                sys.stdout.write("\r\x1b[K")
                sys.stdout.flush()
            self._is_shown = False

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(0.5):
            what, began = self._doing[-1]
            seconds = time.monotonic() - began
            if seconds < _SECONDS:
                continue
            text = f"{what}, {seconds:.0f} s"[: shutil.get_terminal_size().columns - 1]
            with self._lock, contextlib.suppress(OSError):
                sys.stdout.write(f"\r{text}\x1b[K")
                sys.stdout.flush()
                self._is_shown = True


LINE = _Line()


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Name ``what`` on a terminal while the context takes long. Elsewhere nothing is printed.

    No process may be forked in the context.
    """
    if not sys.stdout.isatty():
        yield
        return
    with LINE.naming(what):
        yield
