"""What is let go of without close(): closed all the same, and said by a ResourceWarning, as files
and sockets say it.

Python may find it at any moment, in any thread, in the middle of anything that makes objects.
Closing waits for the reactor, which that very thread may be turning: so it has a thread of its own,
which is started without a lock. At the end of the interpreter, and in a fork, nothing is done: the
process's end closes what it had, and a fork's parent goes on with it.
"""

from __future__ import annotations

import _thread
import logging
import os
import sys
import warnings
from collections.abc import Callable

logger = logging.getLogger("prpc")


def close_dropped(what: object, name: str, close: Callable[[], object], pid: int) -> None:
    """To be called by the __del__ of `what`, made in process `pid`, where close() was never
    called.
    """
    if sys.is_finalizing() or pid != os.getpid():
        return

    def run() -> None:
        try:
            close()
        except Exception:
            logger.exception("%s was dropped without close(), and closing it failed", name)

    try:
        text = (
            f"{name} was dropped without close(), and is closed now: use it in a `with` block, "
            "or call close()"
        )
        warnings.warn(text, ResourceWarning, stacklevel=3, source=what)
    finally:  # also where warnings are errors
        _thread.start_new_thread(run, ())
