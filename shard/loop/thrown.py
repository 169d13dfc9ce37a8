"""Exceptions that one thread throws into another one come out between steps of the engine, as those
of signal handlers do (interrupts.py).

PyThreadState_SetAsyncExc has a thread raise an exception wherever it is: libraries of timeouts,
notebooks and debuggers end a thread so, and reach the function by ctypes.pythonapi. Python offers
no hook, so that one attribute is replaced by a function that holds back:

    the thread is in                               the exception comes
    the application, a handler or a task too       at once
    the engine                                     at the next safe point, or when the thread is
                                                   seen outside of the engine
    the application, whose next step is to drop    the same: Python raises it as the destructor
      an object with a destructor of the engine    begins, where nobody would see it. That runs
                                                   after all, from sys.unraisablehook
    the engine, for HELD_S_MAX so far              where it is

The look where the thread is and the throw are one step of the interpreter, in which no other thread
runs (throw_at()): else the thread could have gone on into the engine in between.

What is thrown past that attribute is not held back: by a function that was taken from it before
the engine was used, by another PyDLL, or in C.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from shard.loop import interrupts

_NAME = "PyThreadState_SetAsyncExc"
_IDENT_MASK = (1 << 8 * ctypes.sizeof(ctypes.c_ulong)) - 1  # programs pass c_long, too
_throw = ctypes.pythonapi[_NAME]
_throw.argtypes = ctypes.c_ulong, ctypes.py_object
_throw.restype = ctypes.c_int
_Base: Any = type(_throw)
_kinds = set[type[BaseException]]()  # of all that was thrown


class _Throw(_Base):  # type: ignore[misc]
    """The function as programs have it, with whatever types of arguments they set."""

    _flags_ = _Base._flags_
    _restype_ = _Base._restype_

    def __call__(self, thread: Any, exception: Any = None) -> int:
        ident = getattr(thread, "value", thread)
        try:
            kind = exception.value if isinstance(exception, ctypes.py_object) else exception
        except ValueError:  # NULL
            kind = None
        if not isinstance(ident, int):
            return int(super().__call__(thread, exception))
        key = -(ident & _IDENT_MASK)
        if not isinstance(kind, type):  # takes back what is pending, or is refused
            was_held = interrupts.held.pop(key, None) is not None
            return int(super().__call__(thread, exception)) or was_held
        return _throw_or_hold(key, kind)


def _throw_or_hold(key: int, kind: type[BaseException]) -> int:
    """Throw it now, or at the next safe point of that thread; how many threads have got it."""
    frame = sys._current_frames().get(-key)
    if frame is None:
        return 0  # there is no such thread
    _kinds.add(kind)
    if interrupts.is_in_engine(frame) or not throw_at(frame, -key, kind):
        _hold(key, kind)
    return 1


def _hold(key: int, kind: type[BaseException]) -> None:
    who = _thread_at(-key)
    raise_it, again = partial(_raise, kind, who), partial(_again, kind, who)
    interrupts.hold(key, interrupts.Delayed(raise_it, time.monotonic(), again))


def unraisable(before: Callable[[Any], object], caught: Any) -> None:
    """As sys.unraisablehook: a destructor that never began runs; what was thrown comes later."""
    frame = getattr(caught.exc_traceback, "tb_frame", None)
    if (
        frame is not None
        and caught.exc_type in _kinds
        and getattr(caught.object, "__code__", None) is frame.f_code
        and interrupts.is_in_engine(frame)
    ):
        caught.object(frame.f_locals["self"])
        _hold(-threading.get_ident(), caught.exc_type)
    else:
        before(caught)


def _again(kind: type[BaseException], who: threading.Thread | None, key: int, since: float) -> None:
    """It is held back: throw it, if that thread is outside of the engine by now."""
    frame = sys._current_frames().get(-key)
    is_gone = frame is None or _thread_at(-key) is not who
    is_over = time.monotonic() - since >= interrupts.HELD_S_MAX
    if not (is_gone or is_over) and interrupts.is_in_engine(frame):
        return
    held = interrupts.held.pop(key, None)
    if held is None or is_gone or frame is None:
        return  # it came to a safe point meanwhile, or there is nobody that it is for
    if is_over:
        _throw(-key, kind)
    elif not throw_at(frame, -key, kind):
        interrupts.held.setdefault(key, held)


def _thread_at(ident: int) -> threading.Thread | None:
    """The thread, where Python knows it: another one may have the number of one that has ended."""
    return next((each for each in threading.enumerate() if each.ident == ident), None)


def throw_at(frame: FrameType, ident: int, kind: type[BaseException]) -> int:
    """Throw it if `frame` is what the thread is in still; how many threads have got it. No function
    in here is one of Python's, so nothing else runs from the look to the throw.
    """
    frames = map(operator.methodcaller("get", ident), iter(sys._current_frames, None))
    is_there = map(partial(operator.is_, frame), frames)
    return int(next(itertools.starmap(_throw, itertools.compress(((ident, kind),), is_there)), 0))


def _raise(
    kind: type[BaseException], who: threading.Thread | None, key: int, frame: FrameType | None
) -> None:
    if _thread_at(-key) is who:
        raise kind


def install() -> None:
    """Hold such exceptions back from now on."""
    before = getattr(ctypes.pythonapi, _NAME)
    if not isinstance(before, _Throw):
        function = _Throw((_NAME, ctypes.pythonapi))
        if before.argtypes is not None:
            function.argtypes = before.argtypes
        function.restype = before.restype
        setattr(ctypes.pythonapi, _NAME, function)
        sys.unraisablehook = partial(unraisable, sys.unraisablehook)
