"""Which cores of this host are taken, so that two tasks on it never bind their shards to one.

    folder/<core number>    an empty file a core; whoever holds its flock has the core

A lock is held as long as its descriptor is open: to the end of the process, however that comes.
Tasks that see another folder, as in another container, do not see each other's locks; those allowed
on other cores do not meet at all. Files stay when nobody holds them: one that were removed could be
locked by one task while another makes it anew.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from shard.group.cpu import placing_order, topology

logger = logging.getLogger("shard")


class CoreLocks:
    """The cores that one task may bind its shards to. Owned by the process: close() is for one that
    ends its task earlier.

    `cores`: as many as were asked for, the best first; none when there were not enough, and the
    task then binds nothing.
    """

    def __init__(self, cores: tuple[int, ...], fds: tuple[int, ...]) -> None:
        self.cores = cores
        self._fds = fds

    @classmethod
    def take(
        cls, count: int, folder: Path, cores: Iterable[int] | None = None, what: str = "shards"
    ) -> CoreLocks:
        """Lock `count` of the cores that this process may use (or of those given, in that order),
        all or none. `what` is to be bound to them, for the log.

        Never waits and never fails: too few free cores, or a folder that cannot be used, are one
        warning and no cores.
        """
        candidates = list(placing_order(topology()) if cores is None else cores)
        held: dict[int, int] = {}  # core -> descriptor
        try:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            for core in candidates:
                if len(held) == count:
                    break
                fd = _try_lock(folder / str(core))
                if fd is not None:
                    held[core] = fd
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
        else:
            reason = f"the locks are in {folder}"
        locks = cls(tuple(held), tuple(held.values()))
        if len(held) == count:
            return locks
        locks.close()
        logger.warning(
            "no cores to bind %s to: %d asked for, %d of the %d usable ones free; %s",
            what,
            count,
            len(held),
            len(candidates),
            reason,
        )
        return cls((), ())

    def close(self) -> None:
        """Let others have the cores; a second time does nothing."""
        fds, self._fds, self.cores = self._fds, (), ()
        for fd in fds:
            os.close(fd)


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock; None when somebody else does. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd
