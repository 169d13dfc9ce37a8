"""Lazy in calls within a process: the very object goes, whatever way; and whatever becomes of the
call, the value is with one side or the other."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from prpc_engine import (
    Bounds,
    Deferred,
    Lazy,
    Master,
    RpcClient,
    RpcRequest,
    RpcResponse,
    RpcService,
    errors,
)
from prpc_engine.archive import register
from prpc_engine.rpc.call import Call
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.server import ServedObject
from prpc_engine.rpc.stream import incoming
from shard import ClosedError, Future
from tests.prpc_engine.archives import same
from tests.prpc_engine.peers import TARGET, Pair, Route
from tests.prpc_engine.processes import PATIENCE_S, wait_until


class Model:
    """What could not be sent to another process."""


@register
@dataclass
class Batch:
    """Refused where it is read, when `size` says so."""

    content: Any
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("a batch of less than nothing")


class Keeper:
    """Takes objects and gives them away."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.gate = Future()

    def take(self, value: Any) -> None:
        self.taken.append(value)

    def take_two(self, one: Any, other: Any) -> None:
        self.taken += [one, other]

    async def take_async(self, value: Any) -> None:
        self.taken.append(value)

    async def take_late(self, value: Any) -> None:
        await self.gate
        self.taken.append(value)

    async def take_all(self) -> int:
        async for item in incoming():
            self.taken.append(item)
        return len(self.taken)

    def look(self, value: Any) -> str:
        return type(value).__name__

    def give(self) -> Any:
        return Lazy(self.taken.pop())

    def give_inside(self) -> Any:
        return {"batch": Batch((Lazy(self.taken.pop()),))}

    async def give_async(self) -> Any:
        return Lazy(self.taken.pop())

    def give_later(self) -> Deferred:
        answer = Deferred()
        self.taken.append(answer)
        return answer

    def give_each(self) -> Iterator[Any]:
        while self.taken:
            yield Lazy(self.taken.pop(0))

    async def give_each_async(self) -> AsyncIterator[Any]:
        while self.taken:
            yield [Lazy(self.taken.pop(0))]


class Own(NamedTuple):
    """A service that calls a server of its own."""

    service: RpcService
    client: RpcClient
    keeper: Keeper


@pytest.fixture
def own() -> Iterator[Own]:
    keeper = Keeper()
    with Master("127.0.0.1:0") as master, RpcService(master.address) as service:
        service.create_server("keeper", keeper)
        yield Own(service, service.create_client("keeper"), keeper)


class World(Pair):
    """The same between two peers; the test turns the reactor.
    The server runs one task at a time.
    """

    def __init__(self) -> None:
        self.keeper = Keeper()
        super().__init__(
            ServedObject("test", 0, TARGET, self.keeper, Bounds(tasks_max=1, queue_calls_max=1))
        )


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def wait_gone(reference: weakref.ref[Any]) -> None:
    def is_gone() -> bool:
        gc.collect()
        return reference() is None

    wait_until(is_gone, "the end of the object")


# -- the very object -------------------------------------------------------------------------------

PLACES: dict[str, Callable[[Any], Any]] = {
    "alone": lambda lazy: lazy,
    "list": lambda lazy: [1, lazy],
    "dict": lambda lazy: {"a": 0, "b": lazy},
    "tuple in a dict with other keys": lambda lazy: {(1, 2): (lazy,)},
    "dataclass": lambda lazy: Batch([lazy]),
    "beside a long integer": lambda lazy: [1 << 100, lazy],
}


def innermost(value: Any) -> Any:
    while not isinstance(value, Model):
        if isinstance(value, Batch):
            value = value.content
        elif isinstance(value, dict):
            *_, value = value.values()
        else:
            *_, value = value
    return value


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", ["take", "take_async"])
def test_a_server_in_this_process_gets_the_very_object_wherever_it_stands(
    own: Own, method: str, place: str
) -> None:
    model = Model()
    own.client.call(method, PLACES[place](Lazy(model)))
    assert innermost(own.keeper.taken.pop()) is model


@pytest.mark.parametrize("method", ["give", "give_inside", "give_async"])
def test_its_caller_gets_the_very_object_back(own: Own, method: str) -> None:
    model = Model()
    own.keeper.take(model)
    value = own.client.call(method)
    assert innermost(value["batch"] if method == "give_inside" else value) is model


