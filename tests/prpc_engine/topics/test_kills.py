"""kill -9 of readers and of the publisher in the middle of a stream of arrays: survivors go on with
whole items in order, are told, and nothing stays lent.

As many rounds as PRPC_TEST_FAULT_ROUNDS says: a hundred at night.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from prpc_engine import Master, RpcService, topics
from tests.faults.rounds import ROUNDS
from tests.program import Program, wait_until
from tests.prpc_engine.topics.test_topics import READER

PUBLISHER = "tests.prpc_engine.topics.publisher"
PATIENCE_S = 20.0


reads_of = [0]


def read_on(reader: topics.Subscriber, mode: str, ends: threading.Event) -> None:
    """Whole items, in order; of a queue each of them."""
    before: topics.Item | None = None
    while not ends.is_set():
        item = reader.receive(PATIENCE_S)
        assert (item.value[1] == np.float32(item.version)).all()
        if before is not None and item.publisher == before.publisher:
            assert item.version > before.version
            if mode == "queue":
                assert item.version == before.version + 1
        before = item
        reads_of[0] += 1


@pytest.mark.slow  # a queue waits 2 s for each, before it counts as gone
@pytest.mark.parametrize("mode", ["queue", "latest"])
def test_readers_that_are_killed_leave_the_publisher_and_the_others_at_work(
    master: Master, mode: str, seed: int
) -> None:
    chance = random.Random(seed)
    with (
        Program(PUBLISHER, master.address, "kills", mode) as publisher,
        RpcService(master.address) as service,
    ):
        assert publisher.read_line() == "up"
        with topics.Subscriber(service, "kills") as survivor, ThreadPoolExecutor(1) as beside:
            ends = threading.Event()
            reads = beside.submit(read_on, survivor, mode, ends)
            try:
                for _ in range(ROUNDS):
                    victim = Program(READER, master.address, "kills")
                    assert victim.read_line() == "up"
                    for _ in range(chance.randrange(5)):
                        assert victim.read_line()
                    victim.kill()
                    read = reads_of[0]
                    wait_until(lambda read=read: reads_of[0] > read or reads.done())
            finally:
                ends.set()
            reads.result(PATIENCE_S)
        wait_until(lambda: service.statistics().slab.leases == 0)


@pytest.mark.parametrize("mode", ["queue", "latest"])
def test_a_publisher_that_is_killed_is_read_again_when_it_is_back(
    master: Master, mode: str, seed: int
) -> None:
    chance = random.Random(seed)
    with (
        RpcService(master.address) as service,
        topics.Subscriber(service, "kills") as reader,
    ):
        for _ in range(max(4, ROUNDS // 2)):
            publisher = Program(PUBLISHER, master.address, "kills", mode)
            assert publisher.read_line() == "up"
            item = reader.receive(PATIENCE_S)
            while item.value[0] != publisher.pid:  # what is left of the one before comes first
                item = reader.receive(PATIENCE_S)
            for _ in range(chance.randrange(20)):
                item = reader.receive(PATIENCE_S)
                assert item.value[0] == publisher.pid
                assert (item.value[1] == np.float32(item.version)).all()
            publisher.kill()
