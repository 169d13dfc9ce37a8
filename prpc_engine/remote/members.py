"""Who is in the group, as the master tells it.

    at the group's master            is
    /_remote_/<name>, ephemeral      {"rank", "incarnation", "state": "up" or "leaving", "begun",
                                     "world_size": its own, or null}

All watch it: who joins, who wants to leave, who has left or died. So no worker asks anybody who is
there, and shutdown() waits for those alone that live. A worker that was silent for longer than its
lease, or whose master began anew without a journal, finds itself missing, and joins again: as the
same, with the values that it has.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import msgspec

from prpc_engine import errors
from prpc_engine.master.client import MasterClient
from prpc_engine.master.namespace import component, name_of
from prpc_engine.master.watch import TreeEvent
from prpc_engine.remote.attendance import Attendant
from prpc_engine.remote.current import NoWorker, WorkerInfo
from prpc_engine.settings.address import NAME_LENGTH_MAX
from shard import Driver, Future, runtime

TREE = "/_remote_"
# There once all of a group of a fixed size have joined: who finds it before it joins has come to a
# group that is about to end, or that it has no place in.
COMPLETE = "/_remote_complete_"
AGAIN_S = 1.0  # between two attempts to join again
FIND_S = 5.0  # for the master to say whether a worker has joined, or to tell of those that have
logger = logging.getLogger("prpc")


class UnknownWorker(errors.NotSent, LookupError, RuntimeError):
    """The group has no worker of that name, or has it no longer. Nothing was sent."""


class Membership(msgspec.Struct, frozen=True):
    """What the master's tree has of one worker; `begun`: see termination.py."""

    rank: int
    incarnation: int
    state: str
    begun: tuple[int, ...] = ()
    world_size: int | None = None  # as that worker was given it


