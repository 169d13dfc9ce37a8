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
ENDS = (
    "the process ends, and its sessions have been ended: a function of atexit that runs steps has "
    "to be registered after prpc_engine.tensorflow was imported"
)

_made: weakref.WeakSet[OpenSessions] = weakref.WeakSet()
os.register_at_fork(after_in_child=_made.clear)  # none of their threads is there


class OpenSessions:
    """The planes of the sessions at one target, until each is collected as garbage. Thread-safe.

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
    """At the end of the process: end all sessions, and wait until their steps have left TensorFlow,
    until then by time.monotonic() at most. Those steps are in daemon threads, as all other threads
    have ended: each of these ends as by sys.exit(), and prints nothing.
    """
    planes = [plane for sessions in list(_made) for plane in sessions.planes()]
    for plane in planes:
        plane.close(_process_ends, ENDS)
    while any(plane.running for plane in planes) and time.monotonic() < until:
        time.sleep(LOOK_S)


def _process_ends(node: Any, op: Any, text: str) -> Any:
    """What a step raises from then on. In the main thread, which runs functions of atexit, an error
    that is seen.
    """
    if threading.current_thread() is threading.main_thread():
        return tf_errors.CancelledError(node, op, text)
    return SystemExit(text)
