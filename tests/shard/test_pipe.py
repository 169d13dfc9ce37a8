"""Items from shards to one shard, and the waiting calls beneath them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shard import ClosedError, Limits, PeerLostError, Pipe, RestartPolicy, ShardError, ShardGroup
from shard.group.pipe import UNTOLD_MAX
from tests.program import wait_until
from tests.shard import pipe_functions as functions
from tests.shard.processes import PATIENCE_S

PIPES = 2000


@pytest.fixture
def group() -> Iterator[ShardGroup]:
    again = RestartPolicy("on-failure", backoff_s=0.01)
    with ShardGroup(3, start_method="forkserver", restart=again) as made:
        yield made


@pytest.mark.parametrize("wrong", [{"to": -1}, {"to": "1"}, {"to": 0, "capacity": 0}])
def test_what_no_pipe_can_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="are allowed"):
        Pipe(**wrong)


def test_items_come_whole_and_in_the_order_of_each_sender(group: ShardGroup) -> None:
    pipe = Pipe(to=2, capacity=4)
    sending = [
        group.submit_to(index, functions.send_all, pipe, 1000 * index, 300, False)
        for index in (0, 1)
    ]
    items = group.submit_to(2, functions.read, pipe, 600).result(PATIENCE_S)
    assert [each.result(PATIENCE_S) for each in sending] == [300, 300]
    assert [item for item in items if item < 1000] == list(range(300))
    assert [item for item in items if item >= 1000] == list(range(1000, 1300))


def test_a_shard_may_send_to_itself(group: ShardGroup) -> None:
    pipe = Pipe(to=1)
    reading = group.submit_to(1, functions.read_to_the_end, pipe)
    group.submit_to(1, functions.send_all, pipe, 0, 200, False).result(PATIENCE_S)
    group.submit_to(0, functions.close_pipe, pipe).result(PATIENCE_S)
    assert reading.result(PATIENCE_S) == list(range(200))


def test_a_sender_waits_while_nobody_reads(group: ShardGroup) -> None:
    pipe = Pipe(to=1, capacity=8)
    sending = group.submit_to(0, functions.send_all, pipe, 0, 100, True)
    # 8 are queued there, 8 more wait for room: the next is not sent
    wait_until(lambda: group.submit_to(0, functions.sent).result(PATIENCE_S) == 16)
    assert group.submit_to(1, functions.read, pipe, 1).result(PATIENCE_S) == [0]
    wait_until(lambda: group.submit_to(0, functions.sent).result(PATIENCE_S) == 17)
    assert not sending.done()
    rest = group.submit_to(1, functions.read_to_the_end, pipe).result(PATIENCE_S)
    assert rest == list(range(1, 100))
    assert sending.result(PATIENCE_S) == 100


def test_after_the_end_nothing_is_taken(group: ShardGroup) -> None:
    pipe = Pipe(to=1)
    group.submit_to(0, functions.send_all, pipe, 0, 3, True).result(PATIENCE_S)
    late = group.submit_to(2, functions.send_until_told, pipe)
    assert "ClosedError: the pipe was closed" in late.result(PATIENCE_S)
    read = group.submit_to(1, functions.read_to_the_end, pipe)
    assert read.result(PATIENCE_S) == [0, 1, 2]
    assert "ClosedError" in group.submit_to(2, functions.send_until_told, pipe).result(PATIENCE_S)
    with pytest.raises(ClosedError, match="all of it was read"):
        group.submit_to(1, functions.read, pipe, 1).result(PATIENCE_S)


def test_who_reads_may_close_it_and_senders_are_told(group: ShardGroup) -> None:
    pipe = Pipe(to=1, capacity=2)
    sending = group.submit_to(0, functions.send_until_told, pipe)
    assert group.submit_to(1, functions.read, pipe, 5).result(PATIENCE_S) == [0, 1, 2, 3, 4]
    group.submit_to(1, functions.close_pipe, pipe).result(PATIENCE_S)
    assert "ClosedError" in sending.result(PATIENCE_S)


@pytest.mark.slow
def test_pipes_that_have_ended_leave_nothing_in_their_shards(group: ShardGroup) -> None:
    group.submit_to(0, functions.use_pipes, 300).result(PATIENCE_S)
    before = group.map(functions.blocks)
    group.submit_to(0, functions.use_pipes, PIPES).result(PATIENCE_S)
    more = [after - was for after, was in zip(group.map(functions.blocks), before, strict=True)]
    assert max(more) < PIPES / 2, more


def test_of_items_that_came_too_late_and_that_nobody_asks_for_some_are_kept(
    group: ShardGroup,
) -> None:
    count = UNTOLD_MAX + 50
    kept = group.submit_to(0, functions.send_too_late, count).result(PATIENCE_S)
    assert UNTOLD_MAX <= kept <= UNTOLD_MAX + 1, "the last may not have been told yet"


def test_a_pipe_that_has_ended_stays_closed_to_all(group: ShardGroup) -> None:
    pipe = Pipe(to=2)
    group.submit_to(0, functions.send_all, pipe, 0, 3, True).result(PATIENCE_S)
    assert group.submit_to(2, functions.read_to_the_end, pipe).result(PATIENCE_S) == [0, 1, 2]
    assert group.submit_to(2, functions.read_to_the_end, pipe).result(PATIENCE_S) == []
    for index in range(3):
        for _ in range(2):
            error = group.submit_to(index, functions.send_until_told, pipe).result(PATIENCE_S)
            assert error == "ClosedError: the pipe was closed: the item was not taken"
    assert group.submit_to(2, functions.read_to_the_end, pipe).result(PATIENCE_S) == []


def test_pipes_of_one_process_to_two_shards_do_not_know_each_other(group: ShardGroup) -> None:
    pipes = [Pipe(to=to) for to in (1, 2)]
    for pipe in pipes:
        group.submit_to(0, functions.send_all, pipe, 10 * pipe.to, 2, True).result(PATIENCE_S)
    for pipe in pipes:
        read = group.submit_to(pipe.to, functions.read_to_the_end, pipe).result(PATIENCE_S)
        assert read == [10 * pipe.to, 10 * pipe.to + 1]


def test_the_others_cannot_read(group: ShardGroup) -> None:
    with pytest.raises(ShardError, match="shard 1 reads this pipe; shard 0 can send"):
        group.submit_to(0, functions.read, Pipe(to=1), 1).result(PATIENCE_S)


def test_senders_are_told_when_the_shard_that_reads_dies_waiting_or_not(
    group: ShardGroup,
) -> None:
    pipe, roomy = Pipe(to=1, capacity=2), Pipe(to=1)
    waiting = group.submit_to(0, functions.send_until_told, pipe)
    group.submit_to(2, functions.send_all, roomy, 0, 1, False).result(PATIENCE_S)
    # answered: it has come before this
    group.submit_to(2, functions.settle, roomy).result(PATIENCE_S)
    with pytest.raises(PeerLostError):
        group.submit_to(1, functions.die).result(PATIENCE_S)
    assert "PeerLostError" in waiting.result(PATIENCE_S)
    group.wait_up(PATIENCE_S)
    # its items were taken, and are gone: it is told, though nothing of its own was under way
    told = group.submit_to(2, functions.send_until_told, roomy).result(PATIENCE_S)
    assert "what was sent before is lost" in told


@pytest.mark.parametrize("capacity", [1, 3, 64])
def test_who_reads_is_told_of_a_lost_sender_behind_its_items_and_goes_on(
    group: ShardGroup, capacity: int
) -> None:
    pipe = Pipe(to=1, capacity=capacity)
    reading = group.submit_to(1, functions.read_and_hear, pipe)
    group.submit_to(0, functions.send_all, pipe, 0, 3, False).result(PATIENCE_S)
    with pytest.raises(PeerLostError):
        group.submit_to(0, functions.die).result(PATIENCE_S)
    group.wait_up(PATIENCE_S)
    group.submit_to(0, functions.send_all, pipe, 3, 1, False).result(PATIENCE_S)
    group.submit_to(0, functions.settle, pipe).result(PATIENCE_S)
    group.submit_to(2, functions.send_all, pipe, 4, 2, True).result(PATIENCE_S)
    *items, last = reading.result(PATIENCE_S)
    assert [*items[:3], *items[4:], last] == [0, 1, 2, 3, 4, 5]
    assert "shard 0, which sent to this pipe, is gone" in items[3]


def test_a_sender_that_is_lost_after_the_end_is_not_missed(group: ShardGroup) -> None:
    pipe = Pipe(to=1)
    group.submit_to(0, functions.send_all, pipe, 0, 3, True).result(PATIENCE_S)
    with pytest.raises(PeerLostError):
        group.submit_to(0, functions.die).result(PATIENCE_S)
    group.wait_up(PATIENCE_S)
    reading = group.submit_to(1, functions.read_and_hear, pipe)
    assert reading.result(PATIENCE_S) == [0, 1, 2]


def test_arrays_arrive_as_they_were(group: ShardGroup) -> None:
    pipe = Pipe(to=1)
    arrays = [np.arange(100_000, dtype=np.float32) * each for each in range(5)]
    for array in arrays:
        group.submit_to(0, _send_one, pipe, array).result(PATIENCE_S)
    for sent, read in zip(
        arrays, group.submit_to(1, functions.read, pipe, 5).result(PATIENCE_S), strict=True
    ):
        np.testing.assert_array_equal(sent, read)


async def _send_one(pipe: Pipe, item: Any) -> None:
    await pipe.send(item)


# -- keyword arguments -----------------------------------------------------------------------------


def test_functions_take_keyword_arguments_wherever_they_run(group: ShardGroup) -> None:
    offset = 100

    def closure(first: int, *, second: int) -> int:
        return offset + first + second

    for _ in range(3):
        submit = group.submit_to
        assert submit(0, functions.add, 1, third=3).result(PATIENCE_S) == (1, 0, 3)
        assert submit(1, functions.add, 1, second=2, third=3).result(PATIENCE_S) == (1, 2, 3)
        assert submit(1, functions.add_later, 1, second=2).result(PATIENCE_S) == 3
        assert submit(1, closure, 1, second=offset).result(PATIENCE_S) == 2 * offset + 1
        assert submit(2, functions.add_elsewhere, 1, 5, 6).result(PATIENCE_S) == (5, 6, 0)
        assert submit(2, functions.add_elsewhere, 2, 5, 6).result(PATIENCE_S) == (5, 6, 0)
        assert submit(0, sorted, [1, 2], reverse=True).result(PATIENCE_S) == [2, 1]
        offset += 1
    assert group.map(functions.add, 7, third=1) == [(7, 0, 1)] * 3
    with pytest.raises(TypeError, match="unexpected keyword"):
        group.submit_to(0, functions.add, 1, fourth=4).result(PATIENCE_S)


# -- calls that wait for room ----------------------------------------------------------------------


@pytest.fixture
def small() -> Iterator[ShardGroup]:
    """Little may wait for a shard."""
    limits = Limits(ring_bytes=64 << 10, outbox_messages_max=20)
    with ShardGroup(2, start_method="forkserver", limits=limits) as made:
        yield made


def test_a_call_that_finds_too_much_waiting_is_sent_when_there_is_room(small: ShardGroup) -> None:
    pid = small.statistics().shards[1].pid
    count, nbytes = small.submit_to(0, functions.flood, 1, pid, 8_000).result(PATIENCE_S)
    assert nbytes == count * 8_000
    assert count > 2 * 20


def test_a_call_that_takes_long_keeps_no_other_from_finding_room(small: ShardGroup) -> None:
    held = small.submit_to(1, functions.hold)  # the oldest, and not answered
    futures = [small.submit_when_room(1, len, b"x" * 8_000) for _ in range(1_000)]
    assert sum(each.result(PATIENCE_S) for each in futures) == 1_000 * 8_000
    assert not held.done()
    assert small.submit_to(1, functions.let_go).result(PATIENCE_S) == 1
    held.result(PATIENCE_S)
