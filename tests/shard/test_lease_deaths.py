"""What the end of a process means for leases: a borrower killed, a lender killed, an interpreter
that ends in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shard import DEFAULT_LIMITS, Connection, Node, PeerLostError, Reactor, ShmTransport, Slab
from shard.memory.leases import held_by_this_process

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0
SIZE = 100_000

BORROWER = """
import sys, time
import numpy as np
from shard import DEFAULT_LIMITS, Node, Reactor, ShmTransport, Slab, control_loop

received = []
reactor = Reactor(time.monotonic)
slab = Slab()
node = Node(secret=b"", incarnation=2, limits=DEFAULT_LIMITS)
transport = ShmTransport(node, slab)
connection = control_loop().spawn(transport.connect(sys.argv[1], 30.0)).result()
connection.on_message = lambda body, blocks=(): received.extend(blocks)
connection.attach(reactor)
while not received:
    reactor.poll(time.monotonic())
kept = received[0][1000:]
assert kept.min() == kept.max() == 5
print("I hold it", flush=True)
sys.stdin.read()
"""

OWNER = """
import sys, time
import numpy as np
from shard import DEFAULT_LIMITS, Node, Reactor, ShmTransport, Slab, control_loop

reactor = Reactor(time.monotonic)
slab = Slab()
node = Node(secret=b"", incarnation=2, limits=DEFAULT_LIMITS)
transport = ShmTransport(node, slab)
connection = control_loop().spawn(transport.connect(sys.argv[1], 30.0)).result()
connection.attach(reactor)
array = slab.empty(1_000_000, np.uint32)
array[:] = np.arange(1_000_000) * 2654435761
connection.send(b"", [array.view(np.uint8)])
print("it is sent", flush=True)
sys.stdin.read()
"""


class Other:
    """Another process of this machine that runs `program` and is connected to us through shared
    memory.
    """

    def __init__(self, program: str) -> None:
        self.slab = Slab()
        self.reactor = Reactor(time.monotonic)
        self.blocks: list[NDArray[np.uint8]] = []
        self.ends: list[Exception] = []
        self.accepted: list[Connection[Any]] = []
        # either side may lack a core in the middle of it
        limits = dataclasses.replace(DEFAULT_LIMITS, handshake_s=PATIENCE_S)
        transport = ShmTransport(Node(secret=b"", incarnation=1, limits=limits), self.slab)
        self.listener = transport.listen("shm://", self.reactor, self._accept)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, self.listener.address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def connection(self) -> Connection[Any]:
        self.turn_until(lambda: self.accepted)
        return self.accepted[0]

    def _accept(self, connection: Connection[Any]) -> None:
        connection.on_message = lambda _, blocks=(): self.blocks.extend(blocks)  # type: ignore[assignment,misc]
        connection.on_close = lambda _, error: self.ends.append(error)
        self.accepted.append(connection)

    def says(self) -> str:
        """The next line that it prints, once it is connected."""
        self.turn_until(lambda: self.accepted)
        output: IO[str] | None = self.process.stdout
        assert output is not None
        assert select.select([output], [], [], PATIENCE_S)[0], "it says nothing"
        return output.readline().rstrip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def turn_until(self, done: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, "it did not come to pass"
            assert self.process.poll() is None or self.accepted, "the process ended early"
            if not self.reactor.poll(time.monotonic()):
                self.reactor.park(0.01)

    def close(self) -> None:
        """May be called twice."""
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.listener.close()
        for connection in self.accepted:
            connection.close()
        self.reactor.close()
        self.slab.close()


@pytest.fixture
def start() -> Iterator[Callable[[str], Other]]:
    """Starts others; they end with the test, however that ends."""
    with contextlib.ExitStack() as started:

        def begin(program: str) -> Other:
            other = Other(program)
            started.callback(other.close)
            return other

        yield begin


def test_a_borrower_that_is_killed_loses_all_its_leases(start: Callable[[str], Other]) -> None:
    other = start(BORROWER)
    array = other.slab.empty(SIZE, np.uint8)
    array[:] = 5
    other.connection.send(b"", [array])
    assert other.says() == "I hold it"
    place = array.__array_interface__["data"][0]
    del array
    (lease,) = other.slab.leases()
    assert lease.borrower == other.connection.peer == f"shm://process {other.process.pid}"
    other.kill()
    other.turn_until(lambda: not other.slab.leases())
    assert other.slab.statistics().blocks_used == 0
    assert isinstance(other.ends[0], PeerLostError)
    assert other.slab.empty(SIZE, np.uint8).__array_interface__["data"][0] == place


def test_a_borrower_that_ignores_everything_still_loses_them_when_it_is_killed(
    start: Callable[[str], Other],
) -> None:
    """It never reads what it was lent, and its memory is not touched by anything but its death."""
    other = start(OWNER)
    assert other.says() == "it is sent"
    other.turn_until(lambda: other.blocks)
    other.blocks.clear()
    for _ in range(3):
        other.connection.send(b"", [np.zeros(SIZE, np.uint8)])
    assert other.slab.statistics().leases == 3
    other.kill()
    other.turn_until(lambda: not other.slab.leases())
    assert other.slab.statistics().blocks_used == 0


def test_an_array_whose_owner_was_killed_stays_whole_to_the_last_byte(
    start: Callable[[str], Other],
) -> None:
    other = start(OWNER)
    assert other.says() == "it is sent"
    other.turn_until(lambda: other.blocks)
    block = other.blocks.pop()
    other.kill()
    other.turn_until(lambda: other.ends)
    expected = (np.arange(1_000_000) * 2654435761).astype(np.uint32)
    assert np.array_equal(block.view(np.uint32), expected)
    part = block[4000:].view(np.uint32).reshape(-1, 300)
    del block
    other.close()
    gc.collect()
    assert np.array_equal(part.ravel(), expected[1000:])
    assert [held.lender for held in held_by_this_process()] == [
        f"shm://process {other.process.pid}"
    ]
    del part


AT_EXIT = """
import atexit, builtins, os, socket, threading
import numpy as np
from shard.memory.leases import Borrowings, Lendings, MeetingSocket
from shard.memory.segment import Segment
from shard.memory.slab import Slab

slab = Slab()
one, two = socket.socketpair()
lendings, borrowings = Lendings(slab, "shard 1"), Borrowings(MeetingSocket(two), "shard 0")
line = MeetingSocket(one)
array = slab.empty(100_000, np.uint8)
segment = Segment.attach(os.dup(slab.segment(0).fd), writable=False)

def lend():
    block, offset = slab.block_of(array)
    lease = lendings.lend(block, array.nbytes)
    return borrowings.borrow(segment.memory, offset, array.nbytes, lease)

class Releases:
    def __init__(self):
        self.block = slab.allocate(9000)
        self.slab = slab
        self.itself = self

    def __del__(self):
        self.slab.release(self.block)

a_global = lend()
builtins.kept = [lend(), slab.empty(50_000)]
knot = [lend(), Releases()]
knot.append(knot)
local = threading.local()
local.kept = lend()
atexit.register(print, lend()[:3])

def freeze_with_the_lock():
    slab._lock.acquire()
    threading.Event().wait()

held = threading.Thread(target=freeze_with_the_lock, daemon=True)
held.start()
"""


def test_arrays_and_leases_that_live_until_the_interpreter_ends_make_no_noise() -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", AT_EXIT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "[0 0 0]\n"), ran.stderr
    assert "Exception ignored" not in ran.stderr
    assert "ResourceWarning" not in ran.stderr
