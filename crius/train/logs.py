"""Log lines: rank 0 speaks on the console and in its file, other ranks only in theirs."""

import logging
import socket
import sys
from pathlib import Path

from crius.redact import printable, redact


class _ConsoleHandler(logging.Handler):
    """Prints to whatever ``sys.stdout`` is now, so that a progress bar can redirect it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        sys.stdout.write(self.format(record) + "\n")
        sys.stdout.flush()


class _Formatter(logging.Formatter):
    """Takes secrets and control characters out of lines, and out of the tracebacks that belong to them."""

    def format(self, record: logging.LogRecord) -> str:
        """The line that is printed."""
        return printable(redact(super().format(record)))


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
        folder = run_dir / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(folder / f"rank-{rank}.log", encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(_Formatter(prefix.replace("%", "%%") + "%(message)s"))
        logger.addHandler(handler)
