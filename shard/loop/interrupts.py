"""Signal handlers of the application run between steps of the engine, never inside one.

Python runs the handler of a signal between any two bytecodes of the main thread, and what it raises
(Ctrl-C raises KeyboardInterrupt) comes out there: between a message that was taken from a ring and
the call that it answers, or inside a lock's bookkeeping. No code in Python can be written so that
each such place is a good one. So the handlers are held back: the stack of the signal's frame says
where the main thread is.

    innermost function that is no library's    the handler runs
    of the application                         at once
    the same, called by the engine as a        at once: it may run for long
      request's handler or a task
    the same, called by the engine otherwise   at the next safe point: what a callback raises, or
                                               what packs an object, goes elsewhere
    of the engine                              at the next safe point
    all of these, for HELD_S_MAX so far        where it is: no fault of ours costs anybody Ctrl-C
    all of these, while no engine runs         at once: no thread of an engine would call the
                                               handler again later

A safe point is a call of deliver(): each wait makes one before each try to lead, with no lead and
no lock in hand, so a handler may make calls of its own. So is any moment outside of the engine:
try_again(), which threads of the engine call now and then, has Python look again. The path of a
call pays for one look at `held`.

Python offers no hook for that, so signal.signal() and signal.getsignal() of the process are
replaced by ones that wrap handlers and unwrap them; no program sees a wrapper. Those that were set
in another way (by a `signal` that was imported before) are found by look(), and wrapped at the next
safe point. Exceptions that one thread throws into another are held back by the same means
(thrown.py).
"""

from __future__ import annotations

import _signal as _signal_module  # type: ignore[import-not-found]
import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

# How long a handler is held back at most, in seconds. The engine's steps take microseconds; copies
# of large arrays and connecting take longer, and hold no lead.
HELD_S_MAX = 1.0
LAST_S = 0.01  # between two repetitions, once the last engine has ended

Handler = Callable[[int, FrameType | None], Any]

# Packages whose functions are the engine's, those inside them that are applications, and modules
# that call requests' handlers and tasks.
_engine: set[str] = {"shard"}
_applications: set[str] = set()
_handlers_callers: set[str] = {"shard.loop.task"}
# What the engine and applications call alike: who called it decides.
_LIBRARIES = sys.stdlib_module_names | {
    *("cloudpickle", "dill", "msgspec", "multiprocess", "numpy", "psutil")
}
_PREFIXES_MAX = 3  # names of modules are looked at to this depth


class Delayed(NamedTuple):
    """What is held back, and since when. `handler` runs at a safe point; `again` is called now and
    then by other threads, with the key and `since`: the thread may be outside of the engine by now.
    """

    handler: Handler
    since: float
    again: Callable[[int, float], None]


# What is held back: by number of a signal, for the main thread; by minus the ident of a thread that
# an exception is thrown into. Changed by one store or deletion at a time.
held: dict[int, Delayed] = {}
# Of what threads sleep in: one of each engine that runs; its threads repeat what is held.
_wakes: dict[int, Callable[[], None]] = {}
# Between a look whether a signal is held and its repetition, no handler may be taken away: the
# system's own action would end the process.
_repeating = threading.Lock()
_signal, _getsignal = signal.signal, _signal_module.getsignal  # without its enums: 10 times as fast
_get_enum = signal.getsignal
_NUMBERS = tuple(signal.valid_signals())
_is_installed = False


class _Wrapped:
    """A handler of the application, as Python has it."""

    __slots__ = ("handler",)

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        before = held.get(number)
        since = time.monotonic() if before is None else before.since
        if _wakes and is_in_engine(frame) and time.monotonic() - since < HELD_S_MAX:
            hold(number, Delayed(self.handler, since, repeat_signal))
            return None
        held.pop(number, None)
        return self.handler(number, frame)


def hold(key: int, one: Delayed) -> None:
    """Hold it back, and wake the thread, if it sleeps: it is to come to a safe point."""
    before = held.get(key)
    held[key] = one
    # Once: others repeat a signal while we wake them, and we would never be done.
    if before is None:
        for wake in tuple(_wakes.values()):
            wake()
        if not _wakes:
            # threading's own would take locks
            _thread.start_new_thread(_see_to_the_last, ())


def belongs_to_engine(
    package: str, but: tuple[str, ...] = (), handlers: tuple[str, ...] = ()
) -> None:
    """Hold signals back in functions of this package; `but`: of its packages that are applications;
    `handlers`: its modules that call requests' handlers.
    """
    _engine.add(package)
    _applications.update(f"{package}.{each}" for each in but)
    _handlers_callers.update(f"{package}.{each}" for each in handlers)


