"""The process that runs cases on a fake GPU: one for a test session, forked for each case."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_fake.library import NoCompiler, shim_library

TESTS = Path(__file__).parents[1]


class FakeGpu:
    """Asks the server of ``cuda_fake.server`` for steps on fake tensors of device cuda."""

    def __init__(self, library: Path) -> None:
        self._library = library
        self._process: subprocess.Popen | None = None

    def step(
        self, argv: list[str], rank: int = 0, *, compiles: bool = False, dry_run: bool = False, stages: bool = False
    ) -> dict:
        """What the steady step of a run with the flags ``argv`` did on ``rank``: the fields of ``watch.Seen``.

        With ``compiles`` also the ``code`` that Inductor generated, a text for each graph; with ``dry_run`` also
        the ``dry_run_peak`` in bytes; with ``stages`` a checkpoint is copied to the host at its beginning.
        """
        process = self._process = self._process or self._started()
        request = {"flags": argv, "rank": rank, "compiles": compiles, "dry_run": dry_run, "stages": stages}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, f"the process with the fake GPU ended with {process.wait()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer

    def _started(self) -> subprocess.Popen:
        path = os.pathsep.join(map(str, (TESTS.parent, TESTS, os.environ.get("PYTHONPATH", ""))))
        command = [sys.executable, "-m", "cuda_fake.server", str(self._library)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **pipes)

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(timeout=60)


@pytest.fixture(scope="session")
def shim():
    """The shim's library."""
    try:
        return shim_library()
    except NoCompiler as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def fake_gpu(shim):
    server = FakeGpu(shim)
    yield server
    server.stop()
