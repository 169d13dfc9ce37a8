"""What the master answers: it binds sessions to connections, and makes what the registry decides
durable, known and waited for.

A verb runs in one turn of the reactor: the registry decides, the journal has the changes, watchers
and waiting verbs hear of them, and only then it is answered. A verb that waits (a lock, a barrier,
a look-up) is a task that sleeps until a node changes. A change is sent once to each session that
watches a node above it: a join costs as many messages as there are watchers.
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any, get_type_hints

import msgspec

from prpc_engine import errors
from prpc_engine.master.history import History
from prpc_engine.master.journal import Journal
from prpc_engine.master.locks_and_barriers import Arrival, LocksAndBarriers, role_of
from prpc_engine.master.namespace import (
    NoSuchNode,
    RegistryError,
    SessionExpired,
    TimedOut,
    component,
)
from prpc_engine.master.protocol import WATCH_ROUTE
from prpc_engine.master.registry import DEFAULT_API, Registry
from prpc_engine.master.tree import Change, Kind, SessionRecord
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.peer import Peer, calling_peer
from prpc_engine.settings.config import TIMEOUT_S_MAX
from shard import Future, Reactor, runtime

logger = logging.getLogger("prpc")
CHANGED = method_key("changed")
TOKEN_BYTES = 16
WATCHES_PER_SESSION_MAX = 4096  # each costs a change a look
SHOWN_MAX = 200  # characters of a wrong argument in the text of its error

# Verbs of the registry that are answered at once; those of MasterMethods below that wait are found
# by WAITING.
VERBS = (
    "count_up",
    "deregister_server",
    "del_rpc_service_info",
    "generate_id",
    "get_comm_info",
    "get_rpc_service_info",
    "join",
    "prepare_server",
    "ranks",
    "register_node",
    "register_rpc_service",
    "register_server",
    "reset_generate_id",
    "services",
    "tree_clear_path",
    "tree_look",
    "tree_node_add",
    "tree_node_del",
    "tree_node_gen",
    "tree_node_get",
    "tree_node_set",
    "tree_node_sub",
)
MEETING_VERBS = ("forget", "release_lock")
WAITING = ("acquire_lock", "alloc_role_rank", "barrier", "lookup", "tree_wait")
# Served a second time they change nothing more: they read, or give back what no other can have got
# since. Those that wait find by their request what they left here.
REPEATABLE = frozenset(
    {
        "deregister_server",
        "forget",
        "get_comm_info",
        "get_rpc_service_info",
        "ranks",
        "register_rpc_service",
        "release_lock",
        "services",
        "tree_look",
        "tree_node_get",
        "tree_node_sub",
    }
)


@dataclass(frozen=True)
class MasterStatistics:
    """A snapshot of a master: how much it holds, how many clients are connected, and how many verbs
    wait.
    """

    version: int
    sessions: int
    connected: int  # of those
    nodes: int
    watches: int
    waiting: int  # looks of verbs that wait: locks, barriers, look-ups
    pushes: int
    pushes_dropped: int  # to watchers that do not read; they find out and watch again


@dataclass(frozen=True)
class _Asker:
    """Who waits: its session and request, over which connection, and until when on the reactor's
    clock.
    """

    session: int
    request: int
    peer: Peer
    deadline: float


@cache
def _parameters(function: Callable[..., Any], given: int) -> tuple[list[str], list[Any], int, str]:
    """Of a function without its `given` first ones: names, types, how many have a default, and how
    they are written. Kept, since each master has the same verbs, and looking at them takes longer
    than all else that it does as it starts.
    """
    hints = get_type_hints(function)
    parameters = list(inspect.signature(function).parameters.values())[given:]
    names = [one.name for one in parameters]
    return (
        names,
        [hints[name] for name in names],
        sum(one.default is not inspect.Parameter.empty for one in parameters),
        ", ".join(map(str, parameters)),
    )


class _Verb:
    """One verb: its function, and what its arguments must be."""

    def __init__(self, name: str, function: Callable[..., Any], given: int) -> None:
        """`given` first parameters come from the master and not from the client."""
        self.function = function
        if isinstance(function, MethodType):
            function, given = function.__func__, given + 1
        self._names, self._types, defaults, shown = _parameters(function, given)
        self._required = len(self._names) - defaults
        self.text = f"{name}({shown})"

    def arguments(self, given: list[Any]) -> list[Any]:
        """The arguments, each of its type. Raises RegistryError."""
        if not self._required <= len(given) <= len(self._types):
            raise RegistryError(f"{self.text} was asked with {len(given)} arguments")
        checked = []
        # the last ones have defaults
        for name, kind, value in zip(self._names, self._types, given, strict=False):
            try:
                checked.append(msgspec.convert(value, kind))
            except msgspec.ValidationError as error:
                shown = repr(value)[:SHOWN_MAX]
                raise RegistryError(
                    f"{self.text} was asked with {name}={shown}: {error}"
                ) from error
        return checked


class MasterMethods:
    """Answers what the clients of one master ask: sessions, verbs, and watches of the tree.

    reactor   whose thread calls all this, and whose clock counts leases and deadlines
    registry  what decides, and has the tree
    journal   gets the changes of a verb before it is answered; None: nothing outlives the master

    Made by a Master and served under MASTER_TARGET. Raises JournalError where the journal cannot be
    written; from then on all requests are answered with it.
    """

    def __init__(self, reactor: Reactor, registry: Registry, journal: Journal | None) -> None:
        self._reactor = reactor
        self._registry = registry
        self._meetings = LocksAndBarriers(registry)
        self._journal = journal
        self._failed: errors.JournalError | None = None
        self._sessions: dict[Peer, int] = {}
        self._peers: dict[int, Peer] = {}
        self._watchers: defaultdict[str, dict[int, None]] = defaultdict(dict)  # path -> sessions
        self._watched: defaultdict[int, set[str]] = defaultdict(set)  # and back
        self._pushed: dict[int, int] = {}
        self._pushes = self._pushes_dropped = 0
        self._history = History(registry.version)
        self._waiting: defaultdict[str, list[Future]] = defaultdict(list)
        self._verbs = {name: _Verb(name, getattr(registry, name), 1) for name in VERBS}
        self._verbs |= {
            name: _Verb(name, getattr(self._meetings, name), 1) for name in MEETING_VERBS
        }
        self._waits = {name: _Verb(name, getattr(self, f"_{name}"), 1) for name in WAITING}
        registry.start(reactor.clock())
        for session, known in list(registry.tree.sessions.items()):
            if runtime.process_is_gone(
                known.record.home
            ):  # it died while there was no master to see it
                registry.end(session)
        self._commit()
        self._look()

    def statistics(self) -> MasterStatistics:
        """A snapshot; no method of the wire."""
        tree = self._registry.tree
        return MasterStatistics(
            version=tree.version,
            sessions=len(tree.sessions),
            connected=len(self._peers),
            nodes=len(tree.nodes),
            watches=sum(len(paths) for paths in list(self._watched.values())),
            waiting=sum(len(waiting) for waiting in list(self._waiting.values())),
            pushes=self._pushes,
            pushes_dropped=self._pushes_dropped,
        )

    @property
    def served(self) -> dict[str, Callable[..., Any]]:
        """The methods of the wire, by name."""
        return {
            function.__name__: function
            for function in (
                self.open_session,
                self.heartbeat,
                self.end_session,
                self.ask,
                self.watch,
                self.unwatch,
            )
        }

    # -- sessions ----------------------------------------------------------------------------------

    def open_session(
        self, session: int, token: str, lease_s: float, root: str, label: str, home: str
    ) -> list[Any]:
        """Open a session for the calling connection (`session` 0), or take one up again, whose
        token it then has to show.

        The answer is [session, token, version of the tree]; lease_s (seconds), root, label and home
        are those of a new session. Raises SessionExpired for one to take up that is over,
        RegistryError, JournalError.
        """
        peer = calling_peer()
        assert peer is not None
        self._check_journal()
        known = self._sessions.get(peer)
        if known is not None and known != session and known in self._registry.tree.sessions:
            raise RegistryError(
                f"this connection has session {known} already: end it first, "
                "or open another connection"
            )
        now = self._reactor.clock()
        if session:
            self._registry.resume(session, token, now)
        else:
            token = runtime.token_hex(TOKEN_BYTES)
            session = self._registry.open(
                SessionRecord(token, float(lease_s), root, label, home), now
            )
            self._commit()
        before = self._peers.get(session)
        self._unbind(session)
        if before is not None and before is not peer:
            before.connection.close()  # the other end is gone, or was given up there
        self._sessions[peer] = session
        self._peers[session] = peer
        self._pushed[session] = 0
        return [session, token, self._registry.version]

    def _calling(self) -> int:
        peer = calling_peer()
        session = self._sessions.get(peer) if peer is not None else None
        if session is None:
            raise SessionExpired("this connection has no session: open one first")
        self._check_journal()
        self._registry.touch(session, self._reactor.clock())
        return session

    def heartbeat(self) -> int:
        """The session lives; how many notifications it should have got."""
        session = self._calling()
        # failpoint: master.heartbeat
        return self._pushed[session]

    def end_session(self) -> bool:
        """The client closes: what it owns goes now, and not when its lease is over."""
        session = self._calling()
        self._unbind(session)  # first: it is told of nothing any more, not even of its own end
        ended = self._registry.end(session)
        self._commit()
        return ended

    def _unbind(self, session: int) -> None:
        peer = self._peers.pop(session, None)
        if peer is not None:
            self._sessions.pop(peer, None)
        self._pushed.pop(session, None)
        for path in self._watched.pop(session, ()):
            self._forget_watcher(path, session)

    def peer_lost(self, peer: Peer) -> None:
        """A connection ended. Its session goes at once when its process is gone; else it has its
        lease to come back in.
        """
        session = self._sessions.get(peer)
        if session is None:
            return
        self._unbind(session)
        known = self._registry.tree.sessions.get(session)
        if (
            known is not None
            and self._failed is None
            and runtime.process_is_gone(known.record.home)
        ):
            self._registry.end(session)
            self._commit_or_log()

    def _look(self) -> None:
        """End sessions whose lease is over; again and again."""
        if self._failed is None:
            for session in self._registry.expire(self._reactor.clock()):
                logger.info("session %d ended: nothing was heard of it for its lease", session)
                peer = self._peers.get(session)
                self._unbind(session)
                if peer is not None:
                    peer.connection.close()  # so that it asks, and hears that it is over
            self._commit_or_log()
        self._reactor.call_later(self._registry.look_every_s(), self._look)

    # -- verbs -------------------------------------------------------------------------------------

    def ask(self, request: int, verb: str, arguments: list[Any], timeout_s: float) -> Any:
        """Serve one verb of the calling session; its answer, or for verbs that wait a coroutine
        that returns it.

        request    the client's number: asked again under it, the verb is not served twice; 0: it
                   has none
        timeout_s  how long a verb that waits may wait, in seconds; others do not look at it

        Raises RegistryError and its kin (AnswerForgotten: it may have been served before),
        JournalError.
        """
        session = self._calling()
        if request:
            known = self._registry.answered(session, request)
            if known is not None:
                return known[0]
        waits = self._waits.get(verb)
        if waits is not None:
            if not 0 <= timeout_s <= TIMEOUT_S_MAX:
                raise RegistryError(f"{verb} waits for 0 to {TIMEOUT_S_MAX} s, not {timeout_s}")
            peer = calling_peer()
            assert peer is not None
            asker = _Asker(session, request, peer, self._reactor.clock() + timeout_s)
            return waits.function(asker, *waits.arguments(arguments))
        known_verb = self._verbs.get(verb)
        if known_verb is None:
            raise RegistryError(
                f"there is no verb {verb!r}; there are "
                f"{', '.join(sorted({*self._verbs, *self._waits}))}"
            )
        if request and verb not in REPEATABLE:
            self._registry.check_remembered(session, request)
        checked = known_verb.arguments(arguments)
        try:
            answer = known_verb.function(session, *checked)
            if request and self._registry.has_changes():
                self._registry.note_answer(session, request, answer)
        finally:
            self._commit()
        return answer

    def _check_journal(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _commit(self) -> None:
        """Make what was changed durable, then known. Raises JournalError: then this master answers
        nothing any more.
        """
        changes = self._registry.take_changes()
        if not changes:
            return
        version = self._registry.version
        if self._journal is not None:
            try:
                self._journal.append(version, changes)
            except errors.JournalError as error:
                self._failed = error
                for path in list(self._waiting):
                    self._wake(path)
                raise
            if self._journal.long:
                self._journal.compact(self._registry.tree)
        self._tell(version - len(changes), changes)

    def _commit_or_log(self) -> None:
        try:
            self._commit()
        except errors.JournalError as error:
            logger.error("%s", error)

    # -- verbs that wait ---------------------------------------------------------------------------

    async def _changed(self, path: str, deadline: float) -> None:
        """Sleep until the node at `path` or one of its children changes, or until the deadline."""
        change = Future()
        waiting = self._waiting[path]
        waiting.append(change)
        timer = self._reactor.timers.call_at(deadline, partial(change.set_result, None))
        try:
            await change
        finally:
            timer.cancel()
            if change in waiting:
                waiting.remove(change)
            if not waiting and self._waiting.get(path) is waiting:
                del self._waiting[path]
        self._check_journal()

    def _time_is_up(self, asker: _Asker) -> bool:
        """Whether to give up what was asked for. Not when its connection was lost: it is asked
        again over the next one, or given up by `forget`, or goes with the session."""
        if self._reactor.clock() < asker.deadline:
            return False
        if asker.peer.lost:
            raise RegistryError("the connection that asked was lost")
        return True

    async def _acquire_lock(self, asker: _Asker, name: str) -> int:
        """The lock's token, once it is held. Raises TimedOut with who holds it."""
        session = asker.session
        token = self._meetings.claim(session, name, asker.request, self._registry.title(session))
        self._commit()
        while True:
            ahead = self._meetings.ahead(session, name, token)
            if ahead is None:
                return token
            if self._time_is_up(asker):
                holder = self._meetings.holder(session, name)
                self._meetings.release_lock(session, name, token)
                self._commit()
                raise TimedOut(f"lock {name!r} was not free: {holder}")
            await self._changed(ahead, asker.deadline)

    async def _meet(self, asker: _Asker, part: str, what: str, arrival: Arrival) -> list[int]:
        """All members' items, sorted, once all are there. Raises TimedOut with who is missing."""
        session = asker.session
        try:
            path = self._meetings.arrive(session, part, arrival)
        finally:
            self._commit()
        while True:
            if session not in self._registry.tree.sessions:
                raise SessionExpired(
                    f"session {session} is over: its lease ended while it waited at {what}"
                )
            answer = self._registry.answered(session, arrival.request)
            if answer is not None:
                return list(answer[0])
            # somebody cleared it away: it opens for others, and never for us
            if path not in self._registry.tree.nodes:
                raise RegistryError(f"{what}: the arrival was deleted meanwhile")
            if self._time_is_up(asker):
                text = self._meetings.give_up(session, part, arrival.request)
                self._commit()
                raise TimedOut(f"{what} did not open: {text}")
            await self._changed(path, asker.deadline)

    async def _barrier(
        self, asker: _Asker, name: str, count: int, member: str = "", expected: tuple[str, ...] = ()
    ) -> list[int]:
        """[] once `count` members are there."""
        named = member or self._registry.title(asker.session)
        return await self._meet(
            asker,
            component(name),
            f"barrier {name!r}",
            Arrival(asker.request, count, named, None, expected),
        )

    async def _alloc_role_rank(self, asker: _Asker, role: str, count: int, rank: int) -> list[int]:
        """The ranks of all members of the role, sorted, once they are `count`."""
        arrival = Arrival(asker.request, count, f"rank {rank}", rank)
        return await self._meet(asker, role_of(role), f"role {role!r}", arrival)

    async def _lookup(
        self, asker: _Asker, service: str, expected: int, api: str = DEFAULT_API
    ) -> list[list[Any]]:
        """[server id, target, rank, addresses, marks] of each server, once there are `expected`, or
        of those at the deadline.
        """
        session = asker.session
        path = (
            f"{self._registry.full_path(session, '')}/_rpc_/{component(api)}/{component(service)}"
        )
        while True:
            found = self._registry.servers(session, service, api)
            if len(found) >= expected or self._time_is_up(asker):
                return [
                    [one.server_id, one.target, one.rank, list(one.addresses), one.marks]
                    for one in found
                ]
            await self._changed(path, asker.deadline)

    async def _tree_wait(self, asker: _Asker, path: str) -> list[Any]:
        """As tree_node_get, once there is such a node. Raises TimedOut."""
        while True:
            try:
                return self._registry.tree_node_get(asker.session, path)
            except NoSuchNode as error:
                if self._time_is_up(asker):
                    raise TimedOut(f"node {path!r} was not made") from error
            await self._changed(self._registry.full_path(asker.session, path), asker.deadline)

    # -- who hears of changes ----------------------------------------------------------------------

    def _wake(self, path: str) -> None:
        for change in self._waiting.pop(path, ()):
            change.set_result(None)

    def _tell(self, version: int, changes: list[Change]) -> None:
        """Watchers and waiting verbs hear of changes made after `version`."""
        pushes: defaultdict[int, list[list[Any]]] = defaultdict(list)
        for change in changes:
            version += 1
            if change.kind is not Kind.PUT and change.kind is not Kind.DELETE:
                continue
            item = [version, int(change.kind), change.path, change.text, change.number]
            self._history.append(item)
            self._wake(change.path)
            self._wake(change.path.rpartition("/")[0])
            if self._watchers:
                self._find_watchers(item, pushes)
        for session, items in pushes.items():
            self._push(session, items)

    def _find_watchers(self, item: list[Any], pushes: defaultdict[int, list[list[Any]]]) -> None:
        interested: dict[int, None] = {}
        path = item[2]
        while path:
            interested |= self._watchers.get(path, {})
            path = path.rpartition("/")[0]
        for session in interested:
            cut = len(self._registry.full_path(session, ""))
            pushes[session].append([item[0], item[1], item[2][cut:], item[3], item[4]])

    def _push(self, session: int, items: list[list[Any]]) -> None:
        # whether it arrives or not: the next number says that one is missing
        self._pushed[session] += 1
        self._pushes += 1
        try:
            self._peers[session].notify(
                WATCH_ROUTE, "changed", CHANGED, (self._pushed[session], items)
            )
        except errors.RpcError as error:
            self._pushes_dropped += 1
            logger.warning(
                "session %d was not told of %d changes, and has to ask: %s",
                session,
                len(items),
                str(error),
            )

    def watch(self, path: str, known: int) -> list[Any]:
        """Tell the calling session of changes at `path` and below from now on; [version, pushes,
        whether a snapshot, items].

        known  the version that the client has: items are the changes since; -1, or one too old: a
               snapshot

        Raises RegistryError, JournalError.
        """
        session = self._calling()
        full = self._registry.full_path(session, path)
        watched = self._watched[session]
        if len(watched) >= WATCHES_PER_SESSION_MAX and full not in watched:
            raise RegistryError(
                f"session {session} watches {WATCHES_PER_SESSION_MAX} nodes: "
                "watch one above them instead"
            )
        watched.add(full)
        self._watchers[full][session] = None
        version, pushed = self._registry.version, self._pushed[session]
        changes = self._history.since(known, version)
        if changes is None:
            return [version, pushed, True, self._registry.tree_look(session, path)]
        cut = len(self._registry.full_path(session, ""))
        items = [
            [item[0], item[1], item[2][cut:], item[3], item[4]]
            for item in changes
            if item[2] == full or item[2].startswith(f"{full}/")
        ]
        return [version, pushed, False, items]

    def unwatch(self, path: str) -> bool:
        """Tell the calling session no more of changes at `path`; whether it watched that. Raises
        RegistryError.
        """
        session = self._calling()
        full = self._registry.full_path(session, path)
        if full not in self._watched[session]:
            return False
        self._watched[session].discard(full)
        self._forget_watcher(full, session)
        return True

    def _forget_watcher(self, path: str, session: int) -> None:
        watchers = self._watchers[path]
        watchers.pop(session, None)
        if not watchers:
            del self._watchers[path]
