"""Hot rows at the worker: how old they may be, how many there are, and who sees whose pushes."""

from __future__ import annotations

import numpy as np
import pytest

from prpc_engine.errors import ConfigError
from prpc_engine.kv import TableServer, TableWorker
from prpc_engine.kv.cache import CachedTable
from prpc_engine.kv.local import LocalService
from tests.helpers import ManualClock

ONES = np.ones((3, 2), np.float32)
KEYS = np.array([5, 1, 9])


def floats(*values: object) -> np.ndarray:
    return np.array(values, np.float32)


def make(clock: ManualClock, rows: int = 8, staleness_s: float = 10.0) -> tuple[LocalService, TableWorker, CachedTable]:
    service = LocalService()
    for _ in range(2):
        TableServer(service)
    kv, other = (TableWorker(service, expected_servers=2) for _ in range(2))
    for each in (kv, other):
        each.create_sparse("clicks", 2, {"name": "add"}, {"name": "uniform", "scale": 0.5})
    return service, other, CachedTable(kv, "clicks", rows=rows, staleness_s=staleness_s, clock=clock)


def test_what_was_pulled_is_read_here_until_it_is_too_old(clock: ManualClock) -> None:
    service, other, cache = make(clock)
    before = cache.pull(KEYS)
    other.push("clicks", KEYS, ONES)
    clock.advance(10.0)
    service.calls.clear()
    np.testing.assert_array_equal(cache.pull(KEYS[[1, 0, 1]]), before[[1, 0, 1]])
    assert not service.calls
    clock.advance(0.1)
    np.testing.assert_allclose(cache.pull(KEYS), before + 1)
    assert (cache.statistics().hits, cache.statistics().misses, cache.statistics().stale) == (2, 6, 3)


def test_a_worker_reads_what_it_wrote(clock: ManualClock) -> None:
    _, _, cache = make(clock)
    before = cache.pull(KEYS)
    cache.push(KEYS[:2], ONES[:2])
    np.testing.assert_allclose(cache.pull(KEYS), before + floats([1, 1], [1, 1], [0, 0]))
    np.testing.assert_allclose(cache.push_pull(KEYS[:1], ONES[:1]), before[:1] + 2)
    np.testing.assert_allclose(cache.pull(KEYS), before + floats([2, 2], [1, 1], [0, 0]))


def test_a_push_that_failed_may_have_been_applied(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    _, other, cache = make(clock)
    cache.pull(KEYS)
    other.push("clicks", KEYS, ONES)

    def fails(*args: object, **more: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(cache.kv, "push", fails)
    with pytest.raises(TimeoutError):
        cache.push(KEYS, ONES)
    np.testing.assert_array_equal(cache.pull(KEYS), other.pull("clicks", KEYS))


def test_the_keys_used_last_keep_their_places(clock: ManualClock) -> None:
    service, _, cache = make(clock, rows=3)
    for keys in ([1, 2, 3], [1], [3], [4]):  # 2 goes
        cache.pull(np.array(keys))
    assert cache.statistics().evicted == 1
    service.calls.clear()
    cache.pull(np.array([1, 3, 4]))
    assert not service.calls
    cache.pull(np.array([2]))
    assert len(service.calls) == 1


def test_more_keys_than_places_are_answered_all_the_same(clock: ManualClock, seed: int) -> None:
    _, other, cache = make(clock, rows=16, staleness_s=3.0)
    random = np.random.default_rng(seed)
    for _ in range(100):
        clock.advance(random.random())
        keys = random.integers(0, 60, random.integers(0, 40))
        np.testing.assert_array_equal(cache.pull(keys), other.pull("clicks", keys))
        own = random.choice(60, random.integers(0, 10), replace=False)
        cache.push(own, np.ones((len(own), 2), np.float32))
    statistics = cache.statistics()
    assert statistics.rows == 16
    assert statistics.hits > 100


@pytest.mark.parametrize(("rows", "staleness_s"), [(0, 1.0), (10, -1.0)])
def test_bounds_are_checked(clock: ManualClock, rows: int, staleness_s: float) -> None:
    with pytest.raises(ConfigError, match="cache of 'clicks'"):
        make(clock, rows, staleness_s)
