"""Where sessions meet: locks and barriers, on nodes of the tree. No I/O and no clock here: waiting
is the master's.

    path below /<root>                    value       there from, to
    _lock_/<name>/<token>                 a Claim     acquire, release; the smallest token holds the
                                                      lock
    _barrier_/<name>/<session>.<request>  an Arrival  arrive, the barrier opens or the member gives
                                                      up

All are ephemeral: what a dead session held or waited for goes with it. Both may be asked again
under the same request number, of a restarted master too: a claim is found by its request, and an
opened barrier leaves its answer with every member's session. A token grows with every claim, over
restarts of the master too: it fences off writes of holders that lost the lock unaware.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from prpc_engine.master.namespace import OWNED_MAX, RegistryError, component, encoded, natural
from prpc_engine.master.registry import Registry

TOKEN_DIGITS = 16
NAMES_SHOWN_MAX = 32  # in the text of an error
# Members of a barrier that is given up, to say who is missing: all do it at once, and each looks at
# all.
NAMES_LOOKED_MAX = 256
MEMBERS_MAX = OWNED_MAX


class _Asked(msgspec.Struct, frozen=True):
    """What both have: the number of the client's request, to be found by."""

    request: int


class Claim(_Asked, frozen=True):
    """A session's wish for one lock, made by one acquire and kept until it has the lock or gives
    up.
    """

    label: str


class Arrival(_Asked, frozen=True):
    """That one member has come to one barrier, and waits for `count` of them in all."""

    count: int
    member: str
    # what the members tell each other: all items, sorted, are the barrier's answer; None: nothing
    item: int | None
    expected: tuple[str, ...] = ()


def listed(names: Sequence[str]) -> str:
    """Names for the text of an error."""
    shown = ", ".join(names[:NAMES_SHOWN_MAX]) or "nobody"
    return (
        shown
        if len(names) <= NAMES_SHOWN_MAX
        else f"{shown} and {len(names) - NAMES_SHOWN_MAX} more"
    )


def role_of(name: str) -> str:
    """That of a role: no name gives such a component."""
    return f"%role%{component(name)}"


