"""Functions that tests send to shards: spawned children import them from here."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

import shard
from shard import (
    BULK,
    LATENCY,
    CancelledError,
    Future,
    ShardGroup,
    in_class,
    this_shard,
    yield_now,
)
from shard.loop import reactor
from shard.loop.task_class import RUNNING
from tests.program import wait_until


class OddError(Exception):
    """Raised in a shard; loads where it is caught because it is found by name."""

    def __init__(self, one: int, two: str) -> None:
        super().__init__(one, two)
        self.one = one


class TwoArgumentsError(Exception):
    """Pickles, and does not load: its constructor wants more than pickle gives it."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.one = one


class AlteredError(Exception):
    """Loads as another one: its constructor makes its text anew, of what it made before."""

    def __init__(self, what: str) -> None:
        super().__init__(f"no {what}")


class WontLoadError(Exception):
    """Pickles, and does not load, however it is made anew."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)

    def __str__(self) -> str:
        return f"1 and 2, at {id(self)}"


noted: list[Any] = []  # in this process, by the functions below


def note(what: Any) -> None:
    noted.append(what)


def notes() -> list[Any]:
    return noted


def bear_late_bells() -> None:
    """In a shard whose late wake-ups are counted: whoever is to ring may lack a core for long, and
    no bell is lost by that.
    """
    this_shard().reactor.late_bell_s = 60.0


def index() -> int:
    return this_shard().index


def index_and_core() -> tuple[int, set[int]]:
    return this_shard().index, os.sched_getaffinity(0)


def double(value: Any) -> Any:
    return value * 2


async def double_async(value: int) -> int:
    return value * 2


async def ask(other: int, value: int) -> tuple[int, int]:
    """(who asks, what the other shard makes of the value)."""
    return this_shard().index, await this_shard().submit_to(other, double, value)


async def around(hops: int) -> list[int]:
    """The way of a call that goes from shard to shard."""
    here = this_shard()
    if not hops:
        return [here.index]
    return [here.index, *await here.submit_to((here.index + 1) % here.size, around, hops - 1)]


async def ask_and_catch(other: int) -> str:
    try:
        await this_shard().submit_to(other, raise_odd, 1)
    except OddError as error:
        return f"caught {error.one}"
    return "nothing raised"


async def wait_for_call(other: int, path: str) -> str:
    """What becomes of a call to a shard that is killed meanwhile."""
    try:
        await this_shard().submit_to(other, read_fifo, path)
    except Exception as error:
        return type(error).__name__
    return "nothing raised"


class TextlessError(Exception):
    """Has no text: its __str__ raises."""

    def __str__(self) -> str:
        raise AttributeError("no such attribute")


class Unreadable:
    """Cannot be read again, by such an error."""

    def __setstate__(self, state: object) -> None:
        raise TextlessError

    def __getstate__(self) -> int:
        return 1


def raise_textless() -> None:
    raise TextlessError


async def raise_textless_in_a_task() -> None:
    raise TextlessError


def raise_odd(one: int) -> None:
    raise OddError(one, "two")


def raise_wont_load() -> None:
    raise WontLoadError("1 and 2")


def raise_two_arguments() -> None:
    raise TwoArgumentsError(1, 2)


def raise_altered() -> None:
    raise AlteredError("luck")


def make_a_group() -> None:
    with ShardGroup(1):
        pass


def give_unpicklable() -> Any:
    return iter([]), (each for each in [1])


def read_fifo(path: str) -> str:
    """Blocks the shard until somebody has written the named pipe."""
    return Path(path).read_text()


def mean(array: NDArray[Any]) -> float:
    return float(array.mean())


def is_writable(array: NDArray[Any]) -> bool:
    return bool(array.flags.writeable)


def ramp(count: int) -> NDArray[np.float64]:
    return np.arange(count, dtype=np.float64)


def ramp_in_slab(count: int) -> NDArray[np.float64]:
    array = this_shard().slab.empty((count,), np.float64)
    array[:] = np.arange(count)
    return array


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def note_the_end(path: str) -> None:
    """The shard writes the file when it stops."""

    def end() -> None:
        Path(path).write_text("stopped")

    this_shard().at_stop(end)


# -- answers that come later -----------------------------------------------------------------------


def double_in_the_next_turn(value: int) -> Future:
    """A plain function whose result is a future."""
    doubled = Future()
    this_shard().reactor.call_soon(partial(doubled.set_result, value * 2))
    return doubled


def hand_on(other: int, value: int) -> Future:
    """A plain function whose result is that of a call to another shard."""
    return this_shard().submit_to(other, double, value)


async def wait_for_ever(what: str) -> None:
    note(f"{what} began")
    try:
        await Future()
    finally:
        note(f"{what} ended")


async def clean_up_with_awaits(what: str) -> None:
    note(f"{what} began")
    try:
        await Future()
    except CancelledError as error:
        note(f"{what} was told: {error}")
        raise
    finally:
        await shard.sleep(0.001)
        note(f"{what} cleaned up")


async def have_cleaned_up(other: int, what: str) -> None:
    """What is cancelled here goes on to the other shard."""
    note(f"{what} asked")
    try:
        await this_shard().submit_to(other, clean_up_with_awaits, what)
    finally:
        note(f"{what} ended")


async def have_all_cleaned_up(count: int, what: str) -> None:
    async def one(number: int) -> None:
        await clean_up_with_awaits(f"{what} {number}")

    reactor = this_shard().reactor
    await shard.gather([reactor.spawn(one(number)) for number in range(count)])


async def swallow(value: int) -> int:
    note("swallows")
    with contextlib.suppress(CancelledError):
        await Future()
    await shard.sleep(0.0)
    note(f"swallowed, and gave {value}")
    return value


async def go_on_for_ever() -> None:
    note("goes on")
    while True:
        try:
            await shard.sleep(0.01)
        except CancelledError:
            note("went on")


async def end_by_an_error() -> None:
    try:
        await Future()
    finally:
        raise OddError(3, "raised at the end")


async def end_by_an_await() -> None:
    try:
        await Future()
    finally:
        await Future()


async def read_when_written(path: str) -> str:
    """Waits for the named pipe to be written, and leaves the shard free meanwhile."""
    written = Future()
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    reactor = this_shard().reactor
    reactor.watch(fd, lambda _: written.set_result(None))
    try:
        await written
        return os.read(fd, 100).decode()
    finally:
        reactor.unwatch(fd)
        os.close(fd)


async def ask_when_written(path: str, other: int, value: int) -> int:
    await read_when_written(path)
    doubled = await this_shard().submit_to(other, double, value)
    assert isinstance(doubled, int)
    return doubled


async def wait_for_a_park() -> None:
    """Until the shard has slept: it does when it has nothing to do, unless it polls."""
    reactor = this_shard().reactor
    while not reactor.parks:
        await reactor.sleep(0.001)


def raise_system_exit() -> NoReturn:
    sys.exit(3)


def exit_at_once(code: int) -> NoReturn:
    os._exit(code)


def raise_homeless() -> NoReturn:
    """An error whose class no other process can import."""
    module = ModuleType("only_in_this_shard")
    module.HomelessError = type("HomelessError", (Exception,), {"__module__": module.__name__})  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    raise module.HomelessError("nobody knows me")


# -- bulk work -------------------------------------------------------------------------------------


@in_class(BULK)
def bulk_step(number: int) -> int:
    """Takes longer than a turn's slice by the reactor's own clock, so that no turn does two."""
    until = time.monotonic() + 2 * reactor.TURN_SLICE_S
    while time.monotonic() < until:
        sum(range(100))
    note(number)
    return number


@in_class(BULK)
async def bulk_task(number: int) -> int:
    note(number)
    await this_shard().reactor.sleep(0.0)
    return number


# -- arrays ----------------------------------------------------------------------------------------


def keep(array: NDArray[Any]) -> None:
    note(array)


def kept_values() -> list[float]:
    return [float(array[0]) for array in noted]


def drop_all() -> None:
    noted.clear()


def make_in_slab(count: int, value: float) -> NDArray[np.float64]:
    array = this_shard().slab.empty((count,), np.float64)
    array[:] = value
    note(array)
    return array


def fill(value: float) -> None:
    """Write into the array made last."""
    noted[-1][:] = value


async def lend_to(other: int, count: int, value: float) -> None:
    """Make an array and let another shard keep it."""
    array = make_in_slab(count, value)
    await this_shard().submit_to(other, keep, array)


async def fetch_from(other: int, count: int, value: float) -> NDArray[np.float64]:
    """An array of another shard, handed on."""
    array = await this_shard().submit_to(other, make_in_slab, count, value)
    assert isinstance(array, np.ndarray)
    return array


def leases() -> tuple[int, int]:
    """(blocks lent to others, bytes in them) of this shard's slab."""
    statistics = this_shard().slab.statistics()
    return statistics.leases, statistics.leased_bytes