def is_in_engine(frame: FrameType | None) -> bool:
    """Whether the engine would have to be left in the middle of something: the table at the file's
    head.
    """
    in_application = False
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "?"))
        if name.partition(".")[0] not in _LIBRARIES:
            prefixes = _prefixes(name)
            if _engine.isdisjoint(prefixes) or not _applications.isdisjoint(prefixes):
                in_application = True
            else:
                return not (in_application and name in _handlers_callers)
        frame = frame.f_back
    return False


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")[:_PREFIXES_MAX]
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def deliver() -> None:
    """Run what is held back of this thread, at a safe point of it; raises what it raises."""
    me = threading.get_ident()
    for key in tuple(held):
        if _thread_of(key) == me:
            entry = held.pop(key, None)
            if entry is not None:  # else a handler that ran here waited, and delivered it
                entry.handler(key, sys._getframe(1))


def is_due() -> bool:
    """Whether something of this thread is held back."""
    me = threading.get_ident()
    return any(_thread_of(key) == me for key in tuple(held))


def _thread_of(key: int) -> int:
    return -key if key < 0 else _main()


def is_main() -> bool:
    """Whether this is the main thread."""
    return threading.get_ident() == _main()


def try_again() -> None:
    """Have threads look whether they are outside of the engine now, and end what they sleep in.
    From any other thread.
    """
    with _repeating:
        for key, entry in tuple(held.items()):
            entry.again(key, entry.since)


def repeat_signal(number: int, since: float) -> None:
    """Have its handler called again, in the main thread."""
    if isinstance(_getsignal(number), _Wrapped):
        signal.pthread_kill(_main(), number)


def _wait(number: int, since: float) -> None:
    """No signal has come: its handler is to be wrapped at a safe point."""


def look() -> None:
    """Find handlers that are not wrapped, and ask the main thread to wrap them at its next safe
    point. From any other thread; takes some 5 us.
    """
    if not _is_installed:
        return
    found = [number for number in _NUMBERS if _is_bare(_getsignal(number))]
    if not found or not is_in_engine(sys._current_frames().get(_main())):
        return  # in the latter case, there is nothing to hold back from, and no safe point to come
    for number in found:
        held.setdefault(number, Delayed(_wrap, time.monotonic(), _wait))


def _is_bare(handler: object) -> bool:
    return callable(handler) and not isinstance(handler, _Wrapped)


def _main() -> int:
    return threading.main_thread().ident or 0


def _wrap(number: int, frame: FrameType | None) -> None:
    """In the main thread, which alone may."""
    handler = _getsignal(number)
    if _is_bare(handler):
        _signal(number, _Wrapped(handler))


def install(owner: object, wake: Callable[[], None]) -> None:
    """Hold handlers back from now on, those that there are (in the main thread) and those to come.
    wake() ends what the main thread may sleep in, until leave(owner).
    """
    global _is_installed
    _wakes[id(owner)] = wake
    if not _is_installed:
        _is_installed = True
        signal.signal, signal.getsignal = _set, _get
    if threading.current_thread() is threading.main_thread():
        for number in _NUMBERS:
            _wrap(number, None)


def leave(owner: object) -> None:
    """Its wake() is called no more."""
    _wakes.pop(id(owner), None)
    if _is_owed() and not _wakes:  # not delivered here: the engine is in the middle of its end
        _thread.start_new_thread(_see_to_the_last, ())


def _is_owed() -> bool:
    """Whether something that has come is held."""
    return any(one.again is not _wait for one in tuple(held.values()))


def _see_to_the_last() -> None:
    """Do what the threads of an engine do while one runs: repeat what is held until its handler has
    run. It may never run (the handler was taken away, the thread has ended), so this gives up.
    """
    give_up_at = time.monotonic() + 2 * HELD_S_MAX
    while _is_owed() and not _wakes and time.monotonic() < give_up_at:
        try_again()
        time.sleep(LAST_S)  # nothing tells when a thread leaves the engine's functions


def _set(signalnum: Any, handler: Any) -> Any:
    """As signal.signal."""
    with _repeating:
        before = _signal(signalnum, _Wrapped(handler) if callable(handler) else handler)
    return before.handler if isinstance(before, _Wrapped) else before


def _get(signalnum: Any) -> Any:
    """As signal.getsignal."""
    handler = _get_enum(signalnum)
    return handler.handler if isinstance(handler, _Wrapped) else handler


def _forget() -> None:
    """A child made by fork() has its parent's handlers, and none of its signals."""
    global _repeating
    held.clear()
    _wakes.clear()
    _repeating = threading.Lock()  # the parent's may be held by a thread that is not here


os.register_at_fork(after_in_child=_forget)
