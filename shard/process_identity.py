"""Which process on which host this is, and whether another one is gone. Used by the names that
runtime.py gives these functions.

A connection that ends says nothing about the process behind it: the network may have cut it. On the
process's own host one can look. A process is known by boot id, pid namespace, pid and start time,
so that a reused pid is not taken for it.
"""

from __future__ import annotations

import os
from pathlib import Path

# Fields of /proc/pid/stat from behind the name, which may hold spaces: in proc(5) state is 3, flags
# 9, start time 22.
STATE, FLAGS, START_TIME = 0, 6, 19
# set before the kernel closes a dying process's sockets: whoever sees those closed sees this
PF_EXITING = 0x4


def _host() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def this_process() -> str:
    """host/pid/start time, for process_is_gone()."""
    return f"{_host()}/{os.getpid()}/{_stat(os.getpid())[START_TIME]}"


def process_is_gone(home: str) -> bool:
    """Whether that process certainly runs no more. False for one of another host: nobody here sees
    it.
    """
    host, _, process = home.rpartition("/")
    host, _, pid = host.rpartition("/")
    if host != _host() or not pid.isdecimal():
        return False
    try:
        fields = _stat(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return True
    return (
        fields[START_TIME] != process
        or fields[STATE] in "ZX"
        or bool(int(fields[FLAGS]) & PF_EXITING)
    )
