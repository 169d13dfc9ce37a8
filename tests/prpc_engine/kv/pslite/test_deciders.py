"""What decides: ids, ranges, slices, priorities, lost messages, sums, settings.
No processes here.
"""

from __future__ import annotations

import itertools
import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prpc_engine import kv, pslite
from prpc_engine.errors import Backpressure, BadArguments, Closed, ConfigError
from prpc_engine.pslite import KVPairs, KVServerDefaultHandle, ids, wire
from prpc_engine.pslite.barriers import Barriers
from prpc_engine.pslite.conversion import converted
from prpc_engine.pslite.customer_router import KV, CustomerRouter
from prpc_engine.pslite.environment import JobSettings
from prpc_engine.pslite.handler_threads import HandlerThreads
from prpc_engine.pslite.outbox import ALONE_MAX, TOGETHER_MAX, Outbox
from prpc_engine.pslite.pairs import check_keys, check_layout, check_pairs, check_vals
from prpc_engine.pslite.reliable import Arrivals, Dice
from prpc_engine.pslite.slicer import by_ranges, check_slices
from shard import Future

JOB = {
    "DMLC_ROLE": "worker",
    "DMLC_NUM_SERVER": "2",
    "DMLC_NUM_WORKER": "3",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "8000",
}


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# Ids


def test_groups_are_sums_and_nodes_have_even_and_odd_ids() -> None:
    assert ids.members(ids.ALL, 2, 3) == (1, 8, 10, 9, 11, 13)
    assert ids.members(ids.SCHEDULER + ids.WORKER_GROUP, 2, 3) == (1, 9, 11, 13)
    assert ids.members(10, 2, 3) == (10,)
    assert [ids.name_of(node) for node in (1, 10, 13)] == ["scheduler", "server 1", "worker 2"]
    assert [ids.rank_of(node) for node in (1, 8, 9, 10, 13)] == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("group", [0, -1, 12, 15, 1 << 40])
def test_an_id_that_nobody_has_is_refused(group: int) -> None:
    with pytest.raises(ConfigError):
        ids.members(group, 2, 3)


@pytest.mark.parametrize("servers", [1, 2, 3, 7, 1000])
def test_every_key_belongs_to_exactly_one_server(servers: int) -> None:
    ranges = ids.key_ranges(servers)
    assert ranges[0].begin == 0
    assert ranges[-1].end == 1 << 64
    assert all(one.end == two.begin for one, two in itertools.pairwise(ranges))


# Slices


