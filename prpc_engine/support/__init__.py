"""What multi-threaded programs around a service are made of, for those who come from pRPC.

channel         Channel             items from threads to threads, bounded and closable
replicator      ChannelReplicator   one channel's items to every one of several
thread_group    ThreadGroup         so many threads; async_exec() -> AsyncReturn
monitor         Monitor             functions that run again and again, by name
"""

from __future__ import annotations

from prpc_engine.support.channel import Channel
from prpc_engine.support.monitor import Monitor, TaskStatistics
from prpc_engine.support.replicator import ChannelReplicator
from prpc_engine.support.thread_group import AsyncReturn, ThreadGroup

__all__ = [
    "AsyncReturn",
    "Channel",
    "ChannelReplicator",
    "Monitor",
    "TaskStatistics",
    "ThreadGroup",
]
