import pytest

from prpc_engine.kv.consistency.durable import SAVES_MAX, Durable
from prpc_engine.rpc.deferred import Deferred


def answered(*answers: Deferred) -> list[bool]:
    return [answer.done() for answer in answers]


def test_a_push_is_answered_by_the_first_committed_save_that_was_cut_after_it() -> None:
    durable = Durable()
    one = durable.wait(1, "t")
    durable.cut("a")
    two = durable.wait(2, "t")
    durable.cut("b")
    three = durable.wait(3, "t")
    durable.committed("a")
    assert answered(one, two, three) == [True, False, False]
    durable.committed("b")
    assert answered(one, two, three) == [True, True, False]
    assert (one.result(), two.result(), len(durable)) == (1, 2, 1)


def test_a_later_save_answers_for_one_that_failed_and_one_that_is_not_known_for_nobody() -> None:
    durable = Durable()
    one = durable.wait(1, "t")
    durable.cut("failed")
    two = durable.wait(2, "t")
    durable.cut("good")
    durable.committed("other")
    assert answered(one, two) == [False, False]
    durable.committed("good")
    assert answered(one, two) == [True, True]
    durable.committed("failed")
    three = durable.wait(3, "t")
    durable.committed("good")
    assert not three.done()


def test_what_cannot_be_saved_as_it_was_fails_and_later_pushes_wait_for_their_own_save() -> None:
    durable = Durable()
    one = durable.wait(1, "t")
    durable.cut("a")
    durable.fail(ValueError("restored"))
    with pytest.raises(ValueError, match="restored"):
        one.result()
    two = durable.wait(2, "t")
    durable.committed("a")
    assert not two.done()


def test_a_push_that_its_caller_gives_up_waits_no_longer() -> None:
    durable = Durable()
    given_up, kept = durable.wait(1, "t"), durable.wait(2, "t")
    given_up.cancel()
    assert len(durable) == 1
    durable.cut("a")
    durable.committed("a")
    assert kept.result() == 2 and len(durable) == 0


def test_saves_that_nobody_commits_are_forgotten() -> None:
    durable = Durable()
    one = durable.wait(1, "t")
    for number in range(SAVES_MAX + 1):
        durable.cut(str(number))
    durable.committed("0")
    assert not one.done()
    durable.committed("1")
    assert one.done()
