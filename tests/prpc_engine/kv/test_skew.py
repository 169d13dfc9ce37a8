import numpy as np

from prpc_engine.kv import TableServer, TableWorker
from prpc_engine.kv.client.local import LocalService
from prpc_engine.kv.consistency.progress import Lag
from prpc_engine.kv.consistency.skew import ServerShare, WorkerLooks, balance_of


def share(server_id: int, keys: int, answer_s: float) -> ServerShare:
    return ServerShare(server_id, 1, 0, 0, keys, answer_s)


def test_the_busiest_server_makes_the_imbalance_and_the_slow_ones_are_named() -> None:
    balance = balance_of(
        [share(1, 100, 0.001), share(2, 300, 0.0011), share(3, 200, 0.0025), share(4, 0, 0.0)],
        (),
        7,
        2,
    )
    assert balance.imbalance == 2.0
    assert balance.stragglers == (3,)
    assert (balance.repeats, balance.unanswered) == (7, 2)


def test_who_has_done_nothing_is_even_and_on_time() -> None:
    assert balance_of([share(1, 0, 0.0), share(2, 0, 0.0)], (), 0, 0).imbalance == 1.0
    assert balance_of([share(1, 0, 0.0), share(2, 5, 0.1)], (), 0, 0).stragglers == ()


def test_a_worker_tells_the_balance_of_its_servers() -> None:
    service = LocalService()
    for _ in range(2):
        TableServer(service)
    worker = TableWorker(service, expected_servers=2)
    worker.create_sparse("clicks", 1, {"name": "add"})
    worker.create_dense("w", (3,), {"name": "add"})
    keys = np.arange(1000)
    worker.push("clicks", keys, np.ones((1000, 1), np.float32))
    worker.pull("clicks", keys)
    balance = worker.balance()
    assert [server.partitions for server in balance.servers] == [1, 1]
    assert sum(server.keys for server in balance.servers) == 2000
    assert sum(server.rows for server in balance.servers) == 1003
    assert 1.0 <= balance.imbalance < 1.2
    assert all(server.answer_s > 0 for server in balance.servers)
    assert (balance.repeats, balance.unanswered) == (0, 0)
    assert [(each.worker, each.pushes, each.lags) for each in balance.workers] == [
        ("this process", 2, {})
    ]


def test_a_workers_pushes_are_those_of_all_partitions_and_its_lags_the_worst() -> None:
    looks = WorkerLooks()
    first = [
        [[7, "seven", 3, {"t": [1, 2.0, 0.5], "u": [0, 0.0, 4.0]}]],
        [[7, "seven", 5, {"t": [0, 0.0, 3.0]}], [8, "eight", 1, {}]],
    ]
    seven, eight = looks.shares(10.0, first)
    assert (seven.worker, seven.pushes, seven.lags) == (
        "seven",
        8,
        {"t": Lag(1, 2.0, 3.0), "u": Lag(0, 0.0, 4.0)},
    )
    assert seven.held_up_s == 7.0
    assert (eight.worker, eight.pushes, eight.lags, eight.held_up_s) == ("eight", 1, {}, 0)


def test_a_rate_is_that_since_the_look_before() -> None:
    looks = WorkerLooks()
    assert [share.pushes_per_s for share in looks.shares(10.0, [[[7, "seven", 30, {}]]])] == [0]
    later = looks.shares(14.0, [[[7, "seven", 50, {}], [8, "eight", 9, {}]]])
    assert {share.worker: share.pushes_per_s for share in later} == {"seven": 5, "eight": 0}
    # a checkpoint was restored
    assert [share.pushes_per_s for share in looks.shares(15.0, [[[7, "seven", 20, {}]]])] == [0]


def test_a_look_of_another_thread_that_began_later_and_came_first_makes_no_rate_negative() -> None:
    looks = WorkerLooks()
    looks.shares(10.0, [[[7, "seven", 30, {}]]])
    looks.shares(14.0, [[[7, "seven", 50, {}]]])
    assert [share.pushes_per_s for share in looks.shares(13.0, [[[7, "seven", 52, {}]]])] == [0]
    assert [share.pushes_per_s for share in looks.shares(14.0, [[[7, "seven", 52, {}]]])] == [0]
    assert [share.pushes_per_s for share in looks.shares(16.0, [[[7, "seven", 60, {}]]])] == [5]
