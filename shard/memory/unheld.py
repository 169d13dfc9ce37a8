"""A message whose arrays this process has no memory for. Its caller is told, and no other call is
harmed.

The arrays are read off and dropped, so that what follows is understood, and the message is
delivered with Unheld in their place: whoever decodes it meets a MemoryError, as for any message
that cannot be read. Without even its body nobody knows whose message it is, and the connection
ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

# Where bytes are received that are dropped. One for all: nobody reads it.
SINK = memoryview(bytearray(64 << 10))


class Unheld(list[NDArray[np.uint8]]):
    """In the place of a message's blocks. Counts as `count` of them; to look at any of them raises
    MemoryError(text).
    """

    def __init__(self, count: int, text: str) -> None:
        super().__init__(np.empty((count, 0), np.uint8))
        self._text = text

    def _refuse(self) -> NoReturn:
        raise MemoryError(self._text)

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        self._refuse()

    def __getitem__(self, index: Any) -> Any:
        self._refuse()


def no_memory(nbytes: int) -> str:
    """The text for an array of so many bytes."""
    return (
        f"this process has no memory for an array of {nbytes} bytes that was sent to it: "
        "raise its limits (`ulimit -v`, `ulimit -d`), or send the array in parts"
    )


def empty_block(nbytes: int) -> NDArray[np.uint8]:
    """Memory of this process for a block. Raises MemoryError."""
    try:
        return np.empty(nbytes, np.uint8)
    except MemoryError:
        raise MemoryError(no_memory(nbytes)) from None
