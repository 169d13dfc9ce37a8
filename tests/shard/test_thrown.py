"""Exceptions that a thread throws into another one: held back inside the engine, and out at once
outside of it.
"""

from __future__ import annotations

import ctypes
import operator
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from shard.loop import interrupts, thrown
from shard.loop.driver import Driver
from shard.loop.future import Future
from tests.helpers import ManualClock
from tests.program import PATIENCE_S, wait_until


class Thrown(BaseException):
    """What is thrown."""


class Victim:
    """A thread that goes round in a function until something is thrown into it."""

    def __init__(self, function: Callable[[Victim], object]) -> None:
        self.is_there = threading.Event()
        self.goes_on = True
        self.rounds = 0
        self.came: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()
        assert self.is_there.wait(PATIENCE_S)

    def _run(self, function: Callable[[Victim], object]) -> None:
        try:
            function(self)
        except BaseException as error:
            self.came = error

    @property
    def ident(self) -> int:
        return self._thread.ident or 0

    def end(self) -> BaseException | None:
        """What came out of it."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.came


def go_round(victim: Victim) -> None:
    victim.is_there.set()
    while victim.goes_on:
        victim.rounds += 1


def deliver_at_the_end(victim: Victim) -> None:
    go_round(victim)
    interrupts.deliver()


def call(function: Callable[..., object], *args: object) -> None:
    function(*args)


def in_module(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """The function, as if it were defined in a module of that name."""
    return types.FunctionType(
        function.__code__, {**function.__globals__, "__name__": name}, closure=function.__closure__
    )


def throw(ident: object, kind: object = Thrown) -> int:
    """As the usual recipe does it."""
    return int(ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(kind)))


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    thrown.install()
    yield
    interrupts.held.clear()


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver(polling=False)
    yield made
    made.close()


def test_in_the_application_it_comes_at_once() -> None:
    victim = Victim(go_round)
    assert throw(ctypes.c_long(victim.ident)) == 1
    assert type(victim.end()) is Thrown
    assert not interrupts.held


def test_of_a_handler_that_the_engine_calls_too() -> None:
    victim = Victim(lambda one: in_module("shard.loop.task", call)(go_round, one))
    assert throw(victim.ident) == 1
    assert type(victim.end()) is Thrown


@pytest.mark.parametrize("module", ["shard", "shard.memory.ring", "shard.transport.shm"])
def test_inside_the_engine_it_is_held_back_until_a_safe_point(module: str) -> None:
    inside = in_module(module, go_round)
    victim = Victim(lambda one: (inside(one), interrupts.deliver()))
    assert throw(victim.ident) == 1
    rounds = victim.rounds
    wait_until(lambda: victim.rounds > rounds + 1000)
    assert victim.came is None
    victim.goes_on = False
    assert type(victim.end()) is Thrown
    assert not interrupts.held


def test_that_of_another_thread_is_not_delivered_here() -> None:
    victim = Victim(in_module("shard", deliver_at_the_end))
    assert throw(victim.ident) == 1
    assert not interrupts.is_due()
    interrupts.deliver()
    victim.goes_on = False
    assert type(victim.end()) is Thrown


def test_the_last_one_counts_and_nothing_takes_it_back() -> None:
    """As Python has it of one that is pending."""
    victim = Victim(in_module("shard", deliver_at_the_end))
    assert throw(victim.ident, ValueError) == 1
    assert throw(victim.ident, KeyError) == 1
    victim.goes_on = False
    assert type(victim.end()) is KeyError
    victim = Victim(in_module("shard", deliver_at_the_end))
    assert throw(victim.ident) == 1
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(victim.ident), None) == 1
    victim.goes_on = False
    assert victim.end() is None


def test_a_thread_that_waits_is_woken_and_the_future_is_as_it_was(driver: Driver) -> None:
    future = Future(driver)

    def wait(victim: Victim) -> None:
        victim.is_there.set()
        future.result(PATIENCE_S)

    victims = [Victim(wait) for _ in range(2)]  # one leads, one follows
    for victim in victims:
        assert throw(victim.ident) == 1
        assert type(victim.end()) is Thrown
    driver.reactor.call_soon(lambda: future.set_result("after all"))
    assert future.result(PATIENCE_S) == "after all"


def test_outside_of_the_engine_it_comes_by_itself(driver: Driver) -> None:
    """The progress thread looks again."""
    inside = in_module("shard", go_round)

    def leave(victim: Victim) -> None:
        inside(victim)
        victim.goes_on = True
        go_round(victim)

    victim = Victim(leave)
    assert throw(victim.ident) == 1
    assert interrupts.held
    victim.goes_on = False
    assert type(victim.end()) is Thrown


def test_another_thread_with_the_number_of_one_that_has_ended_gets_none(driver: Driver) -> None:
    victim = Victim(in_module("shard", go_round))
    assert throw(victim.ident) == 1
    (held,) = interrupts.held.values()
    victim.goes_on = False
    victim.end()
    interrupts.held[-threading.get_ident()] = held
    interrupts.deliver()
    interrupts.held[-threading.get_ident()] = held
    wait_until(lambda: not interrupts.held, "the progress thread, that drops it")


def test_after_a_while_it_comes_wherever_the_thread_is(
    driver: Driver, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts.time, "monotonic", clock)
    victim = Victim(in_module("shard", go_round))
    assert throw(victim.ident) == 1
    assert victim.came is None
    clock.now += interrupts.HELD_S_MAX
    assert type(victim.end()) is Thrown


def test_a_thread_that_went_on_between_the_look_and_the_throw_gets_none_there() -> None:
    victim = Victim(go_round)
    other = Victim(go_round)
    frame = sys._current_frames()[other.ident]
    assert thrown.throw_at(frame, victim.ident, Thrown) == 0
    assert thrown.throw_at(sys._current_frames()[victim.ident], victim.ident, Thrown) == 1
    assert type(victim.end()) is Thrown
    other.goes_on = False
    assert other.end() is None


@pytest.mark.parametrize("ident", [0, 12345, ctypes.c_long(12345)])
def test_a_thread_that_is_not_there_gets_none(ident: object) -> None:
    assert throw(ident) == 0
    assert not interrupts.held


def test_types_of_arguments_are_the_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    function: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
    monkeypatch.setattr(function, "argtypes", (ctypes.c_ulong, ctypes.py_object))
    victim = Victim(go_round)
    assert function(victim.ident, Thrown) == 1
    assert type(victim.end()) is Thrown
    with pytest.raises(ctypes.ArgumentError):
        function("no thread", Thrown)


def test_it_is_installed_once() -> None:
    before = ctypes.pythonapi.PyThreadState_SetAsyncExc, sys.unraisablehook
    thrown.install()
    assert before == (ctypes.pythonapi.PyThreadState_SetAsyncExc, sys.unraisablehook)


class OfTheEngine:
    """Its destructor is a function of the engine's."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def note(self) -> None:
        self.ends.append("it ran")

    __del__ = in_module("shard.memory.leases", note)


