"""State cut into one instance per shard: made there, used there, reached from everywhere."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shard import (
    BULK,
    PeerLostError,
    RestartPolicy,
    Sharded,
    ShardError,
    ShardGroup,
    in_class,
    this_shard,
)
from tests.shard import group_functions as functions
from tests.shard.group_functions import Tin
from tests.shard.pipe_functions import Hooked, calls_of
from tests.shard.processes import PATIENCE_S, kill


@pytest.fixture
def group() -> Iterator[ShardGroup]:
    again = RestartPolicy("on-failure", backoff_s=0.01)
    with ShardGroup(3, start_method="forkserver", restart=again) as made:
        yield made


def values(tins: Sharded[Tin]) -> Any:
    return tins.invoke_on_all(Tin.get).result(PATIENCE_S)


# -- calls -----------------------------------------------------------------------------------------


def test_every_shard_has_an_instance_of_its_own_made_with_the_same_arguments(
    group: ShardGroup,
) -> None:
    tins = Sharded(Tin, 10)
    assert tins.size == 3
    assert values(tins) == [10, 10, 10]
    assert tins.invoke_on(1, Tin.add, 5).result(PATIENCE_S) == 15
    assert values(tins) == [10, 15, 10]
    assert tins.invoke_on_all(Tin.where).result(PATIENCE_S) == [0, 1, 2]


def test_a_method_is_named_by_a_function_or_by_its_name_and_may_be_a_coroutine(
    group: ShardGroup,
) -> None:
    tins = Sharded(Tin)
    methods = [
        Tin.add,
        "add",
        Tin.add_later,
        "add_later",
        lambda tin, value: tin.add(value),
        in_class(BULK)(add_in_bulk),
    ]
    assert [tins.invoke_on(0, method, 1).result(PATIENCE_S) for method in methods] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def add_in_bulk(tin: Tin, value: int) -> int:
    return tin.add(value)


def test_a_closure_takes_its_variable_along_as_it_stands_at_each_call(group: ShardGroup) -> None:
    tins = Sharded(Tin)
    step = 1

    def add(tin: Tin) -> int:
        return tin.add(step)

    while step < 1000:
        tins.invoke_on(0, add).result(PATIENCE_S)
        step *= 10
    assert values(tins) == [111, 0, 0]


def test_defaults_and_callable_objects_take_their_state_along_as_it_stands_at_each_call(
    group: ShardGroup,
) -> None:
    tins = Sharded(Tin)
    held = {"step": 1}
    add = lambda tin, held=held: tin.add(held["step"])  # noqa: E731
    add_held = Add(1)
    for step in (1, 10, 100):
        held["step"] = add_held.step = step
        tins.invoke_on(0, add).result(PATIENCE_S)
        tins.invoke_on(1, add_held).result(PATIENCE_S)
    assert values(tins) == [111, 111, 0]
    assert not tins._calls or set(tins._calls) <= {Tin.get}


@dataclass
class Add:
    """Compares by value and so has no hash."""

    step: int

    def __call__(self, tin: Tin) -> int:
        return tin.add(self.step)


def test_a_factory_may_be_a_lambda_or_a_closure(group: ShardGroup) -> None:
    first = 3
    assert values(Sharded(lambda: Tin(first))) == [3, 3, 3]
    assert values(Sharded(lambda value: Tin(first + value), 4)) == [7, 7, 7]


def test_a_map_is_reduced_from_shard_0_on(group: ShardGroup) -> None:
    tins = Sharded(Tin)
    for index in range(3):
        tins.invoke_on(index, Tin.add, 10**index).result(PATIENCE_S)
    assert tins.map_reduce(Tin.get, operator.add).result(PATIENCE_S) == 111
    assert tins.map_reduce("get", operator.add, 1000).result(PATIENCE_S) == 1111
    assert tins.map_reduce(Tin.get, operator.sub).result(PATIENCE_S) == 1 - 10 - 100
    assert tins.map_reduce(Tin.where, lambda found, one: [*found, one], []).result(PATIENCE_S) == [
        0,
        1,
        2,
    ]


def test_a_reducer_runs_in_an_engine_thread_and_not_in_the_one_that_waits(
    group: ShardGroup,
) -> None:
    names: list[str] = []

    def add(one: int, other: int) -> int:
        names.append(threading.current_thread().name)
        return one + other

    assert Sharded(Tin, 2).map_reduce(Tin.get, add).result(PATIENCE_S) == 6
    assert len(names) == 2
    assert threading.current_thread().name not in names


def test_what_a_mapper_or_a_reducer_raises_is_the_result(group: ShardGroup) -> None:
    tins = Sharded(Tin)
    with pytest.raises(AttributeError, match="no_such_method"):
        tins.map_reduce("no_such_method", operator.add).result(PATIENCE_S)
    with pytest.raises(TypeError, match="can only concatenate"):
        tins.map_reduce(Tin.get, operator.add, "text").result(PATIENCE_S)
    with pytest.raises(SystemExit):
        tins.map_reduce(Tin.get, _leave).result(PATIENCE_S)


def _leave(one: int, other: int) -> int:
    raise SystemExit(3)


def test_an_index_out_of_range_is_named(group: ShardGroup) -> None:
    with pytest.raises(ValueError, match="there is no shard 3: this group has shards 0 to 2"):
        Sharded(Tin).invoke_on(3, Tin.get)


def test_two_of_them_do_not_know_each_other(group: ShardGroup) -> None:
    one, two = Sharded(Tin, 1), Sharded(Tin, 2)
    one.invoke_on(0, Tin.add, 5).result(PATIENCE_S)
    one.invoke_on(0, "add", 5).result(PATIENCE_S)
    assert (values(one), values(two)) == ([11, 1, 1], [2, 2, 2])


# -- inside a shard --------------------------------------------------------------------------------


async def local_and_others(tins: Sharded[Tin]) -> tuple[int, list[int], int]:
    """What the shard itself holds, what all hold, and their sum."""
    held = await tins.invoke_on_all(Tin.get)
    return tins.local.get(), held, await tins.map_reduce(Tin.get, operator.add)


def test_in_a_shard_it_reaches_the_local_instance_and_all_others(group: ShardGroup) -> None:
    tins = Sharded(Tin)
    for index in range(3):
        tins.invoke_on(index, Tin.add, 10**index).result(PATIENCE_S)
    expected = [(10**index, [1, 10, 100], 111) for index in range(3)]
    assert group.map(local_and_others, tins, timeout_s=PATIENCE_S) == expected


def test_outside_the_shards_nothing_is_local(group: ShardGroup) -> None:
    with pytest.raises(ShardError, match="this process is no shard"):
        _ = Sharded(Tin).local


def close_it(tins: Sharded[Tin]) -> None:
    tins.close()


def test_a_shard_does_not_close_it(group: ShardGroup) -> None:
    tins = Sharded(Tin)
    with pytest.raises(ShardError, match="the process that made a Sharded closes it, not a shard"):
        group.submit_to(0, close_it, tins).result(PATIENCE_S)
    assert values(tins) == [0, 0, 0]


# -- birth and death -------------------------------------------------------------------------------


def test_a_factory_that_raises_anywhere_raises_at_construction_and_leaves_nothing(
    group: ShardGroup,
) -> None:
    with pytest.raises(functions.OddError, match="no tin here"):
        Sharded(functions.FailsInShardOne)
    assert group.map(functions.instances) == [0, 0, 0]
    kill(group, 1)
    group.wait_up(PATIENCE_S)
    assert group.map(functions.instances) == [0, 0, 0], "and it is not made at a restart"


def test_arguments_that_cannot_be_sent_are_refused_and_forgotten(group: ShardGroup) -> None:
    with pytest.raises(TypeError, match="generator"):
        Sharded(Tin, (each for each in [1]))
    kill(group, 1)
    group.wait_up(PATIENCE_S)


def test_a_restarted_shard_makes_its_instance_anew(group: ShardGroup) -> None:
    tins = Sharded(Tin, 10)
    tins.invoke_on_all(Tin.add, 1).result(PATIENCE_S)
    kill(group, 1)
    group.wait_up(PATIENCE_S)
    assert values(tins) == [11, 10, 11]
    assert group.submit_to(0, local_and_others, tins).result(PATIENCE_S) == (11, [11, 10, 11], 32)


def test_close_closes_every_instance_and_no_call_finds_one_after_it(
    group: ShardGroup, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with Sharded(Tin, 0, str(log)) as tins:
        assert values(tins) == [0, 0, 0]
    assert sorted(log.read_text().split()) == ["0", "1", "2"]
    with pytest.raises(ShardError, match=r"shard 1 has no instance of this Sharded: it was closed"):
        tins.invoke_on(1, Tin.get).result(PATIENCE_S)
    tins.close()
    assert len(log.read_text().split()) == 3, "a second close finds nothing"
    kill(group, 1)
    group.wait_up(PATIENCE_S)
    assert group.map(functions.instances) == [0, 0, 0], "nor is it made at a restart"


def test_what_an_instance_raises_at_its_end_is_raised_by_close(group: ShardGroup) -> None:
    tins = Sharded(functions.FailsToClose)
    with pytest.raises(functions.OddError, match="does not close"):
        tins.close()
    assert group.map(functions.instances) == [0, 0, 0]


def test_close_after_the_group_does_nothing(group: ShardGroup) -> None:
    tins = Sharded(Tin)
    group.close()
    tins.close()


def test_a_shard_that_is_gone_holds_up_no_close() -> None:
    with ShardGroup(2, start_method="forkserver") as group:
        tins = Sharded(Tin)
        kill(group, 0)
        tins.close()
        assert group.submit_to(1, functions.instances).result(PATIENCE_S) == 0


def test_a_shard_that_is_starting_meanwhile_keeps_no_instance(group: ShardGroup, fifo: str) -> None:
    group.at_start(functions.read_fifo_when_restarted, 0, fifo)
    tins = Sharded(Tin)
    kill(group, 0)
    # opens when the shard reads it, and it has been told of the instance by then
    with Path(fifo).open("w") as starting:
        tins.close()
        starting.write("go")
    group.wait_up(PATIENCE_S)
    assert group.map(functions.instances) == [0, 0, 0]


def test_a_shard_that_dies_while_it_is_asked_to_drop_its_instance_holds_up_no_close() -> None:
    with ShardGroup(2, start_method="forkserver") as group:
        tins = Sharded(DiesAtItsEnd, 0)
        tins.close()
        assert group.submit_to(1, functions.instances).result(PATIENCE_S) == 0


class DiesAtItsEnd(Tin):
    """Takes one shard along, as if that were killed at this very moment."""

    def close(self) -> None:
        if this_shard().index == self.value:
            functions.kill_myself()


def test_what_an_instance_lost_at_its_end_is_raised_by_close_though_its_shard_lives(
    group: ShardGroup,
) -> None:
    tins = Sharded(LosesAPeer)
    with pytest.raises(PeerLostError, match="a server of its own"):
        tins.close()


class LosesAPeer(Tin):
    def close(self) -> None:
        raise PeerLostError("a server of its own was lost")


def test_close_does_nothing_where_another_thread_closes_the_group_meanwhile(
    group: ShardGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    tins = Sharded(Tin)
    take_back = group.not_at_start

    def be_late(*args: Any, **options: Any) -> None:
        take_back(*args, **options)
        group.close()

    monkeypatch.setattr(group, "not_at_start", be_late)
    tins.close()


# -- which group -----------------------------------------------------------------------------------


def test_with_two_groups_it_must_be_said_which_one_is_meant(group: ShardGroup) -> None:
    with ShardGroup(1, start_method="forkserver") as second:
        with pytest.raises(
            ValueError, match="2 groups are open in this process: say which one by group="
        ):
            Sharded(Tin)
        one, two = Sharded(Tin, 1, group=group), Sharded(Tin, 2, group=second)
        assert (values(one), values(two)) == ([1, 1, 1], [2])
    assert values(Sharded(Tin, 4)) == [4, 4, 4], "the other one is closed"


def test_the_group_is_found_while_another_thread_closes_its_own(
    group: ShardGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = ShardGroup(1, start_method="forkserver")

    class Closing(ShardGroup):
        @property  # type: ignore[override]
        def closed(self) -> bool:
            second.close()
            return bool(self.__dict__["closed"])

        @closed.setter
        def closed(self, value: bool) -> None:
            self.__dict__["closed"] = value

    monkeypatch.setattr(group, "__class__", Closing)
    assert values(Sharded(Tin, 4)) == [4, 4, 4]


def test_without_a_group_there_is_nothing_to_be_sharded() -> None:
    with pytest.raises(ValueError, match="no group is open in this process"):
        Sharded(Tin)


def test_it_is_the_same_instance_for_every_call(group: ShardGroup) -> None:
    tins = Sharded(Tin)
    assert tins.invoke_on_all(identity).result(PATIENCE_S) == tins.invoke_on_all(identity).result(
        PATIENCE_S
    )


def identity(tin: Tin) -> tuple[int, int, bool]:
    return os.getpid(), id(tin), tin in this_shard().sharded.values()


# -- hooks -----------------------------------------------------------------------------------------


def test_instances_are_started_before_they_are_called_and_stopped_before_they_are_closed(
    group: ShardGroup,
) -> None:
    with Sharded(Hooked, "hooked", size=5) as hooked:
        every = hooked.invoke_on_all(Hooked.get, more=1).result(PATIENCE_S)
        assert every == [["made", "started", 6]] * 3
        assert hooked.invoke_on(2, "get", more=2).result(PATIENCE_S)[-1] == 7
        kill(group, 1)
        group.wait_up(PATIENCE_S)
        again = hooked.invoke_on(1, Hooked.get, more=0).result(PATIENCE_S)
        assert again == ["made", "started", 5]
    assert group.map(calls_of, "hooked") == [["made", "started", "stopped", "closed"]] * 3


def test_one_that_does_not_start_is_told_and_leaves_no_instance(group: ShardGroup) -> None:
    with pytest.raises(ValueError, match="it does not start"):
        Sharded(Hooked, "failing", size=-1)
    assert group.map(_instances) == [0, 0, 0]


def _instances() -> int:
    return len(this_shard().sharded)
