"""A pytest plugin: the CPU seconds of each test and its children, held against ``budget.toml``.

CPU seconds, because wall time depends on what else the machine does. A session of a suite fails when one of its tests
takes more than its share, or when the suite takes more than its budget, each times ``noise``. ``--cpu-times`` joins
several sessions.
``python tests/cpu_time.py FILE SUITE NAME COMMAND ...`` adds a command that is no test.
"""

import collections
import contextlib
import json
import os
import resource
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import suites

BUDGET = Path(__file__).parent / "budget.toml"
PROPERTY = "cpu seconds"
PAGES = "pages"
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """User and system time of this process, of the children it waited for, and of those that still run."""
    waited = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in waited) + sum(map(_of_process, children(os.getpid())))


def children(pid: int) -> Iterator[int]:
    """Process ids of all that descend from ``pid`` and are alive."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield int(child)
                yield from children(int(child))


def _of_process(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS  # utime, stime, and those of children that it waited for
    return 0.0


def limits(budget: dict) -> dict[str, float]:
    """CPU seconds of a suite, with what issues stated."""
    found = collections.Counter(budget["suites"])
    for stated in budget.get("stated", {}).values():
        found.update(stated)
    return found


def over_budget(times: dict[str, dict[str, float]], budget: dict) -> list[str]:
    """What exceeds its budget, a line each, heaviest first.

    Args:
        times: CPU seconds by suite, and by the id of each test.
        budget: what ``budget.toml`` says.
    """
    noise = budget["noise"]
    most = budget["most_of_a_test"]
    tests = {name: seconds for suite in ("test", PAGES, "full") for name, seconds in times.get(suite, {}).items()}
    lines = [
        f"{name}: {tests[name]:.1f} CPU seconds, a test that is not slow has {most}"
        for name in sorted(tests, key=tests.__getitem__, reverse=True)
        if tests[name] > most * noise and "::" in name
    ]
    allowed = limits(budget)
    for name, seconds in totals(times).items():
        if seconds > allowed[name] * noise:
            lines.append(f"suite {name}: {seconds:.0f} CPU seconds, its budget is {allowed[name]}")
    return lines


def totals(times: dict[str, dict[str, float]]) -> dict[str, float]:
    """CPU seconds of ``make test`` without the pages that a change brought into it, and of both suites."""
    test = sum(times.get("test", {}).values())
    others = sum(sum(times.get(suite, {}).values()) for suite in (PAGES, "full"))
    return {"test": test, "both": test + others}


def by_folder(tests: dict[str, float]) -> dict[str, float]:
    """CPU seconds by folder of ``tests``; what is no test has its own name."""
    folders: dict[str, float] = collections.defaultdict(float)
    for test, seconds in tests.items():
        folders[test.removeprefix("tests/").split("/")[0]] += seconds
    return dict(sorted(folders.items()))


def read_times(file: Path) -> dict[str, dict[str, float]]:
    """Times of earlier sessions at this commit; another commit draws other rows."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found["times"] if found["commit"] == suites.commit() else {}


def write_times(file: Path, times: dict[str, dict[str, float]]) -> None:
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"commit": suites.commit(), "times": times}))
    part.replace(file)


class CpuTimes:
    """Measures in the process that runs a test, and judges in the one that reports."""

    def __init__(self, file: str | None, suite: str | None, *, reports: bool) -> None:
        self.file = Path(file) if file else None
        self.suite = suite
        self.reports = reports
        self.times: dict[str, dict[str, float]] = read_times(self.file) if self.file and reports else {}
        self.over: list[str] = []
        self.before = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        self.before = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call):
        report = yield
        if call.when == "teardown":
            report.user_properties.append((PROPERTY, cpu_seconds() - self.before))
        return report

    def pytest_runtest_logreport(self, report):
        seconds = dict(report.user_properties).get(PROPERTY)
        if seconds is not None:
            suite = PAGES if self.suite == "test" and "page" in report.keywords else self.suite or "none"
            self.times.setdefault(suite, {})[report.nodeid] = seconds

    def pytest_sessionfinish(self, session):
        if not self.reports:
            return
        if self.file:
            write_times(self.file, self.times)
        self.over = over_budget(self.times, tomllib.loads(BUDGET.read_text()))
        if self.over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        pages = self.times.get(PAGES, {}) if self.suite == "test" else {}
        folders = by_folder(self.times.get(self.suite or "none", {}) | pages)
        if folders:
            parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in folders.items())
            terminalreporter.write_line(f"cpu seconds: {parts}")
        allowed = limits(tomllib.loads(BUDGET.read_text()))
        for name, seconds in totals(self.times).items():
            if seconds:
                terminalreporter.write_line(f"cpu seconds: suite {name} {seconds:.0f} of {allowed[name]}")
        for line in self.over:
            terminalreporter.write_line(f"over budget: {line}", red=True)


def pytest_addoption(parser):
    parser.addoption("--cpu-times", metavar="FILE", help="add CPU seconds to those of earlier sessions in FILE")


def pytest_configure(config):
    is_worker = hasattr(config, "workerinput")
    plugin = CpuTimes(config.getoption("--cpu-times"), config.getoption("--suite", None), reports=not is_worker)
    config.pluginmanager.register(plugin, "cpu times")


def main(file: str, suite: str, name: str, *command: str) -> int:
    """Run ``command``, and add its CPU seconds to the times in ``file``."""
    before = cpu_seconds()
    code = subprocess.run(command, check=False).returncode
    times = read_times(Path(file))
    times.setdefault(suite, {})[name] = cpu_seconds() - before
    write_times(Path(file), times)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
