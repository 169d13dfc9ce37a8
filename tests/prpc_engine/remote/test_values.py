"""How often owners are told of references, over connections that are lost."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from prpc_engine import errors
from prpc_engine.remote.calls import RemoteCalls
from prpc_engine.remote.current import ValueAddress
from prpc_engine.remote.device_maps import DeviceMap
from prpc_engine.remote.members import AGAIN_S
from prpc_engine.remote.values import Values
from shard import CONTEXT, Future, behalf

ME, OWNER, RANK = 1, 2, 5
ADDRESS, FORK = ValueAddress(RANK, OWNER, (ME, 1)), (ME, 7)


class Owner:
    """The client of the service that all workers serve, and its reactor."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any, Future]] = []
        self.later: list[Callable[[], object]] = []

    def submit_to(self, rank: int, verb: str, *arguments: Any, timeout_s: float | None) -> Future:
        self.told.append((verb, behalf(), Future(None)))
        return self.told[-1][2]

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


def test_news_of_references_outlive_the_call_in_whose_handler_they_are_told() -> None:
    ours, owner = values({RANK: OWNER})
    CONTEXT.value = asked = (None, 200)
    try:
        ours.drop_soon(ADDRESS, FORK)
        assert behalf() is asked
    finally:
        CONTEXT.value = None
    assert owner.told[0][1] is None
