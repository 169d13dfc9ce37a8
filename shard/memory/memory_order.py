"""What this engine relies on about the order of memory operations, per machine: the only place that
says so.

Rings publish with plain stores: the bytes first, the cursor last. That is right where stores become
visible in program order, which x86-64 promises (Intel SDM vol. 3A, 8.2.2); CPython emits the store
of an aligned 8-byte `memoryview.cast("Q")` element as one move. Machines with weaker order (ARM,
POWER) would need a fence that pure Python does not have, so there the engine refuses to start.

Sleeping needs more: "I sleep" is a store, "is there work?" the load after it, and x86-64 may swap
those two. The one about to sleep therefore runs membarrier(GLOBAL_EXPEDITED), which makes every
registered process run a full fence at once (0.6 us); the ringer needs none. Where the kernel lacks
it, a sleep is bounded by SLEEP_WITHOUT_FENCE_S instead.

A large memcpy() is the exception to the order of stores: libc writes from some MB on by stores that
pass the caches, and those may overtake a plain store before them. A ring does not mind, since what
it writes over has been read. Who writes over what others may still be reading calls store_fence()
between "I begin" and the bytes.
"""

from __future__ import annotations

import ctypes
import os
import platform

from shard import runtime
from shard.errors import ShardError

_SYS_MEMBARRIER_X86_64 = 324
_CMD_QUERY, _CMD_GLOBAL_EXPEDITED, _CMD_REGISTER_GLOBAL_EXPEDITED = 0, 2, 4

# A lost wake-up costs at most this long where membarrier is missing. Long enough to idle at < 1 %
# CPU.
SLEEP_WITHOUT_FENCE_S = 0.001

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_registered_pid = 0
_available = False


def require_store_order() -> None:
    """Refuse machines on which a ring's plain stores could be seen out of order."""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        raise ShardError(
            "shared-memory rings need a machine that keeps stores in order (x86-64); "
            f"this one is {machine!r}: "
            "use transports=['tcp'] there"
        )


def register_fence() -> bool:
    """Let other processes' `fence_all` reach this one; True when the kernel offers it. Once per
    process.
    """
    global _registered_pid, _available
    if _registered_pid != os.getpid():
        offered = _syscall(_SYS_MEMBARRIER_X86_64, _CMD_QUERY, 0, 0)
        _available = (
            offered > 0
            and bool(offered & _CMD_GLOBAL_EXPEDITED)
            and _syscall(_SYS_MEMBARRIER_X86_64, _CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0
        )
        _registered_pid = os.getpid()
    return _available


def fence_all() -> None:
    """A full fence in this process and in every registered one. Call after `register_fence()` said
    True.
    """
    _syscall(_SYS_MEMBARRIER_X86_64, _CMD_GLOBAL_EXPEDITED, 0, 0)


def store_fence() -> None:
    """Stores of this thread before the call are visible before those after it, also those that pass
    the caches: taking a lock is a locked instruction, which waits for all of them (Intel SDM vol.
    3A, 8.2.5). 0.1 us.
    """
    runtime.Lock().acquire(False)  # guards nothing: it is there for that instruction