def test_a_deferred_answer_hands_over_too(own: Own) -> None:
    model = Model()
    call = own.client.submit("give_later")
    wait_until(lambda: own.keeper.taken)
    own.keeper.taken.pop().reply(Lazy(model))
    assert call.result(PATIENCE_S) is model


def test_a_notification_hands_over_too(own: Own) -> None:
    model = Model()
    own.client.notify("take", Lazy(model))
    wait_until(lambda: own.keeper.taken)
    assert own.keeper.taken == [model]


def test_a_stream_hands_over_both_ways(own: Own) -> None:
    models = [Model() for _ in range(20)]
    with own.client.stream("take_all") as stream:
        for model in models:
            stream.send(Lazy(model))
        stream.end()
        assert stream.result(PATIENCE_S) == len(models)
    assert own.keeper.taken == models
    assert list(own.client.stream("give_each")) == models
    own.keeper.taken = models[:]
    assert list(own.client.stream("give_each_async")) == [[model] for model in models]


def test_dealers_hand_over_both_ways(own: Own) -> None:
    server = own.service.create_server("dealt")
    model, answer = Model(), Model()
    with (
        own.service.create_client("dealt").create_dealer() as dealer,
        server.create_dealer() as other,
    ):
        dealer.send_request(RpcRequest("x") << Lazy(model))
        request = other.recv_request(PATIENCE_S)
        text, received = request
        assert text == "x"
        assert received is model
        other.send_response(RpcResponse(request, [Lazy(answer)]))
        assert dealer.recv_response(PATIENCE_S).read() == [answer]
        dealer.send_request_one_way(RpcRequest(Lazy(answer)))
        assert other.recv_request(PATIENCE_S).read() is answer


def test_asyncio_hands_over_both_ways(own: Own) -> None:
    model = Model()

    async def there_and_back() -> Any:
        await own.client.submit("take", Lazy(model))
        return await own.client.submit("give")

    assert asyncio.run(there_and_back()) is model


def test_what_is_not_lazy_is_copied_as_from_another_process(own: Own) -> None:
    array, listed = np.arange(5), [1, (2,)]
    own.client.call("take_two", Lazy(array), {"array": array, "listed": listed})
    handed, other = own.keeper.taken
    assert handed is array
    assert handed.flags.writeable
    assert same(other, {"array": array, "listed": listed})
    assert not np.shares_memory(other["array"], array)
    assert not other["array"].flags.writeable
    with pytest.raises(errors.BadArguments, match="Model, which cannot be sent"):
        own.client.call("take", Model())


def test_the_receiver_is_the_only_one_that_holds_it(own: Own) -> None:
    model = Model()
    reference = weakref.ref(model)
    lazy = Lazy(model)
    del model
    call = own.client.submit("take", lazy)
    call.result(PATIENCE_S)
    assert lazy.is_handed_over
    assert reference() is own.keeper.taken[0]
    own.keeper.taken.clear()
    wait_gone(reference)
    own.keeper.take(Model())
    reference = weakref.ref(own.keeper.taken[0])
    assert own.client.call("look", Lazy(own.client.call("give"))) == "Model"
    wait_gone(reference)


# -- whatever becomes of the call ------------------------------------------------------------------


def test_what_was_handed_over_is_refused_a_second_time(world: World) -> None:
    lazy, model = Lazy(Model()), Lazy(Model())
    expected = lazy.value
    calls = [world.ask("take", lazy), world.ask("take_two", lazy, model)]  # both are on their way
    world.turn()
    assert calls[0].result() is None
    with pytest.raises(errors.BadArguments, match="handed over already"):
        calls[1].result()
    with pytest.raises(
        errors.BadArguments, match="argument 1 is a Lazy that was handed over already"
    ):
        world.ask("take_two", 1, lazy)
    assert world.keeper.taken == [expected]
    assert not model.is_handed_over


def refused_unknown(world: World, lazy: Lazy) -> Call:
    return world.ask("no such method", lazy)


def refused_arguments(world: World, lazy: Lazy) -> Call:
    return world.ask("take", [lazy, WrongBatch])


def refused_service(world: World, lazy: Lazy) -> Call:
    route = Route()
    route.target = TARGET + 1
    return world.client.request(route, "take", method_key("take"), (lazy,), 20.0, False)


def refused_full(world: World, lazy: Lazy) -> Call:
    for _ in range(2):
        world.ask("take_late", 0)
    return world.ask("take_late", lazy)


