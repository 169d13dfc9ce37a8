"""The sessions of this process at one target, and the watch over their steps."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from tensorflow.python.framework import errors_impl as tf_errors

from prpc_engine.tensorflow.stalls import Awaited, watch
from shard import Task, control_loop


class OpenSessions:
    """The planes of the sessions at one target: each until nobody has it any more. Thread-safe.

    Owned by a TaskServer or a RemoteMaster, which closes it.
    """

    def __init__(self) -> None:
        self._planes: weakref.WeakSet[Any] = weakref.WeakSet()
        # of the set, which must not grow while it is iterated over; any thread opens a session
        self._guard = threading.Lock()
        self._watching: Task | None = None  # from the first session on

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