class Members:
    """The workers of a group, this one among them. Owned by a Worker.

    incarnations  of the workers that are there, by rank
    on_gone       called with the incarnation of a worker that has left or died, and its name for
                  texts
    on_back       called with that of one that was gone, and is back: it was silent for too long
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        driver: Driver,
        on_gone: Callable[[int, str], object],
        on_back: Callable[[int], object],
    ) -> None:
        self.name = name
        self.rank = -1  # until it has one
        self._world_size: int | None = None  # as it was given
        self.incarnation = incarnation
        self.is_leaving = False
        self._driver = driver
        self._on_gone, self._on_back = on_gone, on_back
        self._gone: set[int] = set()  # incarnations of those that have left or died
        self._tree: MasterClient | None = None
        self._members: dict[str, Membership] = {}
        # what the master has answered of workers before it told of them
        self._asked: dict[str, Membership] = {}
        self._names: dict[int, str] = {incarnation: name}  # of those that have gone, too
        self._came: dict[str, Membership] = {}  # what was last told of each, of those, too
        self.incarnations: dict[int, int] = {}  # by rank, of those that are there
        self._changed: Future | None = None  # done when somebody comes, goes or is to leave

    def join(
        self, tree: MasterClient, rank: int, where: str, world_size: int | None = None
    ) -> None:
        """Be known to the others from now on. Raises ConfigError for a name that is taken."""
        self.rank, self._world_size = rank, world_size
        with contextlib.suppress(errors.NodeExists):
            tree.tree_node_add(TREE)
        try:
            tree.tree_node_add(self._path, self._said("up"), ephemeral=True)
        except errors.NodeExists as error:
            raise errors.ConfigError(
                f"the group at {where} has a worker named {self.name!r} already: names are unique"
            ) from error
        self._tree = tree
        tree.tree_watch(TREE, self._heard, existing=True)

    @property
    def _path(self) -> str:
        return f"{TREE}/{component(self.name)}"

    def _said(self, state: str, begun: tuple[int, ...] = ()) -> str:
        said = Membership(self.rank, self.incarnation, state, begun, self._world_size)
        return msgspec.json.encode(said).decode()

    def _heard(self, event: TreeEvent) -> None:
        """The master tells of a worker. Where handlers run."""
        if event.path == TREE:
            return
        name = name_of(event.path.rpartition("/")[2])
        before = self._members.get(name)
        self._asked.pop(name, None)
        now = None if event.value is None else msgspec.json.decode(event.value, type=Membership)
        members = {other: member for other, member in self._members.items() if other != name}
        if now is not None:
            members[name] = now
            self._names[now.incarnation] = name
            self._came[name] = now
        self._members = members  # a new one: other threads go through the one before
        self.incarnations = {each.rank: each.incarnation for each in self._members.values()}
        if before is not None and (now is None or now.incarnation != before.incarnation):
            if before.state != "leaving":
                logger.warning(
                    "worker %r (rank %d) has left the group without shutdown(), or died",
                    name,
                    before.rank,
                )
            self._gone.add(before.incarnation)
            self._on_gone(before.incarnation, f"worker {name!r}")
        if now is not None and now.incarnation in self._gone:
            self._gone.discard(now.incarnation)
            self._on_back(now.incarnation)
        if now is None and name == self.name and not self.is_leaving:
            self._join_again()
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set_result(None)

    def _join_again(self) -> None:
        assert self._tree is not None, "it has joined"
        logger.warning(
            "this worker, %r (rank %d), was silent for longer than its lease, or its master began "
            "anew: the others took it for dead; it joins again",
            self.name,
            self.rank,
        )
        self._add_again()

    def _add_again(self) -> None:
        """To the group's folder, which a master that began anew has not. As often as it takes:
        the others find this worker there, and the master may be away for long.
        """
        if self._tree is None or self.is_leaving:
            return
        try:
            self._tree.submit("tree_node_add", TREE, "", False)
            asked = self._tree.submit("tree_node_add", self._path, self._said("up"), True)
        except errors.Closed:
            return
        except errors.RpcError as error:  # too much waits for the master's answers
            self._try_later(error)
        else:
            asked.when_done(self._added_again)

    def _added_again(self, asked: Future) -> None:
        error = asked.error()
        if error is not None and not isinstance(error, errors.NodeExists | errors.Closed):
            self._try_later(error)

    def _try_later(self, error: BaseException) -> None:
        logger.warning("%r could not join its group again yet: %s", self.name, error)
        reactor = self._driver.reactor
        reactor.call_soon(lambda: reactor.call_later(AGAIN_S, self._add_again))

    def wait_for(self, size: int, deadline: float) -> None:
        """Until the master has told of so many workers, which are there or were; at most until that
        time of the monotonic clock, since one that left may never be told of.
        """
        self.wait(lambda: len(self._members) + len(self._gone) >= size, deadline)

    # -- who is there ------------------------------------------------------------------------------

    def infos(self) -> list[WorkerInfo]:
        """All workers known, in order of rank."""
        members = sorted(self._members.items(), key=lambda each: each[1].rank)
        return [WorkerInfo(name, member.rank) for name, member in members]

    def came(self) -> list[Attendant]:
        """All workers that were ever known, as each was last told of."""
        there = {*self._members, self.name}
        own = Membership(self.rank, self.incarnation, "up", (), self._world_size)
        came = {self.name: own, **self._came.copy()}  # news comes in another thread
        return [
            Attendant(name, member.rank, member.world_size, name in there)
            for name, member in came.items()
        ]

    def info(self, name: str | None = None) -> WorkerInfo:
        """Of the worker of that name; None: of this one. Raises UnknownWorker, ConfigError."""
        if name is not None and type(name) is not str:
            raise errors.ConfigError(
                f"worker_name={name!r:.100}: the name of a worker is expected; there are "
                f"{self._there()}"
            )
        if name is None or name == self.name:
            return WorkerInfo(self.name, self.rank)
        return WorkerInfo(name, self._find(name).rank)

    def info_of(self, rank: int) -> WorkerInfo:
        """Of the worker of that rank. Raises UnknownWorker."""
        return self._standing(rank)[0]

    def _standing(self, rank: int) -> tuple[WorkerInfo, int]:
        """The worker of that rank, and its incarnation. Raises UnknownWorker."""
        for known in (self._members, self._asked.copy()):
            for name, member in known.items():
                if member.rank == rank and member.incarnation not in self._gone:
                    return WorkerInfo(name, rank), member.incarnation
        raise self.unknown(rank)

    def unknown(self, rank: int) -> UnknownWorker:
        """The error of who wants the worker of that rank, which is not there."""
        return UnknownWorker(
            f"no worker of rank {rank} is there: it has left, died or never joined; there are "
            f"{self._there()}"
        )

    def describe(self, rank: int) -> str:
        """For texts."""
        for info in self.infos():
            if info.id == rank:
                return f"worker {info.name!r} (rank {rank})"
        return f"the worker of rank {rank}, which is not there: it has left, died or never joined"

    def named(self, incarnation: int) -> str:
        """For texts: the worker of that incarnation, whether or not it is there."""
        name = self._names.get(incarnation)
        return f"worker {name!r}" if name is not None else "a worker that is not known here"

    def _there(self) -> str:
        return ", ".join(f"{info.name!r} ({info.id})" for info in self.infos()) or "none"

    def _find(self, name: str, timeout: float | None = None) -> Membership:
        """`timeout`: of the call that wants it, whose own time the master does not use up."""
        member = self._members.get(name)
        if not 1 <= len(name) <= NAME_LENGTH_MAX:
            raise UnknownWorker(f"no worker has the name {name!r:.100}; there are {self._there()}")
        if member is None and self._tree is not None:
            # it may have joined just now: the master knows first
            limit_s = min(FIND_S, timeout) if timeout and errors.is_number(timeout) else FIND_S
            try:
                found = self._tree.tree_node_get(f"{TREE}/{component(name)}", max(0.0, limit_s))
            except (errors.DeadlineExceeded, errors.NotSent, errors.MaybeExecuted) as error:
                raise UnknownWorker(
                    f"worker {name!r} is not known here, and the group's master has not said "
                    f"within {limit_s:.3g} s whether it has joined; there are {self._there()}"
                ) from error
            except errors.Closed as error:
                raise NoWorker(
                    f"worker {name!r} is not known here, and this one, {self.name!r}, has left the "
                    "group"
                ) from error
            except errors.NoSuchNode:
                gone = name in self._names.values()
                raise UnknownWorker(
                    f"worker {name!r} {'has left or died' if gone else 'is not in the group'}; "
                    f"there are {self._there()}"
                ) from None
            member = msgspec.json.decode(found.value, type=Membership)
            # for what is asked of its rank right after this; the table of incarnations is made anew
            # with each piece of news, in another thread
            self._asked[name] = member
            self.incarnations.setdefault(member.rank, member.incarnation)
        if member is None:
            raise UnknownWorker(f"worker {name!r} is not known yet: this one is still joining")
        return member

    def rank_of(self, to: object, timeout: float | None = None) -> int:
        """Of a worker given by name, WorkerInfo or rank. Raises UnknownWorker, ConfigError."""
        member = self._members.get(to) if type(to) is str else None
        if member is not None:
            return member.rank
        kind = type(to)
        if kind is str:
            return self._find(str(to), timeout).rank
        if isinstance(to, WorkerInfo):
            return to.id
        if kind is int:
            return int(str(to))
        raise errors.ConfigError(
            f"to={to!r:.100}: the name of a worker, its WorkerInfo or its rank is expected"
        )

    def incarnation_of(self, rank: int) -> int:
        """Of the worker that has that rank now. Raises UnknownWorker."""
        found = self.incarnations.get(rank)
        return found if found is not None else self._standing(rank)[1]

    # -- leaving -----------------------------------------------------------------------------------

    def say_leaving(self, timeout_s: float, begun: tuple[int, ...] = ()) -> None:
        """The others need not take this one's end for a death; `begun`: see termination.py. Raises
        the master's errors.
        """
        if self._tree is not None and (begun or not self.is_leaving):
            self.is_leaving = True
            self._tree.tree_node_set(self._path, self._said("leaving", begun), timeout_s=timeout_s)

    def say_staying(self, timeout_s: float) -> None:
        """It does not want to leave any more. Raises the master's errors."""
        if self._tree is not None and self.is_leaving:
            self.is_leaving = False
            self._tree.tree_node_set(self._path, self._said("up"), timeout_s=timeout_s)

    def ask_master(self, timeout_s: float) -> None:
        """Raises what it has where the group's master does not answer within that time."""
        if self._tree is not None:
            with contextlib.suppress(errors.NoSuchNode):
                self._tree.tree_node_get(self._path, timeout_s)

    def leave(self) -> None:
        """Not to be among them any more."""
        self.is_leaving = True  # who hears that its own node is gone would join again
        if self._tree is not None:
            self._tree.tree_node_del(self._path)
        self._members = {
            name: member for name, member in self._members.items() if name != self.name
        }

    def staying(self) -> list[str]:
        """Who of the others does not want to leave, sorted."""
        return sorted(
            name
            for name, member in self._members.items()
            if member.state != "leaving" and name != self.name
        )

    def begun(self) -> dict[str, tuple[int, ...]]:
        """What each of the others has told of the calls that it has begun."""
        members = self._members
        return {name: member.begun for name, member in members.items() if name != self.name}

    def wait(self, happened: Callable[[], bool], deadline: float, serves: bool = False) -> bool:
        """Wait until happened(), which changes with the members; False at that time of the
        monotonic clock. `serves`: what others call runs in this thread meanwhile.
        """
        while True:
            self._changed = changed = Future(self._driver)
            if happened():
                return True
            if not self._driver.wait_until(changed, deadline, serves):
                return False
            if runtime.monotonic() >= deadline:
                return happened()
