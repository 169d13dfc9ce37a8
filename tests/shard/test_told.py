"""Which segments a peer has been handed: each once, and none that is there is called dropped."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from shard import Slab
from shard.transport.control_channel import ControlChannel
from shard.transport.told import ToldSegments

LARGE = 65 << 20  # has a segment to itself


class Notes:
    """In the place of the socket: what the peer is told."""

    def __init__(self) -> None:
        self.handed_over: list[int] = []
        self.dropped: list[int] = []
        self.meanwhile: Callable[[], Any] = lambda: None

    def hand_over(self, kind: int, number: int, fds: Sequence[int], size_bytes: int) -> None:
        self.meanwhile()
        self.handed_over.append(number)

    def tell_dropped(self, number: int) -> bool:
        self.dropped.append(number)
        return True


class AskedSlab(Slab):
    """Lets something happen after it was asked which segments there are."""

    meanwhile: Callable[[], Any] = staticmethod(lambda: None)

    def segment_numbers(self) -> set[int]:
        numbers = super().segment_numbers()
        self.meanwhile()
        return numbers


@pytest.fixture
def slab() -> Iterator[AskedSlab]:
    made = AskedSlab()
    yield made
    made.close()


def test_two_threads_that_first_lend_of_a_segment_tell_the_peer_of_it_once(slab: Slab) -> None:
    notes, both = Notes(), threading.Barrier(2)
    told = ToldSegments(slab, cast(ControlChannel, notes))

    def meet_the_other() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # for the other thread to be here, too, if it can

    notes.meanwhile = meet_the_other
    number = slab.allocate(1).segment
    threads = [threading.Thread(target=told.tell, args=(number,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert notes.handed_over == [number]


def test_a_segment_handed_over_as_dropped_ones_are_told_is_not_called_dropped(
    slab: AskedSlab,
) -> None:
    notes = Notes()
    told = ToldSegments(slab, cast(ControlChannel, notes))
    told.tell(slab.allocate(1).segment)
    slab.meanwhile = lambda: told.tell(slab.allocate(LARGE).segment)  # as another thread sends
    told.tell_drops()
    assert len(notes.handed_over) == 2
    assert notes.dropped == []


def test_a_segment_that_the_slab_gave_back_is_told_once(slab: AskedSlab) -> None:
    notes = Notes()
    told = ToldSegments(slab, cast(ControlChannel, notes))
    slab.limit_bytes = 90 << 20
    first = slab.allocate(LARGE)
    told.tell(first.segment)
    slab.release(first)
    assert slab.allocate(LARGE + (20 << 20)).segment != first.segment  # in the place of the first
    for _ in range(2):
        told.tell_drops()
    assert notes.dropped == [first.segment]
    assert told.drops_seen == slab.segments_dropped == 1
