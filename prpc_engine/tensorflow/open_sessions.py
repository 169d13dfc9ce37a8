"""The sessions of this process at one target, and the watch over their steps."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

from tensorflow.python.framework import errors_impl as tf_errors

from prpc_engine.tensorflow.stalls import Awaited, watch
from shard import Task, control_loop

LOOK_S = 0.001  # at the end of the process, between two looks at what runs

_made: weakref.WeakSet[OpenSessions] = weakref.WeakSet()
os.register_at_fork(after_in_child=_made.clear)  # none of their threads is there


class OpenSessions:
    """The planes of the sessions at one target: each until nobody has it any more. Thread-safe.

    Owned by a TaskServer or a RemoteMaster, which closes it.
    """

    def __init__(self) -> None:
        self._planes: weakref.WeakSet[Any] = weakref.WeakSet()
        # of the set, which must not grow while it is iterated over; any thread opens a session
        self._guard = threading.Lock()
        self._watching: Task | None = None  # from the first session on
        _made.add(self)

    def add(self, plane: Any) -> None:
        """Of a new session."""
        with self._guard:
            self._planes.add(plane)
            if self._watching is None:
                self._watching = control_loop().spawn(watch(self._calls))

    def planes(self) -> list[Any]:
        """That there are now."""
        with self._guard:
            return list(self._planes)

    def _calls(self) -> list[Awaited]:
        return [one for plane in self.planes() for one in plane.calls_under_way.copy().values()]

    def reset(self) -> None:
        """End them all with AbortedError: their target is reset."""
        for plane in self.planes():
            plane.close(tf_errors.AbortedError, "the session was ended: its target was reset")

    def close(self) -> None:
        """Watch them no longer."""
        if self._watching is not None:
            self._watching.cancel()


def end_sessions(until: float) -> None:
    """At the end of the process: end all steps, and wait until they have left TensorFlow, until
    then by time.monotonic() at most. They are in daemon threads, as all others have ended: each
    ends as by sys.exit(), without a word.
    """
    planes = [plane for sessions in list(_made) for plane in sessions.planes()]
    for plane in planes:
        plane.close(_thread_ends, "the process ends")
    while any(plane.running for plane in planes) and time.monotonic() < until:
        time.sleep(LOOK_S)


def _thread_ends(node: object, op: object, text: str) -> SystemExit:
    """In the place of an error of TensorFlow."""
    return SystemExit(text)
