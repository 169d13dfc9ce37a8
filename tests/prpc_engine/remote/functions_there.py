"""What tests have other workers do."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import os
import subprocess
import sys
import threading
import time
from typing import Any, ClassVar

import shard
from prpc_engine import remote as rpc

PATIENCE_S = 20.0
event = threading.Event()
kept: dict[str, Any] = {}
ran: list[str] = []


class Odd(Exception):
    """Its constructor takes more than its args: a pickle of it cannot be read."""

    def __init__(self, first: int, *, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.first, self.second = first, second


class TwoThings(Exception):
    """Of the user's, with fields."""

    def __init__(self, first: int, second: str) -> None:
        super().__init__(first, second)
        self.first, self.second = first, second


class Model:
    """State behind an RRef."""

    def __init__(self, factor: int) -> None:
        if factor < 0:
            raise ValueError(f"factor {factor}")
        self.factor = factor

    def times(self, value: Any) -> Any:
        return self.factor * value

    def set(self, factor: int) -> int:
        before, self.factor = self.factor, factor
        return before

    def block(self) -> bool:
        return event.wait(PATIENCE_S)

    def __del__(self) -> None:
        ran.append(f"freed {getattr(self, 'factor', None)}")


have_waited: list[str] = []


def add(first: Any, second: Any = 100) -> Any:
    return first + second


def same(value: Any) -> Any:
    return value


def pid() -> int:
    return os.getpid()


def here() -> str:
    return rpc.get_worker_info().name


def raise_it(error: BaseException) -> None:
    raise error


def raise_odd() -> None:
    raise Odd(1, second=2)


def wait_for_event() -> bool:
    return event.wait(PATIENCE_S)


def wait_and_end(how: str) -> None:
    """By what is no Exception."""
    event.wait(PATIENCE_S)
    if how == "exit":
        sys.exit(3)
    given_up = rpc.Future()
    given_up.cancel()
    given_up.wait()


class Exits:
    """Made late, and its method exits."""

    def __init__(self) -> None:
        event.wait(PATIENCE_S)

    def exit(self) -> None:
        sys.exit(3)


exits: list[rpc.Future] = []


def exit_of(rref: rpc.RRef[Exits]) -> rpc.Future:
    exits.append(rref.rpc_async().exit())
    return exits[-1]


def asking_to_exit() -> bool:
    return bool(exits)


async def await_event() -> bool:
    return await shard.run_blocking(event.wait, PATIENCE_S)


def future_of_event() -> concurrent.futures.Future[bool]:
    future: concurrent.futures.Future[bool] = concurrent.futures.Future()
    threading.Thread(target=lambda: future.set_result(event.wait(PATIENCE_S))).start()
    return future


def set_event() -> None:
    event.set()


def begin_to_wait(to: str) -> None:
    """There, and nobody waits for that."""
    rpc.rpc_async(to, wait_and_note)


def wait_and_note() -> None:
    wait_for_event()
    have_waited.append(here())


def clear_event() -> None:
    event.clear()


def down(to: str, depth: int) -> int:
    """Calls back and forth, so many deep."""
    if not depth:
        return 0
    return 1 + int(rpc.rpc_sync(to, down, args=(here(), depth - 1)))


def relay(path: str, ways: list[str]) -> None:
    """Has the next one do so, and does not wait for it; the last one tells in a file."""
    if ways:
        rpc.rpc_async(ways[0], relay, args=(path, ways[1:]))
    else:
        time.sleep(0.05)  # its work: who does not wait for it is gone by then
        with open(path, "w") as file:
            file.write("passed on")


@rpc.functions.async_execution
def add_elsewhere(to: str, first: int, second: int, third: int) -> rpc.Future:
    return rpc.rpc_async(to, add, args=(first, second)).then(lambda done: done.wait() + third)


@rpc.functions.async_execution
def fail_elsewhere(to: str) -> rpc.Future:
    return rpc.rpc_async(to, raise_it, args=(KeyError("of elsewhere"),))


class Batch:
    """The batching of torch's tutorial: a future that is completed by the last of so many calls."""

    lock = threading.Lock()
    future = rpc.Future()
    parts: ClassVar[list[int]] = []

    @staticmethod
    @rpc.functions.async_execution
    def put(part: int, of: int) -> rpc.Future:
        with Batch.lock:
            future = Batch.future
            Batch.parts.append(part)
            if len(Batch.parts) == of:
                future.set_result(sorted(Batch.parts))
                Batch.parts, Batch.future = [], rpc.Future()
        return future