@pytest.mark.parametrize("servers", [1, 2, 3, 8])
@pytest.mark.parametrize("varying", [False, True])
def test_slices_are_views_that_together_are_all(servers: int, varying: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    asked = np.unique(np.append(random.integers(0, 1 << 64, 50, np.uint64), keys(0, ids.KEY_MAX)))
    lens = random.integers(0, 4, len(asked)).astype(np.int32) if varying else None
    vals = np.arange(int(lens.sum()) if lens is not None else 2 * len(asked), dtype=np.float32)
    ranges = ids.key_ranges(servers)
    slices = by_ranges(KVPairs(asked, vals, lens), ranges)
    check_slices(slices, asked, ranges)
    used = [each for each in slices if each is not None]
    np.testing.assert_array_equal(np.concatenate([each.vals for each in used]), vals)
    for each, (begin, end) in zip(slices, ranges, strict=True):
        if each is not None:
            assert begin <= int(each.keys[0]) <= int(each.keys[-1]) < end
            assert np.shares_memory(each.keys, asked)
            assert check_layout("push", each.keys, each.vals, each.lens) is each.lens


def test_a_slicer_that_loses_or_doubles_keys_is_found_out() -> None:
    asked, ranges = keys(1, 2, 3), ids.key_ranges(2)
    whole, part = KVPairs(asked, floats(1, 2, 3)), KVPairs(asked[:2], floats(1, 2))
    check_slices([None, whole], asked, ranges)
    for bad in ([part, None], [whole, whole], [whole]):
        with pytest.raises(BadArguments, match="slice"):
            check_slices(bad, asked, ranges)


# What may be sent


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (lambda: check_keys("push", [1]), "push: keys are a list; a numpy array uint64"),
        (lambda: check_keys("push", np.array([1])), "keys are int64[1]"),
        (lambda: check_keys("push", keys(1, 3, 3)), "keys[1] is 3 and keys[2] is 3; sort them"),
        (lambda: check_vals("pull", "vals", np.array(["a"])), "vals are <U1[1]"),
        (lambda: check_vals("pull", "vals", np.zeros((4, 4))[:, 0]), "not contiguous"),
        (lambda: check_vals("pull", "vals", np.broadcast_to(1.0, 1), is_written=True), "read-only"),
        (
            lambda: check_layout("push", keys(1, 2), floats(1, 2, 3), None),
            "3 vals for 2 keys do not divide",
        ),
        (lambda: check_layout("push", keys(), floats(1), None), "1 vals for 0 keys"),
        (
            lambda: check_layout("push", keys(1), floats(1), np.array([1])),
            "lens are int64[1]; a numpy array int32[1]",
        ),
        (
            lambda: check_layout("push", keys(1), floats(1), np.array([2], np.int32)),
            "lens add up to 2, and there are 1",
        ),
        (
            lambda: check_layout("push", keys(1, 2), floats(1), np.array([2, -1], np.int32)),
            "lens[1] is -1; 0 and more",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_named(attempt: object, said: str) -> None:
    with pytest.raises(BadArguments) as caught:
        attempt()  # type: ignore[operator]
    assert said in str(caught.value)


# Priorities


def test_what_waits_leaves_by_priority_and_in_order_among_equals() -> None:
    outbox: Outbox[str] = Outbox(messages_max=1)
    for name, priority in [("a", 0), ("b", 1), ("c", 0), ("d", 1), ("e", -1)]:
        outbox.put(name, 10, priority)
    left = []
    while items := outbox.take():
        assert outbox.take() == []  # one is on its way
        outbox.finished(10)
        left += items
    assert left == ["b", "d", "a", "c", "e"]


def test_bytes_on_their_way_are_bounded_but_one_message_may_always_go() -> None:
    outbox: Outbox[str] = Outbox(bytes_max=100, waiting_max=2)
    outbox.put("large", 500)
    assert outbox.take() == ["large"]
    outbox.put("small", 1)
    assert outbox.take() == []
    outbox.put("other", 60)
    with pytest.raises(Backpressure, match="2 messages wait to be sent, 2 may"):
        outbox.put("one too many", 1)
    outbox.finished(500)
    assert [outbox.take(), outbox.take()] == [["small"], ["other"]]


def test_once_some_are_on_their_way_messages_of_a_kind_wait_and_leave_together() -> None:
    outbox: Outbox[int] = Outbox()
    kind = "kind", 1000
    assert all(outbox.admit(1, ALONE_MAX) for _ in range(ALONE_MAX))
    assert not outbox.admit(1, ALONE_MAX)
    assert [outbox.put(number, 1, 0, kind) for number in range(TOGETHER_MAX)] == [False] * (
        TOGETHER_MAX - 1
    ) + [True]
    outbox.put(100, 1, 0, kind)
    outbox.put(101, 1, 1, kind)
    assert [outbox.take(), outbox.take(), outbox.take()] == [
        [101],
        list(range(TOGETHER_MAX)),
        [100],
    ]
    assert not outbox.finished(TOGETHER_MAX, TOGETHER_MAX)


def test_what_leaves_together_is_of_one_kind_and_bounded_in_bytes_and_number() -> None:
    outbox: Outbox[str] = Outbox(messages_max=6)
    one, two = ("one", 1000), ("two", 15)
    for name, kind in [
        ("a", one),
        ("b", one),
        ("c", two),
        ("d", None),
        ("e", None),
        ("f", two),
        ("g", two),
    ]:
        outbox.put(name, 10, 0, kind)
    left = []
    while items := outbox.take():
        left.append(items)
    assert left == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]  # six are on their way
    outbox.finished(60, 6)
    outbox.put("h", 5, 0, two)
    outbox.put("i", 1, 0, two)
    assert [outbox.take(), outbox.take()] == [["g", "h"], ["i"]]


# Lost messages


def test_draws_are_independent_and_repeatable() -> None:
    draws = [Dice(10, 7, 8).drops() for _ in range(2)]
    assert draws[0] == draws[1]
    dice = Dice(10, 7, 8)
    many = [dice.drops() for _ in range(10_000)]
    assert 800 < sum(many) < 1200
    # ps-lite loses whole seconds
    assert sum(one and two for one, two in itertools.pairwise(many)) < 200


LANE = (77, 0)


def test_a_message_that_comes_again_gets_the_first_answer_and_is_not_handled() -> None:
    arrivals = Arrivals()
    handled = []
    later = Future()

    def handle() -> Future:
        handled.append(1)
        return later

    first, second = arrivals.answer(LANE, 0, 0, handle), arrivals.answer(LANE, 0, 0, handle)
    first.cancel()  # its caller gave up
    later.set_result("done")
    assert second.result() == arrivals.answer(LANE, 0, 0, handle).result() == "done"
    assert handled == [1]
    assert arrivals.answer((78, 0), 0, 0, lambda: "of another").result() == "of another"
    with pytest.raises(BadArguments, match="gave it up"):
        arrivals.answer(LANE, 1, 1, lambda: None)  # below the floor nothing is remembered
        arrivals.answer(LANE, 0, 0, handle)
    assert handled == [1]


def test_messages_are_handled_in_order_whichever_comes_first() -> None:
    arrivals = Arrivals(ahead_max=8)
    handled: list[int] = []
    answers = {
        number: arrivals.answer(LANE, number, 0, lambda number=number: handled.append(number))
        for number in (2, 1, 3)
    }
    assert (handled, answers[1].done()) == ([], False)  # 0 was lost
    arrivals.answer(LANE, 0, 0, lambda: handled.append(0))
    assert handled == [0, 1, 2, 3]
    assert all(answer.done() for answer in answers.values())
    arrivals.answer(LANE, 6, 4, lambda: handled.append(6))
    # 4 and 5 were given up: nobody waits for them
    arrivals.answer(LANE, 7, 6, lambda: handled.append(7))
    assert handled == [0, 1, 2, 3, 6, 7]
    with pytest.raises(Backpressure, match="20 is 14 ahead"):
        arrivals.answer(LANE, 20, 6, lambda: None)


def test_the_lane_that_was_silent_for_longest_is_forgotten() -> None:
    arrivals = Arrivals(lanes_max=2)
    handled: list[int] = []
    for process in (1, 2, 1, 3, 1, 2):
        arrivals.answer((process, 0), 5, 5, lambda process=process: handled.append(process))
    assert handled == [1, 2, 3, 2]


def leave() -> None:
    sys.exit("from a handler")


def test_a_handler_that_exits_ends_its_own_message_and_no_other() -> None:
    arrivals = Arrivals()
    early = [arrivals.answer(LANE, 1, 0, leave), arrivals.answer(LANE, 2, 0, lambda: "next")]
    assert arrivals.answer(LANE, 0, 0, lambda: "first").result() == "first"
    assert isinstance(early[0].error(), SystemExit)
    assert early[1].result() == "next"
    room = CustomerRouter("node", SimpleNamespace(call_soon=lambda function: function()))  # type: ignore[arg-type]
    early = [room.take(KV, 0, (work,)) for work in (leave, lambda: "next")]
    room.add_handler(KV, 0, lambda work: work())
    assert isinstance(early[0].error(), SystemExit)
    assert early[1].result() == "next"


def test_a_thread_of_handlers_that_is_closed_refuses_what_nobody_would_run() -> None:
    threads = HandlerThreads("handlers", 1)
    threads.close()
    with pytest.raises(Closed, match="handlers takes no more requests"):
        threads.put(0, leave)


# Barriers


def test_a_barrier_opens_with_the_last_one_and_names_those_that_are_missing() -> None:
    meetings, group, expected = Barriers(), 6, (8, 9, 11)
    first, second = Future(), Future()
    assert not meetings.arrive(group, expected, [8, 9], first)  # a joint process brings both
    meetings.give_up(group, expected, first)
    assert first.result() == (11,)
    meetings.leave(group, [8, 9], first)
    assert not meetings.arrive(group, expected, [11], second)
    third = Future()
    assert not meetings.arrive(group, expected, [8], third)
    again = Future()
    assert not meetings.arrive(group, expected, [8], again)  # it died, and its successor is here
    meetings.leave(group, [8], third)
    assert meetings.arrive(group, expected, [9], Future())
    assert (second.result(), again.result(), third.done()) == ((), (), False)
    assert not meetings.arrive(group, expected, [8, 9], Future())  # the next one


def test_who_missed_that_a_barrier_opened_is_let_through_and_not_counted_for_the_next() -> None:
    meetings, group, expected = Barriers(), 4, (9, 11, 13)
    behind, newcomer, ahead = Future(), Future(), Future()
    assert not meetings.arrive(group, expected, [11], behind, 6)
    # it took a place, and counts for any
    assert not meetings.arrive(group, expected, [9], newcomer)
    assert not meetings.arrive(group, expected, [13], ahead, 7)
    assert (behind.result(), newcomer.done(), ahead.done()) == ((), False, False)
    assert meetings.arrive(group, expected, [11], Future(), 6)  # again, as the answer was lost
    assert meetings.arrive(group, expected, [11], Future(), 7)
    assert (newcomer.result(), ahead.result()) == ((), ())


# On the way


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f2", "f4", "f8", "c16"])
@pytest.mark.parametrize("length", [0, 3, 500, 5000])
@pytest.mark.parametrize("varying", [False, True])
def test_pairs_arrive_as_they_were_packed(dtype: str, length: int, varying: bool) -> None:
    asked, vals = keys(1, ids.KEY_MAX), np.ones(2 * length, dtype)
    lens = np.array([length, length], np.int32) if varying else None
    (head, *arrays), nbytes = wire.pack(
        3, 9, 1, -7, 1 << 40, wire.PUSH, KVPairs(asked, vals, lens, priority=-2)
    )
    fields = wire.Head(*wire.read_head(head))
    assert (fields.app_id, fields.sender, fields.customer_id, fields.cmd, fields.timestamp) == (
        3,
        9,
        1,
        -7,
        1 << 40,
    )
    got = wire.read_pairs(head, fields, tuple(arrays))
    assert (got.keys.tolist(), got.vals.dtype, got.priority) == (asked.tolist(), vals.dtype, -2)
    np.testing.assert_array_equal(got.vals, vals)
    assert (got.lens is None) == (lens is None)
    assert nbytes == asked.nbytes + vals.nbytes + (0 if lens is None else lens.nbytes)
    n_keys, answer, their_lens = wire.read_answer(wire.pack_answer(2, vals, lens))
    assert n_keys == 2 and (their_lens is None) == (lens is None)
    np.testing.assert_array_equal(answer, vals)


@pytest.mark.parametrize(
    ("n_keys", "width", "beside"),
    [(1, 10, 0), (1, 5000, 1), (600, 20, 1), (3000, 0, 3), (3000, 1, 3)],
)
@pytest.mark.parametrize("varying", [False, True])
def test_small_keys_travel_in_the_head_of_what_is_beside_it(
    n_keys: int, width: int, beside: int, varying: bool
) -> None:
    asked, vals = np.arange(n_keys, dtype=np.uint64), np.arange(n_keys * width, dtype=np.float32)
    lens = np.full(n_keys, width, np.int32) if varying else None
    (head, *arrays), _ = wire.pack(0, 9, 0, 0, 0, wire.PUSH, KVPairs(asked, vals, lens))
    assert len(arrays) == beside
    got = wire.read_pairs(head, wire.read_head(head), tuple(arrays))
    assert np.array_equal(got.keys, asked) and np.array_equal(got.vals, vals)
    assert got.lens is None if lens is None else np.array_equal(got.lens, lens)


def test_a_large_answer_to_one_key_is_the_array_itself() -> None:
    vals = np.ones(5000, np.float32)
    assert wire.pack_answer(1, vals, None) is vals
    assert wire.read_answer(vals) == (1, vals, None)


def test_values_in_another_byte_order_go_beside_the_head() -> None:
    vals = np.arange(3, dtype=">f4")
    (head, *arrays), _ = wire.pack(0, 9, 0, 0, 0, wire.PUSH, KVPairs(keys(1), vals))
    got = wire.read_pairs(head, wire.read_head(head), tuple(arrays))
    assert (
        got.keys.tolist() == [1] and got.vals.dtype == vals.dtype and got.vals.tolist() == [0, 1, 2]
    )


def test_truth_values_go_beside_the_head_where_their_bytes_are_looked_at() -> None:
    vals = np.array([True, False, True])
    (_, *arrays), _ = wire.pack(0, 9, 0, 0, 0, wire.PUSH, KVPairs(keys(1), vals))
    assert len(arrays) == 1 and arrays[0] is vals
    assert wire.pack_answer(1, vals, None) is vals
    forged = bytearray(wire.pack_answer(1, np.array([2, 0, 1], np.uint8), None))
    forged[1] = vals.dtype.num
    with pytest.raises(BadArguments, match="a malformed answer"):
        wire.read_answer(bytes(forged))


def test_what_was_not_packed_here_is_refused() -> None:
    (head,), _ = wire.pack(0, 9, 0, 0, 0, wire.PUSH, KVPairs(keys(1, 2), floats(1, 2)))
    for cut in (b"", head[:39], head[:60]):
        with pytest.raises(BadArguments, match="a request"):
            wire.read_pairs(cut, wire.read_head(cut), ())
    with pytest.raises(BadArguments, match="no number of 32 bits"):
        wire.pack(0, 9, 0, 1 << 31, 0, wire.PUSH, KVPairs(keys(1), floats(1)))
    for bad in (b"", b"\x00\xff\x00\x00\x01\x00\x00\x00", b"\x04\x0b\x00\x00\xff\x00\x00\x00"):
        with pytest.raises(BadArguments, match="a malformed answer"):
            wire.read_answer(bad)


# Names


def test_ps_lites_names_stand_beside_the_tables_and_each_points_at_the_other() -> None:
    assert (kv.KVWorker, kv.start) == (pslite.KVWorker, pslite.start)
    assert set(pslite.__all__) <= set(kv.__all__)
    with pytest.raises(ConfigError, match="holds tables is TableWorker"):
        kv.KVWorker(object())
    with pytest.raises(ConfigError, match="holds tables is TableServer"):
        kv.KVServer(object())


# Sums


def test_the_default_handle_sums_each_key_whatever_its_length(seed: int) -> None:
    random = np.random.default_rng(seed)
    handle, expected = KVServerDefaultHandle(), {}
    lengths = {
        int(key): int(random.integers(0, 5))
        for key in np.unique(random.integers(0, 1 << 64, 300, np.uint64))
    }
    everything = sorted(lengths)
    for _ in range(30):
        asked = sorted(
            everything[at] for at in random.permutation(len(everything))[: random.integers(1, 200)]
        )
        lens = np.array([lengths[key] for key in asked], np.int32)
        vals = random.integers(0, 100, int(lens.sum())).astype(np.float32)
        handle.push(KVPairs(keys(*asked), vals, lens))
        for key, part in zip(asked, np.split(vals, np.cumsum(lens)[:-1]), strict=True):
            expected[key] = expected.get(key, 0) + part
    known = sorted(expected)
    vals, lens = handle.pull(keys(*known))
    assert lens is not None and lens.tolist() == [lengths[key] for key in known]
    np.testing.assert_array_equal(vals, np.concatenate([expected[key] for key in known]))
    assert len(handle) == len(known)


def test_a_push_that_does_not_fit_adds_nothing() -> None:
    handle = KVServerDefaultHandle()
    handle.push(KVPairs(keys(1, 2), floats(1, 2, 3, 4)))
    with pytest.raises(
        BadArguments, match="values are float32 since the first push, and complex64 were pushed now"
    ):
        handle.push(KVPairs(keys(3), np.zeros(2, np.complex64)))
    with pytest.raises(
        BadArguments, match="key 2 has 2 values since its first push, and 1 were pushed now"
    ):
        handle.push(KVPairs(keys(2, 3), floats(9, 9)))
    assert handle.pull(keys(1, 2))[0].tolist() == [1, 2, 3, 4]
    assert len(handle) == 2
    with pytest.raises(BadArguments, match="key 3 was never pushed"):
        handle.pull(keys(1, 3))


@pytest.mark.parametrize(
    ("kept", "pushed", "said"),
    [
        ("float32", np.array([1, 2**53 + 1]), "key 4: int64 9007199254740993"),
        ("float64", np.array([1, 2**63 - 1]), "key 4: int64 9223372036854775807"),
        ("float64", np.array([1, 2**64 - 1], np.uint64), "key 4: uint64 18446744073709551615"),
        ("float32", np.array([1, 1e300]), "key 4: float64 1e+300"),
        ("complex64", np.array([1, 1e300]), "key 4: float64 1e+300"),
        ("int8", np.array([300, 1]), "key 3: int64 300"),
        ("int64", np.array([2**63, 1], np.uint64), "key 3: uint64 9223372036854775808"),
    ],
)
def test_a_pushed_value_that_the_first_pushs_dtype_does_not_hold_is_refused_and_nothing_added(
    kept: str, pushed: np.ndarray, said: str
) -> None:
    handle = KVServerDefaultHandle()
    handle.push(KVPairs(keys(2), np.ones(1, kept)))
    with pytest.raises(
        BadArguments, match=f"{re.escape(said)} does not fit into {kept}, the dtype"
    ):
        handle.push(KVPairs(keys(3, 4), pushed))
    assert len(handle) == 1


@pytest.mark.parametrize(
    ("kept", "pushed", "sums"),
    [
        ("float32", np.array([0.1, np.inf]), [np.float32(0.1), np.inf]),  # rounded
        ("float32", np.array([2**24, -(2**40)]), [2**24, -(2**40)]),
        ("float64", np.array([2**62, 2**63], np.uint64), [2**62, 2**63]),
        ("int16", np.array([-128, 127], np.int8), [-128, 127]),
        ("int64", np.array([True, False]), [1, 0]),
        (">f4", np.array([1, 2], np.float32), [1, 2]),
        ("complex64", np.array([1.5, 2]), [1.5, 2]),
    ],
)
def test_a_pushed_value_that_the_first_pushs_dtype_holds_is_added(
    kept: str, pushed: np.ndarray, sums: list[float]
) -> None:
    handle = KVServerDefaultHandle()
    handle.push(KVPairs(keys(2), np.ones(1, kept)))
    handle.push(KVPairs(keys(3, 4), pushed))
    got, _ = handle.pull(keys(3, 4))
    assert (got.dtype, got.tolist()) == (np.dtype(kept), sums)


def test_a_value_that_does_not_fit_is_named_with_its_own_key_of_those_with_lens() -> None:
    lens = np.array([2, 0, 3], np.int32)
    with pytest.raises(ValueError, match="key 9: float32 nan does not fit into int64"):
        converted(keys(1, 5, 9), floats(1, 2, np.nan, 4, 5), lens, np.dtype(np.int64))
    with pytest.raises(ValueError, match=re.escape("key 9: complex64 (3+1j) does not")):
        converted(keys(1, 9), np.array([1, 2, 3 + 1j, 4], np.complex64), None, np.dtype("f8"))


def test_scalars_read_as_zero_before_their_first_push_and_answers_are_copies() -> None:
    handle = KVServerDefaultHandle()
    assert handle.pull(keys(4, 5))[0].tolist() == [0, 0]
    handle.push(KVPairs(keys(2, ids.KEY_MAX), floats(1, 2)))
    got, lens = handle.pull(keys(1, 2, ids.KEY_MAX))
    assert (got.tolist(), lens) == ([0, 1, 2], None)
    before = handle.pull(keys(2))[0]
    handle.push(KVPairs(keys(2), floats(5)))
    assert before.tolist() == [1]


# Settings


def test_the_environment_says_who_this_process_is() -> None:
    settings = JobSettings.from_environment(
        {**JOB, "PS_RESEND": "1", "PS_RESEND_TIMEOUT": "250", "DMLC_RANK": "2"}
    )
    assert (settings.role, settings.servers, settings.workers, settings.rank) == ("worker", 2, 3, 2)
    assert (str(settings.root), settings.host, settings.transports) == (
        "127.0.0.1:8000",
        "127.0.0.1",
        ("shm", "unix", "tcp"),
    )
    assert settings.resend_s == 0.25
    other = JobSettings.from_environment({**JOB, "DMLC_LOCAL": "1"}, role="server", rank=1)
    assert (other.role, other.rank, other.transports, other.resend_s) == (
        "server",
        1,
        ("shm", "unix"),
        0,
    )
    for rdma in ({"DMLC_PS_VAN_TYPE": "ibverbs"}, {"DMLC_ENABLE_RDMA": "1"}):
        assert JobSettings.from_environment({**JOB, **rdma}).transports == (
            *("shm", "unix", "verbs", "tcp"),
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"DMLC_ROLE": ""}, "DMLC_ROLE must be set"),
        (
            {"DMLC_ROLE": "master"},
            "DMLC_ROLE='master': scheduler, server, worker, joint are allowed",
        ),
        ({"DMLC_NUM_SERVER": "0"}, "DMLC_NUM_SERVER='0': a whole number from 1 to"),
        ({"DMLC_NUM_WORKER": "two"}, "DMLC_NUM_WORKER='two'"),
        ({"DMLC_PS_ROOT_PORT": "65536"}, "DMLC_PS_ROOT_PORT='65536'"),
        ({"DMLC_PS_ROOT_URI": "no host"}, "DMLC_PS_ROOT_URI='no host': "),
        ({"DMLC_NODE_HOST": "10.0.0.256"}, "DMLC_NODE_HOST='10.0.0.256': "),
        ({"DMLC_PS_VAN_TYPE": "ucx"}, "DMLC_PS_VAN_TYPE='ucx': zmq, p3"),
        ({"DMLC_ENABLE_RDMA": "fabric"}, "DMLC_ENABLE_RDMA='fabric'"),
        (
            {"DMLC_ENABLE_UCX": "1"},
            "DMLC_ENABLE_UCX='1': there is no transport over UCX here; leave it at 0",
        ),
        ({"DMLC_LOCAL": "1", "DMLC_PS_VAN_TYPE": "tcpp"}, "DMLC_PS_VAN_TYPE='tcpp': zmq, p3"),
        ({"PS_VERBOSE": "very"}, "PS_VERBOSE='very': a whole number from 0 to"),
        (
            {"BYTEPS_ORDERED_HOSTS": "127.0.0.1,b"},
            "3 different hosts are allowed, one for each worker, and one of them is this node",
        ),
        ({"BYTEPS_ORDERED_HOSTS": "a,b,a"}, "BYTEPS_ORDERED_HOSTS='a,b,a': 3 different hosts"),
        (
            {"BYTEPS_ORDERED_HOSTS": "a,b,c"},
            "this node's, 127.0.0.1 (DMLC_NODE_HOST) or 127.0.0.1:0",
        ),
        ({"PS_RESEND_TIMEOUT": "soon"}, "PS_RESEND_TIMEOUT='soon': a whole number from 1 to"),
        (
            {"BYTEPS_ENABLE_MIXED_MODE": "1"},
            "BYTEPS_ENABLE_MIXED_MODE='1': ranks do not follow hosts here",
        ),
        ({"DMLC_GROUP_SIZE": "2"}, "instances of one worker stay together, so give it a DMLC_RANK"),
        ({"DMLC_NUM_PORTS": "2"}, "a node has one port here"),
        ({"DMLC_RANK": "3"}, "rank 3 (argument, or DMLC_RANK) of a job with 3 workers: 0 to 2"),
        ({"DMLC_INTERFACE": "nosuch"}, "DMLC_INTERFACE='nosuch': no interface"),
        ({"PS_DROP_MSG": "101"}, "PS_DROP_MSG='101': a whole number from 0 to 100"),
    ],
)
def test_a_bad_variable_is_named_with_what_is_allowed(change: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        JobSettings.from_environment({**JOB, **change})
    assert said in str(caught.value)


@pytest.mark.parametrize("uri", ["::1", "[::1]"])
def test_a_variable_that_is_empty_is_as_one_not_set_and_ipv6_needs_no_brackets(uri: str) -> None:
    settings = JobSettings.from_environment(
        {**JOB, "DMLC_PORT": "", "PORT": "81", "DMLC_NUM_PORTS": "", "DMLC_PS_ROOT_URI": uri}
    )
    assert (settings.port, settings.root.host) == (81, "::1")


def test_ordered_hosts_give_each_node_the_rank_of_its_host_unless_it_wants_another() -> None:
    job = {**JOB, "BYTEPS_ORDERED_HOSTS": "10.0.0.7, 127.0.0.1:82,127.0.0.1:81", "PORT": "81"}
    assert JobSettings.from_environment(job).rank == 2
    assert JobSettings.from_environment({**job, "DMLC_NODE_HOST": "10.0.0.7"}).rank == 0
    assert JobSettings.from_environment({**job, "DMLC_RANK": "1"}).rank == 1
    assert JobSettings.from_environment(job, role="scheduler").rank == -1


def test_an_early_message_that_its_sender_gives_up_is_kept_no_longer() -> None:
    room = CustomerRouter("node", SimpleNamespace(call_soon=lambda function: function()))  # type: ignore[arg-type]
    given_up, kept = room.take(KV, 0, (1,)), room.take(KV, 0, (2,))
    given_up.cancel()
    assert room.early_messages == 1 and len(room.early[KV, 0]) == 1
    handled: list[int] = []
    room.add_handler(KV, 0, handled.append)
    assert handled == [2] and kept.done() and not room.early and room.early_messages == 0


def test_pairs_of_one_key_and_of_several_are_checked_alike() -> None:
    for wanted in (keys(3), keys(3, 4)):
        vals = floats(*range(2 * len(wanted)))
        pairs = check_pairs("push", wanted, vals, None, 5)
        assert (pairs.keys is wanted, pairs.vals is vals) == (True, True)
        assert (pairs.lens, pairs.priority) == (None, 5)
    lens = np.array([0, 2], np.int32)
    assert check_pairs("push", keys(1, 2), floats(1, 2), lens, 0).lens is lens
    flat = check_pairs("push", keys(1, 2), np.ones((2, 3), np.float32), None, 0)
    assert flat.vals.shape == (6,)
    with pytest.raises(BadArguments, match="do not divide"):
        check_pairs("push", keys(1, 2), floats(1), None, 0)


def test_subclasses_of_arrays_are_pushed_as_plain_ones() -> None:
    class Named(np.ndarray[Any, Any]):
        """An array with a name of its own."""

    vals = floats(1, 2).reshape(1, 2).view(np.matrix)
    lens = np.array([1, 1], np.int32).view(Named)
    pairs = check_pairs("push", keys(1, 2).view(Named), vals, lens, 0)
    assert pairs.vals.tolist() == [1.0, 2.0]
    assert {type(each) for each in (pairs.keys, pairs.vals, pairs.lens)} == {np.ndarray}


@pytest.mark.parametrize(("push", "pull"), [(True, False), (False, True), (True, True)])
def test_the_default_handle_answers_each_request_once(push: bool, pull: bool) -> None:
    answers = []
    server = SimpleNamespace(response=lambda *answer: answers.append(answer))
    handle = KVServerDefaultHandle()
    meta = SimpleNamespace(push=push, pull=pull)
    handle(meta, KVPairs(keys(1), floats(4)), server)  # type: ignore[arg-type]
    ((first, *pairs),) = answers
    assert first is meta
    assert [each.vals.tolist() for each in pairs] == ([[4.0 if push else 0.0]] if pull else [])


def test_the_default_handle_takes_no_pushed_keys_for_none_and_lens_that_fit_alone() -> None:
    handle = KVServerDefaultHandle()
    handle.push(KVPairs(keys(), floats()))
    assert len(handle) == 0
    with pytest.raises(BadArguments, match="a push of 2 keys and 3 vals"):
        handle.push(KVPairs(keys(1, 2), floats(1, 2, 3)))
    assert len(handle) == 0
