"""One thread, no network, a cache of its own: the same for every test, before torch runs anything."""

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"  # results depend on the thread count in the last bits
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of a thousand programs compiles all of Crius anew
for name in [name for name in os.environ if name.startswith("GIT_")]:  # from a hook of git
    os.environ.pop(name)
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

for number in (signal.SIGHUP, signal.SIGINT):  # ignored under nohup, or in the background: Crius would leave them so
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

import fork_server
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

torch.set_num_threads(1)  # no thread pool in this process: workers are forked from it

pytest_plugins = ["suites", "cpu_time", "capabilities", "workers"]


def suite_folder(tmp_path_factory):
    """A folder that all processes of this test session share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory):
    """One cache for all: a corpus is tokenised once, a graph is compiled once."""
    os.environ["XDG_CACHE_HOME"] = str(suite_folder(tmp_path_factory) / "cache")


@pytest.fixture
def user_cache(tmp_path, monkeypatch):
    """An empty folder for what a user's machine knows, such as its calibrated hardware."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True, scope="session")
def _end_fork_server():
    yield
    fork_server.stop()


@pytest.fixture(scope="session")
def imported_torchao():
    """torchao, imported once: the workers are forked."""
    from crius.quantize.convert import usable_torchao

    with usable_torchao():
        import crius.quantize.backend  # noqa: F401


def pytest_collection_modifyitems(items):
    # the long ones first: no process waits at the end
    items.sort(key=lambda item: item.nodeid.startswith("tests/unit/"))
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip)


class ByFile(LoadScopeScheduling):
    """Several processes (``pytest -n``): the tests of a file are one process's, since they share fixtures and standing
    workers. So are the commands of a page, which build on each other."""

    def __init__(self, config, log):
        super().__init__(config, log)
        config.option.loadscopereorder = False  # by number of tests, as if all took as long

    def _split_scope(self, nodeid):
        if "test_documented_command_runs[" in nodeid:
            return nodeid.split(".md: ")[0]
        return nodeid.split("::")[0]


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)
