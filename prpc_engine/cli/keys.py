"""Keys pressed at a terminal, one at a time and without Enter."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from collections import deque
from types import TracebackType
from typing import Any

# What terminals send for a key that is no character -> its name; all others go by their character.
NAMES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
}
_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
BYTES_MAX = 1024  # at a time


class Keys:
    """What is typed at standard input while the block runs; nothing where that is no terminal.

    Ctrl-C stays a signal. The terminal is as before when the block ends.
    """

    def __init__(self) -> None:
        self._input = -1
        self._before: list[Any] = []
        self._typed: deque[str] = deque()

    def __enter__(self) -> Keys:
        # A job in the background would be stopped by the change of the terminal.
        with contextlib.suppress(OSError, ValueError, AttributeError, termios.error):
            descriptor = sys.stdin.fileno()
            if os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp():
                self._before = termios.tcgetattr(descriptor)
                tty.setcbreak(descriptor)
                self._input = descriptor
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> str:
        """The next key, by its name or character; "" when none came within so many seconds."""
        until = time.monotonic() + seconds
        while not self._typed:
            left_s = max(0.0, until - time.monotonic())
            if self._input < 0:
                time.sleep(left_s)
                return ""
            if not select.select([self._input], [], [], left_s)[0]:
                return ""
            got = os.read(self._input, BYTES_MAX)
            if not got:  # it hung up
                self._input = -1
            self._typed.extend(_names(got))
        return self._typed.popleft()


def _names(got: bytes) -> list[str]:
    keys = (key.replace(b"\x1bO", b"\x1b[") for key in _KEY.findall(got))
    return [NAMES.get(key) or key.decode("latin-1") for key in keys]
