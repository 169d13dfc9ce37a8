"""Whatever a handler raises, its caller is answered, its server goes on, and nothing leaves the
process but what it raised.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import pytest

from prpc_engine import Call, Deferred, Master, RpcClient, RpcService, idempotent, once
from prpc_engine.archive import register
from prpc_engine.archive.classes import by_class, by_name
from prpc_engine.errors import BadArguments, DeadlineExceeded, RemoteError, RpcError
from prpc_engine.rpc.failure_codes import ERROR_BYTES_MAX, HOPS_MAX
from shard import CancelledError
from tests.program import Program
from tests.prpc_engine.inside import nap
from tests.prpc_engine.processes import PATIENCE_S, wait_until


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise asyncio.CancelledError("no text")

    __repr__ = __str__


class Rude(BaseException):
    """No Exception, and its module is no text."""


Rude.__module__ = 7  # type: ignore[assignment]


class Masked(Exception):
    """isinstance() asks for its class, and is told nothing."""

    @property
    def __class__(self) -> type:
        raise RuntimeError("no class")

    @__class__.setter
    def __class__(self, value: type) -> None: ...


RAISED: dict[str, Callable[[], BaseException]] = {
    "surrogate": lambda: ValueError("file \udcff.txt"),
    "mute": Mute,
    "mute cause": lambda: _caused(ValueError("outer"), Mute()),
    "cancelled": lambda: asyncio.CancelledError("by asyncio"),
    "generator exit": lambda: GeneratorExit("left"),
    "exit": lambda: SystemExit("enough"),
    "rude": lambda: Rude("unlike others"),
    "masked": lambda: Masked("no class"),
    "huge": lambda: ValueError("x" * (65 << 20)),
    "interrupt": lambda: KeyboardInterrupt("not of the main thread"),
    "deadline": lambda: DeadlineExceeded("of its own"),
    "engine's cancel": lambda: CancelledError("of what it waited for"),
}


def _caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


class Unpackable:
    """Nothing that a message can hold, and its repr is none."""

    def __repr__(self) -> str:
        raise SystemExit("no repr")

    def __hash__(self) -> int:
        return 1


class Stubborn:
    """Can be sent, and made of what was sent only where `refuses` says so."""

    refuses = False

    def __init__(self, value: int) -> None:
        self.value = value

    @staticmethod
    def unpack(value: int) -> Stubborn:
        if Stubborn.refuses:
            raise asyncio.CancelledError("not here")
        return Stubborn(value)


class Raising:
    """Each kind of handler, which raises what it is asked to."""

    def plain(self, what: str) -> None:
        raise RAISED[what]()

    async def task(self, what: str) -> None:
        raise RAISED[what]()

    async def task_later(self, what: str) -> None:
        await self._pause()
        raise RAISED[what]()

    @once
    def done_once(self, what: str) -> None:
        raise RAISED[what]()

    @idempotent
    def deferred(self, what: str) -> Deferred:
        answer = Deferred()
        threading.Thread(target=lambda: answer.fail(RAISED[what]())).start()
        return answer

    def items(self, what: str) -> Iterator[int]:
        yield 1
        raise RAISED[what]()

    async def items_async(self, what: str) -> AsyncIterator[int]:
        yield 1
        raise RAISED[what]()

    @idempotent
    async def nested(self) -> Any:
        return await self._ask_never(0.01)

    @once
    def nested_once(self) -> Any:
        return self._ask_never(0.01).result()

    def nested_plain(self) -> Any:
        return self._ask_never(0.01).result()

    def nested_later(self) -> Any:
        return self._ask_never(0.01)

    def nested_items(self) -> Iterator[int]:
        yield self._ask_never(0.01).result()

    async def never(self) -> None:
        await nap(SERVICES[0], 3600.0)

    def _ask_never(self, timeout_s: float) -> Call:
        return (
            SERVICES[0]
            .create_client("raising", timeout_s=PATIENCE_S)
            .submit("never", timeout_s=timeout_s)
        )

    def result(self) -> Any:
        return {Unpackable(): object()}

    def echo(self, value: Any) -> Any:
        return value

    def stubborn(self) -> Stubborn:
        return Stubborn(1)

    async def _pause(self) -> None:
        service = SERVICES[0]
        await nap(service, 0.0)


SERVICES: list[RpcService] = []


class World(NamedTuple):
    """A service that serves Raising from a serve_forever() of another thread, and a client
    of it.
    """

    client: RpcClient
    server: threading.Thread


@pytest.fixture(params=["serve_forever", "progress thread"])
def world(request: pytest.FixtureRequest, master: Master) -> Iterator[World]:
    with (
        RpcService(master.address) as served,
        RpcService(master.address, transports=["tcp"]) as caller,
    ):
        SERVICES[:] = [served]
        served.create_server("raising", Raising())
        thread = threading.Thread(target=served.serve_forever)
        if request.param == "serve_forever":
            thread.start()
        yield World(caller.create_client("raising", timeout_s=PATIENCE_S), thread)
        served.stop_serving()
        if thread.ident is not None:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        SERVICES.clear()


@pytest.fixture
def registered_stubborn() -> Iterator[None]:
    register(Stubborn, pack=lambda one: one.value, unpack=Stubborn.unpack)
    yield
    Stubborn.refuses = False
    del by_name[by_class.pop(Stubborn).name]


def size_of(error: RemoteError) -> int:
    return sum(
        len(text.encode())
        for text in (error.type_name, error.remote_message, error.remote_traceback)
    )


@pytest.mark.parametrize("method", ["plain", "task", "task_later", "done_once", "deferred"])
def test_whatever_a_handler_raises_its_caller_is_answered(
    world: World, method: str, subtests: pytest.Subtests
) -> None:
    for what in RAISED:
        with subtests.test(what=what):
            with pytest.raises(RemoteError) as caught:
                world.client.call(method, what, timeout_s=PATIENCE_S)
            assert size_of(caught.value) <= ERROR_BYTES_MAX
            assert world.client.call("echo", 1, timeout_s=PATIENCE_S) == 1
            assert world.server.ident is None or world.server.is_alive()


@pytest.mark.parametrize("method", ["items", "items_async"])
def test_whatever_a_stream_raises_its_reader_is_told(
    world: World, method: str, subtests: pytest.Subtests
) -> None:
    for what in RAISED:
        with subtests.test(what=what):
            with world.client.stream(method, what, timeout_s=PATIENCE_S) as stream:
                assert next(stream) == 1
                with pytest.raises(RemoteError):
                    next(stream)
            assert world.client.call("echo", 1, timeout_s=PATIENCE_S) == 1


@pytest.mark.parametrize(
    "method", ["nested_plain", "nested_once", "nested", "nested_later", "nested_items"]
)
def test_a_caller_tells_a_deadline_of_its_handler_from_its_own(world: World, method: str) -> None:
    call = world.client.stream if method == "nested_items" else world.client.submit
    with pytest.raises(RemoteError) as caught:
        call(method, timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert caught.value.type_name == "prpc_engine.errors.DeadlineExceeded"
    assert caught.value.remote_message.startswith("no answer to 'never' from server 0 of 'raising'")
    with pytest.raises(DeadlineExceeded):
        world.client.call("never", timeout_s=0.01)


def test_a_result_that_cannot_even_be_named_is_answered_for(world: World) -> None:
    with pytest.raises(RemoteError, match="returned what cannot be sent"):
        world.client.call("result", timeout_s=PATIENCE_S)
    assert world.client.call("echo", 1, timeout_s=PATIENCE_S) == 1


def test_values_whose_class_refuses_them_in_its_own_way_are_answered_for(
    world: World, registered_stubborn: None
) -> None:
    Stubborn.refuses = True
    with pytest.raises(BadArguments, match="CancelledError: not here"):
        world.client.call("echo", Stubborn(1), timeout_s=PATIENCE_S)
    with pytest.raises(RpcError, match=r"cannot be read.*CancelledError: not here"):
        world.client.call("stubborn", timeout_s=PATIENCE_S)
    assert world.client.call("echo", 1, timeout_s=PATIENCE_S) == 1


def test_what_cannot_be_encoded_arrives_escaped_and_a_long_text_with_both_of_its_ends(
    world: World,
) -> None:
    with pytest.raises(RemoteError) as caught:
        world.client.call("plain", "surrogate", timeout_s=PATIENCE_S)
    assert caught.value.remote_message == r"file \udcff.txt"
    with pytest.raises(RemoteError) as caught:
        world.client.call("plain", "huge", timeout_s=PATIENCE_S)
    text = caught.value.remote_message
    assert text.startswith("xxx") and text.endswith("xxx") and "characters left out" in text
    with pytest.raises(RemoteError) as caught:
        world.client.call("plain", "mute", timeout_s=PATIENCE_S)
    assert caught.value.type_name.endswith(".Mute")
    assert caught.value.remote_message == "<its text cannot be made: CancelledError>"


# -- Ctrl-C ----------------------------------------------------------------------------------------


def serve_until_interrupted(master: str, kind: str) -> None:
    """What the process runs: it says how serve_forever() ended."""
    import time

    def nap() -> None:
        print("napping", flush=True)
        time.sleep(600)

    async def nap_async() -> None:
        nap()

    with RpcService(master) as service:
        service.create_server("napping", {"nap": nap if kind == "plain" else nap_async})
        print("ready", flush=True)
        try:
            service.serve_forever()
        except KeyboardInterrupt:
            print("interrupted", flush=True)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_ctrl_c_ends_serve_forever_and_the_call_under_way_is_answered_first(
    master: Master, kind: str
) -> None:
    with (
        Program("tests.prpc_engine.test_handler_errors", master.address, kind) as program,
        RpcService(master.address) as service,
    ):
        assert program.read_line() == "ready"
        call = service.create_client("napping", timeout_s=PATIENCE_S).submit("nap", timeout_s=None)
        assert program.read_line() == "napping"
        program.process.send_signal(signal.SIGINT)
        with pytest.raises(RemoteError, match="raised KeyboardInterrupt"):
            call.result(PATIENCE_S)
        assert program.read_line() == "interrupted"


# -- hops, and what stays in the process -----------------------------------------------------------


class Hops:
    """Passes a call on, some hops deep, and raises at the last."""

    def __init__(self) -> None:
        self.client: RpcClient | None = None

    def down(self, hops: int, text: str = "at the bottom") -> None:
        if not hops:
            raise KeyError(text)
        assert self.client is not None
        self.client.call("down", hops - 1, text, timeout_s=PATIENCE_S)

    def caught(self, hops: int) -> None:
        try:
            self.down(hops)
        except RemoteError as error:
            raise ValueError("instead") from error

    def own_context(self) -> None:
        try:
            raise KeyError("inner secret")
        except KeyError:
            self._deeper()

    def _deeper(self) -> None:
        raise ValueError("outer")


@pytest.fixture
def hops(master: Master) -> Iterator[RpcClient]:
    with RpcService(master.address) as service:
        served = Hops()
        service.create_server("hops", served)
        served.client = service.create_client("hops", timeout_s=PATIENCE_S)
        yield served.client


@pytest.mark.parametrize("depth", [1, 12])
def test_an_error_that_is_passed_on_gains_one_line_a_hop_and_stays_what_it_was(
    hops: RpcClient, depth: int
) -> None:
    with pytest.raises(RemoteError) as first:
        hops.call("down", 0, timeout_s=PATIENCE_S)
    with pytest.raises(RemoteError) as caught:
        hops.call("down", depth, timeout_s=PATIENCE_S)
    origin, error = first.value, caught.value
    assert (error.type_name, error.remote_message) == ("KeyError", "'at the bottom'")
    assert error.remote_traceback.startswith(origin.remote_traceback)
    lines = error.remote_traceback.removeprefix(origin.remote_traceback).splitlines()
    assert len(lines) == depth
    assert all(line.startswith("via 'down' of server 0 of 'hops' (rank 0) at ") for line in lines)


def test_an_error_that_is_passed_on_for_ever_stays_within_bounds(hops: RpcClient) -> None:
    with pytest.raises(RemoteError) as caught:
        hops.call("down", HOPS_MAX + 10, "long " * 10_000, timeout_s=PATIENCE_S)
    error = caught.value
    assert size_of(error) <= ERROR_BYTES_MAX
    assert error.remote_traceback.count("\nvia ") == HOPS_MAX + 1
    assert error.remote_traceback.splitlines()[-1] == f"via more than {HOPS_MAX} hops"
    assert error.remote_traceback.startswith("Traceback (most recent call last):")


def test_an_explicit_cause_from_another_server_is_told(hops: RpcClient) -> None:
    with pytest.raises(RemoteError, match="raised ValueError: instead") as caught:
        hops.call("caught", 1, timeout_s=PATIENCE_S)
    assert "KeyError: 'at the bottom'" in caught.value.remote_traceback
    assert "direct cause" in caught.value.remote_traceback


def test_what_a_handler_was_handling_itself_is_told(hops: RpcClient) -> None:
    with pytest.raises(RemoteError, match="raised ValueError: outer") as caught:
        hops.call("own_context", timeout_s=PATIENCE_S)
    assert "inner secret" in caught.value.remote_traceback


def test_what_the_waiting_thread_was_handling_stays_in_its_process(master: Master) -> None:
    """The thread turns the reactor inside an `except` block, so Python takes that for the context
    of what handlers raise.
    """
    with (
        RpcService(master.address) as served,
        RpcService(master.address, transports=["tcp"]) as caller,
    ):

        async def task() -> None:
            raise ValueError("mine")

        def grouped() -> None:
            raise _group()

        served.create_server(
            "raising", {"plain": lambda: int("mine"), "task": task, "grouped": grouped}
        )
        client = caller.create_client("raising", timeout_s=PATIENCE_S)
        for method in ("plain", "task", "grouped")[: 3 if sys.version_info >= (3, 11) else 2]:
            asked = client.submit(method, timeout_s=PATIENCE_S)
            try:
                raise LookupError("the password is swordfish")
            except LookupError:
                served.driver.run(0.0)
                wait_until(lambda: bool(served.driver.run(0.01)) or asked.done(), "the answer")  # noqa: B023
            error = asked.error(PATIENCE_S)
            assert isinstance(error, RemoteError)
            assert "mine" in error.remote_traceback
            assert "swordfish" not in str(error)


def _group() -> BaseException:
    try:
        raise ValueError("mine")
    except ValueError as error:
        return sys.modules["builtins"].__dict__["ExceptionGroup"]("several", [error])


def test_the_context_of_an_error_that_another_thread_raised_first_stays_in_the_process(
    master: Master,
) -> None:
    with (
        RpcService(master.address) as served,
        RpcService(master.address, transports=["tcp"]) as caller,
    ):
        kept: list[ValueError] = []

        def prepare() -> None:
            try:
                raise LookupError("the password is swordfish")
            except LookupError:
                try:
                    raise ValueError("mine")
                except ValueError as error:
                    kept.append(error)

        def again() -> None:
            raise kept[0]

        thread = threading.Thread(target=prepare)
        thread.start()
        thread.join(PATIENCE_S)
        served.create_server("raising", {"again": again})
        error = (
            caller.create_client("raising", timeout_s=PATIENCE_S)
            .submit("again", timeout_s=PATIENCE_S)
            .error(PATIENCE_S)
        )
        assert isinstance(error, RemoteError)
        assert "swordfish" not in str(error)


if __name__ == "__main__":
    serve_until_interrupted(*sys.argv[1:])


@pytest.mark.parametrize("error", [ValueError, "no room", None])
def test_a_deferred_fails_with_an_exception_and_nothing_else(error: Any) -> None:
    answer = Deferred()
    with pytest.raises(BadArguments, match=r"fail\(.*an exception is allowed"):
        answer.fail(error)
    assert not answer.done()
    assert answer.fail(ValueError("no room"))
