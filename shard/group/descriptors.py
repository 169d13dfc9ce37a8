"""Whether a group's file descriptors find room: every lane is a socket and a mapping at each of its
ends.

    application  during the start  of each lane between a shard that has been started and one that
                                   has not, an end waits here: size / 2 shards on either side is the
                                   worst moment
                 afterwards        its own end of one lane for each shard, and what tells of the
                                   process's end
    shard                          an end of a lane for every other process

Shards inherit the limit.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from shard.errors import ShardError
from shard.shortage import shortage_in, shortage_of

END = 2  # descriptors of one end of a lane
# the application's end of its lane, the newborn's ends as they are handed on, pipes of the start,
# the sentinel
PER_SHARD = 10
OTHERS = 64  # what Python, the driver and a few segments of the slab need besides
# that multiprocessing's fork server takes over for one process (256, of which it needs some itself)
FORKSERVER_MAX = 240

logger = logging.getLogger("shard")


def needed(size: int) -> int:
    """By the application at the worst moment of the start of so many shards, besides what it has
    open.
    """
    return END * (size // 2) * (size - size // 2) + PER_SHARD * size + OTHERS


def make_room(size: int, start_method: str) -> None:
    """Raise the soft limit to the hard one where that is needed. Raises ShardError where even that
    is too low.
    """
    if start_method == "forkserver" and END * size > FORKSERVER_MAX:
        raise ShardError(
            f"a group of {size} shards hands each {END * size} file descriptors, "
            f"and start_method='forkserver' passes at most {FORKSERVER_MAX}: use 'spawn'"
        )
    wanted = needed(size) + len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise ShardError(_text(size, wanted, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logger.debug(
        "raised the soft limit of open files from %d to %d: %d shards need up to %d",
        soft,
        hard,
        size,
        wanted,
    )


@contextmanager
def named(size: int) -> Iterator[None]:
    """Say what was wanted where none is left all the same: others in this process, or on this host,
    took them meanwhile.
    """
    try:
        yield
    except (OSError, ShardError) as error:
        shortage = shortage_of(error)
        if shortage is None:
            raise
        if shortage.errno == errno.ENFILE:
            raise ShardError(shortage_in(f"{size} shards", error)) from error
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # so many are open
        raise ShardError(_text(size, needed(size) + soft, soft)) from error


def _text(size: int, wanted: int, allowed: int) -> str:
    return (
        f"a group of {size} shards needs up to {wanted} file descriptors in this process while it "
        f"starts, and {allowed} are "
        f"allowed: raise the limit (`ulimit -n {wanted}`, LimitNOFILE= of systemd, "
        "docker run --ulimit), or make fewer shards"
    )
