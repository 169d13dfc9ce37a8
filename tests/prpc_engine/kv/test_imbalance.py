import numpy as np

from prpc_engine.kv import TableServer, TableWorker
from prpc_engine.kv.imbalance import ServerShare, balance_of
from prpc_engine.kv.local import LocalService


def share(server_id: int, keys: int, answer_s: float) -> ServerShare:
    return ServerShare(server_id, 1, 0, 0, keys, answer_s)


def test_the_busiest_server_makes_the_imbalance_and_the_slow_ones_are_named() -> None:
    balance = balance_of([share(1, 100, 0.001), share(2, 300, 0.0011), share(3, 200, 0.0025), share(4, 0, 0.0)], 7, 2)
    assert balance.imbalance == 2.0
    assert balance.stragglers == (3,)
    assert (balance.repeats, balance.unanswered) == (7, 2)


def test_who_has_done_nothing_is_even_and_on_time() -> None:
    assert balance_of([share(1, 0, 0.0), share(2, 0, 0.0)], 0, 0).imbalance == 1.0
    assert balance_of([share(1, 0, 0.0), share(2, 5, 0.1)], 0, 0).stragglers == ()


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
