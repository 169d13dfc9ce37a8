"""Leases: what keeps one, how it comes back, and who is on the books for it."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shard import (
    LocalProtocolError,
    RemoteProtocolError,
    Slab,
)
from shard.memory.lease_table import Held, Lease, debug_leases
from shard.memory.leases import Borrowings, Lendings, MeetingSocket, held_by_this_process
from shard.memory.segment import Segment
from tests.helpers import ManualClock

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0
SIZE = 100_000


class Pair:
    """A lender and a borrower with a socket between them; the borrower maps the segment for itself,
    to read.
    """

    def __init__(self, clock: ManualClock, debug: bool = False) -> None:
        self.slab = Slab(clock=clock, debug=debug)
        one, two = socket.socketpair()
        self.line = MeetingSocket(one)
        self.lendings = Lendings(self.slab, "shard 1")
        self.borrowings = Borrowings(MeetingSocket(two), "shard 0", clock)
        self.mapped: dict[int, Segment] = {}

    def lend(self, array: NDArray[Any]) -> NDArray[np.uint8]:
        """What the borrower gets."""
        found = self.slab.block_of(array)
        assert found is not None
        block, offset = found
        lease = self.lendings.lend(block, array.nbytes)
        if block.segment not in self.mapped:
            self.mapped[block.segment] = Segment.attach(
                os.dup(self.slab.segment(block.segment).fd), writable=False
            )
        return self.borrowings.borrow(
            self.mapped[block.segment].memory, offset, array.nbytes, lease
        )

    def bring_back(self) -> int:
        """Returned leases reach the lender; how many."""
        count = 0
        while self.borrowings.returned:
            self.lendings.take_back(self.borrowings.returned.popleft())
            count += 1
        return count

    def close(self) -> None:
        for segment in self.mapped.values():
            segment.close()
        self.slab.close()


@pytest.fixture
def pair(clock: ManualClock) -> Iterator[Pair]:
    made = Pair(clock)
    yield made
    made.close()


# -- what keeps a lease ----------------------------------------------------------------------------


def in_a_cycle(array: NDArray[np.uint8]) -> Any:
    knot: list[Any] = [array[5:]]
    knot.append(knot)
    return knot


VIEWS: dict[str, Callable[[NDArray[np.uint8]], Any]] = {
    "the array": lambda array: array,
    "a slice": lambda array: array[10:20],
    "a slice with a step": lambda array: array[::-7],
    "a reshape": lambda array: array.reshape(100, -1),
    "a transpose": lambda array: array.reshape(100, -1).T,
    "another dtype": lambda array: array.view(np.float32),
    "a view of a view": lambda array: array.view(np.uint16)[3:].reshape(-1, 1)[1:],
    "asarray": lambda array: np.asarray(array),
    "a broadcast": lambda array: np.broadcast_to(array[:10], (5, 10)),
    "an iterator": lambda array: array.flat,
    "a memoryview": lambda array: memoryview(array),
    "a slice of a memoryview": lambda array: memoryview(array)[3:9].cast("B"),
    "the data attribute": lambda array: array.data,
    "frombuffer of the array": lambda array: np.frombuffer(array, np.uint32)[:5],
    "frombuffer of a memoryview": lambda array: np.frombuffer(memoryview(array)[8:], np.uint16),
    "a PickleBuffer": lambda array: pickle.PickleBuffer(array),
    "a pickle's out-of-band buffer": lambda array: out_of_band(array),
    "a cycle of references": in_a_cycle,
}


def out_of_band(array: NDArray[np.uint8]) -> list[pickle.PickleBuffer]:
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(array, protocol=5, buffer_callback=buffers.append)
    assert buffers
    return buffers


@pytest.fixture(params=[True, False], ids=["collector on", "collector off"])
def collector(request: pytest.FixtureRequest) -> Iterator[bool]:
    (gc.enable if request.param else gc.disable)()
    yield request.param
    gc.enable()


@pytest.mark.parametrize("kind", VIEWS)
def test_a_lease_lasts_as_long_as(kind: str, pair: Pair, collector: bool) -> None:
    array = pair.slab.empty(SIZE, np.uint8)
    kept = VIEWS[kind](pair.lend(array))
    del array
    if collector:
        gc.collect()
    assert not pair.borrowings.returned
    assert pair.slab.statistics().blocks_used == 1
    assert len(pair.borrowings.held()) == 1
    del kept
    if kind == "a cycle of references":
        assert not pair.borrowings.returned, "only the collector finds it"
        gc.collect()
    assert pair.bring_back() == 1
    assert pair.slab.statistics().blocks_used == 0
    assert pair.borrowings.held() == ()


@pytest.mark.parametrize("kind", VIEWS)
def test_a_block_of_our_own_is_used_as_long_as(kind: str, pair: Pair, collector: bool) -> None:
    kept = VIEWS[kind](pair.slab.empty(SIZE, np.uint8))
    if collector:
        gc.collect()
    assert pair.slab.statistics().blocks_used == 1
    del kept
    if kind == "a cycle of references":
        gc.collect()
    assert pair.slab.statistics().blocks_used == 0


def test_borrowed_arrays_are_read_only_and_show_what_the_owner_writes(pair: Pair) -> None:
    array = pair.slab.empty(SIZE, np.uint8)
    array[:] = 1
    borrowed = pair.lend(array)
    assert (borrowed.dtype, borrowed.shape) == (np.uint8, (SIZE,))
    with pytest.raises(ValueError, match="read-only"):
        borrowed[0] = 2
    with pytest.raises(ValueError, match="WRITEABLE"):
        borrowed.flags.writeable = True
    array[7] = 99
    assert borrowed[7] == 99


def test_a_view_of_the_root_made_by_a_user_returns_no_lease_of_its_own(pair: Pair) -> None:
    borrowed = pair.lend(pair.slab.empty(SIZE, np.uint8))
    assert borrowed.base is not None
    part = borrowed.base[5:]
    del borrowed
    assert not pair.borrowings.returned
    del part
    assert pair.bring_back() == 1


# -- how it comes back -----------------------------------------------------------------------------


def test_the_same_block_goes_round_and_round(pair: Pair) -> None:
    places = set()
    for turn in range(1000):
        array = pair.slab.empty(SIZE, np.uint8)
        array[0] = turn % 256
        borrowed = pair.lend(array)
        places.add(array.__array_interface__["data"][0])
        assert borrowed[0] == turn % 256
        del array, borrowed
        assert pair.bring_back() == 1
    assert len(places) == 1


def test_a_lease_returned_twice_names_lease_and_peer_and_changes_nothing(pair: Pair) -> None:
    array = pair.slab.empty(SIZE, np.uint8)
    first, second = pair.lend(array), pair.lend(array)
    del first
    pair.bring_back()
    before = pair.slab.statistics()
    for lease in (1, 77):
        with pytest.raises(
            RemoteProtocolError,
            match=rf"shard 1 returned lease {lease}, which it does not hold.*1 leases are out",
        ):
            pair.lendings.take_back(lease)
    assert pair.slab.statistics() == before
    del second
    assert pair.bring_back() == 1


def test_a_lease_that_is_held_is_not_taken_a_second_time(pair: Pair) -> None:
    borrowed = pair.lend(pair.slab.empty(SIZE, np.uint8))
    memory = next(iter(pair.mapped.values())).memory
    with pytest.raises(
        RemoteProtocolError, match="shard 0 lent under number 1 again while we hold that lease"
    ):
        pair.borrowings.borrow(memory, 0, SIZE, 1)
    assert len(pair.borrowings.held()) == 1
    del borrowed
    assert pair.bring_back() == 1


def test_a_lease_whose_message_was_never_written_is_undone_once(pair: Pair) -> None:
    block = pair.slab.allocate(SIZE)
    lease = pair.lendings.pass_on(block, SIZE)
    pair.lendings.undo(lease)
    assert pair.slab.statistics().blocks_used == 0
    pair.lendings.undo(lease)
    assert pair.slab.statistics().blocks_used == 0


def test_a_free_block_is_not_lent(pair: Pair) -> None:
    block = pair.slab.allocate(SIZE)
    pair.slab.release(block)
    with pytest.raises(LocalProtocolError, match="is free and cannot be lent"):
        pair.lendings.lend(block, SIZE)
    assert pair.slab.leases() == ()


def test_leases_are_lent_and_returned_by_several_threads(pair: Pair) -> None:
    array = pair.slab.empty(SIZE, np.uint8)
    pair.lend(array)  # the segment is mapped before the threads look for it
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for turn in range(300):
                kept = [pair.lend(array) for _ in range(3)]
                if turn % 50 == 0:
                    pair.slab.leases()
                    pair.slab.statistics()
                    pair.borrowings.held()
                kept.clear()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        pair.bring_back()
        for thread in threads:
            thread.join(0.001)
    pair.bring_back()
    assert failed == []
    assert pair.slab.leases() == ()
    assert pair.slab.statistics().blocks_used == 1, "the array itself"


# -- the books -------------------------------------------------------------------------------------


def test_the_books_say_who_holds_what_since_when_on_both_sides(
    pair: Pair, clock: ManualClock
) -> None:
    array = pair.slab.empty((100, 100), np.float32)
    clock.now = 10.0
    first = pair.lend(array)
    clock.now = 25.0
    second = pair.lend(array[50:])
    pair.lendings.pass_on(pair.slab.allocate(SIZE), SIZE)
    block_bytes = pair.slab.statistics().used_bytes
    found = pair.slab.leases()
    assert found[0] == Lease(
        1, "shard 1", 0, 0, 40_960, 40_000, 10.0, connection_ended=False, call_site=None
    )
    assert [(lease.number, lease.offset, lease.size_bytes, lease.since_s) for lease in found] == [
        (1, 0, 40_000, 10.0),
        (2, 0, 20_000, 25.0),
        (3, 40_960, SIZE, 25.0),
    ]
    assert pair.borrowings.held() == (
        Held(1, "shard 0", 40_000, 10.0),
        Held(2, "shard 0", 20_000, 25.0),
    )
    assert set(pair.borrowings.held()) <= set(held_by_this_process())
    clock.now = 70.0
    statistics = pair.slab.statistics()
    assert (statistics.leases, statistics.leased_bytes, statistics.lease_age_s_max) == (
        3,
        block_bytes,
        60.0,
    )
    del first
    pair.bring_back()
    assert [lease.number for lease in pair.slab.leases()] == [2, 3]
    assert pair.slab.statistics().lease_age_s_max == 45.0
    del second


def test_the_books_can_be_read_while_connections_are_made(pair: Pair) -> None:
    several = [Borrowings(pair.line, "shard 0") for _ in range(2000)]
    read = threading.Event()

    def connect() -> None:
        # never more: while a reader lacked its core they would fill the memory
        for at in itertools.cycle(range(len(several))):
            if read.is_set():
                return
            several[at] = Borrowings(pair.line, "shard 0")

    connecting = threading.Thread(target=connect)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        connecting.start()
        for _ in range(20):
            assert held_by_this_process() == ()
    finally:
        read.set()
        connecting.join(PATIENCE_S)
        sys.setswitchinterval(interval_s)


def test_a_full_slab_says_who_holds_its_memory(clock: ManualClock) -> None:
    slab = Slab(limit_bytes=8 << 20, clock=clock)
    lendings = Lendings(slab, "10.0.0.3 (pid 77)")
    for _ in range(2):
        lendings.pass_on(slab.allocate(3 << 20), 3 << 20)
    with pytest.raises(
        MemoryError,
        match=r"2 leases at peers, the oldest at 10\.0\.0\.3 \(pid 77\).*Slab\.leases\(\) says who",
    ):
        slab.allocate(3 << 20)
    slab.close()


def test_in_debug_mode_a_lease_names_the_line_that_lent_it(clock: ManualClock) -> None:
    pair = Pair(clock, debug=True)
    borrowed = pair.lend(pair.slab.empty(SIZE, np.uint8))
    (lease,) = pair.slab.leases()
    assert lease.call_site is not None
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in lend", lease.call_site)
    del borrowed
    pair.close()


@pytest.mark.parametrize(("text", "debug"), [("1", True), ("0", False), (None, False)])
def test_the_variable_turns_debug_mode_on(
    monkeypatch: pytest.MonkeyPatch, text: str | None, debug: bool
) -> None:
    if text is None:
        monkeypatch.delenv("PRPC_DEBUG_LEASES", raising=False)
    else:
        monkeypatch.setenv("PRPC_DEBUG_LEASES", text)
    assert debug_leases() is debug
    slab = Slab()
    assert slab.debug is debug
    slab.close()


@pytest.mark.parametrize("text", ["yes please", ""])
def test_another_value_of_the_variable_is_refused_by_name(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRPC_DEBUG_LEASES", text)
    allowed = "1 .* or 0 is allowed; unset it for the default"
    with pytest.raises(ValueError, match=f"PRPC_DEBUG_LEASES={text!r}: {allowed}$"):
        Slab()


# -- the end of a connection -----------------------------------------------------------------------


def test_what_a_peer_reads_after_the_connection_is_on_the_books_until_it_hangs_up(
    pair: Pair, clock: ManualClock
) -> None:
    borrowed = pair.lend(pair.slab.empty(SIZE, np.uint8))
    clock.advance(5.0)
    pair.lendings.hand_over(pair.line)
    (lease,) = pair.slab.leases()
    assert (lease.borrower, lease.connection_ended, lease.since_s) == (
        "shard 1",
        True,
        clock.now - 5.0,
    )
    # the connection's part in them ends
    pair.borrowings = Borrowings(MeetingSocket(socket.socket()), "nobody", clock)
    assert [held.lease for held in held_by_this_process()] == [1], "the array has kept its own"
    assert len(pair.slab.leases()) == 1
    del borrowed  # the last array hangs up
    assert pair.slab.leases() == ()
    assert pair.slab.statistics().blocks_used == 0
    assert held_by_this_process() == ()


def test_a_connection_that_ends_with_nothing_lent_leaves_the_books(pair: Pair) -> None:
    pair.lendings.hand_over(pair.line)
    assert pair.slab._books == []
    late = pair.lendings.pass_on(pair.slab.allocate(SIZE), SIZE)  # by a send that was under way
    pair.lendings.undo(late)
    assert pair.slab.statistics().blocks_used == 0
