"""What one node says to another: a fixed header, then an archive. No I/O here.

    offset  size  field       meaning
         0     1  kind        REQUEST, NOTIFY, REPLY, FAILURE, CANCEL, OPEN, ITEM, CREDIT, END,
                              REPEAT
         1     1  side        ITEM, CREDIT, END: 0 from the caller, 1 to the caller;
                              OPEN: 1 when the caller sends no items before it gets credit
                              (NO_CREDIT); else 0
         2     2  status      FAILURE: a Status; else 0
         4     4  target      REQUEST, REPEAT, NOTIFY, OPEN: the number the master gave the server;
                              CREDIT: how many; ITEM: its number in this direction, from 0 on; END:
                              how many items there were; both modulo 2**32; else 0
         8     8  call_id     pairs what belongs to one request; no other one of that node has it. 0
                              for NOTIFY
        16     4  method      REQUEST, REPEAT, NOTIFY, OPEN: CRC-32 of the method's name; else 0
        20     4  timeout_ms  REQUEST, REPEAT, OPEN: how long the caller waits; 0: as long as the
                              connection lasts
        24   ...  archive     REQUEST, REPEAT, NOTIFY, OPEN: list of arguments; REPLY, ITEM: the
                              value; FAILURE: [type name, message, traceback]

A call is a REQUEST, answered by one REPLY or FAILURE. A stream is an OPEN, then ITEMs of both sides
as far as the other's CREDIT goes (stream.py), an END of each side that sent any, and at last the
server's REPLY or FAILURE. CANCEL gives either up.

A REPEAT is a REQUEST that was sent before over a connection that was lost since, to the same
process and with the same number: a method that must not run twice is known by that number and the
name that the caller proved (once.py).

Large messages and small ones may overtake each other (shard/transport). So items have numbers; END
and CANCEL go over every lane, and may arrive more than once; and the caller sends no item that
could overtake a large OPEN.

All integers little-endian. Incarnation and version belong to the connection and were checked in its
handshake. A method goes by number because a name would cost both sides more than the rest of the
header; a server whose names collide is refused.
"""

from __future__ import annotations

import enum
import struct
import zlib

# Kind, side and status are packed as one number, 65536 * status + 256 * side + kind, which a REPLY
# and most REQUESTs have none of but the kind: a field less costs a call 20 ns each time.
HEADER = struct.Struct("<IIQII")
assert HEADER.size == 24  # the table above
SIDE_SHIFT, STATUS_SHIFT, KIND_MASK = 8, 16, 0xFF
REQUEST, NOTIFY, REPLY, FAILURE, CANCEL, OPEN, ITEM, CREDIT, END, REPEAT = range(1, 11)
FROM_CALLER, TO_CALLER = 0, 1
WITH_CREDIT, NO_CREDIT = 0, 1
TIMEOUT_S_MAX = 4_000_000.0  # 46 days: milliseconds that 32 bits hold


class Status(enum.IntEnum):
    """Why a request has no value: the code of a FAILURE message. The numbers are part of the
    protocol.
    """

    UNKNOWN_SERVICE = 1
    UNKNOWN_METHOD = 2
    BAD_ARGUMENTS = 3
    BACKPRESSURE = 4
    HANDLER_RAISED = 5
    BAD_RESULT = 6  # the handler's value cannot be put into a message
    DEADLINE = 7  # passed before the handler was done
    STOPPING = 8  # the server takes on nothing new
    CANCELLED = 9  # by the handler's side
    NOT_ALLOWED = 10  # this caller, that method
    FORGOTTEN = 11  # the call came again, and the server cannot know any more whether it ran


def method_key(name: str) -> int:
    """A method's number on the wire."""
    return zlib.crc32(name.encode())
