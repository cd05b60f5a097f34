"""A pytest plugin: the CPU seconds of each test and its children, held against ``budget.toml``.

CPU seconds, because wall time depends on what else the machine does. A session fails when an unmarked test takes more
than its share, or when a folder takes more than its budget. ``--cpu-times FILE`` joins several sessions to one suite.
"""

import collections
import contextlib
import json
import os
import resource
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

BUDGET = Path(__file__).parent / "budget.toml"
OUTSIDE = ("slow", "real")
PROPERTY = "cpu seconds"
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


def over_budget(times: dict[str, float], budget: dict) -> list[str]:
    """What exceeds its budget, a line each, heaviest first.

    Args:
        times: CPU seconds by the id of each test that counts.
        budget: what ``budget.toml`` says.
    """
    most, folders = budget["most_of_a_test"], collections.Counter(totals(times, budget))
    lines = [
        f"{name}: {seconds:.1f} CPU seconds, a test that is not marked slow has {most}"
        for name, seconds in sorted(times.items(), key=lambda item: -item[1])
        if seconds > most
    ]
    for name, seconds in folders.most_common():
        allowed = budget["folders"].get(name)
        if allowed is None:
            lines.append(f"tests/{name} has no budget in tests/budget.toml")
        elif seconds > allowed:
            lines.append(f"tests/{name}: {seconds:.0f} CPU seconds, its budget is {allowed}")
    return lines


def totals(times: dict[str, float], budget: dict) -> dict[str, float]:
    """CPU seconds by the name that a folder is counted under."""
    folders: dict[str, float] = collections.defaultdict(float)
    for test, seconds in times.items():
        folder = test.removeprefix("tests/").split("/")[0]
        folders[budget["counted_as"].get(folder, folder)] += seconds
    return folders


class CpuTimes:
    """Measures in the process that runs a test, and judges in the one that reports."""

    def __init__(self, file: str | None, *, reports: bool) -> None:
        self.file = Path(file) if file else None
        self.reports = reports
        self.times: dict[str, float] = {}
        if self.file and self.file.exists() and reports:
            self.times = json.loads(self.file.read_text())
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
        if seconds is not None and not any(mark in report.keywords for mark in OUTSIDE):
            self.times[report.nodeid] = seconds

    def pytest_sessionfinish(self, session):
        if not self.reports:
            return
        if self.file:
            self.file.write_text(json.dumps(self.times))
        self.over = over_budget(self.times, tomllib.loads(BUDGET.read_text()))
        if self.over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        budget = tomllib.loads(BUDGET.read_text())
        for name, seconds in sorted(totals(self.times, budget).items()):
            terminalreporter.write_line(f"cpu: {name} {seconds:.0f} of {budget['folders'].get(name, 0)} s")
        for line in self.over:
            terminalreporter.write_line(f"over budget: {line}", red=True)


def pytest_addoption(parser):
    parser.addoption("--cpu-times", metavar="FILE", help="add CPU seconds to those of earlier sessions in FILE")


def pytest_configure(config):
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(CpuTimes(config.getoption("--cpu-times"), reports=not is_worker), "cpu times")
