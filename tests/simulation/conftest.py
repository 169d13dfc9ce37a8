"""The options by which a seed is replayed, and by which transitions of the state tables are
reported; and the core on which a simulation runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.figures import told
from tests.simulation.transitions import PROPERTY, Report, taken


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        default=None,
        help="run scenarios of the simulation with this seed alone",
    )
    parser.addoption(
        "--transitions",
        nargs="?",
        const="",
        default=None,
        metavar="FILE",
        help="report which transitions of the state tables the scenarios have taken, to FILE too",
    )
    parser.addoption(
        "--all-transitions",
        action="store_true",
        help="the same, and fail where one is neither taken nor argued in untaken.py",
    )


def _is_asked(config: pytest.Config) -> bool:
    return config.getoption("--transitions") is not None or config.getoption("--all-transitions")


@pytest.fixture(autouse=True)
def _transitions_are_noted(request: pytest.FixtureRequest) -> Iterator[None]:
    watches_itself = request.module.__name__.endswith("test_transitions")
    if watches_itself or not _is_asked(request.config):
        yield
        return
    with taken() as found:
        yield
    request.node.user_properties.append((PROPERTY, sorted(map(list, found))))


@pytest.fixture(autouse=True)
def _one_core() -> Iterator[None]:
    """Threads that hand a baton to each other do so on one core, a quarter faster than across two;
    and one that is woken does not take the core from who wakes it, which still has the interpreter.
    """
    cores = os.sched_getaffinity(0)
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[number % len(cores)]})
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    yield
    os.sched_setscheduler(0, policy, priority)
    os.sched_setaffinity(0, cores)


def _report(config: pytest.Config) -> Report:
    report = Report()
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        for _, found in told(reporter, PROPERTY):
            report.add(found)
    return report


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _is_asked(terminalreporter.config):
        return
    lines = _report(terminalreporter.config).lines()
    terminalreporter.section("transitions")
    for line in lines:
        terminalreporter.write_line(line)
    file = terminalreporter.config.getoption("--transitions")
    if file:
        Path(file).write_text("\n".join(lines) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A transition that is neither taken nor argued fails the run; in the process that reports."""
    config = session.config
    if not config.getoption("--all-transitions") or hasattr(config, "workerinput"):
        return
    report = _report(config)
    if session.exitstatus == pytest.ExitCode.OK and (report.open() or report.unknown()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
