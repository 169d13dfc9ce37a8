"""On whose behalf a handler runs: the peer that asked, and how long it will wait.

A call that a handler makes inherits the deadline: it never waits longer than the one it works for.
A plain handler's time counts from the moment it asks, as it runs in the turn its request arrived
in; a task's from its arrival. What a task calls while it cleans up, after nobody waits for it any
more, has deadlines of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prpc_engine.errors import BadArguments, is_number
from prpc_engine.rpc.job import Caller, Job
from prpc_engine.rpc.message import TIMEOUT_S_MAX
from shard import behalf

# What behalf() is while a handler runs: a Job, or (peer, timeout_ms) for a plain function that
# runs at once: it costs less.


def who_asked() -> Caller | None:
    """Who made the request that is being handled; None outside handlers."""
    caller: Any = behalf()
    if caller is None:
        return None
    asker: Caller = caller.peer if isinstance(caller, Job) else caller[0]
    return asker


def is_asked() -> bool:
    """Whether what runs here is a handler, or was begun by one, of a request that is not over."""
    caller: Any = behalf()
    return caller is not None and not (isinstance(caller, Job) and caller.is_over)


def caller_name() -> str:
    """The address or process that made the request being handled. Raises LookupError outside
    handlers.
    """
    asker = who_asked()
    if asker is None:
        raise LookupError("nobody is calling: caller_name() works in the methods of a server")
    return str(asker.connection.peer)


def remaining_s(clock: Callable[[], float]) -> float | None:
    """Seconds that the caller will still wait for what is being handled; None when it sets no
    bound, was answered already, or outside handlers.
    """
    caller: Any = behalf()
    if caller is None:
        return None
    if isinstance(caller, Job):
        if caller.is_over or not caller.timeout_ms:
            return None
        return max(0.0, caller.deadline - clock())
    timeout_ms: int = caller[1]
    return timeout_ms / 1000 if timeout_ms else None


def inherited_s(timeout_s: float | None, clock: Callable[[], float]) -> float | None:
    """The timeout of a call made here, in seconds: on somebody's behalf it waits no longer than
    that one does.
    """
    remaining = remaining_s(clock)
    if remaining is None or not (timeout_s is None or is_number(timeout_s)):
        return timeout_s  # what is no number is named by wait_in_ms()
    return remaining if timeout_s is None else min(timeout_s, remaining)


def wait_in_ms(timeout_s: float | None, name: str = "timeout_s") -> int:
    """A timeout as the header of a message has it; `name` is what its caller calls it. Raises
    BadArguments.
    """
    if timeout_s is None:
        return 0
    if is_number(timeout_s) and 0.0 <= timeout_s <= TIMEOUT_S_MAX:
        return int(timeout_s * 1000.0) + 1
    raise BadArguments(
        f"{name}={timeout_s!r:.100}: 0 to {TIMEOUT_S_MAX:.0f} seconds are allowed, or None"
    )