def throw_and_drop(dropped: list[Any]) -> list[str]:
    """Throw into this thread, and drop what is in the list with no step of Python in between: the
    exception comes as its destructor begins. What the destructor did.
    """
    ends: list[str] = dropped[0].ends
    victim = Victim(go_round)
    assert throw(victim.ident) == 1  # programs throw such exceptions
    assert type(victim.end()) is Thrown
    function = ctypes.PyDLL(None).PyThreadState_SetAsyncExc
    ident, kind = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(Thrown)
    throw_it = partial(function, ident, kind)
    deque(map(operator.methodcaller("__call__"), (throw_it, dropped.clear)), 0)
    return ends


def test_a_destructor_of_the_engine_runs_and_what_was_thrown_comes_after_it() -> None:
    assert throw_and_drop([OfTheEngine()]) == ["it ran"]
    with pytest.raises(Thrown):
        interrupts.deliver()


def test_in_a_destructor_of_the_application_it_is_told_as_ever() -> None:
    def destructor(self: object) -> None:
        raise Thrown

    with pytest.raises(Thrown) as caught:
        destructor(None)
    told: list[Any] = []
    of_python = types.SimpleNamespace(
        exc_type=Thrown, exc_traceback=caught.tb.tb_next, object=destructor
    )
    thrown.unraisable(told.append, of_python)
    assert told == [of_python]
    assert not interrupts.held
