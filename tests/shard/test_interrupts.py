"""Signal handlers of the application: held back inside the engine, run outside of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator

import pytest

from shard.loop import interrupts
from shard.loop.driver import Driver
from shard.loop.future import Future
from tests.helpers import ManualClock
from tests.program import PATIENCE_S, ROOT

NUMBER = signal.SIGUSR2


class Interrupted(Exception):
    """What the handler raises."""


def interrupt(number: int, frame: types.FrameType | None) -> None:
    raise Interrupted


@pytest.fixture(autouse=True)
def main_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert threading.current_thread() is threading.main_thread(), "signals are handled there alone"
    before = signal.getsignal(NUMBER)
    monkeypatch.setattr(interrupts, "_engine", {"shard", "layer"})
    monkeypatch.setattr(interrupts, "_applications", {"layer.tools"})
    yield
    signal.signal(NUMBER, before)
    interrupts.held.clear()


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver(polling=False)
    yield made
    made.close()


def in_module(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """The function, as if it were defined in a module of that name."""
    return types.FunctionType(
        function.__code__,
        {**function.__globals__, "__name__": name},
        closure=function.__closure__,
    )


def raise_signal() -> str:
    signal.raise_signal(NUMBER)
    return "went on"


def call(function: Callable[..., object], *args: object) -> object:
    return function(*args)


@pytest.mark.parametrize("module", ["shard", "shard.memory.ring", "layer.calls"])
def test_inside_the_engine_it_is_held_back_until_a_safe_point(driver: Driver, module: str) -> None:
    signal.signal(NUMBER, interrupt)
    assert in_module(module, raise_signal)() == "went on"
    with pytest.raises(Interrupted):
        interrupts.deliver()
    interrupts.deliver()  # once


def test_one_that_comes_while_others_are_woken_for_it_is_held_back_as_well(
    driver: Driver,
) -> None:
    """The progress thread repeats what is held: each repetition would wake it again, and so on."""
    signal.signal(NUMBER, interrupt)
    woken = []

    def wake() -> None:
        woken.append(None)
        in_module("shard", raise_signal)()

    interrupts.install(woken, wake)
    try:
        assert in_module("shard", raise_signal)() == "went on"
    finally:
        interrupts.leave(woken)
    assert len(woken) == 1
    with pytest.raises(Interrupted):
        interrupts.deliver()


@pytest.mark.parametrize(
    "module", ["__main__", "trainer", "shards", "layer.tools.top", "layer.tools"]
)
def test_in_the_application_it_runs_at_once(driver: Driver, module: str) -> None:
    signal.signal(NUMBER, interrupt)
    with pytest.raises(Interrupted):
        in_module(module, raise_signal)()


def test_of_an_application_that_the_engine_calls_too(driver: Driver) -> None:
    signal.signal(NUMBER, interrupt)
    with pytest.raises(Interrupted):
        in_module("shard.loop.task", call)(raise_signal)


def test_what_a_callback_raises_would_be_lost_so_it_is_held_back_there(driver: Driver) -> None:
    signal.signal(NUMBER, interrupt)
    assert in_module("shard.loop.future", call)(raise_signal) == "went on"
    with pytest.raises(Interrupted):
        interrupts.deliver()


def test_a_handler_that_was_set_past_us_is_found_while_the_engine_is_used(driver: Driver) -> None:
    interrupts._signal(NUMBER, interrupt)  # as `from signal import signal` before gives it
    while interrupts._is_bare(interrupts._getsignal(NUMBER)):
        with pytest.raises(TimeoutError):
            Future(driver).result(0.01)
    assert in_module("shard", raise_signal)() == "went on"
    with pytest.raises(Interrupted):
        interrupts.deliver()


@pytest.mark.parametrize("library", ["threading", "numpy.linalg", "logging.handlers"])
def test_a_library_is_of_whoever_called_it(driver: Driver, library: str) -> None:
    signal.signal(NUMBER, interrupt)
    of_library = in_module(library, raise_signal)
    assert in_module("shard.loop.reactor", call)(of_library) == "went on"
    with pytest.raises(Interrupted):
        interrupts.deliver()
    with pytest.raises(Interrupted):
        call(of_library)


def test_whoever_waits_is_interrupted_and_the_future_is_as_it_was(driver: Driver) -> None:
    signal.signal(NUMBER, interrupt)
    future = Future(driver)
    main = threading.main_thread().ident or 0
    driver.reactor.call_soon(lambda: signal.pthread_kill(main, NUMBER))
    with pytest.raises(Interrupted):
        future.result(PATIENCE_S)
    driver.reactor.call_soon(lambda: future.set_result("after all"))
    assert future.result(PATIENCE_S) == "after all"


def test_a_handler_may_wait_for_the_engine_itself(driver: Driver) -> None:
    inner, outer, seen = Future(driver), Future(driver), list[object]()

    def wait(number: int, frame: types.FrameType | None) -> None:
        driver.reactor.call_soon(lambda: inner.set_result("inner"))
        seen.append(inner.result(PATIENCE_S))
        driver.reactor.call_soon(lambda: outer.set_result("outer"))

    signal.signal(NUMBER, wait)
    main = threading.main_thread().ident or 0
    driver.reactor.call_soon(lambda: signal.pthread_kill(main, NUMBER))
    assert outer.result(PATIENCE_S) == "outer"
    assert seen == ["inner"]


def test_outside_of_the_engine_it_comes_by_itself(driver: Driver) -> None:
    """Nobody waits: the progress thread has Python look again."""
    signal.signal(NUMBER, interrupt)
    assert in_module("shard", raise_signal)() == "went on"
    with pytest.raises(Interrupted):
        threading.Event().wait(PATIENCE_S)


def test_while_no_engine_runs_it_runs_at_once_as_nobody_would_repeat_it() -> None:
    Driver(polling=False).close()
    signal.signal(NUMBER, interrupt)
    with pytest.raises(Interrupted):
        in_module("shard", raise_signal)()


def test_one_that_is_held_back_as_the_last_engine_ends_comes_after_it() -> None:
    driver = Driver(polling=False)
    signal.signal(NUMBER, interrupt)
    reactor_closes = driver.reactor.close

    def close() -> None:
        reactor_closes()
        in_module("shard", raise_signal)()

    driver.reactor.close = close  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        driver.close()
        threading.Event().wait(PATIENCE_S)


def test_after_a_while_it_runs_wherever_the_main_thread_is(
    driver: Driver, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts.time, "monotonic", clock)
    signal.signal(NUMBER, interrupt)
    engine = in_module("shard", raise_signal)
    assert engine() == "went on"
    clock.now += interrupts.HELD_S_MAX
    with pytest.raises(Interrupted):
        engine()


def test_no_program_sees_the_wrapper(driver: Driver) -> None:
    assert signal.signal(NUMBER, interrupt) is signal.SIG_DFL
    assert signal.getsignal(NUMBER) is interrupt
    assert signal.signal(NUMBER, signal.SIG_DFL) is interrupt
    assert signal.getsignal(NUMBER) is signal.SIG_DFL
    with pytest.raises((TypeError, ValueError)):
        signal.signal(NUMBER, "handler")  # type: ignore[arg-type]


def test_asyncio_still_finds_pythons_own_handler_of_ctrl_c(driver: Driver) -> None:
    """Its Runner cancels the main task on Ctrl-C only where it does."""

    async def main() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(PATIENCE_S)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())


PROGRAM = """
import os, signal, time
from shard.loop import interrupts
from shard.loop.driver import Driver
driver = Driver(polling=False)
def hold(handler):
    one = interrupts.Delayed(handler, time.monotonic(), interrupts.repeat_signal)
    interrupts.hold(signal.SIGTERM, one)
{body}
"""
ENDINGS = {
    # a handler that is taken away while it is held back: the system's own action ends nobody
    "hold(lambda *_: None)\n"
    "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
    "interrupts.try_again()\n"
    "driver.close(); print('alive')": "alive",
    # a child has none of its parent's
    "hold(lambda *_: print('parent'))\n"
    "pid = os.fork()\n"
    "if not pid: interrupts.deliver(); print('child', flush=True); os._exit(0)\n"
    "os.waitpid(pid, 0); interrupts.deliver(); driver.close()": "child\nparent",
    # who ignores Ctrl-C goes on ignoring it
    "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    "signal.raise_signal(signal.SIGINT); driver.close(); print('alive')": "alive",
}


@pytest.mark.parametrize("body", ENDINGS)
def test_a_process(body: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM).format(body=body)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=ROOT,
    )
    assert (ended.stdout.strip(), ended.returncode) == (ENDINGS[body], 0), ended.stderr