class LocksAndBarriers:
    """Decides who holds which lock and when a barrier opens, by ephemeral nodes of the master's
    tree.

    registry  whose tree has the claims and arrivals as nodes; nothing is kept here

    Owned by MasterMethods, in the reactor's thread; no method waits. What is refused raises
    RegistryError. Nodes and their values: the table at the file's head.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._nodes = registry.tree.nodes

    def _directory(self, session: int, kind: str, part: str) -> str:
        return f"{self._registry.full_path(session, '')}/{kind}/{part}"

    # -- locks -------------------------------------------------------------------------------------

    def _claims(self, directory: str) -> dict[str, None]:
        """In the order of their tokens, in which they were made."""
        return self._nodes[directory].children if directory in self._nodes else {}

    def _own(self, session: int, directory: str) -> list[str]:
        """Paths of the session's claims there. It looks at what is less: a queue may be long, and
        so may be what one owns.
        """
        owned, claims = self._registry.tree.sessions[session].owned, self._claims(directory)
        if len(owned) <= len(claims):
            return [path for path in owned if path.startswith(f"{directory}/")]
        return [path for part in claims if (path := f"{directory}/{part}") in owned]

    def claim(self, session: int, name: str, request: int, label: str) -> int:
        """Stand in the queue of a lock, or find the place taken before under that request; the
        token.
        """
        directory = self._directory(session, "_lock_", component(name))
        if directory not in self._nodes:
            self._registry.put(directory, "", 0)
        for path in self._own(session, directory):
            if msgspec.json.decode(self._nodes[path].value, type=Claim).request == request:
                return int(path.rpartition("/")[2])
        token = self._registry.count("#lock", self._registry.first_token)
        self._registry.put(
            f"{directory}/{token:0{TOKEN_DIGITS}}", encoded(Claim(request, label)), session
        )
        return token

    def ahead(self, session: int, name: str, token: int) -> str | None:
        """The path of the claim just before this one, None for the holder. Raises RegistryError
        when the claim is gone.
        """
        directory = self._directory(session, "_lock_", component(name))
        claims = self._claims(directory)
        own = f"{token:0{TOKEN_DIGITS}}"
        if own not in claims:
            raise RegistryError(f"lock {name!r}: claim {token} was released meanwhile")
        if next(iter(claims)) == own:
            return None
        later = reversed(claims)  # whoever asks is the last one, or the first
        for part in later:
            if part == own:
                break
        return f"{directory}/{next(later)}"

    def holder(self, session: int, name: str) -> str:
        """Who holds the lock and how many wait, in words."""
        directory = self._directory(session, "_lock_", component(name))
        claims = self._claims(directory)
        if not claims:
            return "nobody holds it"
        node = self._nodes[f"{directory}/{next(iter(claims))}"]
        label = msgspec.json.decode(node.value, type=Claim).label
        return f"{label} (session {node.owner}) holds it, {len(claims) - 1} wait for it"

    def release_lock(self, session: int, name: str, token: int) -> bool:
        """Give the lock, or the place in its queue, back; whether this session had it."""
        path = f"{self._directory(session, '_lock_', component(name))}/{token:0{TOKEN_DIGITS}}"
        node = self._nodes.get(path)
        if node is None or node.owner != session:
            return False
        self._registry.delete(path)
        return True

    def forget(self, session: int, request: int) -> bool:
        """Give up what that request claimed or waits for: who asked has lost patience meanwhile;
        whether there was anything.
        """
        for path in self._registry.tree.sessions[session].owned:
            kind = path.split("/")[2]
            if kind in ("_lock_", "_barrier_"):
                known = msgspec.json.decode(self._nodes[path].value, type=_Asked)
                if known.request == request:
                    self._registry.delete(path)
                    return True
        return False

    # -- barriers ----------------------------------------------------------------------------------

    def _arrivals(self, directory: str, most: int = MEMBERS_MAX) -> list[tuple[int, Arrival]]:
        """(session, arrival) of all that wait, or of so many."""
        names = self._nodes[directory].children if directory in self._nodes else ()
        nodes = [self._nodes[f"{directory}/{name}"] for name in itertools.islice(names, most)]
        return [(node.owner, msgspec.json.decode(node.value, type=Arrival)) for node in nodes]

    def arrive(self, session: int, part: str, arrival: Arrival) -> str:
        """A member is there; the path to watch. The last one opens the barrier: then each member's
        session has its answer.

        Raises RegistryError for a count that is not that of those who wait."""
        if not 1 <= arrival.count <= MEMBERS_MAX:
            raise RegistryError(f"a barrier has 1 to {MEMBERS_MAX} members, not {arrival.count}")
        directory = self._directory(session, "_barrier_", part)
        path = f"{directory}/{session}.{arrival.request}"
        if path in self._nodes:
            return path  # asked again
        first = self._arrivals(directory, 1)
        if first and first[0][1].count != arrival.count:
            raise RegistryError(
                f"barrier {part!r} is under way for {first[0][1].count} members "
                f"({self._who_waits(directory)} "
                f"wait there), not for {arrival.count}: give all the same count"
            )
        if self._count_waiting(directory) + 1 < arrival.count:
            if directory not in self._nodes:
                self._registry.put(directory, "", 0)
            self._registry.put(path, encoded(arrival), session)
            return path
        waiting = self._arrivals(directory)
        members = [*waiting, (session, arrival)]
        # once, for all
        answer = encoded(sorted(one.item for _, one in members if one.item is not None))
        for owner, one in members:
            self._registry.note_encoded(owner, one.request, answer)
        for owner, one in waiting:
            self._registry.delete(f"{directory}/{owner}.{one.request}")
        return path

    def _count_waiting(self, directory: str) -> int:
        return len(self._nodes[directory].children) if directory in self._nodes else 0

    def _who_waits(self, directory: str) -> str:
        shown = [one.member for _, one in self._arrivals(directory, NAMES_SHOWN_MAX)]
        more = self._count_waiting(directory) - len(shown)
        return f"{listed(shown)} and {more} more" if more else listed(shown)

    def give_up(self, session: int, part: str, request: int) -> str:
        """A member waits no longer; who was there and who was not, in words."""
        directory = self._directory(session, "_barrier_", part)
        path = f"{directory}/{session}.{request}"
        if path not in self._nodes:
            return "its arrival was lost"
        own = msgspec.json.decode(self._nodes[path].value, type=Arrival)
        count = self._count_waiting(directory)
        if count > NAMES_LOOKED_MAX:
            text = f"{count} of {own.count} arrived: {self._who_waits(directory)}"
            self._registry.delete(path)
            return text
        waiting = self._arrivals(directory)
        self._registry.delete(path)
        arrived = sorted((one.member for _, one in waiting), key=natural)
        expected = sorted({name for _, one in waiting for name in one.expected}, key=natural)
        if not expected and own.count == len(self._registry.ranks(session)):
            expected = [f"rank {rank}" for rank in self._registry.ranks(session)]
            if not set(arrived) <= set(expected):
                expected = []  # others than the nodes meet here: who is missing cannot be told
        text = f"{len(arrived)} of {own.count} arrived: {listed(arrived)}"
        missing = [name for name in expected if name not in arrived]
        return f"{text}; missing: {listed(missing)}" if expected else text
