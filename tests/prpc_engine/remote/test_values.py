"""How often owners are told of references, over connections that are lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from prpc_engine import errors
from prpc_engine.remote.calls import RemoteCalls
from prpc_engine.remote.current import ValueAddress
from prpc_engine.remote.device_maps import DeviceMap
from prpc_engine.remote.members import AGAIN_S
from prpc_engine.remote.rref import RRef
from prpc_engine.remote.values import Values
from shard import CONTEXT, Future, behalf

ME, OWNER, RANK = 1, 2, 5
ADDRESS, FORK = ValueAddress(RANK, OWNER, (ME, 1)), (ME, 7)


class Owner:
    """The client of the service that all workers serve, and its reactor."""

    def __init__(self) -> None:
        self.calls: RemoteCalls | None = None  # which it is the client of
        self.encode: Callable[[], object] = lambda: None  # the arguments of a call
        self.told: list[tuple[str, Any, Future]] = []
        self.later: list[Callable[[], object]] = []

    def submit_to(self, rank: int, verb: str, *arguments: Any, timeout_s: float | None) -> Future:
        answer = Future(None)
        if verb == "run":
            self.encode()
        self.told.append((verb, behalf(), answer))
        return answer

    def call_soon(self, callback: Callable[[], object]) -> None:
        callback()

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> None:
        assert delay_s == AGAIN_S
        self.later.append(callback)


def values(there: dict[int, int]) -> tuple[Values, Owner]:
    owner = Owner()
    members: Any = SimpleNamespace(incarnation=ME, incarnations=there)
    driver: Any = SimpleNamespace(reactor=owner)
    calls = RemoteCalls(members, driver, 1.0, True, DeviceMap.of({}))
    calls.client = owner  # type: ignore[assignment]
    owner.calls = calls
    return Values(calls), owner


def test_a_drop_is_told_until_the_owner_has_heard() -> None:
    ours, owner = values({RANK: OWNER})
    ours.drop_soon(ADDRESS, FORK)
    for _ in range(2):
        owner.told.pop()[2].set_error(errors.MaybeExecuted("the connection was lost"))
        owner.later.pop()()
    owner.told.pop()[2].set_result(None)
    assert not owner.told
    assert not owner.later


def test_an_owner_that_is_gone_is_told_of_no_drops() -> None:
    there = {RANK: OWNER}
    ours, owner = values(there)
    ours.drop_soon(ADDRESS, FORK)
    there.clear()
    owner.told.pop()[2].set_error(errors.NoServer("there is none"))
    assert not owner.later


def passes_on(ours: Values, owner: Owner) -> tuple[Future, Future]:
    """The answers to a call that a reference travels in, and to what its owner is told of that."""
    rref = RRef.made(ours, ADDRESS, FORK, None)
    owner.encode = partial(ours.pass_on, rref)
    assert owner.calls is not None
    owner.calls.submit(RANK, "run", (), print, (), None, None)
    (told, _, heard), (called, _, answered) = owner.told
    assert (told, called) == ("passed", "run")
    owner.told.clear()
    owner.encode = lambda: None  # and what it keeps
    return answered, heard


def test_a_reference_passed_on_is_told_until_the_owner_has_heard_and_kept_until_then() -> None:
    ours, owner = values({RANK: OWNER})
    answered, heard = passes_on(ours, owner)
    answered.set_result(None)
    for _ in range(2):
        heard.set_error(errors.MaybeExecuted("the connection was lost"))
        owner.later.pop()()
        ((told, _, heard),) = owner.told
        assert told == "passed"
        owner.told.clear()
    heard.set_result(True)
    assert not owner.later
    assert [told for told, _, _ in owner.told] == ["dropped"]  # nobody else keeps it


@pytest.mark.parametrize(
    ("error", "verb"),
    [(errors.MaybeExecuted("lost"), "may_be_lost"), (errors.NotSent("nobody there"), "dropped")],
)
@pytest.mark.parametrize("is_heard_first", [False, True])
def test_an_owner_hears_of_references_in_calls_that_failed_after_it_heard_of_them(
    error: errors.RpcError, verb: str, is_heard_first: bool
) -> None:
    ours, owner = values({RANK: OWNER})
    answered, heard = passes_on(ours, owner)
    if is_heard_first:
        heard.set_result(True)
        assert [told for told, _, _ in owner.told] == ["dropped"]  # its own
        owner.told.clear()
        answered.set_error(error)
        assert [told for told, _, _ in owner.told] == [verb]
    else:
        answered.set_error(error)
        assert not owner.told
        heard.set_result(True)
        assert verb in [told for told, _, _ in owner.told]


def test_news_of_references_outlive_the_call_in_whose_handler_they_are_told() -> None:
    ours, owner = values({RANK: OWNER})
    CONTEXT.value = asked = (None, 200)
    try:
        ours.drop_soon(ADDRESS, FORK)
        assert behalf() is asked
    finally:
        CONTEXT.value = None
    assert owner.told[0][1] is None
