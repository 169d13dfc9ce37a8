"""What the two ends of a queue tell each other. No I/O.

    message   from    to      arguments                                  answer
    join      reader  writer  token, rank, the reader's target, pid,     None at the writer's
                              host                                       shutdown; at once why it is
                                                                         refused
    welcome   writer  reader  ticket, max_chunks                         (a note)
    item      writer  reader  number, body, blocks                       (a note)
    ready     writer  reader                                             (a note)
    end       writer  reader  number of the last item                    None: all of them have come
    taken     reader  writer  ticket, number of items dequeued           (a note)
    leave     reader  writer  ticket, whether it was dropped             None

One connection of one lane has them all, so they arrive in order. `join` stays open as long as both
ends are there: it fails when the connection does, and a connection with a call under way is not
idle, so it is never left for a better path.
"""

from __future__ import annotations

from prpc_engine.rpc.message import method_key

JOIN, TAKEN, LEAVE = "join", "taken", "leave"
WELCOME, ITEM, READY, END = "welcome", "item", "ready", "end"
KEYS = {name: method_key(name) for name in (JOIN, TAKEN, LEAVE, WELCOME, ITEM, READY, END)}
# While one waits longer than so, the log says for whom, and again after as long.
TELL_S = 60.0
NO_ROOM_AGAIN_S = 0.01  # between tries where the outbox or the slab had no room
