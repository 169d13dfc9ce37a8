"""A slab against a model: arrays of mixed sizes are made, lent, returned and dropped in any order,
and always:

no two blocks in use overlap, each is 64-byte aligned, and what was written to it stays
users are the array and the leases, never negative; a lease comes back once
the bound is kept, and with everything free any size up to it can be had again
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from shard import RemoteProtocolError, ShmFull, Slab
from shard.memory.arena import ALIGNMENT_BYTES, Block
from shard.memory.leases import Lendings
from tests.examples import examples

MIB = 1 << 20
BOUND = 24 * MIB
SIZES = st.sampled_from(
    [0, 1, 4096, 4097, 300_000, MIB, MIB + 1, 3 * MIB, 5 * MIB, 9 * MIB, 15 * MIB, 23 * MIB, BOUND]
)


class Used:
    """What the model knows of a block: who uses it, and what was written to it."""

    def __init__(self, block: Block, place: int, nbytes: int, mark: int) -> None:
        self.block, self.place, self.nbytes, self.mark = block, place, nbytes, mark
        self.array: NDArray[Any] | None = None
        self.leases: list[tuple[Lendings, int]] = []


class AnySlab(RuleBasedStateMachine):
    """Arrays of mixed sizes are made, lent to two peers, returned and dropped in any order."""

    @initialize()
    def begin(self) -> None:
        self.slab = Slab(limit_bytes=BOUND)
        self.peers = [Lendings(self.slab, name) for name in ("shard 1", "shard 2")]
        self.used: list[Used] = []
        self.mark = 0

    @rule(nbytes=SIZES)
    def make(self, nbytes: int) -> None:
        try:
            array = self.slab.empty(nbytes, np.uint8)
        except ShmFull:
            assert self.used, "with everything free, any size up to the bound fits"
            return
        found = self.slab.block_of(array)
        assert found is not None
        self.mark = self.mark % 255 + 1
        array[:1], array[-1:] = self.mark, self.mark
        entry = Used(found[0], array.__array_interface__["data"][0], nbytes, self.mark)
        entry.array = array
        self.used.append(entry)

    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        if self.used:
            entry = data.draw(st.sampled_from(self.used))
            peer = data.draw(st.sampled_from(self.peers))
            entry.leases.append((peer, peer.lend(entry.block, entry.nbytes)))

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lent = [entry for entry in self.used if entry.leases]
        if lent:
            entry = data.draw(st.sampled_from(lent))
            peer, lease = entry.leases.pop(data.draw(st.integers(0, len(entry.leases) - 1)))
            peer.take_back(lease)
            with pytest.raises(RemoteProtocolError):
                peer.take_back(lease)
            self.forget_free()

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        owned = [entry for entry in self.used if entry.array is not None]
        if owned:
            data.draw(st.sampled_from(owned)).array = None
            self.forget_free()

    @rule()
    def drop_all(self) -> None:
        for entry in self.used:
            entry.array = None
        self.forget_free()

    def forget_free(self) -> None:
        self.used = [entry for entry in self.used if entry.leases or entry.array is not None]

    @invariant()
    def blocks_are_apart_aligned_and_whole(self) -> None:
        ends = sorted((entry.place, entry.place + entry.block.size_bytes) for entry in self.used)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        for entry in self.used:
            assert entry.place % ALIGNMENT_BYTES == 0
            assert entry.nbytes <= entry.block.size_bytes
            content = self.slab.memory(entry.block, entry.nbytes)
            assert not entry.nbytes or content[0] == content[-1] == entry.mark

    @invariant()
    def the_figures_agree(self) -> None:
        statistics = self.slab.statistics()
        assert statistics.blocks_used == len(self.used)
        assert statistics.used_bytes == sum(entry.block.size_bytes for entry in self.used)
        assert statistics.internal_bytes == sum(
            entry.block.size_bytes - entry.nbytes for entry in self.used
        )
        assert statistics.leases == sum(len(entry.leases) for entry in self.used)
        assert statistics.leased_bytes == sum(
            entry.block.size_bytes for entry in self.used if entry.leases
        )
        assert statistics.used_bytes + statistics.free_bytes <= statistics.reserved_bytes <= BOUND
        assert 0 <= statistics.external_bytes <= statistics.free_bytes
        for entry in self.used:
            assert entry.block.users == len(entry.leases) + (entry.array is not None)

    def teardown(self) -> None:
        for entry in self.used:
            entry.array = None
            for peer, lease in entry.leases:
                peer.take_back(lease)
        for nbytes in (BOUND, 1, BOUND // 2, BOUND - 1, BOUND):
            self.slab.release(self.slab.allocate(nbytes))
        assert self.slab.statistics().blocks_used == 0
        self.slab.close()


TestAnySlab = AnySlab.TestCase
# Not by time: a segment takes some ten milliseconds to reserve here, and more on a machine that is
# busy.
TestAnySlab.settings = settings(
    max_examples=examples(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
