"""A run in a process that does other things too, such as a notebook."""

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator

import numpy as np
import torch

from crius.errors import EnvironmentError
from crius.kernels import choice
from crius.launch.status import status
from crius.signals import STOP_SIGNALS

_TRAINS = threading.Lock()  # a process has one process group, one status and one set of kernels


@contextlib.contextmanager
def only_run() -> Iterator[None]:
    """While this is open, this process trains nothing else.

    Raises:
        EnvironmentError: it trains already, or has a process group.
    """
    if not _TRAINS.acquire(blocking=False):
        fix = "train one run after the other, or crius train in a process of its own"
        raise EnvironmentError("this process already trains a run.", where="crius.run", fix=fix)
    try:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            fix = "torch.distributed.destroy_process_group(), or crius train in a process of its own"
            raise EnvironmentError("this process has a process group already.", where="crius.run", fix=fix)
        yield
    finally:
        _TRAINS.release()


@contextlib.contextmanager
def _plain_torch() -> Iterator[None]:
    """While this is open, torch computes as in a new process: with gradients, on the CPU where no device is named, in
    the dtype of the tensors, and with whole products in float32."""
    precision = "highest"
    with contextlib.suppress(RuntimeError):  # it was set by torch.backends, which has no one value for all devices
        precision = torch.get_float32_matmul_precision()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device() != torch.device("cpu"):
            stack.enter_context(torch.device("cpu"))
        if precision != "highest":
            torch.set_float32_matmul_precision("highest")
            stack.callback(torch.set_float32_matmul_precision, precision)
        yield


@contextlib.contextmanager
def process_as_before() -> Iterator[None]:
    """Train in a state of its own, and restore what a run changes in its process: signals, log lines, environment
    variables, random numbers, threads, determinism, kernels, the collector."""
    threads = torch.get_num_threads()
    is_exact = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    finds_anomalies = torch.is_anomaly_enabled()
    collects = gc.isenabled()
    dtype = torch.get_default_dtype()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    environ = dict(os.environ)
    hook = sys.excepthook
    drawn = random.getstate(), np.random.get_state(), torch.get_rng_state()
    logger = logging.getLogger("crius")
    logs = list(logger.handlers), logger.propagate, logger.level
    status.step = None
    status.limit_seconds = 0.0
    logger.handlers = []
    torch.set_default_dtype(torch.float32)
    try:
        with choice.applied(choice.current()), _plain_torch():
            yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)
        for one in logger.handlers:
            one.close()
        logger.handlers, logger.propagate = logs[:2]
        logger.setLevel(logs[2])
        if collects:
            gc.enable()
        sys.excepthook = hook
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        torch.set_rng_state(drawn[2])
        torch.set_default_dtype(dtype)
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)
        torch.use_deterministic_algorithms(is_exact, warn_only=only_warns)
        torch.autograd.set_detect_anomaly(finds_anomalies)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
