"""References to values of other workers, and when those are freed."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from prpc_engine import errors
from prpc_engine import remote as rpc
from tests.program import wait_until
from tests.prpc_engine.remote import functions_there as there
from tests.prpc_engine.remote.conftest import Group

NOTHING = {"values": 0, "references": 0}


def kept_at(worker: str) -> dict[str, int]:
    found: dict[str, int] = rpc.rpc_sync(worker, there.figures)
    return {name: found[name] for name in ("values", "references")}


def freed_at(*workers: str) -> None:
    """All values of these are freed, and nothing is known of references to them."""
    gc.collect()
    wait_until(
        lambda: all(kept_at(worker) == NOTHING for worker in workers),
        f"the end of all values: {[kept_at(worker) for worker in workers]}",
    )


def test_a_value_stays_where_it_was_made_and_is_copied_by_to_here(pair: Group) -> None:
    rref = rpc.remote("there", there.add, args=(np.ones(3), 1))
    np.testing.assert_array_equal(rref.to_here(), [2.0, 2.0, 2.0])
    assert rref.owner() == rpc.WorkerInfo("there", 1)
    assert rref.owner_name() == "there"
    assert not rref.is_owner()
    assert rref.confirmed_by_owner()
    assert "owned by worker 'there' (rank 1)" in repr(rref)
    with pytest.raises(RuntimeError, match="to_here"):
        rref.local_value()


def test_methods_of_the_value_are_called_where_it_is(pair: Group) -> None:
    rref = rpc.remote("there", there.Model, args=(3,))
    assert rref.rpc_sync().times(4) == 12
    assert rref.rpc_async().times(5).wait() == 15
    assert rref.remote().times(6).to_here() == 18
    assert rref.rpc_sync().set(10) == 3
    assert rref.rpc_sync(timeout=there.PATIENCE_S).times(value=2) == 20
    with pytest.raises(AttributeError, match="nothing_such"):
        rref.rpc_sync().nothing_such()


def test_what_making_the_value_raised_is_raised_by_each_use(pair: Group) -> None:
    rref = rpc.remote("there", there.Model, args=(-1,))
    for use in (
        rref.to_here,
        lambda: rref.rpc_sync().times(1),
        lambda: rref.rpc_async().times(1).wait(),
        lambda: rref.remote().times(1).to_here(),
    ):
        with pytest.raises(ValueError, match="factor -1"):
            use()


def test_a_creation_that_could_not_be_sent_leaves_no_gap_in_the_numbers(pair: Group) -> None:
    """The owner would remember each number behind it."""
    first = rpc.remote("there", there.Model, args=(3,))
    first.to_here()
    for begin in (
        lambda: rpc.remote("there", there.same, args=(threading.Lock(),)),
        lambda: first.remote().times(threading.Lock()),
    ):
        with pytest.raises(errors.BadArguments):
            begin()
    second = rpc.remote("there", there.Model, args=(4,))
    assert [repr(one).partition(" of ")[0] for one in (first, second)] == [
        "<RRef to value 1",
        "<RRef to value 2",
    ]
    assert second.to_here().factor == 4


def test_a_reference_after_shutdown_says_so(pair: Group) -> None:
    own, of_there = rpc.RRef(1), rpc.remote("there", there.Model, args=(3,))
    of_there.to_here()
    rpc.shutdown(graceful=False)
    for rref in (own, of_there):
        for use in (
            rref.to_here,
            lambda rref=rref: rref.rpc_sync().times(1),
            lambda rref=rref: rref.rpc_async().times(1),
            lambda rref=rref: rref.remote().times(1),
        ):
            with pytest.raises(errors.Closed, match=r"'here'.*shutdown\(\) was called here"):
                use()


def test_a_method_that_raises_raises_here_and_the_value_stays(pair: Group) -> None:
    rref = rpc.remote("there", there.Model, args=(3,))
    with pytest.raises(TypeError):
        rref.rpc_sync().times({})
    assert rref.rpc_sync().times("text") == "texttexttext"


def test_a_value_that_is_still_being_made_is_waited_for_by_whoever_uses_it(three: Group) -> None:
    rref = rpc.remote("there", there.wait_for_event)
    elsewhere = rpc.rpc_async("elsewhere", there.fetch, args=(rref,))
    method = rref.rpc_async().bit_length()
    with pytest.raises(errors.DeadlineExceeded):
        rref.to_here(timeout=0.02)
    assert not elsewhere.done()
    rpc.rpc_sync("there", there.set_event)
    assert elsewhere.wait() is True
    assert method.wait() == 1
    assert rref.to_here() is True


@pytest.mark.parametrize("how", ["block", "wait_for_event", "await_event", "future_of_event"])
def test_the_timeout_of_remote_ends_the_making_of_the_value_each_time(
    three: Group, how: str
) -> None:
    model = rpc.remote("there", there.Model, args=(3,))
    model.to_here()

    def begin(timeout: float) -> rpc.RRef[Any]:
        if how == "block":
            made: rpc.RRef[Any] = model.remote(timeout=timeout).block()
            return made
        return rpc.remote("there", getattr(there, how), timeout=timeout)

    # first in the engine's thread; where it blocks, it is known for that from then on
    before = begin(there.PATIENCE_S)
    rpc.rpc_sync("there", there.set_event)
    assert before.to_here() is True
    blocks = how in ("block", "wait_for_event")
    assert rpc.rpc_sync("there", there.figures)["overtaken"] == blocks
    rpc.rpc_sync("there", there.clear_event)
    late = begin(0.05)
    elsewhere = rpc.rpc_async("elsewhere", there.fetch, args=(late,))
    for _ in range(2):
        with pytest.raises(errors.DeadlineExceeded):
            late.to_here(timeout=there.PATIENCE_S)
    # what was begun goes on, for others
    assert not elsewhere.done()
    rpc.rpc_sync("there", there.set_event)
    assert elsewhere.wait() is True


def test_a_reference_that_the_caller_drops_is_kept_until_its_methods_call_is_answered(
    pair: Group,
) -> None:
    method = rpc.remote("there", there.wait_for_event).rpc_async().bit_length()
    for _ in range(20):
        made = rpc.RRef(there.Model(3)).remote().times(4)
        assert made.to_here() == 12
        assert rpc.RRef(there.Model(3)).rpc_async().times(4).wait() == 12
    rpc.rpc_sync("there", there.set_event)
    assert method.wait() == 1
    del method, made
    freed_at("there", "here")


def test_a_method_that_blocks_lets_others_run(pair: Group) -> None:
    rref = rpc.remote("there", there.Model, args=(1,))
    blocked = rref.rpc_async().block()
    assert rref.rpc_sync().times(3) == 3
    rpc.rpc_sync("there", there.set_event)
    assert blocked.wait()


def test_a_value_is_freed_with_the_last_reference_to_it(three: Group) -> None:
    rref = rpc.remote("there", there.Model, args=(7,))
    assert rref.rpc_sync().times(1) == 7
    rpc.rpc_sync("elsewhere", there.keep, args=("first", rref))
    rpc.rpc_sync("elsewhere", there.pass_on, args=("first", "there"))
    del rref
    gc.collect()
    assert rpc.rpc_sync("elsewhere", there.use, args=("first",)).factor == 7
    rpc.rpc_sync("elsewhere", there.forget, args=("first",))
    is_owner, model = rpc.rpc_sync("there", there.kept_local, args=("first",))
    assert (is_owner, model.factor) == (True, 7)
    assert kept_at("there")["values"] == 1
    rpc.rpc_sync("there", there.forget, args=("first",))
    freed_at("there")
    assert "freed 7" in rpc.rpc_sync("there", there.said)


def test_a_reference_that_comes_in_an_answer_keeps_the_value(pair: Group) -> None:
    rref = rpc.rpc_sync("there", there.own_model, args=(5,))
    assert rref.rpc_sync().times(2) == 10
    wait_until(rref.confirmed_by_owner)
    assert kept_at("there") == {"values": 1, "references": 1}
    del rref
    freed_at("there")


def test_a_reference_may_stand_anywhere_in_what_is_sent(three: Group) -> None:
    rref = rpc.remote("there", there.add, args=(1, 2))
    assert rpc.rpc_sync("elsewhere", there.fetch_inside, args=({"at": [rref]},)) == 3
    back = rpc.rpc_sync("elsewhere", there.same, args=([rref, {"x": rref}],))
    assert [back[0].to_here(), back[1]["x"].to_here()] == [3, 3]
    inside = there.Model(0)
    inside.factor = rref  # type: ignore[assignment]
    assert rpc.rpc_sync("elsewhere", there.same, args=(inside,)).factor.to_here() == 3
    inside.factor = 0
    del rref, back, inside
    freed_at("there", "elsewhere")


def test_an_own_value_is_fetched_by_others_and_comes_home_as_it_is(pair: Group) -> None:
    value: list[Any] = [1, 2]
    rref = rpc.RRef(value)
    assert rref.is_owner()
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert rpc.rpc_sync("there", there.fetch, args=(rref,)) == [1, 2]
    home = rpc.rpc_sync("there", there.same, args=(rref,))
    assert home.local_value() is value
    assert rpc.rpc_sync("there", _append, args=(rref, 3)) is None
    assert value == [1, 2, 3]
    del rref, home
    gc.collect()
    wait_until(lambda: rpc.statistics()["values"] == 0)


@pytest.mark.parametrize("begin", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
@pytest.mark.parametrize("to", ["there", "elsewhere"])
def test_a_reference_in_what_cannot_be_sent_is_no_reference(
    three: Group, begin: Callable[..., Any], to: str
) -> None:
    """Beside an argument that cannot be pickled."""
    own, of_there = rpc.RRef([1]), rpc.remote("there", there.Model, args=(2,))
    assert of_there.rpc_sync().times(1) == 2
    for _ in range(10):
        with pytest.raises(errors.BadArguments):
            begin(to, there.same, args=([own, of_there], threading.Lock()))
    assert rpc.rpc_sync(to, there.fetch, args=(own,)) == [1]
    assert rpc.rpc_sync(to, there.fetch, args=(of_there,)).factor == 2
    del own, of_there
    freed_at("there", "elsewhere")
    wait_until(lambda: rpc.statistics() == rpc.statistics() | NOTHING)


def _append(rref: rpc.RRef[Any], value: int) -> None:
    rref.rpc_sync().append(value)


def test_the_death_of_a_user_frees_what_it_alone_referred_to(three: Group) -> None:
    rref = rpc.remote("there", there.Model, args=(9,))
    rpc.rpc_sync("elsewhere", there.keep, args=("only", rref))
    del rref
    gc.collect()
    wait_until(lambda: kept_at("there") == {"values": 1, "references": 1})
    three.programs["elsewhere"].kill()
    freed_at("there")


def test_the_death_of_who_passed_it_on_takes_nothing_from_who_received_it(three: Group) -> None:
    own = rpc.rpc_sync("there", there.own_model, args=(4,))
    rpc.rpc_sync("elsewhere", there.keep, args=("mine", own))
    del own
    gc.collect()
    back = rpc.rpc_sync("elsewhere", _kept, args=("mine",))
    three.programs["elsewhere"].kill()
    wait_until(lambda: len(rpc.get_worker_infos()) == 2)
    assert back.rpc_sync().times(2) == 8
    del back
    freed_at("there")


def _kept(name: str) -> Any:
    return there.kept[name]


def test_the_death_of_the_owner_is_told_by_name(pair: Group) -> None:
    rref = rpc.remote("there", there.Model, args=(1,))
    blocked = rref.rpc_async().block()
    assert rref.rpc_sync().times(1) == 1
    pair.programs["there"].kill()
    with pytest.raises(errors.MaybeExecuted, match="'there'"):
        blocked.wait()
    with pytest.raises(RuntimeError):
        rref.to_here(timeout=there.PATIENCE_S)


def test_an_owner_that_was_started_again_says_that_the_value_is_gone(group: Group) -> None:
    group.join("there", size=None)
    rref = rpc.remote("there", there.Model, args=(1,))
    assert rref.rpc_sync().times(1) == 1
    group.programs["there"].kill()
    wait_until(lambda: len(rpc.get_worker_infos()) == 1)
    again = group.start("there", 1, None)
    assert again.read_line() == "up"
    with pytest.raises(rpc.ValueGone, match=r"'there' \(rank 1\) was started again"):
        rref.to_here()
    with pytest.raises(rpc.ValueGone):
        rref.rpc_sync().times(1)
    fresh = rpc.remote("there", there.Model, args=(2,))
    assert fresh.rpc_sync().times(2) == 4


def test_many_references_made_and_dropped_leave_nothing(three: Group) -> None:
    rrefs = [rpc.remote("there", there.add, args=(number, 0)) for number in range(200)]
    futures = [rpc.rpc_async("elsewhere", there.fetch, args=(rref,)) for rref in rrefs]
    assert [one.wait() for one in futures] == list(range(200))
    del rrefs, futures
    freed_at("there", "elsewhere")


def test_a_reference_cannot_be_made_without_a_group() -> None:
    with pytest.raises(rpc.NoWorker, match="init_rpc"):
        rpc.RRef(1)
    with pytest.raises(RuntimeError):
        rpc.remote("there", there.pid)


def test_distributed_autograd_is_refused_by_name(pair: Group) -> None:
    with pytest.raises(NotImplementedError, match="autograd"):
        rpc.RRef(1).backward()


def test_a_reference_pickled_by_hand_is_good_for_this_group_alone(pair: Group) -> None:
    rref = rpc.remote("there", there.add, args=(1, 2))
    data = pickle.dumps(rref)
    assert pickle.loads(data).to_here() == 3
    rpc.shutdown(graceful=False)
    with pytest.raises(rpc.NoWorker):
        pickle.loads(data)


def test_a_reference_to_a_value_of_this_worker_that_is_dropped_at_once_is_over(
    group: Group,
) -> None:
    group.join()
    for number in range(20):
        rpc.remote("here", there.same, args=(number,))
    freed_at("here")


def test_a_value_of_this_worker_that_is_still_being_made_is_late_as_any_other(pair: Group) -> None:
    rref = rpc.rpc_sync("there", rpc.remote, args=("here", time.sleep, (1.0,)))
    assert rref.is_owner()
    with pytest.raises(errors.DeadlineExceeded, match="still being made") as caught:
        rref.to_here(timeout=0.05)
    assert isinstance(caught.value, RuntimeError)
    assert rref.to_here() is None
