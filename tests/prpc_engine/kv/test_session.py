"""Versions beside values: they grow with pushes, survive what loses nothing, and tell every worker
when state went back.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.kv import Cache, ElasticServer, EpochChanged, TableServer, TableShard, TableWorker
from prpc_engine.kv.client.local import LocalService
from prpc_engine.kv.client.locator import Locator
from prpc_engine.kv.client.partition_client import PartitionAddress, PartitionClient
from prpc_engine.kv.client.session import Session
from prpc_engine.kv.consistency.cache import RowCache
from prpc_engine.kv.schema.placement import Placed, Placement
from shard import Future, control_loop, yield_now
from tests.faults.zygote import Life
from tests.program import halt
from tests.prpc_engine.kv.elastic_processes import PUSH_TIMEOUT_S, elastic_world
from tests.prpc_engine.kv.test_exactly_once import cuts_at_random, serve_tables
from tests.prpc_engine.processes import PATIENCE_S
from tests.prpc_engine.workloads.farm import Farm, end, kill

ADD = {"name": "add"}
KEYS = np.arange(8)
ONES = np.ones((8, 1), np.float32)
LARGE = (8 << 20,)  # 32 MiB: more than the sockets to a stopped process take


def make(
    servers: int = 2, workers: int = 2, monotonic: bool = True
) -> tuple[LocalService, list[TableWorker]]:
    service = LocalService()
    for _ in range(servers):
        TableServer(service)
    made = [
        TableWorker(service, expected_servers=servers, monotonic=monotonic) for _ in range(workers)
    ]
    for worker in made:
        worker.create_sparse("counts", 1, ADD)
        worker.create_dense("sum", (4,), ADD, split_bytes_min=0)
    return service, made


def test_a_version_counts_the_pushes_of_all_workers_to_a_partition() -> None:
    service, (one, other) = make()
    assert one.pull_versioned("counts", KEYS).versions == {0: 0, 1: 0}
    one.push("counts", KEYS, ONES)
    other.push("counts", KEYS, ONES)
    values, versions = one.pull_versioned("counts", KEYS)
    assert values.ravel().tolist() == [2] * 8
    assert versions == {0: 2, 1: 2}
    partition = int(
        np.flatnonzero([shard.statistics()["counts"]["rows"] for shard in service.servers["kv"]])[0]
    )
    key = next(
        key
        for key in KEYS
        if list(one.pull_versioned("counts", np.array([key])).versions) == [partition]
    )
    one.push("counts", np.array([key]), ONES[:1])
    assert one.submit_pull_versioned("counts", KEYS).result().versions == {
        partition: 3,
        1 - partition: 2,
    }
    one.push("sum", np.ones(4, np.float32))
    assert one.pull_versioned("sum").versions == {0: 1, 1: 1}


def test_a_plain_pull_carries_no_version_and_a_monotonic_one_does() -> None:
    service, (plain,) = make(workers=1, monotonic=False)
    _, (monotonic,) = make(workers=1)
    plain.pull("counts", KEYS)
    assert {method for _, method, _, _ in service.calls[-2:]} == {"pull"}
    assert monotonic.push_pull("counts", KEYS, ONES).ravel().tolist() == [1] * 8
    assert monotonic.push_pull("sum", np.ones(4, np.float32)).tolist() == [1] * 4
    assert monotonic.pull("sum").tolist() == [1] * 4


@pytest.mark.parametrize("verb", ["pull", "push_pull", "push"])
def test_after_a_restore_by_another_worker_each_one_is_told_once(tmp_path: Path, verb: str) -> None:
    _, (one, other) = make()
    one.push("counts", KEYS, ONES)
    one.save(str(tmp_path), step=1)
    for _ in range(3):
        one.push("counts", KEYS, ONES)
    assert other.pull("counts", KEYS).ravel().tolist() == [4] * 8
    assert one.restore(str(tmp_path)) == 1
    # saved with the values; who restores is told nothing
    assert one.pull_versioned("counts", KEYS).versions == {0: 1, 1: 1}
    if verb == "push":
        other.push("counts", KEYS, ONES)  # is applied: the next verb says it
    with pytest.raises(
        EpochChanged,
        match=r"table 'counts' in partition 0 is at version \d, this worker has seen 4",
    ) as told:
        other.push_pull("counts", KEYS, ONES) if verb == "push_pull" else other.pull("counts", KEYS)
    assert (told.value.partition, told.value.step) == (-1, -1)  # of both
    assert pickle.loads(pickle.dumps(told.value)).pushes_lost == told.value.pushes_lost > 0
    assert other.pull("counts", KEYS).ravel().tolist() == [1 if verb == "pull" else 2] * 8


def test_answers_may_come_in_any_order() -> None:
    session = Session("kv")
    before = session.floors("t")
    assert session.answered("t", before, {0: 7}) is None
    assert session.answered("t", before, {0: 5}) is None  # asked before 7 was seen
    assert session.answered("t", session.floors("t"), {0: 7, 1: 2}) is None
    late = session.floors("t")
    told = session.answered("t", late, {0: 6, 1: 3})
    assert told is not None
    assert (told.partition, told.pushes_lost) == (0, 1)
    # of before state went back: it says nothing, and is not seen
    assert session.answered("t", late, {0: 9}) is None
    assert session.answered("t", session.floors("t"), {0: 6}) is None


def test_two_threads_are_not_told_one_thing_twice() -> None:
    session = Session("kv")

    class Between(deque[EpochChanged]):
        """Another thread takes what is there once somebody has seen it."""

        def __bool__(self) -> bool:
            self.clear()
            return True

    session.news = Between([EpochChanged("gone", 0, -1, 1)])
    session.tell()


def test_several_partitions_that_went_back_at_a_time_are_told_as_no_single_one() -> None:
    session = Session("kv")
    assert session.answered("t", session.floors("t"), {0: 5, 1: 7, 2: 3}) is None
    told = session.answered("t", session.floors("t"), {0: 4, 1: 5, 2: 3})
    assert told is not None
    assert (told.partition, told.pushes_lost) == (-1, 3)


def test_who_looks_where_a_partition_is_with_an_older_placement_does_not_come_last() -> None:
    placements = [Placement((Placed(3, epoch=epoch, history=1),)) for epoch in (2, 3)]
    reading, go_on = threading.Event(), Future()

    class Node:
        def wait(self, timeout_s: float) -> Placement:
            return Placement((Placed(1),))

        async def read(self) -> tuple[Placement, int]:
            placement = placements.pop(0)
            if placements:
                reading.set()
                await go_on
            return placement, 1

    class Client:
        server_ids = (1, 3)

        def submit_to(
            self, server_id: int, method: str, /, *args: object, timeout_s: float = 30.0
        ) -> Future:
            answer = Future()
            answer.set_result(0)
            return answer

    session = Session("kv")
    where = Locator(Node(), Client(), "kv", 7, session, 1.0)  # type: ignore[arg-type]
    lane = PartitionClient(
        Client(), "kv", 0, where.addresses()[0], 7, lambda _: None, is_placed=True
    )
    looks = [control_loop().spawn(where.locate([lane]))]
    assert reading.wait(PATIENCE_S)
    looks.append(control_loop().spawn(where.locate([lane])))
    # its first step is over when that of a later one is
    control_loop().spawn(one_turn()).result(PATIENCE_S)
    go_on.set_result(None)
    for look in looks:
        look.result(PATIENCE_S)
    assert lane.address == PartitionAddress(3, (0, 3))
    assert len(session.news) == 1


async def one_turn() -> None:
    await yield_now()


class LosesAPartition:
    """A master's node, and a client of the new primary, of a partition that is back without its
    history; `kept` pushes are in.
    """

    server_ids = (1, 3)
    kept = 1

    def wait(self, timeout_s: float) -> Placement:
        return Placement((Placed(1),))

    async def read(self) -> tuple[Placement, int]:
        return Placement((Placed(3, epoch=2, history=1),)), 1

    def submit_to(
        self, server_id: int, method: str, /, *args: object, timeout_s: float = 30.0
    ) -> Future:
        answer = Future()
        answer.set_result(self.kept)
        return answer

    def lane(self, where: Locator) -> PartitionClient:
        return PartitionClient(
            self, "kv", 0, where.addresses()[0], 7, lambda _: None, is_placed=True
        )


def test_a_push_that_begins_as_a_loss_is_found_out_is_not_taken_for_an_acknowledged_one() -> None:
    class Meanwhile(AbstractContextManager[None]):
        """A lock that another thread is faster to take, once."""

        def __init__(self, begin: Callable[[], object]) -> None:
            self.lock, self.begins = threading.Lock(), [begin]

        def __enter__(self) -> None:
            if self.begins:
                other = threading.Thread(target=self.begins.pop())
                other.start()
                other.join(PATIENCE_S)
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    session, world = Session("kv"), LosesAPartition()
    where = Locator(world, world, "kv", 7, session, 1.0)  # type: ignore[arg-type]
    lane = world.lane(where)
    for _ in range(3):
        lane.push("push", 1.0, "t", ONES)

    def begin() -> None:
        world.submit_to = lambda *_, **__: Future()  # type: ignore[method-assign]
        lane.push("push", 1.0, "t", ONES)

    lane._lock = Meanwhile(begin)  # type: ignore[assignment]
    control_loop().spawn(where.locate([lane])).result(PATIENCE_S)
    assert session.news[0].pushes_lost == 2
    assert lane.unanswered() == 1


def test_who_is_told_that_state_went_back_reads_no_row_of_before() -> None:
    session, world = Session("kv"), LosesAPartition()
    cache = RowCache(Cache(rows=8, staleness_s=PATIENCE_S), 1)
    cache.fill(KEYS, ONES, cache.look_up(KEYS, session.losses))
    assert not len(cache.look_up(KEYS, session.losses).missing)
    missing: list[int] = []

    class News(deque[EpochChanged]):
        """Another thread is told at once, and pulls."""

        def append(self, news: EpochChanged) -> None:
            super().append(news)
            with pytest.raises(EpochChanged):
                session.tell()
            missing.extend(cache.look_up(KEYS, session.losses).missing)

    session.news = News()
    where = Locator(world, world, "kv", 7, session, 1.0)  # type: ignore[arg-type]
    control_loop().spawn(where.locate([world.lane(where)])).result(PATIENCE_S)
    assert len(missing) == len(KEYS)


def test_a_partition_that_begins_with_less_is_found_though_it_has_grown_again() -> None:
    session = Session("kv")
    under_way = session.floors("t")
    session.answered("t", under_way, {0: 7, 1: 4})
    assert session.began(1, {"t": 4, "other": 1}) is None
    told = session.began(0, {"t": 5})
    assert told is not None
    assert told.pushes_lost == 2
    assert session.answered("t", session.floors("t"), {0: 5}) is None
    session.begin_again(1)
    assert session.answered("t", under_way, {1: 9}) is None
    assert session.answered("t", session.floors("t"), {1: 1}) is None


@pytest.mark.parametrize("verb", ["push", "push_pull", "push_pull_versioned"])
def test_a_push_that_comes_again_is_answered_as_the_first_time_was(verb: str) -> None:
    service, _ = make(servers=1)
    shard = service.servers["kv"][0]
    assert isinstance(shard, TableShard)
    first, again = (shard.apply(1, 1, verb, "counts", KEYS, ONES) for _ in range(2))
    assert np.all(first[0] == again[0] if verb != "push" else first == again == 1)
    dense = np.ones(4, np.float32)
    first, again = (
        shard.apply(
            1,
            2,
            verb.replace("pull", "pull_dense") if "pull" in verb else "push_dense",
            "sum",
            dense,
        )
        for _ in "ab"
    )
    assert np.all(first == again if verb == "push" else first[0] == again[0])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_cut_connections_take_nothing_back(farm: Farm, transport: str, seed: int) -> None:
    chance, number = random.Random(seed), 0
    with Master() as master:
        server = farm.start_ready(serve_tables, master.address, transport)
        with RpcService(master.address, transports=[transport]) as service:
            worker = TableWorker(service, monotonic=True)
            worker.create_sparse("counts", 1, ADD)
            with cuts_at_random(service, chance, (0.002, 0.02), lambda: number):
                for number in range(1, 101):
                    worker.push("counts", KEYS, ONES)
                    assert worker.pull_versioned("counts", KEYS[:1]).versions == {0: number}
                    assert worker.pull("counts", KEYS[:1]) == number
        end(server)


def serve(life: Life, master: str) -> None:
    """One server until SIGTERM; life.done: its id. One that the test stops keeps its lease, however
    long a push takes.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with (
        RpcService(master, transports=["tcp"], lease_s=PATIENCE_S) as service,
        ElasticServer(service, partitions=1, replicas=1, servers=2) as server,
    ):
        life.done = server.server_id
        signal.sigwait({signal.SIGTERM})


