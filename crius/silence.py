"""What optional packages print on import whatever the machine, left out at the logger that says it."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

# logger to what it says on every import. The libraries hold CUDA kernels: that they do not load on a machine without
# CUDA is no news, nor that Triton is missing there, elsewhere it is. The other line is about torchao's own code.
_TORCHAO: Mapping[str, re.Pattern[str]] = {
    "torchao": re.compile(r"Failed to load \S*_C\w*\.\S*so: "),
    "torchao.kernel.intmm": re.compile("Warning: Detected no triton"),
    "torch.utils._pytree": re.compile(r"<enum '\w+'> is an Enum subclass and is now natively supported"),
}


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Import torchao inside: without the lines that say nothing about this machine; all others pass."""
    filters = [
        (logging.getLogger(name), _Without(pattern))
        for name, pattern in _TORCHAO.items()
        if not name.startswith("torchao") or not torch.cuda.is_available()
    ]
    for logger, unwanted in filters:
        logger.addFilter(unwanted)
    try:
        yield
    finally:
        for logger, unwanted in filters:
            logger.removeFilter(unwanted)


class _Without(logging.Filter):
    def __init__(self, pattern: re.Pattern[str]) -> None:
        super().__init__()
        self._pattern = pattern

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line stays."""
        return self._pattern.match(record.getMessage()) is None
