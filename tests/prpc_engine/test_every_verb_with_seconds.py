"""Every public verb that takes seconds refuses by name what is none. Verbs are found by inspection,
so that none is left out.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import prpc_engine
from prpc_engine import (
    CommInfo,
    Master,
    MasterClient,
    RpcRequest,
    RpcService,
    Server,
    ServerConfig,
    accumulator,
    cluster,
    errors,
    support,
)
from prpc_engine.accumulator import (
    Accumulator,
    AccumulatorClient,
    AccumulatorServer,
    CounterSet,
    Sum,
)
from prpc_engine.settings.sections import NodeArguments
from prpc_engine.support import Channel, ChannelReplicator, Monitor, ThreadGroup
from tests.prpc_engine.cluster.tasks import cluster_at, fresh_host
from tests.prpc_engine.handlers import Plain
from tests.prpc_engine.processes import PATIENCE_S

MODULES: tuple[ModuleType, ...] = (prpc_engine, support, cluster, accumulator)
NO_SECONDS: list[Any] = ["5", True, math.nan, -1, 10**400, [1.0], 1j]
NAMED = (errors.ConfigError, errors.BadArguments, ValueError)
# Settings that have tests of their own: test_settings_are_numbers.py, endpoint_map/test_network.py
# (of variables).
SETTINGS = {"RetryPolicy", "HedgePolicy", "Bounds", "NetworkSettings"}
# What verbs are given beside the seconds, by the names of their parameters.
ARGUMENTS: dict[str, Any] = {
    "aggregator": Sum,
    "api": "RpcService",
    "arguments": lambda incarnation: (),
    "callback": print,
    "context": "",
    "count": 1,
    "error": "over",
    "flush_count": 1,
    "function": print,
    "info": CommInfo(0, ("127.0.0.1:1",)),
    "item": 1,
    "items": [1],
    "items_max": 1,
    "key": "key",
    "keys": ["key"],
    "member": "",
    "message": "",
    "method": "echo",
    "model": "",
    "name": "name",
    "path": "/path",
    "protocol": Plain,
    "rank": 0,
    "request": RpcRequest(1),
    "role": "role",
    "server_id": 0,
    "source": "/job:ps/task:0",
    "step": 0,
    "storage_id": 0,
    "task": "/job:worker/task:0",
    "value": "",
    "what": "it",
    "verb": "services",
}


class Verb(NamedTuple):
    """One parameter of one verb that is in seconds; `name` "" is the class itself."""

    of: str
    name: str
    seconds: str
    takes_none: bool

    def __str__(self) -> str:
        return f"{self.of}.{self.name or '__init__'}.{self.seconds}"


def verbs_of(module: ModuleType) -> Iterator[Verb]:
    for exported in module.__all__:
        kind = getattr(module, exported)
        if not inspect.isclass(kind) or exported in SETTINGS or exported.endswith("Statistics"):
            continue
        functions = {
            name: one
            for name, one in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }
        if not issubclass(kind, BaseException):
            functions[""] = kind.__init__
        for name, function in functions.items():
            parameters = dict(inspect.signature(function).parameters)
            if (
                parameters.pop("arguments", None) is not None and kind is RpcService
            ):  # by name, of these
                parameters |= {
                    setting: inspect.Parameter(
                        setting, inspect.Parameter.KEYWORD_ONLY, annotation=of
                    )
                    for setting, of in NodeArguments.__annotations__.items()
                }
            for parameter in parameters.values():
                # which is a time, and no user's
                if parameter.name.endswith("_s") and parameter.name != "now_s":
                    yield Verb(exported, name, parameter.name, "None" in str(parameter.annotation))


VERBS = sorted({verb for module in MODULES for verb in verbs_of(module)})


MAKERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "Accumulator": lambda world, seconds: Accumulator(
        "another", Sum, counters=CounterSet(), **seconds
    ),
    "AccumulatorClient": lambda world, seconds: AccumulatorClient(
        world["RpcService"], counters=CounterSet(), **seconds
    ),
    "AccumulatorServer": lambda world, seconds: AccumulatorServer(world["RpcService"], **seconds),
    "Master": lambda world, seconds: Master(**seconds),
    "MasterClient": lambda world, seconds: MasterClient(world["Master"].address, **seconds),
    "RpcService": lambda world, seconds: RpcService(world["Master"].address, **seconds),
    # which a Server checks that it is given to
    "ServerConfig": lambda world, seconds: Server(
        {"ps": ["h:1"]}, "ps", 0, config=ServerConfig(**seconds), start=False
    ),
}


@pytest.fixture(scope="module")
def world() -> Iterator[dict[str, Any]]:
    """One living object of each class."""
    with ExitStack() as exits:
        enter = exits.enter_context
        master = enter(Master())
        service = enter(RpcService(master.address))
        served = service.create_server("name", Plain())
        client = service.create_client("name", timeout_s=PATIENCE_S)
        enter(AccumulatorServer(service))
        counters = CounterSet()
        counting = enter(AccumulatorClient(service, counters=counters))
        group = enter(ThreadGroup(1))
        source: Channel[int] = enter(Channel())
        task = enter(Server(cluster_at(fresh_host(17), ps=1, worker=1), "ps", 0))
        dealer = enter(service.create_dealer("peers"))
        call = client.submit("echo", 1)
        receipt = task.submit_recv("never", source="/job:worker/task:0", step=0)
        exits.callback(receipt.cancel)
        deferred = prpc_engine.Deferred()
        exits.callback(deferred.cancel)
        yield {
            "Accumulator": Accumulator("counter", Sum, counters=counters),
            "AccumulatorClient": counting,
            "AsyncReturn": group.async_exec(int),
            "Call": call,
            "Channel": Channel(),
            "CounterSet": counters,
            "ChannelReplicator": enter(ChannelReplicator(source, 1)),
            "Dealer": dealer,
            "Deferred": deferred,
            "Master": master,
            "MasterClient": enter(MasterClient(master.address)),
            "Monitor": enter(Monitor()),
            "Receipt": receipt,
            "RpcClient": client,
            "RpcServer": served,
            "RpcService": service,
            "Server": task,
            "Stream": enter(client.stream("echo", 1)),
            "ThreadGroup": group,
        }


def ask(world: dict[str, Any], verb: Verb, seconds: Any) -> None:
    if not verb.name:
        MAKERS[verb.of](world, {verb.seconds: seconds})
        return
    method = getattr(world[verb.of], verb.name)
    given = {verb.seconds: seconds}
    for one in inspect.signature(method).parameters.values():
        if (
            one.name == verb.seconds
            or one.default is not one.empty
            or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ):
            continue
        given[one.name] = 1.0 if one.name.endswith("_s") else ARGUMENTS[one.name]
    asked = method(**given)
    if isinstance(asked, AbstractContextManager):  # a lock, which is asked for as it is entered
        with asked:
            pass


def test_verbs_are_found() -> None:
    found = set(map(str, VERBS))
    assert found >= {
        "Channel.put.timeout_s",
        "Monitor.submit.period_s",
        "Server.recv.timeout_s",
        "RpcService.__init__.lease_s",
    }
    assert found >= {
        "Stream.send.timeout_s",
        "Call.result.timeout_s",
        "AccumulatorClient.close.timeout_s",
    }


@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_seconds_that_are_none_are_refused_by_name(world: dict[str, Any], verb: Verb) -> None:
    for seconds in [*NO_SECONDS, *(() if verb.takes_none else (None,))]:
        with pytest.raises(NAMED, match=re.escape(f"{verb.seconds}={seconds!r}"[:60])):
            ask(world, verb, seconds)