@pytest.mark.slow
@pytest.mark.parametrize("ack", ["applied", "replicated"])
def test_a_promoted_replica_that_has_less_than_was_acknowledged_is_found_out(
    farm: Farm, ack: str
) -> None:
    with elastic_world() as (master, watcher):
        servers = {
            each.life.done: each
            for each in [farm.start_ready(serve, master.address) for _ in range(2)]
        }
        watcher.wait_whole(2)
        with RpcService(master.address, transports=["tcp"]) as service:
            worker = TableWorker(
                service, elastic=True, ack=ack, monotonic=True, timeout_s=PATIENCE_S
            )
            careful = TableWorker(service, elastic=True, ack="replicated", timeout_s=PATIENCE_S)
            for each in (worker, careful):
                each.create_dense("large", LARGE, ADD)
            grads = np.ones(LARGE, np.float32)
            careful.push("large", grads, timeout_s=PUSH_TIMEOUT_S)
            assert worker.pull_versioned("large").versions == {0: 1}
            placement = watcher.placement()
            assert placement is not None
            primary, (replica,) = placement.partitions[0].primary, placement.partitions[0].replicas
            if ack == "applied":
                halt(servers[replica].pid)
            worker.push("large", grads, timeout_s=PUSH_TIMEOUT_S)
            kill(servers[primary])
            os.kill(servers[replica].pid, signal.SIGCONT)
            if ack == "applied":
                with pytest.raises(
                    EpochChanged, match="partition 0 is at version 1, this worker has seen 2"
                ):
                    worker.pull("large", timeout_s=PUSH_TIMEOUT_S)
            values, versions = worker.pull_versioned("large", timeout_s=PUSH_TIMEOUT_S)
            assert versions == {0: 1 if ack == "applied" else 2}
            assert values[0] == worker.pull("large")[0] == versions[0]
        end(servers[replica])
