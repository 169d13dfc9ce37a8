"""How long handlers take: counted by method where a service was told to, and nothing wrapped where
it was not.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from prpc_engine import Deferred, Master, RpcService, idempotent
from prpc_engine.errors import BadArguments, ConfigError, RemoteError
from prpc_engine.rpc.method import bulk
from prpc_engine.rpc.server import ServedObject
from prpc_engine.rpc.timing import TELL_NS, MethodTimer, MethodTiming, Timing
from prpc_engine.support import ThreadGroup
from tests.prpc_engine.inside import nap, node_of
from tests.prpc_engine.processes import PATIENCE_S, wait_until

NAP_S = 0.02


class Handlers:
    def __init__(self, service: RpcService) -> None:
        self._service = service

    @idempotent
    def echo(self, value: Any) -> Any:
        """Back again."""
        return value

    async def nap(self, seconds: float) -> str:
        await nap(self._service, seconds)
        return "rested"

    @bulk
    def slowly(self, value: Any) -> Any:
        return value

    def later(self) -> Deferred:
        answer = Deferred()
        reactor = node_of(self._service).reactor
        reactor.timers.call_at(reactor.clock() + NAP_S, lambda: answer.reply("there"))
        return answer

    def count(self, most: int) -> Iterator[int]:
        yield from range(most)

    def boom(self) -> None:
        raise KeyError("boom")


@pytest.fixture
def service() -> Iterator[RpcService]:
    with Master() as master, RpcService(master=master.address, slow_call_s=NAP_S) as one:
        one.create_server("test", Handlers(one))
        yield one


def timings(service: RpcService) -> dict[str, MethodTiming]:
    return dict(service.statistics().servers["test/0"].timings)


def test_every_kind_of_handler_is_counted_but_streams(service: RpcService) -> None:
    client = service.create_client("test")
    for number in range(7):
        assert client.call("echo", number) == number
    client.notify("echo", 0)
    assert client.call("nap", NAP_S) == "rested"
    assert client.call("slowly", 1) == 1
    assert client.call("later") == "there"
    with client.stream("count", 3) as stream:
        assert list(stream) == [0, 1, 2]
    with pytest.raises(RemoteError):
        client.call("boom")
    wait_until(lambda: timings(service)["echo"].calls == 8)
    found = timings(service)
    assert "count" not in found
    assert {
        name: found[name].calls for name in ("nap", "slowly", "later", "boom")
    } == dict.fromkeys(("nap", "slowly", "later", "boom"), 1)
    assert NAP_S <= found["nap"].total_s < PATIENCE_S
    assert sum(found["nap"].buckets[int(NAP_S * 1e9).bit_length() :]) == 1


def test_a_timed_method_is_described_and_refused_like_any_other(service: RpcService) -> None:
    client = service.create_client("test")
    described = client.call("prpc.describe")
    assert described["echo"] == {
        "signature": "(value: 'Any') -> 'Any'",
        "kind": "plain",
        "idempotent": True,
        "once": False,
        "text": "Back again.",
    }
    assert {name: described[name]["kind"] for name in ("nap", "slowly", "count")} == {
        "nap": "task",
        "slowly": "task",
        "count": "stream",
    }
    for method in ("echo", "nap", "slowly"):
        with pytest.raises(BadArguments, match=method):
            client.call(method)


def test_slow_calls_are_named_in_the_log(
    service: RpcService, caplog: pytest.LogCaptureFixture
) -> None:
    client = service.create_client("test")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            client.call("nap", NAP_S)
    assert timings(service)["nap"].slow == 3
    told = [record.getMessage() for record in caplog.records if "slow call" in record.getMessage()]
    assert "'nap' of server 0 of 'test' took " in told[0]
    assert "slow_call_s=0.02" in told[0]


def test_a_line_that_was_left_out_is_counted_in_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = iter([0, 10, 20, 30, 40, 50, 60, 70, TELL_NS + 80, TELL_NS + 90])
    timer = MethodTimer("'f' of server 0 of 'test'", Timing(slow_call_s=1e-9), lambda: next(times))
    function = timer.wrap(lambda: None)
    for _ in range(4):
        function()
    assert len(caplog.records) == 1
    function()
    assert timer.statistics().slow == 5
    assert caplog.records[1].getMessage().endswith("; 3 more since the last such line")


def test_what_is_quicker_than_slow_call_s_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    timer = MethodTimer("'f' of server 0 of 'test'", Timing(slow_call_s=3600))
    timer.wrap(lambda: None)()
    assert (timer.statistics().calls, timer.statistics().slow) == (1, 0)
    assert not caplog.records


def test_a_stall_is_blamed_on_the_handler_and_not_on_its_timer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()

    def dawdle() -> bool:
        return gate.wait(PATIENCE_S)

    with (
        Master() as master,
        RpcService(master=master.address, timing=True, stall_budget_s=NAP_S) as service,
        ThreadGroup(1) as group,
    ):
        service.create_server("test", {"dawdle": dawdle})
        answer = group.async_exec(service.create_client("test").call, "dawdle")
        wait_until(
            lambda: re.search(
                r"dawdle \(\S+test_timing\.py:\d+\) has held the reactor", caplog.text
            )
        )
        gate.set()
        assert answer.result(PATIENCE_S) is True


def test_without_timing_nothing_is_wrapped() -> None:
    handlers = {"echo": lambda value: value}
    plain = ServedObject("test", 0, 1, handlers)
    assert handlers["echo"] in plain._plain.values()
    assert not plain.statistics().timings
    timed = ServedObject("test", 0, 1, handlers, timing=Timing())
    assert handlers["echo"] not in timed._plain.values()


@pytest.mark.parametrize("slow_call_s", [0, -1, float("nan"), float("inf")])
def test_a_time_that_is_never_slow_or_always_is_refused(slow_call_s: float) -> None:
    with pytest.raises(ConfigError, match="slow_call_s"):
        RpcService(master="127.0.0.1:1", slow_call_s=slow_call_s)
