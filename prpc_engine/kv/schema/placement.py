"""Who holds which partition: one value in the master's tree, changed by compare-and-set only. What
follows what is decided here.

    epoch     grows whenever another server becomes the primary, or a checkpoint is restored;
              requests and forwards of an older one are refused
    primary   applies and answers; -1: nobody
    replicas  have all that the primary has acknowledged as replicated: any of them may be promoted
    joining   are being filled by the primary; they may not be promoted
    spares    of those: still have all that was ever acknowledged as replicated, as no other replica
              has come since; promoted when nobody else is left
    heir      of those two the one that is to become the primary, at the primary's own hand; -1:
              none
    loading   the primary has no state yet: it takes the newest checkpoint's, or begins empty, and
              serves then
    history   grows when state was lost: what was acknowledged since the checkpoint is gone
    step      of that checkpoint; -1: there was none
    restored  the id of the restore that its state comes from; "": it comes from none, or was lost
              since

    what happens           who changes it  the partition then
    a joining one has all  primary         it is a replica
    a replica cannot be    primary         it is joining: it is filled anew before it counts again
      reached
    its tables were        primary         epoch + 1; replicas are joining, and no spares: what
      restored                             they have is of before; workers that ask with the old
                                           epoch are told (locator.py)
    the heir is a replica  primary         epoch + 1; the heir is primary, the old one a replica:
                                           nothing is lost
    a server ends          who sees it     its replicas and fillings are gone; where it was
                                           primary: epoch + 1, a replica is promoted, and other
                                           replicas are joining, since each may have had more than
                                           it; without a replica: history + 1, somebody loads
    a server comes         who sees it     moves that balance: it is heir, and joining where it is
                                           no replica; each partition moves once
    a server is drained    who sees it     the same, away from it; its replicas are replaced
                                           before they go
    too few replicas       who sees it     the least loaded server is joining

Server ids are given once and never again, so an id is one process's life.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

NOBODY = -1


class Placed(msgspec.Struct, frozen=True):
    """Where one partition is: which servers hold it in which role, in which epoch, and which
    checkpoint its state came from. Part of the Placement, which is one value in the master's
    tree; roles are server ids, NOBODY for none.
    """

    primary: int
    epoch: int = 1
    replicas: tuple[int, ...] = ()
    joining: tuple[int, ...] = ()
    spares: tuple[int, ...] = ()
    heir: int = NOBODY
    loading: bool = False
    history: int = 0
    step: int = -1
    restored: str = ""

    @property
    def holders(self) -> tuple[int, ...]:
        """Who has it or is to have it."""
        return (self.primary, *self.replicas, *self.joining)


class Placement(msgspec.Struct, frozen=True):
    """All partitions of a service. replicas: how many copies there should be beside the primary;
    draining: who is to leave.
    """

    partitions: tuple[Placed, ...]
    replicas: int = 0
    draining: tuple[int, ...] = ()

    def encode(self) -> str:
        """JSON, as decode() takes it."""
        return msgspec.json.encode(self).decode()

    def replace(self, index: int, placed: Placed) -> Placement:
        """With another state of one partition."""
        partitions = (*self.partitions[:index], placed, *self.partitions[index + 1 :])
        return Placement(partitions, self.replicas, self.draining)

    @property
    def is_settled(self) -> bool:
        """Whether somebody serves each partition, nothing is on its way, and as many servers as can
        be have copies.
        """
        servers = {each for placed in self.partitions for each in placed.holders}
        copies = min(self.replicas, len(servers) - 1)
        return all(
            placed.primary != NOBODY
            and not placed.loading
            and not placed.joining
            and placed.heir == NOBODY
            and len(placed.replicas) == copies
            for placed in self.partitions
        )

    def held_by(self, server: int) -> list[int]:
        """The partitions that it has or is to have."""
        return [index for index, placed in enumerate(self.partitions) if server in placed.holders]


def decode(text: str) -> Placement:
    """Raises msgspec.ValidationError or msgspec.DecodeError for what encode() never gave."""
    return msgspec.json.decode(text, type=Placement)


def first(partitions: int, replicas: int, servers: Sequence[int]) -> Placement:
    """Nothing is stored yet: primaries in turn, each to load what a checkpoint has."""
    placed = tuple(
        Placed(servers[index % len(servers)], loading=True) for index in range(partitions)
    )
    return plan(Placement(placed, replicas), servers)


# -- one partition's primary says ------------------------------------------------------------------


def loaded(placed: Placed, step: int) -> Placed:
    """Its state is there, from the checkpoint of that step."""
    return msgspec.structs.replace(placed, loading=False, step=step)


def joined(placed: Placed, server: int) -> Placed:
    """A joining one has all."""
    rest = tuple(each for each in placed.joining if each != server)
    return msgspec.structs.replace(
        placed, replicas=(*placed.replicas, server), joining=rest, spares=()
    )


def demoted(placed: Placed, server: int) -> Placed:
    """A replica cannot be reached, or has something else."""
    rest = tuple(each for each in placed.replicas if each != server)
    # nothing is acknowledged as replicated before another one has come
    spares = () if rest else (server,)
    return msgspec.structs.replace(
        placed, replicas=rest, joining=(*placed.joining, server), spares=spares
    )


def replaced(placed: Placed, restored: str, step: int) -> Placed:
    """A checkpoint of that step was restored into it: others that have a copy have another state,
    which must not be promoted.
    """
    joining = (*placed.joining, *placed.replicas)
    return msgspec.structs.replace(
        placed,
        epoch=placed.epoch + 1,
        replicas=(),
        joining=joining,
        spares=(),
        restored=restored,
        step=step,
    )


def handed_over(placed: Placed) -> Placed:
    """The heir, a replica, has all that the primary has, and the primary takes no more."""
    assert placed.heir in placed.replicas
    rest = tuple(each for each in placed.replicas if each != placed.heir)
    return msgspec.structs.replace(
        placed,
        epoch=placed.epoch + 1,
        primary=placed.heir,
        replicas=(*rest, placed.primary),
        heir=NOBODY,
        spares=(),
    )


# -- everybody sees --------------------------------------------------------------------------------


def plan(placement: Placement, alive: Sequence[int]) -> Placement:
    """What is to be, with those servers alive; the same when that is so. Whoever sees the same,
    proposes the same.
    """
    living = set(alive)
    if not living:
        return placement
    partitions = [_without_the_dead(placed, living) for placed in placement.partitions]
    draining = tuple(each for each in placement.draining if each in living)
    staying = sorted(living - set(draining)) or sorted(living)
    wanted = min(placement.replicas, len(staying) - 1)
    load = Counter(dict.fromkeys(staying, 0))
    for placed in partitions:
        load.update(each for each in set(placed.holders) if each in load)
    for index, placed in enumerate(partitions):
        partitions[index] = _loading_somewhere(placed, load)
    for index, placed in enumerate(partitions):
        partitions[index] = _copied(_leaving(placed, draining, load), wanted, load)
    _balance(partitions, staying, load)
    planned = Placement(tuple(partitions), placement.replicas, draining)
    return placement if planned == placement else planned


def _without_the_dead(placed: Placed, living: set[int]) -> Placed:
    replicas = tuple(each for each in placed.replicas if each in living)
    joining = tuple(each for each in placed.joining if each in living)
    spares = tuple(each for each in placed.spares if each in living)
    heir = placed.heir if placed.heir in living else NOBODY
    if placed.primary in living:
        return msgspec.structs.replace(
            placed, replicas=replicas, joining=joining, spares=spares, heir=heir
        )
    able = replicas or spares
    if not able:
        return msgspec.structs.replace(
            placed, primary=NOBODY, replicas=(), joining=(), spares=(), heir=NOBODY
        )
    chosen = heir if heir in able else able[0]
    spares = tuple(each for each in able if each != chosen)
    joining = tuple(each for each in (*replicas, *joining) if each != chosen)
    return msgspec.structs.replace(
        placed,
        epoch=placed.epoch + 1,
        primary=chosen,
        replicas=(),
        joining=joining,
        spares=spares,
        heir=heir if heir != chosen else NOBODY,
    )


def _loading_somewhere(placed: Placed, load: Counter[int]) -> Placed:
    if placed.primary != NOBODY:
        return placed
    chosen = _least_loaded(load, ())
    load[chosen] += 1
    return Placed(
        chosen,
        placed.epoch + 1,
        loading=True,
        history=placed.history + (not placed.loading),
        step=placed.step,
    )


def _leaving(placed: Placed, draining: Sequence[int], load: Counter[int]) -> Placed:
    """With somebody to take over from a primary that is drained, and without drained copies that
    are not needed.
    """
    kept = [each for each in placed.joining if each not in draining]
    heir = placed.heir if placed.heir not in draining else NOBODY
    if placed.primary in draining and heir == NOBODY:
        able = [each for each in (*placed.replicas, *kept) if each not in draining]
        if not able:
            able = [each for each in [_least_loaded(load, placed.holders)] if each != NOBODY]
            kept += able
            load.update(able)
        heir = able[0] if able else NOBODY
    spares = tuple(each for each in placed.spares if each in kept)
    return msgspec.structs.replace(placed, joining=tuple(kept), spares=spares, heir=heir)


def _copied(placed: Placed, wanted: int, load: Counter[int]) -> Placed:
    """With as many copies as wanted, where there are servers: some are added, or those that are too
    many go.
    """
    if placed.loading:
        return placed
    replicas, joining = list(placed.replicas), list(placed.joining)
    staying = [each for each in (*replicas, *joining) if each in load and each != placed.heir]
    # The primary becomes a copy when its heir takes over, unless it is drained.
    coming = 1 if placed.heir != NOBODY and placed.primary in load else 0
    while len(staying) + coming < wanted:
        chosen = _least_loaded(load, (placed.primary, *replicas, *joining))
        if chosen == NOBODY:
            break
        load[chosen] += 1
        joining.append(chosen)
        staying.append(chosen)
    needed = [each for each in replicas if each in load]  # in sync, and not drained
    for each in sorted(replicas, key=lambda server: (server in load, -load[server])):
        spare = len(needed) > wanted if each in load else len(needed) >= wanted
        if spare and each != placed.heir and placed.heir == NOBODY:
            replicas.remove(each)
            if each in load:
                needed.remove(each)
                load[each] -= 1
    for each in joining[:]:
        if len(needed) >= wanted and each != placed.heir:
            joining.remove(each)
            load[each] -= 1
    spares = tuple(each for each in placed.spares if each in joining)
    return msgspec.structs.replace(
        placed, replicas=tuple(replicas), joining=tuple(joining), spares=spares
    )


def _balance(partitions: list[Placed], staying: Sequence[int], load: Counter[int]) -> None:
    """Moves from who has most primaries to who has least, until they differ by one at most."""
    primaries = Counter(dict.fromkeys(staying, 0))
    for placed in partitions:
        owner = placed.heir if placed.heir != NOBODY else placed.primary
        if owner in primaries:
            primaries[owner] += 1
    for index, placed in enumerate(partitions):
        least = min(staying, key=lambda server: (primaries[server], load[server], server))
        movable = placed.heir == NOBODY and not placed.loading and placed.primary in primaries
        if (
            movable
            and primaries[placed.primary] == max(primaries.values())
            and primaries[placed.primary] - primaries[least] > 1
        ):
            primaries[placed.primary] -= 1
            primaries[least] += 1
            joining = placed.joining if least in placed.holders else (*placed.joining, least)
            partitions[index] = msgspec.structs.replace(placed, heir=least, joining=joining)


def _least_loaded(load: Counter[int], but: Sequence[int]) -> int:
    """NOBODY: there is no other."""
    return min(
        (each for each in load if each not in but),
        key=lambda server: (load[server], server),
        default=NOBODY,
    )
