"""One value in shared memory that processes replace as a whole and read as a whole: three slots,
numbered values, no reader and no dead writer in anybody's way.

    offset  size  field    written by          meaning
         0     8  whole    the writer, last    number of the newest whole value; 0: the first, zeros
       128     8  begun    the writer, first   number of the value whose writing began last
       256   ...  slot 0   the writer          values 0, 3, 6, ...
           + stride  slot 1, slot 2            values 1, 4, ... and 2, 5, ...; a slot begins on a
                                               line of its own

    of the file two bytes are locked (open file description locks, fcntl(2)); nothing lies in them:
         0     1  ENTRY    who is about to write passes it; a reader that was overtaken often holds
                           it for the length of one copy
         1     1  WRITING  held while a value is written

Writer, holding WRITING:  v = whole + 1;  begun = v;  fence;  bytes into slot v % 3;  fence;
                          whole = v
Reader, holding nothing:  n = whole;  bytes out of slot n % 3;  whole if begun < n + 3, else again

Invariant: whole <= begun <= whole + 1, and slot whole % 3 is written by nobody.

Why a reader never has halves: its slot is written over by value n + 3 alone. Had the reader seen a
byte of that, it would see begun >= n + 3 afterwards, since `begun` is stored before those bytes and
read after them.

Why nobody waits for the dead: a writer that dies in the middle leaves `whole` as it was, with the
slot of that value untouched, and the kernel takes its lock back; the next writer begins the same
number again. A reader takes no lock at all, unless writers replace two values within one of its
copies READ_TRIES times in a row; then it holds ENTRY, so that at most those who have passed it
already still write. A writer never waits for a reader longer than for that one copy.

Why cast("Q"), and why this order: see shard/memory/memory_order.py. x86-64 keeps stores in order,
and loads; what its large copies do not keep, the two fences do. On machines that promise less (ARM,
POWER) a reader would need fences that Python does not have: there nothing is made.
"""

from __future__ import annotations

import fcntl
import os
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import context
from typing import Any

from prpc_engine.errors import Backpressure
from shard import Segment, require_store_order, runtime, store_fence

SLOTS = 3
WHOLE_WORD, BEGUN_WORD, SLOTS_OFFSET = 0, 16, 256
# two lines: processors fetch them in pairs
LINE_BYTES = 128
assert (BEGUN_WORD - WHOLE_WORD) * 8 >= LINE_BYTES and SLOTS_OFFSET % LINE_BYTES == 0
ENTRY_BYTE, WRITING_BYTE = 0, 1

# Copies that are tried before writers are held back. A writer that does nothing else replaces two
# values in the time of one copy about as often as not.
READ_TRIES = 4
READ_PAUSE_S = 50e-6
# Only processes that are stopped between two instructions can make a reader wait at all.
READ_S_MAX = 10.0

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of x86-64: type, whence, start, length, pid


class _LockFile:
    """This process's own open file description of a segment, which its locks belong to: of another
    one that a process has inherited, the locks would be both's, and outlive either.
    """

    fd = -1

    def __init__(self, fd: int) -> None:
        """Of the file of that descriptor, which stays the caller's."""
        self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def _lock_of(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)


