"""Hot rows at the worker: how old they may be, how many there are, and who sees whose pushes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prpc_engine import Master, RpcService
from prpc_engine.errors import ConfigError, RemoteError
from prpc_engine.kv import (
    Cache,
    CacheStatistics,
    EpochChanged,
    TableServer,
    TableShard,
    TableWorker,
)
from prpc_engine.kv.client.local import LocalService
from prpc_engine.kv.consistency.cache import WINDOW, RowCache
from tests.helpers import ManualClock
from tests.prpc_engine.processes import PATIENCE_S

ONES = np.ones((3, 2), np.float32)
KEYS = np.array([5, 1, 9])
ADD, START = {"name": "add"}, {"name": "uniform", "scale": 0.5}


def floats(*values: object) -> np.ndarray:
    return np.array(values, np.float32)


class Failing(TableShard):
    """Pushes fail, while they are to."""

    fails = False

    def apply(self, *arguments: Any) -> Any:
        if self.fails:
            raise MemoryError
        return super().apply(*arguments)


def make(
    rows: int = 8, staleness_s: float = 10.0, clock: Callable[[], float] = time.monotonic
) -> tuple[LocalService, TableWorker, TableWorker]:
    """A worker with a cache, and one without."""
    service = LocalService()
    for _ in range(2):
        service.create_server("kv", Failing())
    kv, other = (TableWorker(service, expected_servers=2, clock=clock) for _ in range(2))
    kv.create_sparse("clicks", 2, ADD, START, cache={"rows": rows, "staleness_s": staleness_s})
    other.create_sparse("clicks", 2, ADD, START)
    return service, kv, other


def statistics(kv: TableWorker) -> CacheStatistics:
    return kv.cache_statistics()["clicks"]


def test_what_was_pulled_is_read_here_until_it_is_too_old(clock: ManualClock) -> None:
    service, kv, other = make(clock=clock)
    before = kv.pull("clicks", KEYS)
    other.push("clicks", KEYS, ONES)
    clock.advance(10.0)
    service.calls.clear()
    np.testing.assert_array_equal(kv.pull("clicks", KEYS[[1, 0, 1]]), before[[1, 0, 1]])
    assert not service.calls
    clock.advance(0.1)
    np.testing.assert_allclose(kv.pull("clicks", KEYS), before + 1)
    assert statistics(kv) == CacheStatistics(
        rows=3, hits=2, misses=6, stale=3, evicted=0, age_s_mean=10.0, age_s_max=10.0
    )
    assert not other.cache_statistics()


def test_statistics_are_told_while_another_thread_makes_a_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, kv, _ = make()
    look = RowCache.statistics

    def look_meanwhile(cache: RowCache) -> CacheStatistics:
        making = threading.Thread(target=kv.create_dense, args=("w", (3,), ADD))
        making.start()
        making.join(PATIENCE_S)
        return look(cache)

    monkeypatch.setattr(RowCache, "statistics", look_meanwhile)
    assert list(kv.cache_statistics()) == ["clicks"]


@pytest.mark.parametrize("submits", [False, True])
def test_a_worker_reads_what_it_wrote(submits: bool) -> None:
    _, kv, _ = make()

    def push(keys: np.ndarray) -> None:
        given = keys.copy()
        if submits:
            under_way = kv.submit_push("clicks", given, ONES[: len(given)])
            given[:] = 77  # the caller's again
            under_way.result()
        else:
            kv.push("clicks", given, ONES[: len(given)])

    before = kv.pull("clicks", KEYS)
    push(KEYS[:2])
    np.testing.assert_allclose(kv.pull("clicks", KEYS), before + floats([1, 1], [1, 1], [0, 0]))
    np.testing.assert_allclose(kv.push_pull("clicks", KEYS[:1], ONES[:1]), before[:1] + 2)
    np.testing.assert_allclose(kv.pull("clicks", KEYS), before + floats([2, 2], [1, 1], [0, 0]))


def test_an_answer_from_before_an_own_push_is_not_kept() -> None:
    _, kv, _ = make()
    early = kv.submit_pull("clicks", KEYS)  # answered, and not looked at
    push = kv.submit_push("clicks", KEYS[:1], ONES[:1])
    before = early.result()
    np.testing.assert_allclose(kv.pull("clicks", KEYS), before + floats([1, 1], [0, 0], [0, 0]))
    late = kv.submit_pull("clicks", KEYS)
    push.result()
    np.testing.assert_array_equal(late.result(), kv.pull("clicks", KEYS))
    # the other two keys', and after the push's result the first is asked again
    assert statistics(kv).hits == 2 + 3 + 2


def test_a_push_that_failed_may_have_been_applied() -> None:
    service, kv, other = make()
    kv.pull("clicks", KEYS)
    other.push("clicks", KEYS, ONES)
    service.servers["kv"][1].fails = True  # type: ignore[attr-defined]
    with pytest.raises(RemoteError, match="MemoryError"):
        kv.push("clicks", KEYS, ONES)
    np.testing.assert_array_equal(kv.pull("clicks", KEYS), other.pull("clicks", KEYS))


def test_versions_are_asked_for_past_the_cache() -> None:
    _, kv, other = make()
    before = kv.pull("clicks", KEYS)
    other.push("clicks", KEYS, ONES)
    np.testing.assert_allclose(kv.pull_versioned("clicks", KEYS).values, before + 1)
    np.testing.assert_array_equal(kv.pull("clicks", KEYS), before)


@pytest.mark.parametrize("restorer", [0, 1])
def test_after_a_restore_nothing_of_before_is_read(tmp_path: Path, restorer: int) -> None:
    _, *workers = make()
    kv = workers[0]
    saved = kv.pull("clicks", KEYS)
    kv.save(str(tmp_path), step=1)
    kv.push("clicks", KEYS, ONES)
    kv.pull("clicks", KEYS)
    workers[restorer].restore(str(tmp_path))
    if restorer:
        kv.push("clicks", np.arange(8), np.zeros((8, 2), np.float32))  # finds it out
        with pytest.raises(Exception, match="went back"):
            kv.pull("clicks", KEYS)
    np.testing.assert_array_equal(kv.pull("clicks", KEYS), saved)
    kv.pull("clicks", KEYS)
    assert statistics(kv).hits == 3


def test_a_worker_hears_of_a_restore_when_a_pull_asks_a_server_again(
    master: Master, clock: ManualClock, tmp_path: Path
) -> None:
    with ExitStack() as closing:
        server, ours, theirs = (closing.enter_context(RpcService(master.address)) for _ in range(3))
        TableServer(server)
        kv, other = TableWorker(ours, clock=clock), TableWorker(theirs)
        kv.create_sparse("clicks", 2, ADD, cache=Cache(rows=8, staleness_s=10.0))
        other.create_sparse("clicks", 2, ADD)
        other.save(str(tmp_path), step=1)
        kv.push("clicks", KEYS, ONES)
        lost = kv.pull("clicks", KEYS)
        other.restore(str(tmp_path))
        np.testing.assert_array_equal(kv.pull("clicks", KEYS), lost)
        clock.advance(10.1)
        with pytest.raises(EpochChanged):
            kv.pull("clicks", KEYS)
        assert not kv.pull("clicks", KEYS).any()


def test_the_keys_used_again_keep_their_places() -> None:
    service, kv, _ = make(rows=3)
    for keys in ([1, 2, 3], [1], [3], [4]):  # 2 goes
        kv.pull("clicks", np.array(keys))
    assert statistics(kv).evicted == 1
    service.calls.clear()
    kv.pull("clicks", np.array([1, 3, 4]))
    assert not service.calls
    kv.pull("clicks", np.array([2]))
    assert len(service.calls) == 1


def test_a_scan_passes_hot_keys_by() -> None:
    _, kv, _ = make(rows=2 * WINDOW)
    hot = np.arange(100)
    for number in range(50):
        kv.pull("clicks", hot)
        kv.pull("clicks", np.arange(1000, 1100) + 100 * number)
    assert statistics(kv).hits == 49 * 100
    assert statistics(kv).rows == 2 * WINDOW


def test_more_keys_than_places_are_answered_all_the_same(clock: ManualClock, seed: int) -> None:
    _, kv, other = make(clock=clock, rows=16, staleness_s=3.0)
    random = np.random.default_rng(seed)
    for _ in range(100):
        clock.advance(random.random())
        keys = random.integers(0, 60, random.integers(0, 40))
        np.testing.assert_array_equal(kv.pull("clicks", keys), other.pull("clicks", keys))
        own = random.choice(60, random.integers(0, 10), replace=False)
        kv.push("clicks", own, np.ones((len(own), 2), np.float32))
    assert statistics(kv).rows == 16
    assert statistics(kv).hits > 100


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rows": 0, "staleness_s": 1.0}, "cache: rows is 0"),
        ({"rows": 10, "staleness_s": -1.0}, "cache: staleness_s is -1.0"),
        ({"rows": 10}, "cache needs the setting 'staleness_s'"),
        (10, "cache is 10; a dict of its settings is allowed: rows, staleness_s"),
    ],
)
def test_bounds_are_checked(settings: object, said: str) -> None:
    _, kv, _ = make()
    with pytest.raises(ConfigError, match=said):
        kv.create_sparse("clicks", 2, ADD, START, cache=settings)  # type: ignore[arg-type]


def test_a_cache_does_not_go_with_what_bounds_staleness_otherwise() -> None:
    service, kv, _ = make()
    monotonic = TableWorker(service, expected_servers=2, monotonic=True)
    with pytest.raises(ConfigError, match="older rows than monotonic allows"):
        monotonic.create_sparse("clicks", 2, ADD, START, cache=Cache(8, 1.0))
    with pytest.raises(ConfigError, match=r"older rows than Ssp.* allows"):
        kv.create_sparse(
            "paced",
            2,
            ADD,
            cache=Cache(8, 1.0),
            consistency={"name": "ssp", "workers": 1, "bound": 0},
        )
