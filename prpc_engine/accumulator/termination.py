"""What SIGTERM does in a process that would just die of it: servers are closed first, so that they
save what they hold.

A handler is set where there is none (SIG_DFL), by the main thread, once. At the first SIGTERM it
restores SIG_DFL, so that a second one ends the process at once, and starts a thread that closes the
servers and sends the signal again. A thread of its own, for once: the main one may be what drives
the reactor that close() waits for; the control loop may not block, and what close() awaits runs
there; and a thread of run_blocking() may not be free. It is there while the process ends.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Protocol

from shard import runtime

logger = logging.getLogger("prpc")


class Closable(Protocol):
    """What on SIGTERM is closed before the process ends, so that nothing is lost that waits to be
    pushed.
    """

    def close(self) -> None:
        """Save it."""

    def wait_closed(self) -> None:
        """Return when the close() of another thread is over, too."""


_waiting: weakref.WeakSet[Closable] = weakref.WeakSet()
_pid = 0  # of the process that set the handler


def close_at_sigterm(one: Closable) -> None:
    """Close it when SIGTERM comes, unless the program handles that signal itself, or this is not
    its main thread.
    """
    global _pid
    _waiting.add(one)
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _on_terminate)
        _pid = os.getpid()


def _on_terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    if _pid != os.getpid():  # a fork: nothing in it is ours
        os.kill(os.getpid(), number)
        return
    runtime.Thread(target=_close_and_die, args=(number,), name="prpc-accumulator-sigterm").start()


def _close_and_die(number: int) -> None:
    for one in list(_waiting):
        try:
            one.close()
            one.wait_closed()
        except Exception:
            logger.exception("%s was not saved at SIGTERM", one)
    os.kill(os.getpid(), number)
