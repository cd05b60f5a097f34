"""One thread, no network, a cache of its own: the same for every test, before torch runs anything."""

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"  # results depend on the thread count in the last bits
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

for number in (signal.SIGHUP, signal.SIGINT):  # ignored under nohup, or in the background: Crius would leave them so
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

import pytest
import torch

torch.set_num_threads(1)  # no thread pool in this process: workers are forked from it


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory):
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def user_cache(tmp_path, monkeypatch):
    """An empty folder for what a user's machine knows, such as its calibrated hardware."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def imported_torchao():
    """torchao, imported once: the workers are forked."""
    from crius.quantize.convert import usable_torchao

    with usable_torchao():
        import crius.quantize.backend  # noqa: F401


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a CUDA device")
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
