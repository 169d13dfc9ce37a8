"""The extension types of a body: their codes, their bounds, and the error for bytes that break
them.

    code  value                payload
       1  tuple                MessagePack array of its items
       2  numpy array          MessagePack [block number, dtype, shape], and "F" as a fourth item
                               for Fortran order
       3  bytes                MessagePack block number: bytes of over BYTES_INLINE_MAX
       4  int over 64 bits     two's complement, little-endian
       5  numpy scalar         MessagePack [dtype, bytes]
       6  complex              two little-endian doubles
       7  set                  MessagePack array of its items
       8  frozenset            MessagePack array of its items
       9  dict                 MessagePack array of key, value, key, value, ...: one with keys that
                               MessagePack's maps lack
      10  of a known class     MessagePack [name, what its `pack` made of it]: see classes.py
      11  array of StringDType MessagePack [shape, items]
      12  tensor               MessagePack [library, block number, dtype, shape]: C order, see
                               tensors.py
      13  pickle               MessagePack [pieces of its stream, each bytes or a block number,
                               block numbers of its buffers]: see pickles.py
      14  compressed message   MessagePack [algorithm, body size, sizes of the blocks]: see
                               compression.py
      15  object of a Lazy     MessagePack block number: of a block that only comes from this very
                               process, see lazy.py
      16  tensor of a device   MessagePack [library, receiver's device, block number, dtype, shape,
                               share or nil]: see device_tensors.py

A dtype is written as dtypes.py says. Codes 0 and 17 to 127 are free; -1 is MessagePack's own
timestamp.
"""

from __future__ import annotations

from prpc_engine.errors import Rejected

TUPLE, ARRAY, BYTES, INTEGER, SCALAR, COMPLEX = 1, 2, 3, 4, 5, 6
SET, FROZENSET, MAP, CLASS, STRINGS, TENSOR, PICKLE, COMPRESSED, HANDOVER, DEVICE = (
    7,
    8,
    9,
    10,
    11,
    12,
    13,
    14,
    15,
    16,
)

# Longer bytes travel as a block, so that a large payload is not copied through the encoder.
BYTES_INLINE_MAX = 16 << 10
DEPTH_MAX = 64  # of containers in containers; Python's and msgspec's recursion limits are far above
# A container is at most two extension types (a class, and the dict that it packs to); a compressed
# message is one more.
EXTENSION_DEPTH_MAX = 2 * DEPTH_MAX + 3
# 8192 bits: keys and hashes, and no way to make us compute with megabytes of digits
INTEGER_BYTES_MAX = 1024

BUILT_IN = (
    "None, bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, range, "
    "slice, dates and times, UUID, "
    "Decimal, array.array, numpy arrays and scalars, tensors of torch and JAX, CuPy arrays, "
    "TensorFlow tensors on the CPU, objects with the buffer protocol or __dlpack__"
)


class ArchiveError(ValueError):
    """Bytes that are no archive, or one that does not fit its blocks."""


class PickleRefused(ArchiveError, Rejected):
    """The message holds a pickle, which runs code of the sender's choice, and this side has not
    agreed to that.
    """
