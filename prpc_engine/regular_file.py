"""Reads a whole file that a user or a peer named: never waits for a writer, and never reads more
than is allowed.

A path may lead to anything. Opening a FIFO waits for who writes to it, /dev/zero never ends, and a
file of 10 GB that was named by mistake is no secret. So the file is opened without waiting, and
looked at before a byte of it is read.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | Path) -> int:
    """A descriptor for reading a regular file; the caller closes it. Raises OSError, whose strerror
    says what else is there.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:  # a zero byte in the name
        raise OSError(errno.EINVAL, str(error)) from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
            raise OSError(errno.EINVAL, f"it is {kind}, and a regular file is expected")
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular_file(path: str | Path, bytes_max: int | None = None) -> bytes:
    """The whole content of a regular file. Raises OSError, also for one of more than `bytes_max`
    bytes: strerror says why.
    """
    with open(open_regular(path), "rb") as file:
        if bytes_max is None:
            return file.read()
        content = file.read(bytes_max + 1)
        if len(content) > bytes_max:
            size = max(os.fstat(file.fileno()).st_size, len(content))
            raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {bytes_max} are allowed")
        return content
