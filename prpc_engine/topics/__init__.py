"""Topics: one process publishes, any number read, each on its own host from one copy.

    with topics.Publisher(service, "weights", mode="latest") as publisher:
        version = publisher.publish(state, changed_since=0)
        version = publisher.publish(state, changed_since=version)   # what has changed

    with topics.Subscriber(service, "weights") as subscriber:
        item = subscriber.receive(timeout_s=5)                      # item.value, item.version

Readers ask, and are answered when there is something: so a slow one holds up nobody but where that
is asked for, what is lost on the way is given again, and a dead one is noticed. The items: backlog
(what waits for whom), tree (from whom another host has it), publisher, subscriber; deltas for
weights.
"""

from __future__ import annotations

from prpc_engine.topics.backlog import CAPACITY
from prpc_engine.topics.publisher import Publisher, ReaderStatistics
from prpc_engine.topics.subscriber import Item, Subscriber, TakenOff

__all__ = ["CAPACITY", "Item", "Publisher", "ReaderStatistics", "Subscriber", "TakenOff"]