# -- lives -----------------------------------------------------------------------------------------


def die_when_restarted(index: int) -> None:
    if this_shard().index == index and this_shard().incarnation > 1:
        kill_myself()


def fail_when_restarted() -> None:
    if this_shard().incarnation > 1:
        raise OddError(4, "no second life")


def read_fifo_when_restarted(index: int, path: str) -> None:
    if this_shard().index == index and this_shard().incarnation == 2:
        read_fifo(path)


async def ask_all(value: int) -> list[int]:
    """What every other shard makes of the value."""
    here = this_shard()
    asked = [
        here.submit_to(other, double, value) for other in range(here.size) if other != here.index
    ]
    return [await each for each in asked]


def never_return(path: str) -> None:
    """Says "in", and "asked" once a SIGTERM was handled, and stays."""
    with Path(path).open("w") as out:
        handler = signal.getsignal(signal.SIGTERM)
        out.write("in\n")
        out.flush()
        while signal.getsignal(signal.SIGTERM) is handler:
            os.sched_yield()
        out.write("asked\n")
    while True:
        time.sleep(0.1)  # not pause(): a signal that comes just before that does not end it


def never_return_and_miss_an_alarm(path: str) -> None:
    """As if the first one had come just before a system call that lasts."""
    force = signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, lambda *_: signal.signal(signal.SIGALRM, force))
    never_return(path)


