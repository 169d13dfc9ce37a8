"""Event loops that tests of asyncio run in: the standard one, and uvloop where it is installed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import pytest


def _uvloop() -> asyncio.AbstractEventLoop:
    return pytest.importorskip("uvloop").new_event_loop()  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def _uvloop_has_begun() -> None:
    """Its first loop makes a pipe for signals that stays as long as the process."""
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.new_event_loop().close()


@pytest.fixture(params=[asyncio.new_event_loop, _uvloop], ids=["asyncio", "uvloop"])
def loop(
    request: pytest.FixtureRequest, _uvloop_has_begun: None
) -> Iterator[asyncio.AbstractEventLoop]:
    """A new loop that does not run; closed at the end, unless the test did."""
    make: Callable[[], asyncio.AbstractEventLoop] = request.param
    made = make()
    yield made
    if not made.is_closed():
        made.run_until_complete(made.shutdown_asyncgens())
        made.run_until_complete(made.shutdown_default_executor())
        made.close()