def refused_stopping(world: World, lazy: Lazy) -> Call:
    world.server.stop()
    return world.ask("take", lazy)


WrongBatch = Batch(1)
WrongBatch.size = -1  # which its class refuses at the other end


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (refused_unknown, errors.UnknownMethod),
        (refused_arguments, errors.BadArguments),
        (refused_service, errors.UnknownService),
        (refused_full, errors.Backpressure),
        (refused_stopping, errors.Stopping),
    ],
)
def test_a_call_that_is_refused_leaves_the_value_with_its_caller(
    world: World, ask: Callable[[World, Lazy], Call], error: type[Exception]
) -> None:
    lazy = Lazy(Model())
    reference = weakref.ref(lazy.value)
    call = ask(world, lazy)
    world.turn()
    with pytest.raises(error):
        call.result()
    assert lazy.value is reference()
    del lazy
    wait_gone(reference)
    world.keeper.gate.set_result(None)
    world.turn()


def test_a_request_that_is_dropped_from_the_queue_gives_its_value_back(world: World) -> None:
    cancelled, late = Lazy(Model()), Lazy(Model())
    running = world.ask("take_late", 0)
    call = world.ask("take_late", [cancelled])
    world.turn()
    assert cancelled.is_handed_over  # for the time being
    call.cancel()
    world.turn()
    assert isinstance(cancelled.value, Model)
    world.ask("take_late", late, timeout_s=0.0)  # one millisecond, to the server
    world.turn()
    (waiting,) = (job for job in world.served.running.values() if job.is_queued)
    wait_until(lambda: time.monotonic() > waiting.deadline, "the deadline")
    world.keeper.gate.set_result(None)
    world.turn()
    assert isinstance(late.value, Model)
    assert running.result() is None
    assert world.keeper.taken == [0]
    assert world.server.statistics().expired == 1


def test_what_waited_in_the_queue_and_ran_is_not_given_back(world: World) -> None:
    lazy, model = Lazy(Model()), Model()
    calls = [world.ask("take_late", 0), world.ask("take_late", lazy)]
    world.turn()
    world.keeper.gate.set_result(None)
    world.turn()
    assert [call.result() for call in calls] == [None, None]
    assert lazy.is_handed_over
    reference = weakref.ref(world.keeper.taken.pop())
    wait_gone(reference)
    assert model


def test_an_answer_that_nobody_waits_for_leaves_the_value_with_the_server(world: World) -> None:
    lazy = Lazy(Model())
    call = world.ask("give_later")
    world.turn()
    answer = world.keeper.taken.pop()
    answer.reply(lazy)  # on its way
    call.cancel()
    world.turn()
    assert isinstance(lazy.value, Model)


@pytest.mark.parametrize("end", ["client", "served"])
def test_a_connection_that_ends_keeps_no_value(world: World, end: str) -> None:
    # more than what may be in flight: some wait in the outbox
    lazies = [Lazy(Model()) for _ in range(5000)]
    references = [weakref.ref(lazy.value) for lazy in lazies]
    calls = [world.ask("take", lazy) for lazy in lazies]
    getattr(world, end).connection.close(ClosedError("the test"))
    world.turn()
    for lazy, reference, call in zip(lazies, references, calls, strict=True):
        assert isinstance(
            call.error(),
            errors.Closed if end == "client" else errors.MaybeExecuted | errors.NotSent,
        )
        assert lazy.is_handed_over or lazy.value is reference()
    assert len(world.keeper.taken) == sum(lazy.is_handed_over for lazy in lazies) < 5000
    with pytest.raises((errors.Closed, errors.NotSent)):
        world.ask("take", lazies[-1])
    assert lazies[-1].value is references[-1]()
    world.keeper.taken.clear()
    del lazies, lazy
    for reference in (references[0], references[2000], references[-1]):
        wait_gone(reference)


def test_a_call_keeps_nothing_of_what_it_handed_over(world: World) -> None:
    class Recorder:
        def failed(self, call: Call, error: BaseException) -> bool:
            return False

    lazy = Lazy(Model())
    reference = weakref.ref(lazy.value)
    call = world.client.request(
        Route(), "take", method_key("take"), ([lazy],), 20.0, True, Recorder()
    )
    assert call.blocks  # for trying again
    world.turn()
    assert call.result() is None
    world.keeper.taken.clear()
    wait_gone(reference)
