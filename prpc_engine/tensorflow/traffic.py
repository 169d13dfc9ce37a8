"""What tensors took on their way to other tasks and back: bytes, and how many of them this process
copied. No I/O here.

a tensor                  before it is sent                       after it was received
of up to SMALL_BYTES_MAX  copied into its message, before that    copied out of it
                          into a block with the others of its
                          call, where there are any
larger, numbers           copied once, from TensorFlow's memory   not at all: fed where it lies,
                          into shared memory (a socket's buffer)  in the sender's shared memory,
                                                                  or where the socket put it;
                                                                  copied when that is not aligned
strings                   joined, and as above                    cut, and as above

TensorFlow gives its ops' memory to Python as it is, and takes aligned arrays as they are: neither
is a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALL_BYTES_MAX = 16 << 10  # what is larger travels by lease on one host
ALIGNMENT_BYTES = 64  # TensorFlow copies what it is fed at another address


class StepTraffic:
    """Of one session. Counted without a lock, as its steps are: threads that run steps at once may
    lose a count.
    """

    __slots__ = (
        "bytes_copied_after",
        "bytes_copied_before",
        "bytes_received",
        "bytes_sent",
        "leased",
    )

    def __init__(self) -> None:
        self.bytes_sent = self.bytes_received = self.bytes_copied_before = (
            self.bytes_copied_after
        ) = self.leased = 0

    def sent(self, packed: Sequence[Any]) -> None:
        """Tensors as tensors.pack_all() made them."""
        if packed[0]:  # a block comes first
            self.bytes_copied_before += packed[1].nbytes
        for one in packed[1:]:
            if type(one) is np.ndarray:
                nbytes = one.nbytes
                self.bytes_copied_before += nbytes
            elif len(one) == 2:  # (name, its bytes)
                nbytes = one[1].nbytes
                self.bytes_copied_before += nbytes
            else:  # (shape, lengths, texts)
                nbytes = one[2].nbytes
                self.bytes_copied_before += 2 * nbytes
            self.bytes_sent += nbytes

    def received(self, packed: Sequence[Any]) -> None:
        """The same, as they arrived."""
        others = packed[1:]
        if packed[0]:
            nbytes = packed[1].nbytes
            self.bytes_received += nbytes
            self.bytes_copied_after += nbytes
            others = packed[2:]
        for one in others:
            if type(one) is np.ndarray:
                array, is_cut = one, False
            else:
                array, is_cut = one[-1], len(one) == 3
            nbytes = array.nbytes
            self.bytes_received += nbytes
            if nbytes <= SMALL_BYTES_MAX:
                self.bytes_copied_after += nbytes
            else:
                self.leased += _is_lease(array)
                if array.ctypes.data % ALIGNMENT_BYTES and not is_cut:
                    self.bytes_copied_after += nbytes
            if is_cut:
                self.bytes_copied_after += nbytes


def _is_lease(array: NDArray[Any]) -> bool:
    """Whether it lies in memory of another process: not numpy's, and not ours to write to."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    return not (root.flags.owndata or root.flags.writeable)