def drops_its_future() -> rpc.Future:
    return rpc.Future()


def drops_one_of_threads() -> concurrent.futures.Future[int]:
    return concurrent.futures.Future()


def of_threads(value: int) -> concurrent.futures.Future[int]:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    threading.Timer(0.001, lambda: future.set_result(value + 1)).start()
    return future


async def sleeps(value: int) -> int:
    await asyncio.sleep(0.001)
    return 2 * value


async def fails() -> None:
    await asyncio.sleep(0.001)
    raise TwoThings(1, "two")


async def counts_async(count: int) -> Any:
    for number in range(count):
        yield number


def counts(count: int) -> Any:
    yield from range(count)


def fetch(rref: rpc.RRef[Any]) -> Any:
    return rref.to_here()


def fetch_inside(value: dict[str, Any]) -> Any:
    return value["at"][0].to_here()


def keep(name: str, rref: Any) -> None:
    kept[name] = rref


def use(name: str) -> Any:
    return kept[name].to_here()


def pass_on(name: str, to: str) -> None:
    rpc.rpc_sync(to, keep, args=(name, kept[name]))


def forget(name: str) -> None:
    del kept[name]


def own(value: Any) -> rpc.RRef[Any]:
    return rpc.RRef(value)


def own_model(factor: int) -> rpc.RRef[Any]:
    return rpc.RRef(Model(factor))


def kept_local(name: str) -> tuple[bool, Any]:
    return kept[name].is_owner(), kept[name].local_value()


def figures() -> dict[str, int]:
    gc.collect()
    return rpc.statistics()


def said() -> list[str]:
    gc.collect()
    return list(ran)


def names_of_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def cpu_s() -> float:
    return time.process_time()


@rpc.expose
def allowed(value: Any) -> Any:
    return value


@rpc.expose
class Counter:
    """Served by a worker of an allow list."""

    def __init__(self) -> None:
        self.count = 0

    def up(self, by: int = 1) -> int:
        self.count += by
        return self.count

    def _hidden(self) -> int:
        return self.count

    def fail(self) -> None:
        raise ZeroDivisionError("as told")


class Unexposed:
    """What a class inherits that is served."""

    def inherited(self) -> list[str]:
        return subprocess.check_output(["id"], text=True).splitlines()

    @rpc.expose
    def marked(self) -> str:
        return "marked"


@rpc.expose
class ExposedBase:
    def of_base(self) -> str:
        return "base"

    def replaced(self) -> str:
        return "base"


class Holder:
    """What can be called, and no `def` of the class has made."""

    def __call__(self, *args: Any) -> Any:
        return args

    def method(self) -> str:
        return "of a collaborator"


class Deeper(Unexposed, ExposedBase):
    """Is not exposed itself."""

    def replaced(self) -> str:
        return "not exposed"


@rpc.expose
class Served(Deeper):
    """Of an allow list: has methods of all kinds, and much else that can be called."""

    runs_builtin = len
    runs_object = Holder()
    runs_part = functools.partial(subprocess.check_output, ["id"])
    runs_part_method = functools.partialmethod(subprocess.check_output, ["id"])
    runs_static_builtin = staticmethod(len)
    Nested = Holder

    def __init__(self) -> None:
        self.runs = subprocess.check_output
        self.runs_bound = Holder().method
        self.shadowed = lambda: "of the object alone"  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        ran.append(f"looked up {name}")
        return subprocess.check_output

    @property
    def runs_property(self) -> Any:
        ran.append("property")
        return subprocess.check_output

    def __call__(self) -> str:
        return "called"

    def shadowed(self) -> str:
        return "of the class"

    def plain(self, value: int) -> int:
        return value

    async def later(self, value: int) -> int:
        await asyncio.sleep(0)
        return value

    def many(self) -> Any:
        yield 1

    @staticmethod
    def static(value: int) -> int:
        return value

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    @functools.lru_cache  # noqa: B019
    def cached(self, value: int) -> int:
        return value

    @functools.wraps(subprocess.check_output)
    def wrapping(self) -> str:
        return "wrapper"


class Imitation:
    """Has the name of a class that is exposed, and is another one."""

    def plain(self, value: int) -> int:
        return value


Imitation.__qualname__ = Served.__qualname__


@rpc.expose
def made(kind: str) -> Any:
    """An object of a class that is not exposed, or of another class of the same name."""
    return {"deeper": Deeper, "imitation": Imitation, "holder": Holder}[kind]()


@functools.wraps(allowed)
def around_allowed(value: Any) -> Any:
    return value, "around"
