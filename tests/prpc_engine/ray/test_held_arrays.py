"""Arrays that real processes hold for each other, without Ray."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from prpc_engine import errors
from prpc_engine.node.slab import default_slab
from prpc_engine.ray.held_arrays import HeldArrays, HolderProcess, Missing
from tests.program import Program, halt, wait_until

PATIENCE_S = 20.0
HOLDER = "tests.prpc_engine.ray.holder"
NBYTES = 1_000_000


@pytest.fixture
def held() -> Iterator[HeldArrays]:
    made = HeldArrays()
    yield made
    made.close()


def place_of(holder: Program) -> HolderProcess:
    addresses, process = json.loads(holder.read_line())
    return HolderProcess(tuple(addresses), process)


def test_what_another_process_holds_is_its_memory_until_the_last_array_is_dropped(
    held: HeldArrays,
) -> None:
    with Program(HOLDER, "weights", str(NBYTES)) as holder:
        place = place_of(holder)
        first = held.wait(held.fetch(place, "weights"), PATIENCE_S)
        again = held.wait(held.fetch(place, "weights"), PATIENCE_S)
        for ones, twos in (first, again):
            assert ones.nbytes == twos.nbytes == NBYTES
            assert (ones == 1).all() and (twos == 2).all()
            assert not ones.flags.writeable
        holder.write_line("let go")
        assert json.loads(holder.read_line()) == []
        assert (first[0] == 1).all()  # it is lent
        with pytest.raises(Missing, match=r"holds nothing under 'weights', or not any more"):
            held.wait(held.fetch(place, "weights"), PATIENCE_S)
        del ones, twos, first, again


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
@pytest.mark.parametrize("nbytes", [0, 5, 40_000_000])
def test_each_transport_brings_blocks_of_each_size(
    held: HeldArrays, transport: str, nbytes: int
) -> None:
    with Program(HOLDER, "a", str(nbytes), env={"PRPC_TRANSPORTS": transport}) as holder:
        ones, twos = held.wait(held.fetch(place_of(holder), "a"), PATIENCE_S)
        assert ones.nbytes == twos.nbytes == nbytes
        assert (ones == 1).all() and (twos == 2).all()
        del ones, twos


def test_what_is_held_is_a_copy_unless_it_is_of_the_slab_already(held: HeldArrays) -> None:
    array = np.zeros(NBYTES, np.uint8)
    own = default_slab().empty(NBYTES, np.uint8)
    own[:] = 0
    held.hold("a", [array, own])
    array[:], own[:] = 1, 1
    copied, lent = held.wait(held.fetch(held.holder, "a"), PATIENCE_S)
    assert not copied.any() and lent.all()
    held.let_go("a")
    held.let_go("a")
    del copied, lent, own
    wait_until(lambda: default_slab().statistics().blocks_used == 0)


def test_many_threads_fetch_at_once(held: HeldArrays) -> None:
    with Program(HOLDER, "a", str(NBYTES)) as holder, ThreadPoolExecutor(8) as threads:
        place = place_of(holder)

        def fetch(_: int) -> int:
            return int(sum(block[-1] for block in held.wait(held.fetch(place, "a"), PATIENCE_S)))

        assert list(threads.map(fetch, range(200))) == [3] * 200


def test_a_process_that_does_not_answer_is_waited_for_in_parts_and_one_that_died_is_named(
    held: HeldArrays,
) -> None:
    with Program(HOLDER, "a", str(NBYTES)) as holder:
        place = place_of(holder)
        held.wait(held.fetch(place, "a"), PATIENCE_S)
        halt(holder.pid)
        fetch = held.fetch(place, "a")
        with pytest.raises(errors.DeadlineExceeded, match=f"did not come from {place.process}"):
            held.wait(fetch, 0.1)
        holder.process.send_signal(signal.SIGCONT)
        assert len(held.wait(fetch, PATIENCE_S)) == 2
        halt(holder.pid)
        fetch = held.fetch(place, "a")
        holder.kill()
        with pytest.raises(errors.NotSent, match=place.process):
            held.wait(fetch, PATIENCE_S)
        with pytest.raises(errors.NotSent, match=place.process):
            held.fetch(place, "a")


def test_a_fetch_that_is_cancelled_ends_for_who_waits(held: HeldArrays) -> None:
    with Program(HOLDER, "a", str(NBYTES)) as holder, ThreadPoolExecutor(1) as threads:
        place = place_of(holder)
        held.wait(held.fetch(place, "a"), PATIENCE_S)
        halt(holder.pid)
        fetch = held.fetch(place, "a")
        waits = threads.submit(held.wait, fetch, PATIENCE_S)
        held.cancel(fetch)
        with pytest.raises(errors.Cancelled):
            waits.result(PATIENCE_S)
        holder.process.send_signal(signal.SIGCONT)


def test_a_process_that_holds_nothing_any_more_is_not_reached(held: HeldArrays) -> None:
    with contextlib.closing(HeldArrays()) as other:
        place = other.holder
    with pytest.raises(errors.NotSent):
        held.fetch(place, "a")