class _Turn:
    """The lock of one byte of a file, among all threads of all processes."""

    def __init__(self, file: _LockFile, byte: int) -> None:
        # open file description locks belong to the process: among its threads this one counts
        self._threads = runtime.Lock()
        self._file = file
        self._lock, self._unlock = _lock_of(fcntl.F_WRLCK, byte), _lock_of(fcntl.F_UNLCK, byte)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for it. An exception of a signal handler at any point lets go of it again."""
        with self._threads:
            try:
                fcntl.fcntl(self._file.fd, fcntl.F_OFD_SETLKW, self._lock)
                yield
            finally:  # where it was not had yet, nothing changes
                fcntl.fcntl(self._file.fd, fcntl.F_OFD_SETLK, self._unlock)


def _has_locked(file: _LockFile, byte: int) -> bool:
    """Whether that byte is locked now by this open file description, which lets go when it is
    closed.
    """
    try:
        fcntl.fcntl(file.fd, fcntl.F_OFD_SETLK, _lock_of(fcntl.F_WRLCK, byte))
    except (BlockingIOError, PermissionError):  # EAGAIN, EACCES: fcntl(2)
        return False
    return True


class ValueSlots:
    """A value of `nbytes` bytes in memory of its own, which goes with the last process that has it.

    Any thread of any process may read() and write() that inherited it by fork(), or got it as an
    argument of a multiprocessing.Process of any start method.
    """

    def __init__(self, nbytes: int) -> None:
        """All zeros. Raises shard.ShmFull, and shard.ShardError on a machine whose stores are seen
        out of order.
        """
        require_store_order()
        self.nbytes = nbytes
        self._stride = -(-max(nbytes, 1) // LINE_BYTES) * LINE_BYTES
        self._map(Segment.create(SLOTS_OFFSET + SLOTS * self._stride))

    def _map(self, segment: Segment) -> None:
        self._words = segment.memory[:SLOTS_OFFSET].cast("Q")
        slots = segment.memory[SLOTS_OFFSET:]
        self.slots = [
            slots[number * self._stride : number * self._stride + self.nbytes]
            for number in range(SLOTS)
        ]
        self._lock_by(_LockFile(segment.fd))
        segment.close()  # the mapping stays, and is that of the slots
        _made_here.add(self)

    def _lock_by(self, file: _LockFile) -> None:
        self._file = file
        self._entry, self._writing = _Turn(file, ENTRY_BYTE), _Turn(file, WRITING_BYTE)

    def renew_locks(self) -> None:
        """In a child made by fork(): those that it inherited are its parent's."""
        self._lock_by(_LockFile(self._file.fd))

    @property
    def number(self) -> int:
        """How many values were written so far."""
        return int(self._words[WHOLE_WORD])

    def write(self, copy_in: Callable[[int], object]) -> None:
        """Replace the value: copy_in(slot) writes slots[slot]. Where that raises, the old value
        stays. Blocks while another writer is at work.
        """
        with self._entry.taken():
            pass  # a reader that is always overtaken is let through
        with self._writing.taken():
            words = self._words
            number = words[WHOLE_WORD] + 1
            words[BEGUN_WORD] = number
            store_fence()
            copy_in(number % SLOTS)
            store_fence()
            words[WHOLE_WORD] = number

    def read(self, copy_out: Callable[[int], object]) -> None:
        """copy_out(slot) copies slots[slot]; it is called again where it was overtaken, and what
        the last call has copied is whole. Raises Backpressure when no copy was whole for
        READ_S_MAX.
        """
        for _ in range(READ_TRIES):
            if self._has_read(copy_out):
                return
        deadline = runtime.monotonic() + READ_S_MAX
        # of this thread alone: it excludes the others, too, and is closed however this ends
        own = _LockFile(self._file.fd)
        try:
            while not _has_locked(own, ENTRY_BYTE):
                if self._has_read(copy_out):
                    return
                if runtime.monotonic() > deadline:
                    raise self._overtaken()
                runtime.sleep(READ_PAUSE_S)  # another process has it: no event of ours tells of it
            while not self._has_read(copy_out):  # writers that have passed are few, and end
                if runtime.monotonic() > deadline:
                    raise self._overtaken()
        finally:  # before it is closed: a process forked meanwhile has inherited it
            fcntl.fcntl(own.fd, fcntl.F_OFD_SETLK, _lock_of(fcntl.F_UNLCK, ENTRY_BYTE))

    def latest(self) -> int:
        """The slot of the newest whole value. It stays as it is until the third write() from now
        begins.
        """
        return int(self._words[WHOLE_WORD]) % SLOTS

    def _has_read(self, copy_out: Callable[[int], object]) -> bool:
        words = self._words
        number = words[WHOLE_WORD]
        copy_out(number % SLOTS)
        return bool(words[BEGUN_WORD] < number + SLOTS)

    def _overtaken(self) -> Backpressure:
        return Backpressure(
            f"a value of {self.nbytes} bytes in shared memory was replaced twice or more during "
            f"each copy of it for {READ_S_MAX:g} s: write less often, or from fewer processes"
        )

    # -- other processes ---------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        context.assert_spawning(self)  # RuntimeError: as with multiprocessing's own locks
        popen: Any = context.get_spawning_popen()
        fd = popen.DupFd(popen.duplicate_for_child(self._file.fd))
        return {"nbytes": self.nbytes, "fd": fd}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.nbytes = state["nbytes"]
        self._stride = -(-max(self.nbytes, 1) // LINE_BYTES) * LINE_BYTES
        inherited = state["fd"].detach()
        own = _LockFile(inherited)
        os.close(inherited)
        segment = Segment.attach(os.dup(own.fd), size_bytes=SLOTS_OFFSET + SLOTS * self._stride)
        self._map(segment)


_made_here: weakref.WeakSet[ValueSlots] = weakref.WeakSet()


def _renew_locks() -> None:
    for slots in list(_made_here):
        slots.renew_locks()


os.register_at_fork(after_in_child=_renew_locks)
