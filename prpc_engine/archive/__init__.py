"""Values <-> a small typed body and untouched blocks. No I/O here.

    values                                                    where
    None, bool, int, float, str, bytes, list, dict            the body: MessagePack's own types
                                                              (msgspec reads and writes, in C)
    tuple, set, complex, long int, dict with other keys, ...  the body: extension types, wire.py has
                                                              their table
    numpy arrays, tensors, bytes of over 16 KiB,              blocks: 1-D uint8 arrays, the very
    array.array                                               memory of what was given, and at the
                                                              other end the memory that it arrived
                                                              in; dtypes.py, tensors.py, items.py
    dataclasses, Structs, NamedTuples, Enums, other classes   the body, after register(Class) on
                                                              both sides: classes.py
    any other object                                          a pickle, where both sides said
                                                              allow_pickle=True: pickles.py. What
                                                              memory it has is blocks: reducers.py
    without that, one with the buffer protocol or __dlpack__  a numpy array on its memory:
                                                              exporters.py
    the value of a Lazy                                       as without Lazy; inside of one process
                                                              the very object: lazy.py

Anything else is refused with BadArguments, which says where in the value it stands. All types come
back as they were, but: bytearray and memoryview (of bytes, 1-D) as bytes; subclasses of arrays, and
what only shows its memory, as arrays; arrays read-only, C or Fortran order kept, others in C order.

    file          turns
    encoder       values into a body and blocks
    decoder       those into values
    codec         both, under one set of agreements: Archive
    compression   a message into a smaller one
    lazy          ownership over with the message
    keys          nothing: refuses dicts and sets that would take longer than their bytes
"""

from __future__ import annotations

from prpc_engine.archive.classes import register
from prpc_engine.archive.codec import Archive
from prpc_engine.archive.decoder import DECODE_ERRORS, Decoder
from prpc_engine.archive.encoder import Encoder
from prpc_engine.archive.keys import PLAIN_BYTES_MAX
from prpc_engine.archive.lazy import Handover, Lazy, handovers_in
from prpc_engine.archive.wire import ArchiveError, PickleRefused

__all__ = [
    "DECODE_ERRORS",
    "PLAIN_BYTES_MAX",
    "Archive",
    "ArchiveError",
    "Decoder",
    "Encoder",
    "Handover",
    "Lazy",
    "PickleRefused",
    "encode",
    "encode_arguments",
    "handovers_in",
    "register",
]

_default = Encoder()
encode = _default.encode
encode_arguments = _default.encode_arguments
