"""Log lines: rank 0 speaks on the console and in its file, other ranks only in theirs."""

import contextlib
import logging
import socket
import sys
from pathlib import Path

from crius.redact import redact
from crius.run_file import RunFile

log = logging.getLogger("crius.train")


class _ConsoleHandler(logging.Handler):
    """Prints to whatever ``sys.stdout`` is now, so that a progress bar can redirect it.

    A terminal that was closed, or a disk that is full, ends no run: what cannot be printed is lost.
    """

    _has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        try:
            sys.stdout.write(self.format(record) + "\n")
            sys.stdout.flush()
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True  # before the next line, which comes here too
                log.warning("standard output cannot be written (%s): its lines are lost", error.strerror or error)


class _FileHandler(logging.Handler):
    """Adds lines to a log file of the run folder."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = RunFile(path, self._warn, "its lines are lost, and the run goes on")

    def emit(self, record: logging.LogRecord) -> None:
        """Add one line."""
        self._file.append(self.format(record) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def _warn(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"warning: {text}\n")


class _Formatter(logging.Formatter):
    """Takes secrets out of lines, and out of the tracebacks that belong to them."""

    def format(self, record: logging.LogRecord) -> str:
        """The line that is printed."""
        return redact(super().format(record))


def start_logging(rank: int, run_dir: Path, is_own_file: bool) -> None:
    """Route the lines of the ``crius`` loggers.

    Args:
        rank: 0 speaks; others keep to warnings, with their rank and host before them.
        run_dir: run folder; rank 0's lines also go to ``logs/rank-0.log``.
        is_own_file: standard output of this rank is its own log file already.
    """
    logger = logging.getLogger("crius")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = False
    logger.setLevel(logging.INFO if rank == 0 or is_own_file else logging.WARNING)
    prefix = "" if rank == 0 else f"[rank {rank}, host {socket.gethostname()}] "
    handlers: list[logging.Handler] = [_ConsoleHandler()]
    if not is_own_file:
        handlers.append(_FileHandler(run_dir / "logs" / f"rank-{rank}.log"))
    for handler in handlers:
        handler.setFormatter(_Formatter(prefix.replace("%", "%%") + "%(message)s"))
        logger.addHandler(handler)
