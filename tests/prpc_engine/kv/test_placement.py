import random

import pytest

from prpc_engine.kv.schema.placement import (
    Placed,
    Placement,
    decode,
    demoted,
    first,
    handed_over,
    joined,
    loaded,
    plan,
)


def settled(placement: Placement, alive: list[int], moves_max: int = 100) -> Placement:
    """Let every primary do what it has to, until nothing is left to do; of a partition it changes
    that often at most.
    """
    moves: dict[int, int] = {}
    for _ in range(100):
        before = placement
        for index, placed in enumerate(placement.partitions):
            if placed.primary not in alive:
                continue
            if placed.loading:
                placed = loaded(placed, -1)
            for server in placed.joining:
                placed = joined(placed, server)
            if placed.heir in placed.replicas:
                moves[index] = moves.get(index, 0) + 1
                placed = handed_over(placed)
            placement = placement.replace(index, placed)
        placement = plan(placement, alive)
        if placement == before:
            assert max(moves.values(), default=0) <= moves_max
            return placement
    raise AssertionError(f"it does not settle: {placement}")


def check(placement: Placement, alive: list[int], replicas: int) -> None:
    """Everybody has a share, and each partition all its copies."""
    # the last keep what they have
    staying = [each for each in alive if each not in placement.draining] or alive
    primaries = [sum(placed.primary == each for placed in placement.partitions) for each in staying]
    assert max(primaries) - min(primaries) <= 1
    for placed in placement.partitions:
        assert len(set(placed.holders)) == len(placed.holders)
        assert len(placed.replicas) == min(replicas, len(staying) - 1)
        assert not placed.joining
        assert set(placed.holders) <= set(staying)


def test_the_first_placement_is_even_and_nothing_moves() -> None:
    placement = first(6, 1, [3, 4, 5])
    assert [placed.primary for placed in placement.partitions] == [3, 4, 5, 3, 4, 5]
    assert all(placed.loading for placed in placement.partitions)
    placement = settled(placement, [3, 4, 5])
    check(placement, [3, 4, 5], 1)
    assert [placed.primary for placed in placement.partitions] == [3, 4, 5, 3, 4, 5]
    assert decode(placement.encode()) == placement


def test_a_death_promotes_a_replica_with_a_new_epoch_and_fills_others_anew() -> None:
    placement = Placement(
        (Placed(1, 5, replicas=(2, 3)), Placed(2, 7, replicas=(1,), joining=(3,))), 2
    )
    one, other = plan(placement, [2, 3, 4]).partitions
    assert (one.primary, one.epoch, one.replicas) == (2, 6, ())
    assert set(one.joining) == {3, 4}
    assert (other.primary, other.epoch, other.replicas) == (2, 7, ())
    assert set(other.joining) == {3, 4}


def test_replicas_of_before_are_promoted_when_nobody_else_is_left_and_none_has_come() -> None:
    placed = Placed(1, 5, replicas=(2, 3))
    one = plan(Placement((placed,), 2), [2, 3, 4]).partitions[0]
    assert (one.primary, one.spares, set(one.joining)) == (2, (3,), {3, 4})
    two = plan(Placement((one,), 2), [3, 4]).partitions[0]
    assert (two.primary, two.epoch, two.spares, two.history) == (3, 7, (), 0)
    filled = joined(one, 4)
    assert filled.spares == ()
    assert plan(Placement((filled,), 2), [3, 4]).partitions[0].primary == 4
    assert plan(Placement((filled,), 2), [3]).partitions[0].loading
    alone = demoted(Placed(1, 5, replicas=(2,)), 2)
    assert plan(Placement((alone,), 1), [2, 3]).partitions[0].primary == 2
    assert not demoted(placed, 3).spares


def test_a_partition_without_a_replica_is_loaded_somewhere_and_its_history_says_so() -> None:
    placement = Placement((Placed(1, 5, joining=(2,)), Placed(2, 7)))
    lost, other = plan(placement, [2, 3]).partitions
    assert (lost.primary, lost.epoch, lost.loading, lost.history) == (3, 6, True, 1)
    assert other == placement.partitions[1]
    again = plan(Placement((lost, other)), [2]).partitions[0]
    assert (again.primary, again.loading, again.history) == (2, True, 1)


def test_when_all_are_gone_the_placement_stays_for_who_comes() -> None:
    placement = settled(first(2, 1, [1, 2]), [1, 2])
    assert plan(placement, []) is placement
    assert all(placed.primary == 3 and placed.loading for placed in plan(placement, [3]).partitions)


def test_only_the_heir_becomes_primary_and_the_old_one_stays_a_copy() -> None:
    placed = joined(Placed(1, 5, joining=(2,), heir=2), 2)
    assert handed_over(placed) == Placed(2, 6, replicas=(1,))
    assert demoted(placed, 2) == Placed(1, 5, joining=(2,), spares=(2,), heir=2)


def test_a_drained_server_loses_everything_and_nothing_else_moves() -> None:
    placement = settled(first(6, 1, [1, 2, 3]), [1, 2, 3])
    drained = settled(Placement(placement.partitions, 1, (3,)), [1, 2, 3], moves_max=1)
    check(drained, [1, 2, 3], 1)
    assert not drained.held_by(3)
    for before, after in zip(placement.partitions, drained.partitions, strict=True):
        assert after.primary == before.primary or before.primary == 3


@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_whoever_comes_and_goes_it_settles_evenly(replicas: int, seed: int) -> None:
    chooser = random.Random(seed)
    alive = [1, 2]
    placement = settled(first(8, replicas, alive), alive)
    for server in range(3, 60):
        if len(alive) > 1 and chooser.random() < 0.45:
            alive.remove(chooser.choice(alive))
        else:
            alive.append(server)
        if chooser.random() < 0.2 and len(alive) > 2:
            placement = Placement(placement.partitions, replicas, (chooser.choice(alive),))
        placement = plan(placement, alive)
        if chooser.random() < 0.6:
            placement = settled(placement, alive)
            check(placement, alive, replicas)
    check(settled(placement, alive), alive, replicas)


def test_a_server_that_comes_takes_its_share_and_no_partition_moves_twice() -> None:
    placement = settled(first(9, 0, [1, 2]), [1, 2])
    grown = settled(plan(placement, [1, 2, 3]), [1, 2, 3], moves_max=1)
    check(grown, [1, 2, 3], 0)
    moved = [
        after
        for before, after in zip(placement.partitions, grown.partitions, strict=True)
        if before != after
    ]
    assert len(moved) == 3
    assert all(placed.primary == 3 and placed.epoch == 2 for placed in moved)
