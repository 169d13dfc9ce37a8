"""A handler of an inline service that keeps its reactor is named in the log; one that is quick is
not.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from prpc_engine import Master, RpcService, bulk
from prpc_engine.errors import ConfigError
from tests.prpc_engine.processes import PATIENCE_S, wait_until


class Blocking:
    def __init__(self) -> None:
        self.release = threading.Event()

    def block(self) -> str:
        self.release.wait(PATIENCE_S)
        return "went on"

    async def block_later(self) -> str:
        return self.block()

    @bulk
    def block_in_bulk(self) -> str:
        return self.block()

    def echo(self, value: Any) -> Any:
        return value


BUDGET_S = 0.5  # far above what keeps a quick handler from its end on a busy machine


@pytest.mark.parametrize(
    ("method", "timing"),
    [
        ("block", False),
        ("block_later", False),
        ("block_in_bulk", False),
        ("block", True),
        ("block_later", True),
    ],
)
def test_the_handler_that_blocks_is_named_and_nothing_else_is(
    method: str, timing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Master(stall_budget_s=math.inf) as master,
        RpcService(master=master.address, stall_budget_s=BUDGET_S, timing=timing) as service,
    ):
        handlers = Blocking()
        service.create_server("test", handlers)
        client = service.create_client("test", timeout_s=PATIENCE_S)
        assert [client.call("echo", number) for number in range(50)] == list(range(50))
        assert "has held the reactor" not in caplog.text
        call = client.submit(method, timeout_s=PATIENCE_S)
        wait_until(lambda: "has held the reactor" in caplog.text, "the report")
        handlers.release.set()
        assert call.result() == "went on"
        wait_until(lambda: "let the reactor go on after" in caplog.text, "the end of the stall")
        assert service.driver.watchdog.stalls == 1
    first = next(line for line in caplog.text.splitlines() if "has held the reactor" in line)
    assert f"Blocking.{method} " in first or f": {method} " in first, (
        "before Python 3.11 without its class"
    )
    assert "test_stalls.py:" in first
    assert "self.release.wait" in caplog.text


def test_the_master_is_watched_too_and_both_can_be_left_alone() -> None:
    with Master() as master, RpcService(master=master.address, stall_budget_s=math.inf):
        assert "prpc-stalls" in {thread.name for thread in threading.enumerate()}
    with (
        Master(stall_budget_s=math.inf) as master,
        RpcService(master=master.address, stall_budget_s=math.inf),
    ):
        assert "prpc-stalls" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("budget_s", [0.0, -1.0, float("nan"), 1e9, True, "1"])
def test_a_budget_that_makes_no_sense_is_refused(budget_s: Any) -> None:
    for make in (
        lambda: RpcService(master="127.0.0.1:1", stall_budget_s=budget_s),
        lambda: Master(stall_budget_s=budget_s),
    ):
        with pytest.raises(
            ConfigError,
            match=r"stall_budget_s=.*: more than 0 and at most 3600 seconds are allowed, "
            r"or math\.inf",
        ):
            make()
