"""Any other object, by pickle protocol 5, between two sides that have both agreed to it: reading
one runs the sender's code.

A pickle is a stream of opcodes and the buffers that some of these ask for. Memory of any size is in
neither of them copied:

    memory                              travels as
    of arrays and tensors in the object a buffer, so a block: reducers.py says of which
    other libraries' (pandas, pyarrow)  a buffer, where they give pickle one
    bytes, bytearray and str of 64 KiB  a piece of the stream, so a block: the pickler hands them to
    or more                             its file as they are, and the unpickler reads them into
                                        their place
    all else                            the stream: in the body up to 16 KiB, else a block

With cloudpickle installed, functions and classes that the other side cannot import (lambdas,
closures, those of `__main__`) travel by value.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive.reducers import reducers
from prpc_engine.archive.wire import BYTES_INLINE_MAX

Block = NDArray[np.uint8]
Piece = bytes | Block
Table = Mapping[type, Callable[[Any], Any]]

CONSENT = "allow_pickle=True on both sides, between peers who trust each other with running code"
# Of a message, from its pickles: half of Limits.blocks_max. What is beyond is copied, as a message
# with too many blocks is refused.
BLOCKS_MAX = 2048


def dump(value: Any, room: int = BLOCKS_MAX) -> tuple[list[Piece], list[Block]]:
    """The stream in pieces, and the buffers; at most `room` of them are blocks, and one more.
    Raises ValueError, with the reason, for what cannot be pickled.
    """
    buffers: list[Block] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Whether the buffer's bytes go into the stream."""
        if len(buffers) >= room:
            return True
        try:
            raw = buffer.raw()
        except BufferError:  # with gaps
            return True
        buffers.append(np.frombuffer(raw, np.uint8) if raw.nbytes else np.empty(0, np.uint8))
        return False

    library = _library()
    written = _Output()
    try:
        pickler = _reducing(library).pickler()
        pickler(written, 5, buffer_callback=keep).dump(value)
    except Exception as error:  # an object's own __reduce__ may raise anything
        needed = (
            "; lambdas and what __main__ defines need cloudpickle: "
            "pip install 'prpc-engine[cloudpickle]'"
        )
        more = "" if library == "cloudpickle" else needed
        raise ValueError(f"it cannot be pickled: {type(error).__name__}: {error}{more}") from error
    if len(written) == 1 and len(written[0]) <= BYTES_INLINE_MAX:
        return written, buffers
    return _pieces(written, room - len(buffers)), buffers


def load(stream: Sequence[Any], buffers: Sequence[Block]) -> Any:
    """The object. Raises anything: call it for peers with consent only."""
    if len(stream) == 1:
        return pickle.loads(stream[0], buffers=buffers)
    return pickle.Unpickler(_Input(stream), buffers=buffers).load()


# -- the stream ------------------------------------------------------------------------------------


class _Output(list[Any]):
    """A file for the pickler, which only writes: what it wrote, in order."""

    write = list.append


def _pieces(written: Sequence[Any], room: int) -> list[Piece]:
    """What the pickler wrote as few pieces, of which `room` may be blocks, and one more: each long
    bytes, bytearray or str is one, and what is between two is one.
    """
    pieces: list[Piece] = []
    opcodes: list[Any] = []
    for chunk in written:
        if room > 1 and opcodes and _announces(opcodes[-1], len(chunk)):
            pieces += [_piece(b"".join(opcodes)), np.frombuffer(chunk, np.uint8)]
            opcodes.clear()
            room -= 1 if isinstance(pieces[-2], bytes) else 2
        else:
            opcodes.append(chunk)
    if opcodes:
        pieces.append(_piece(b"".join(opcodes)))
    return pieces


def _announces(opcodes: bytes, size: int) -> bool:
    """Whether these end with the length of what the pickler writes next: then that is in one piece
    because it is long. It may be so by chance, too, and then does no harm.
    """
    return size > BYTES_INLINE_MAX and (
        opcodes[-8:] == size.to_bytes(8, "little") or opcodes[-4:] == size.to_bytes(8, "little")[:4]
    )


def _piece(data: bytes) -> Piece:
    return data if len(data) <= BYTES_INLINE_MAX else np.frombuffer(data, np.uint8)


class _Input:
    """The pieces as one file for the unpickler, which copies each byte once, into its place."""

    def __init__(self, pieces: Sequence[Any]) -> None:
        self._left = [memoryview(piece) for piece in reversed(pieces) if len(piece)]

    def readinto(self, into: Any) -> int:
        target = memoryview(into)
        done = 0
        while done < len(target) and self._left:
            part = self._left[-1][: len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)
            self._skip(len(part))
        return done

    def read(self, size: int) -> bytes:
        parts = []
        while size > 0 and self._left:
            parts.append(self._left[-1][:size])
            size -= len(parts[-1])
            self._skip(len(parts[-1]))
        return b"".join(parts)

    def readline(self) -> bytes:
        """Asked for by opcodes of old protocols alone, which dump() never writes."""
        line = b""
        while not line.endswith(b"\n") and self._left:
            line += self.read(1)
        return line

    def _skip(self, size: int) -> None:
        rest = self._left.pop()[size:]
        if rest:
            self._left.append(rest)


# -- the pickler -----------------------------------------------------------------------------------


def _library() -> str:
    if "cloudpickle" in sys.modules:
        return "cloudpickle" if sys.modules["cloudpickle"] is not None else "pickle"
    return _library_to_import()


@functools.cache
def _library_to_import() -> str:
    """Looked for once: to find no module takes longer than a small pickle."""
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        return "pickle"
    return "cloudpickle"


class _Reducing:
    """A library's pickler with our reducers behind its own. They are found by type in a dict, in C:
    what is no array or tensor costs one look-up, where reducer_override() would be a call.
    """

    def __init__(self, library: str) -> None:
        self._base: Any = importlib.import_module(library).Pickler
        table = getattr(self._base, "dispatch_table", None)
        # cloudpickle's own reducers, which come first; those of copyreg stand behind them there
        self._first: Table = table.maps[0] if isinstance(table, ChainMap) else {}
        self._merge()

    def pickler(self) -> type[pickle.Pickler]:
        """That knows all reducers of this moment: a user registers some with copyreg, now and then,
        and ours come with the libraries that are imported.
        """
        counted = len(self._first) + len(reducers())
        if counted != self._counted or copyreg.dispatch_table != self._users:
            self._merge()
        return self._pickler

    def _merge(self) -> None:
        ours, self._users = reducers(), dict(copyreg.dispatch_table)
        self._counted = len(self._first) + len(ours)

        class ReducingPickler(self._base):  # type: ignore[misc, name-defined]
            # a plain dict: a ChainMap takes 10 times as long to look into
            dispatch_table = {**ours, **self._users, **self._first}  # noqa: RUF012

        self._pickler: type[pickle.Pickler] = ReducingPickler


_reducing = functools.cache(_Reducing)
