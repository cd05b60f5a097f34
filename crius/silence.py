"""Lines that optional packages print on import on every machine, dropped at the logger that prints them."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

# logger to its line on every import. The libraries contain CUDA kernels: on a machine without CUDA it is normal that
# they do not load and that Triton is missing; elsewhere it is not. The other line is about torchao's own code.
_TORCHAO: Mapping[str, re.Pattern[str]] = {
    "torchao": re.compile(r"Failed to load \S*_C\w*\.\S*so: "),
    "torchao.kernel.intmm": re.compile("Warning: Detected no triton"),
    "torch.utils._pytree": re.compile(r"<enum '\w+'> is an Enum subclass and is now natively supported"),
}


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Import torchao in this context: lines that mean nothing on this machine are dropped, all others pass."""
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
