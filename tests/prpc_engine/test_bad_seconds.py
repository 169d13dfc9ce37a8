"""A number of seconds that is none, or none that is possible: refused by name, with what is
allowed, wherever it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from prpc_engine import Master, MasterClient, RetryPolicy, RpcClient, RpcService, errors
from prpc_engine.rpc.backoff import Backoff
from shard import Future
from tests.prpc_engine.handlers import Plain
from tests.prpc_engine.processes import PATIENCE_S

NO_SECONDS: list[Any] = ["5", True, float("nan"), -1, [1.0]]
NO_CALL_TIMEOUTS: list[Any] = [*NO_SECONDS, float("inf"), 1e12]


class World(NamedTuple):
    """Two services, of which one serves, and a client."""

    master: Master
    served: RpcService
    caller: RpcService
    client: RpcClient


@pytest.fixture
def world(master: Master) -> Iterator[World]:
    with (
        RpcService(master.address) as served,
        RpcService(master.address, transports=["tcp"]) as caller,
    ):
        served.create_server("test", Plain())
        yield World(master, served, caller, caller.create_client("test", timeout_s=PATIENCE_S))


@pytest.mark.parametrize("timeout_s", NO_CALL_TIMEOUTS, ids=repr)
def test_the_timeout_of_a_call_is_refused_before_it_leaves(world: World, timeout_s: Any) -> None:
    client = world.client
    verbs: list[Callable[[], object]] = [
        lambda: client.call("echo", 1, timeout_s=timeout_s),
        lambda: client.submit("echo", 1, timeout_s=timeout_s),
        lambda: client.stream("echo", 1, timeout_s=timeout_s),
        lambda: client.broadcast("echo", 1, timeout_s=timeout_s),
        lambda: client.call_to(0, "echo", 1, timeout_s=timeout_s),
        lambda: client.submit_to(0, "echo", 1, timeout_s=timeout_s),
        lambda: client.stream_to(0, "echo", 1, timeout_s=timeout_s),
        lambda: client.call_by("key", "echo", 1, timeout_s=timeout_s),
        lambda: client.submit_by("key", "echo", 1, timeout_s=timeout_s),
        lambda: client.health(timeout_s=timeout_s),
        lambda: client.describe(timeout_s=timeout_s),
    ]
    for _ in ("not connected yet", "connected"):
        for verb in verbs:
            with pytest.raises(errors.BadArguments) as caught:
                verb()
            assert (
                str(caught.value)
                == f"timeout_s={timeout_s!r}: 0 to 4000000 seconds are allowed, or None"
            )
        assert client.call("echo", 1, timeout_s=PATIENCE_S) == 1


@pytest.mark.parametrize("timeout_s", NO_CALL_TIMEOUTS, ids=repr)
def test_a_handler_which_inherits_a_deadline_is_told_of_its_own_bad_one(
    world: World, timeout_s: Any
) -> None:
    world.served.create_server(
        "asking", {"ask": lambda: world.client.submit("echo", 1, timeout_s=timeout_s) and None}
    )
    client = world.caller.create_client("asking", timeout_s=PATIENCE_S)
    if timeout_s in (float("inf"), 1e12):
        client.call("ask", timeout_s=PATIENCE_S)  # it is bounded by its caller's
    else:
        with pytest.raises(
            errors.RemoteError, match=r"raised prpc_engine\.errors\.BadArguments: timeout_s="
        ):
            client.call("ask", timeout_s=PATIENCE_S)


@pytest.mark.parametrize("seconds", NO_SECONDS, ids=repr)
def test_wherever_seconds_are_asked_for_what_is_none_is_a_named_error(
    world: World, seconds: Any
) -> None:
    address = world.master.address
    server = world.served.create_server("brief", Plain())
    asked: list[tuple[str, Callable[[], object]]] = [
        ("timeout_s", lambda: RpcService(address, timeout_s=seconds)),
        ("lease_s", lambda: RpcService(address, lease_s=seconds)),
        ("stall_budget_s", lambda: RpcService(address, stall_budget_s=seconds)),
        ("slow_call_s", lambda: RpcService(address, slow_call_s=seconds)),
        ("timeout_s", lambda: world.caller.create_client("test", timeout_s=seconds)),
        ("timeout_s", lambda: world.caller.serve_forever(seconds)),
        ("timeout_s", lambda: world.caller.figures_of_shards(seconds)),
        ("timeout_s", lambda: world.master.serve_forever(seconds)),
        ("timeout_s", lambda: MasterClient(address, timeout_s=seconds)),
        ("lease_s", lambda: MasterClient(address, lease_s=seconds)),
        ("heartbeat_s", lambda: MasterClient(address, heartbeat_s=seconds)),
        ("timeout_s", lambda: world.caller.master_client.generate_id("key", timeout_s=seconds)),
        ("drain_s", lambda: server.close(seconds)),
        ("attempt_s", lambda: RetryPolicy(attempt_s=seconds)),
        ("first_s", lambda: Backoff(first_s=seconds, max_s=1.0)),
    ]
    if seconds is not True:
        asked.append(("attempts_max", lambda: RetryPolicy(attempts_max=seconds)))
    for name, ask in asked:
        with pytest.raises(errors.ConfigError, match="allowed") as caught:
            ask()
        assert f"{name}={seconds!r}" in str(caught.value)
    server.close(0)


@pytest.mark.parametrize("seconds", NO_SECONDS, ids=repr)
def test_a_future_is_waited_for_as_long_as_a_number_says(seconds: Any) -> None:
    pending = Future()
    for wait in (pending.result, pending.error):
        with pytest.raises(ValueError, match="seconds from 0 on are allowed, or None"):
            wait(seconds)
