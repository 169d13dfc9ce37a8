"""A request that is not answered in the turn it arrived in: queued, then a task, then its answer.

    state     event                               next
    queued    one of the server's tasks ended     running, or dropped when the deadline has passed
    queued    CANCEL, the peer is lost            dropped
    running   it ends                             answered
    running   the deadline passes                 cut: the caller is told DEADLINE
    running   CANCEL; lost peer of a stream       ended, its `finally` blocks run; a unary call of a lost peer runs to its end

So many tasks run at a time, so many calls and bytes wait (server.Bounds); what is over that is refused, and the caller told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from prpc_engine.halves import Inbox, Window
from shard import Timer

if TYPE_CHECKING:
    from prpc_engine.peer import Peer


class Job(msgspec.Struct, eq=False):
    """One request. Made and changed in the reactor's thread."""

    peer: Peer
    call_id: int  # 0: a notification
    timeout_ms: int  # 0: the caller waits as long as the connection lasts
    deadline: float  # on the reactor's clock; meaningless when timeout_ms is 0
    key: int  # the method
    arguments: Sequence[Any]
    nbytes: int  # as it arrived
    is_queued: bool = False
    inbox: Inbox | None = None  # of a stream
    window: Window | None = None
    cancel: Callable[[BaseException], object] | None = None  # set by the server as the job goes through its states
    timer: Timer | None = None
