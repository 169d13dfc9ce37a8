"""Objects that a supervisor's children have, in tests."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np

from prpc_engine.ding import RecvPayload, ShmBufferContainer


class Unpicklable(Exception):
    """An error that cannot cross: it has a lock."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Unreadable(Exception):
    """An error that can be pickled and not be made again."""

    def __init__(self, text: str, more: str) -> None:
        super().__init__(text)
        self.more = more


class Counter:
    """A child's object."""

    kind = "counter"

    def __init__(self, first: int = 0) -> None:
        self.count = first
        self.pid = os.getpid()
        self.lock = threading.Lock()

    def add(self, number: int = 1, *, times: int = 1) -> int:
        self.count += number * times
        return self.count

    def double(self, array: Any) -> Any:
        array *= 2  # what has arrived can be written
        return array

    def fail(self, text: str) -> None:
        raise ValueError(text)

    def fail_unpicklably(self) -> None:
        raise Unpicklable("with a lock")

    def fail_unreadably(self) -> None:
        raise Unreadable("one", "two")

    def get_lock(self) -> Any:
        return self.lock

    def wait_for(self, fifo: str) -> None:
        with open(fifo) as opened:
            opened.read()

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, code: int) -> None:
        os._exit(code)

    def exit(self, code: int) -> None:
        raise SystemExit(code)

    def shut_files(self) -> None:
        """As a process does that becomes a daemon."""
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        while True:
            signal.pause()

    def block_sigterm(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)  # until it is killed

    def image(self, value: int) -> Any:
        return {"image": np.full((4, 84, 84), value, np.uint8)}


def no_counter() -> Counter:
    """What cannot be made."""
    raise LookupError("no such environment")


def move_images(answer: RecvPayload, buffers: dict[int, ShmBufferContainer]) -> None:
    """A shm_callback: images go by shared memory."""
    if answer.method == "image":
        buffers[answer.proc_id].fill(answer.data)
        answer.data = None