def hang_up_and_stop() -> None:
    """The lane to the application ends, and the process stands still: stopped, and not dead."""
    lane = this_shard()._lanes[-1]
    socket.socket(fileno=os.dup(lane.connection.notes.fileno())).shutdown(socket.SHUT_RDWR)
    os.kill(os.getpid(), signal.SIGSTOP)


# -- state, one a shard ----------------------------------------------------------------------------


class Tin:
    """Something to be sharded."""

    def __init__(self, first: int = 0, log: str | None = None) -> None:
        self.value = first
        self._log = log

    def add(self, value: int) -> int:
        self.value += value
        return self.value

    async def add_later(self, value: int) -> int:
        await this_shard().reactor.sleep(0.0)
        return self.add(value)

    def get(self) -> int:
        return self.value

    def where(self) -> int:
        return this_shard().index

    def close(self) -> None:
        if self._log is not None:
            with Path(self._log).open("a") as log:
                log.write(f"{this_shard().index}\n")


class FailsInShardOne(Tin):
    """Its constructor works everywhere else."""

    def __init__(self) -> None:
        super().__init__()
        if this_shard().index == 1:
            raise OddError(1, "no tin here")


class FailsToClose(Tin):
    def close(self) -> None:
        raise OddError(2, "does not close")


def instances() -> int:
    return len(this_shard().sharded)


# -- processes beside a group ----------------------------------------------------------------------


def put_double(value: int, results: multiprocessing.SimpleQueue[int]) -> None:
    results.put(value * 2)


def main() -> None:
    """A parent to be killed: makes a group, tells the pids of its shards, keeps one of them busy,
    and waits.
    """
    with ShardGroup(3, start_method=sys.argv[1]) as group:
        group.submit_to(1, signal.pause)
        group.submit_to(2, os.kill, os.getpid(), 0)
        print(*(each.pid for each in group.statistics().shards), flush=True)
        signal.pause()


if __name__ == "__main__":
    main()


class Kept:
    """What a function has with it."""

    alive: ClassVar[WeakSet[Kept]] = WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()


def count_kept() -> int:
    """How many of them there are in this process."""
    gc.collect()
    return len(Kept.alive)


def length(value: Any) -> int:
    """Of what it is sent."""
    return len(value)


def texts(count: int) -> tuple[bytes, str]:
    """`count` bytes and as many characters."""
    return bytes(count), "é" * count


def strided(count: int) -> NDArray[Any]:
    """Every other number up to `count`, backwards, as a view."""
    return np.arange(count, dtype=np.float64)[::-2]


def is_writable_within(value: Any) -> bool:
    """The array, or the one in a list or dict."""
    array = (
        value[0] if isinstance(value, list) else value["in"] if isinstance(value, dict) else value
    )
    return bool(array.flags.writeable)


def says_its_class() -> str:
    """The same, of a function of no class of its own."""
    return RUNNING.value.name


async def says_its_class_later() -> str:
    """The same, after a wait."""
    await yield_now()
    return RUNNING.value.name


@in_class(LATENCY)
def latency_says_its_class() -> str:
    """The same, of a function that says what it is."""
    return RUNNING.value.name


@in_class(BULK)
async def classes_of_submitted(index: int) -> list[str]:
    """What functions run as that a bulk task submits to shard `index`."""
    here = "shard.loop.task_class"
    functions = [
        says_its_class,
        says_its_class_later,
        latency_says_its_class,
        lambda: import_module("shard.loop.task_class").RUNNING.value.name,
        lambda: import_module(here).RUNNING.value.name,
        in_class(LATENCY)(lambda: import_module(here).RUNNING.value.name),
    ]
    return [await this_shard().submit_to(index, function) for function in functions]


async def classes_of_submitted_by_latency(index: int) -> list[str]:
    """The same, of a task of LATENCY."""
    functions = [says_its_class, says_its_class_later, bulk_says_its_class]
    return [await this_shard().submit_to(index, function) for function in functions]


@in_class(BULK)
def bulk_says_its_class() -> str:
    """The same, of a bulk function."""
    return RUNNING.value.name


def wait_until_gone(groups: list[ShardGroup]) -> None:
    """Until shard 0 of the group is down for good; in the application."""
    wait_until(lambda: groups[0].statistics().shards[0].state == "gone", "the end of shard 0")
