"""Log records stay one line each, whatever texts of peers are in them. No I/O in this file.

Names of services, sessions, certificates and methods come from peers, and a newline in one would
begin a line of the peer's making in the log; other control characters move the cursor of a
terminal. ONE_LINE is a filter of both loggers, "shard" and "prpc". Tracebacks go through exc_info,
which it leaves alone, as it does Lines.
"""

from __future__ import annotations

import logging
import re

_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """The text with control characters, and those that turn the direction of writing, as backslash
    escapes.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Lines(str):
    """A text of our own that has several lines, as a stack of calls: a record that is such a text
    stays as it is.
    """


class OneLine(logging.Filter):
    """A logging filter that escapes control characters, so that no text of a peer begins a line of
    its own in the log or moves a terminal's cursor. It drops no record.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite a record that holds control characters; others cost one look."""
        if type(record.msg) is Lines:
            return True
        message = record.getMessage()
        if _CONTROL.search(message):
            record.msg, record.args = escaped(message), ()
        return True


ONE_LINE = OneLine()
