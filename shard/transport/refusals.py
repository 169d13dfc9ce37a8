"""Refusals are written to the log, but not as often as somebody can cause them. `now` comes in;
nothing here reads a clock.
"""

from __future__ import annotations

import logging

# Lines in one window: enough to see who knocks and why. A flood of strangers must not fill the
# disk.
LINES_PER_WINDOW = 10
WINDOW_S = 10.0


class RefusalLog:
    """LINES_PER_WINDOW lines a window; the first line of the next says how many were left out.
    Owned by a Door.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._window_ends = float("-inf")
        self._lines = 0
        self._left_out = 0

    def write(self, now: float, text: str) -> None:
        """Log `text`, or count it."""
        if now >= self._window_ends:
            self._window_ends = now + WINDOW_S
            self._lines = 0
            if self._left_out:
                text += f" (and {self._left_out} refusals before it that were not logged)"
                self._left_out = 0
        if self._lines >= LINES_PER_WINDOW:
            self._left_out += 1
            return
        self._lines += 1
        self._logger.warning("%s", text)
