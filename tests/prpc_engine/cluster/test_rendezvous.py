"""The table where tensors wait: each row of its table of states, and its bounds."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from prpc_engine.cluster.errors import Duplicate, StepAborted, TaskRestarted
from prpc_engine.cluster.rendezvous import Rendezvous
from prpc_engine.errors import Backpressure

ONE, TWO = np.array(1), np.array(2)


def table(tensors_max: int = 100, bytes_max: int = 1 << 20, **more: int) -> Rendezvous:
    return Rendezvous(contextlib.nullcontext(), tensors_max, bytes_max, **more)


def test_a_tensor_waits_for_its_receiver() -> None:
    there = table()
    assert there.put(0, 1, "a", ONE) is None
    assert (there.waiting, there.nbytes) == (1, ONE.nbytes)
    assert there.ask(0, 1, ["a"], "peer")[1] == [ONE]
    assert (there.waiting, there.nbytes) == (0, 0)


def test_a_receiver_waits_for_its_tensors() -> None:
    there = table()
    there.put(0, 1, "b", TWO)
    request, tensors, _ = there.ask(0, 1, ["a", "b"], "peer")
    assert tensors is None
    assert there.put(0, 1, "a", ONE) == request
    assert there.waiting == 2
    assert there.take(request) == [ONE, TWO]
    assert there.take(request) is None
    assert there.waiting == 0


def test_the_same_key_of_another_step_or_for_another_task_is_another_tensor() -> None:
    there = table()
    for step, destination in ((0, 1), (0, 2), (1, 1)):
        there.put(step, destination, "a", ONE)
    assert there.waiting == 3


@pytest.mark.parametrize("state", ["ready", "held", "taken"])
def test_a_key_is_sent_once(state: str) -> None:
    there = table()
    there.put(0, 1, "a", ONE)
    if state != "ready":
        there.ask(0, 1, ["a", "b"] if state == "held" else ["a"], "peer")
    with pytest.raises(Duplicate, match="'a' of step 0 was sent before"):
        there.put(0, 1, "a", TWO)


def test_a_key_is_received_once() -> None:
    there = table()
    there.put(0, 1, "a", ONE)
    there.ask(0, 1, ["a"], "peer")
    with pytest.raises(Duplicate, match=r"'a' of step 0 was sent to its receiver before"):
        there.ask(0, 1, ["a"], "other")


@pytest.mark.parametrize("state", ["wanted", "held"])
def test_a_request_replaces_one_that_waits_for_the_same_key(state: str) -> None:
    there = table(tensors_max=3)
    if state == "held":
        there.put(0, 1, "a", ONE)
    first, _, _ = there.ask(0, 1, ["a", "b", "c"], "peer")
    second, tensors, replaced = there.ask(0, 1, ["b", "a"], "peer")
    assert (tensors, list(replaced)) == (None, [first])
    assert there.waiting == 2
    there.give_up(first)  # its end is heard of later: does nothing
    if state == "wanted":
        there.put(0, 1, "a", ONE)
    assert there.put(0, 1, "b", TWO) == second
    assert there.take(second) == [TWO, ONE]
    assert there.waiting == 0


def test_a_request_that_is_refused_replaces_none() -> None:
    there = table(tensors_max=2)
    there.put(0, 1, "taken", ONE)
    there.ask(0, 1, ["taken"], "peer")
    first, _, _ = there.ask(0, 1, ["a"], "peer")
    for keys, error in (
        (["a", "taken"], Duplicate),
        (["a", "a"], Duplicate),
        (["a", "b", "c"], Backpressure),
    ):
        with pytest.raises(error):
            there.ask(0, 1, keys, "peer")
    assert there.put(0, 1, "a", ONE) == first
    assert there.take(first) == [ONE]


def test_one_key_twice_in_a_request_is_refused() -> None:
    with pytest.raises(Duplicate, match="one key twice"):
        table().ask(0, 1, ["a", "a"], "peer")


def test_what_a_lost_receiver_was_about_to_get_is_there_for_the_next() -> None:
    there = table()
    there.put(0, 1, "a", ONE)
    request, _, _ = there.ask(0, 1, ["a", "b"], "peer")
    assert there.give_up_all("other") == []
    assert there.give_up_all("peer") == [request]
    there.give_up(request)  # again: does nothing
    assert there.waiting == 1
    assert there.ask(0, 1, ["a"], "again")[1] == [ONE]


@pytest.mark.parametrize("ending", ["given up", "replaced", "aborted"])
def test_what_a_request_waited_for_is_not_lost_when_it_ends_as_the_last_tensor_comes(
    ending: str,
) -> None:
    there = table()
    there.ask(0, 1, ["a"], "peer")
    request = there.put(0, 1, "a", ONE)
    assert request is not None
    if ending == "given up":
        there.give_up(request)
        assert there.ask(0, 1, ["a"], "again")[1] == [ONE]
    elif ending == "replaced":
        assert there.ask(0, 1, ["a"], "again")[1:] == ([ONE], {request: None})
    else:
        there.abort(0, "over")
    assert there.take(request) is None
    assert (there.waiting, there.nbytes) == (0, 0)


def test_an_aborted_step_ends_its_requests_drops_its_tensors_and_refuses_others() -> None:
    there = table()
    there.put(0, 1, "a", ONE)
    request, _, _ = there.ask(0, 2, ["b"], "peer")
    assert there.abort(0, "over") == [request]
    assert there.abort(0, "over again") == []
    assert (there.waiting, there.nbytes) == (0, 0)
    there.give_up(request)
    for use in (lambda: there.put(0, 1, "c", ONE), lambda: there.ask(0, 1, ["c"], "peer")):
        with pytest.raises(StepAborted, match=r"^over$"):
            use()
    assert str(there.error(0)) == "over"


def test_a_step_that_was_cleaned_up_begins_anew() -> None:
    there = table()
    there.put(0, 1, "a", ONE)
    there.abort(0, "over")
    there.cleanup(0)
    there.put(0, 1, "a", TWO)
    assert there.ask(0, 1, ["a"], "peer")[1] == [TWO]


def test_a_step_goes_on_with_one_incarnation_of_a_task() -> None:
    there = table()
    there.met(0, 1, 0xA, "/job:ps/task:0")
    there.met(1, 1, 0xB, "/job:ps/task:0")
    with pytest.raises(
        TaskRestarted, match=r"step 0: /job:ps/task:0 was started again .incarnation a then, b now"
    ):
        there.met(0, 1, 0xB, "/job:ps/task:0")


def test_what_waits_is_bounded_by_count_and_bytes() -> None:
    there = table(tensors_max=2, bytes_max=100)
    with pytest.raises(
        Backpressure,
        match=(
            "'large' of step 0, 104 bytes, was not sent: 0 bytes wait for their receivers, 100 may"
        ),
    ):
        there.put(0, 1, "large", np.zeros(13))
    there.put(0, 1, "a", ONE)
    there.ask(0, 1, ["b"], "peer")
    with pytest.raises(Backpressure, match="2 tensors and requests wait already, 2 may"):
        there.put(0, 1, "c", ONE)
    there.put(0, 1, "b", ONE)  # takes no more room


def test_steps_in_which_nothing_waits_are_forgotten_before_others_are_refused() -> None:
    there = table(steps_max=2)
    there.put(0, 1, "a", ONE)
    there.abort(1, "over")
    there.put(2, 1, "a", ONE)
    assert there.error(1) is None
    with pytest.raises(Backpressure, match="wait in 2 steps"):
        there.put(3, 1, "a", ONE)


def test_marks_of_what_was_taken_are_bounded() -> None:
    there = table(entries_max=2)
    for step in (0, 1, 2):
        there.put(step, 1, "a", ONE)
        there.ask(step, 1, ["a"], "peer")
    there.put(0, 1, "a", TWO)  # step 0 is forgotten
