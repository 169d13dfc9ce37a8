"""`prpc bench rdma` on a real device: every way of it works here, where perf's own test lets those
be left out that a machine does not offer.
"""

from __future__ import annotations

import pytest

from perf.bench_rdma import (
    READ_BW,
    VERBS,
    WRITE_BW,
    Moved,
    Verb,
    measure,
    measure_perftest,
    measure_pingpong,
    measure_prpc,
)
from perf.harness import Place
from perf.timing import TINY

HERE = Place((), (), (), "")
SIZES_BYTES = [64, pytest.param(1 << 20, marks=pytest.mark.slow)]  # the large one at night


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
@pytest.mark.parametrize("size_bytes", SIZES_BYTES)
def test_every_verb_moves_what_it_is_timed_for(verb: Verb, size_bytes: int) -> None:
    if verb.is_inline and size_bytes > 64:
        size_bytes = 32
    sample = measure(HERE, TINY, Moved(size_bytes), verb)
    assert sample.work == {"last_right": 1}
    assert sample.p50_ns


@pytest.mark.parametrize("size_bytes", SIZES_BYTES)
def test_the_transport_delivers_what_it_is_timed_for(size_bytes: int) -> None:
    sample = measure_prpc(HERE, TINY, Moved(size_bytes))
    assert sample.work == {"last_right": 1}


def test_the_peer_tells_its_time() -> None:
    assert measure_pingpong(HERE, TINY, Moved(64)).p50_ns


@pytest.mark.parametrize("name", [WRITE_BW, READ_BW])
@pytest.mark.parametrize("size_bytes", SIZES_BYTES)
def test_each_program_of_perftest_tells_its_rate(name: str, size_bytes: int) -> None:
    sample = measure_perftest(HERE, TINY, Moved(size_bytes), name)
    assert sample.ops and sample.p50_ns
