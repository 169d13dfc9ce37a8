"""What a peer that means harm may hand over: memfds as it likes."""

from __future__ import annotations

import fcntl
import os

from shard.memory.segment import F_ADD_SEALS


def memfd(size_bytes: int, seals: int, sparse: bool = False) -> int:
    """A descriptor of a memfd with these seals; the caller owns it."""
    fd = os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if sparse:
        os.ftruncate(fd, size_bytes)
    else:
        os.posix_fallocate(fd, 0, size_bytes)
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd
