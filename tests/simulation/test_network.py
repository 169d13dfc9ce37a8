"""The network of a simulation keeps what connections of ours promise."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from prpc_engine.simulation.network import Network, Wire
from prpc_engine.simulation.scheduler import Scheduler
from prpc_engine.simulation.timeline import Timeline

MESSAGES = 30


@dataclass(eq=False)
class End:
    """One end of a connection, which notes what it is told."""

    process: Any
    came: list[object] = field(default_factory=list)

    def arrive(self, item: object, nbytes: int) -> None:
        self.came.append(item)

    def has_room(self) -> None:
        self.came.append("room")

    def peer_hung_up(self, why: str) -> None:
        self.came.append("hung up")

    def lost(self, why: str) -> None:
        self.came.append("lost")


def connected(seed: int) -> tuple[Scheduler, Network, Wire, End, End]:
    """Two hosts, with a connection from the first end to the other."""
    scheduler = Scheduler(seed, Timeline(False))
    network = Network(scheduler)
    ends = [
        End(SimpleNamespace(name=name, host=network.host(name), is_dead=False))
        for name in ("a", "b")
    ]
    wire, _ = network.join(ends[0], ends[1], 60.0, 0.0)
    return scheduler, network, wire, ends[0], ends[1]


@pytest.mark.parametrize("seed", range(10))
def test_messages_of_one_lane_arrive_in_order(seed: int) -> None:
    scheduler, network, wire, _, there = connected(seed)
    for number in range(MESSAGES):
        assert network.send(wire, 0, number, 10)
    scheduler.run(lambda: len(there.came) == MESSAGES, 10.0)
    assert there.came == list(range(MESSAGES))


@pytest.mark.parametrize("seed", range(10))
def test_messages_that_meet_a_cut_link_arrive_in_order_once_it_is_mended(seed: int) -> None:
    scheduler, network, wire, _, there = connected(seed)
    for number in range(MESSAGES):
        scheduler.at(1e-5 * number, lambda number=number: network.send(wire, 0, number, 10))
    scheduler.at(1e-5 * (MESSAGES / 2), lambda: network.cut("a", "b"))
    scheduler.at(1.0, lambda: network.mend("a", "b"))
    scheduler.run(lambda: len(there.came) == MESSAGES, 10.0)
    assert there.came == list(range(MESSAGES))
    assert scheduler.now > 1.0


def test_a_connection_that_is_reset_behind_a_message_brings_that_one_and_no_other() -> None:
    scheduler, network, wire, here, there = connected(1)
    network.reset_after_next(wire, "a test")
    network.send(wire, 0, "first", 10)
    network.send(wire, 0, "second", 10)
    scheduler.run(lambda: bool(here.came) and "lost" in there.came, 10.0)
    assert there.came == ["first", "lost"]
    assert here.came == ["lost"]


def ends_unheard(seed: int, by: str) -> tuple[Scheduler, Network, Wire, End]:
    """One end's process ends while nobody can hear of it; the wire is the other end's."""
    scheduler, network, _, here, there = connected(seed)
    wire = network.connections()[0][1]

    def end() -> None:
        if by == "a crash":
            network.crash("a")
        else:
            network.cut("a", "b")
        here.process.is_dead = True
        network.process_ended(here.process)

    def again() -> None:
        if by == "a crash":
            network.boot("a")
        else:
            network.mend("a", "b")

    scheduler.at(1.0, end)
    scheduler.at(2.0, again)
    return scheduler, network, wire, there


@pytest.mark.parametrize("by", ["a crash", "a kill over a cut link"])
@pytest.mark.parametrize("seed", range(10))
def test_an_end_that_nobody_heard_of_is_heard_of_by_who_can_reach_the_host(
    seed: int, by: str
) -> None:
    scheduler, _, _, there = ends_unheard(seed, by)
    scheduler.run(lambda: False, 1.9)
    assert not there.came, "not before the host can be reached"
    scheduler.run(lambda: bool(there.came), 60.0)
    assert there.came in (["lost"], ["hung up"])
    assert 2.0 < scheduler.now < 2.0 + 60.0


@pytest.mark.parametrize("seed", range(10))
def test_who_sends_to_a_host_that_has_crashed_and_is_back_is_refused_at_once(seed: int) -> None:
    scheduler, network, wire, there = ends_unheard(seed, "a crash")
    scheduler.at(2.001, lambda: network.send(wire, 0, "to nobody", 10))
    scheduler.run(lambda: bool(there.came), 60.0)
    assert there.came == ["lost"]
    assert scheduler.now < 2.2


def test_a_link_to_a_host_without_power_is_not_mended() -> None:
    scheduler, network, wire, here, there = connected(1)
    network.crash("a")
    network.mend("a", "b")
    assert wire.link.is_cut
    network.boot("a")
    assert not wire.link.is_cut
    network.send(wire, 0, "first", 10)
    scheduler.run(lambda: bool(there.came), 10.0)
    assert there.came == ["first"] and not here.came


@pytest.mark.parametrize("does_send", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_an_end_that_one_side_gave_up_over_a_cut_link_is_refused_to_the_other(
    seed: int, does_send: bool
) -> None:
    scheduler, network, _, here, there = connected(seed)
    scheduler.at(1.0, lambda: (network.cut("a", "b"), network.cut("b", "a")))
    scheduler.run(lambda: bool(here.came or there.came), 90.0)
    assert (here.came + there.came) == ["lost"], "one of them sees the silence first"
    network.mend("a", "b")
    network.mend("b", "a")
    if does_send:
        other = network.connections()[0][bool(here.came)]
        network.send(other, 0, "to nobody", 10)
    before_s = scheduler.now
    scheduler.run(lambda: bool(here.came and there.came), 60.0)
    assert here.came == there.came == ["lost"]
    if does_send:
        assert scheduler.now < before_s + 0.2, "at once"
    else:
        assert scheduler.now < before_s + 30.0, "when its kernel asks"
    scheduler.run(lambda: False, 60.0)
    assert here.came == there.came == ["lost"], "once"
