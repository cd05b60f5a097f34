"""What happens to garbage and to a CPU's freed memory between the steps of a run."""

import ctypes
import gc
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from crius.kernels.cpu import heap
from crius.metrics.ledger import TimeLedger
from crius.train.loop import _tidied

CPU = torch.device("cpu")


class MallocInfo(ctypes.Structure):
    """glibc's ``mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def bytes_apart():
    """Bytes that came from the system block by block, not from the heap."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = MallocInfo
    return ask().hblkhd


def apart_for_a_tensor():
    before = bytes_apart()
    tensor = torch.empty(1 << 20)
    return bytes_apart() - before >= tensor.nbytes


def print_memory():
    with _tidied(50, CPU, TimeLedger(time.monotonic())) as tidy:
        during = apart_for_a_tensor()
        tidy(1)
        print(during, apart_for_a_tensor())


@pytest.mark.parametrize("by_user", [None, *heap._SET_BY_USER])
def test_malloc_is_told_unless_the_user_told_it(by_user, monkeypatch):
    told = {}
    library = SimpleNamespace(mallopt=lambda parameter, value: told.update({parameter: value}) or value < 1 << 30)
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: library)
    for name in heap._SET_BY_USER:
        monkeypatch.delenv(name, raising=False)
    if by_user:
        monkeypatch.setenv(by_user, "1")
    assert heap.keep_tensors_apart() == (not by_user)
    assert not heap.keep_freed_memory()
    assert sorted(told) == ([] if by_user else [-3, -1])  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, "True False"), pytest.param({"MALLOC_MMAP_THRESHOLD_": "65536"}, "True True", marks=pytest.mark.slow)],
)
def test_tensors_are_apart_in_the_first_step_only_and_as_the_user_set_it(settings, expected):
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == expected


def test_garbage_is_collected_as_python_likes_in_the_first_step_and_every_interval_after_it(monkeypatch):
    generations = []
    monkeypatch.setattr(gc, "collect", generations.append)
    with _tidied(3, CPU, TimeLedger(time.monotonic())) as tidy:
        assert gc.isenabled()
        for step in range(4, 11):  # a run that goes on from step 3
            tidy(step)
            assert not gc.isenabled()
    assert generations == [2, 1, 1]
    assert gc.isenabled()


def test_without_an_interval_garbage_is_left_to_python(monkeypatch):
    monkeypatch.setattr(gc, "collect", pytest.fail)
    with _tidied(0, CPU, TimeLedger(time.monotonic())) as tidy:
        for step in (1, 2):
            tidy(step)
            assert gc.isenabled()


if __name__ == "__main__":
    print_memory()
