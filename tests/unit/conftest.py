"""What the tests of several verbs share."""

import json
import logging
import sys

import pytest
from harness import ROOT

from crius import cli
from crius.interop.safetensors_file import said

sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.fixture
def plan(capsys):
    """Run ``crius plan`` in this process; gives exit code, stdout and stderr."""

    def run(*argv):
        code = cli.main(["plan", *map(str, argv)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def planned(plan):
    """The JSON of a plan."""

    def run(*argv):
        code, out, err = plan(*argv, "--json")
        assert err == ""
        return code, json.loads(out)

    return run


@pytest.fixture(autouse=True)
def _log_as_before():
    """A run in this process gives the log handlers, a level and no parent."""
    logger = logging.getLogger("crius")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate, logger.level = before


@pytest.fixture
def lines(caplog, monkeypatch):
    """What is logged; a line that another test has caused is logged again."""
    said.cache_clear()
    caplog.set_level(logging.INFO, "crius.interop")
    return lambda: [record.getMessage() for record in caplog.records]
