"""What tests have found and want told, passed or failed: printed at the end of the run, whichever
worker they ran in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

FIGURES = "figures"  # a user property of a test: a text


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Have a text of figures printed at the end, under the test's name."""

    def say(text: str) -> None:
        request.node.user_properties.append((FIGURES, text))

    return say


def told(reporter: pytest.TerminalReporter, name: str) -> Iterator[tuple[str, Any]]:
    """(test, value) of each user property of that name, of all tests that have run."""
    for reports in reporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "teardown":
                yield from (
                    (report.nodeid, value) for key, value in report.user_properties if key == name
                )


def print_figures(reporter: pytest.TerminalReporter) -> None:
    """All that tell() was given."""
    texts = list(told(reporter, FIGURES))
    if texts:
        reporter.section(FIGURES)
        for test, text in texts:
            reporter.write_line(f"{test}\n  {text}")
