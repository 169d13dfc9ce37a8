"""kill -9 of a reader and of the writer in the middle of a stream of arrays: survivors have whole
items in order, are told by name, and nothing stays lent.

As many rounds as PRPC_TEST_FAULT_ROUNDS says: a hundred at night.
"""

from __future__ import annotations

import random

import pytest

from prpc_engine.node.slab import default_slab
from prpc_engine.vllm import MessageQueue, ReaderLost, WriterLost
from tests.faults.rounds import ROUNDS
from tests.program import PATIENCE_S, wait_until
from tests.prpc_engine.vllm.ends import EndProcess, array_of, number_in
from tests.prpc_engine.vllm.test_message_queue import over


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_readers_that_are_killed_in_a_stream(transport: str, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(max(3, ROUNDS // 4)):
        queue = MessageQueue(2, 2, max_chunks=chance.randint(1, 10))
        handle = over(transport, queue.export_handle())
        with EndProcess() as survivor, EndProcess() as victim:
            survivor.join(handle, 0)
            victim.join(handle, 1)
            survivor.begin("numbers", count=10**9)
            victim.begin("echo")
            last, dies_at = 0, chance.randrange(1, 30)
            with pytest.raises(ReaderLost, match=rf"reader 1 \(process {victim.pid} on"):
                while True:
                    queue.enqueue(array_of(last), timeout=PATIENCE_S)
                    last += 1
                    if last == dies_at:
                        for number in range(chance.randrange(last)):
                            assert victim.answer() == number
                        victim.kill()
            queue.shutdown()
            kind, text = survivor.answer()
            assert (kind, f"has had {last} items" in text) == ("WriterLost", True)
            survivor.do("shutdown")
        wait_until(lambda: default_slab().statistics().leases == 0)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_writers_that_are_killed_in_a_stream(transport: str, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(max(3, ROUNDS // 4)):
        with EndProcess() as writer:
            handle = over(transport, writer.make(2, 2, max_chunks=chance.randint(1, 10)))
            readers = [MessageQueue.create_from_handle(handle, rank) for rank in (0, 1)]
            writer.begin("pour")
            next_of, dies_at = [0, 0], chance.randrange(1, 30)
            with pytest.raises(WriterLost, match=f"process {writer.pid} on"):
                while True:
                    for rank, reader in enumerate(readers):
                        found = reader.dequeue(timeout=PATIENCE_S)
                        assert number_in(found) == next_of[rank]
                        next_of[rank] += 1
                    if next_of[0] == dies_at:
                        writer.kill()
            for rank, reader in enumerate(readers):
                with pytest.raises(WriterLost):
                    while True:
                        assert number_in(reader.dequeue(timeout=PATIENCE_S)) == next_of[rank]
                        next_of[rank] += 1
                reader.shutdown()
