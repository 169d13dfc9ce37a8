"""Watches of the master's tree, at the client: deltas come in, callbacks are called, gaps are
filled.

One thread, `prpc-master-watch`, does it all, one event after the other: so callbacks may ask the
master, watch and unwatch, and nothing is locked while they run. It has everything below a watched
path as of one version, and goes from version to version:

    comes in                             what it does
    deltas with the next number          applies those that are newer than the watch, and calls back
    a number too high, or a heartbeat's  something was missed: watches again from the version it has
    another connection to the master     the same
    another session                      watches from the beginning, and calls back for what differs
    a heartbeat, and a watch is behind   watches that one again: the master had been asked, and too
                                         slow to answer

EVENTS_MAX events wait for it. While a callback holds it up for longer, deltas and heartbeats are
dropped: what comes next has too high a number, and the thread reads anew what it missed.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prpc_engine import errors
from prpc_engine.master.protocol import WATCH_TARGET
from prpc_engine.master.session import CLOSE_TIMEOUT_S, MasterSession
from prpc_engine.master.tree import Kind
from prpc_engine.rpc.peer import Peer, calling_peer
from prpc_engine.rpc.server import ServedObject
from shard import ClosedError, Future, control_loop

logger = logging.getLogger("prpc")
# That wait for the thread: a message of deltas each, up to a MiB a value. Who is so many behind
# reads anew, one request a watch.
EVENTS_MAX = 1024


@dataclass(frozen=True)
class TreeEvent:
    """One change of a node. `value` is None when it was deleted; `version` is that of the whole
    tree.
    """

    path: str
    value: str | None
    node_version: int
    version: int


Callback = Callable[[TreeEvent], object]


@dataclass(eq=False)
class _Watch:
    path: str
    callback: Callback
    silent: bool  # about what is there already
    version: int = -1  # of the tree; -1: not watched yet
    is_behind: bool = True  # the master is to be asked
    is_given_up: bool = False  # by who added it
    known: dict[str, tuple[str, int]] = field(default_factory=dict)  # path -> value, version


class Watches:
    """Calls users' callbacks for changes of the master's tree, and reads anew what was missed.

    session  whose on_open and on_heartbeat it sets, and whose node it serves WATCH_TARGET at

    Owned by who owns the session, and closed before it. add(), cancel() and close() may be called
    from any thread, and by callbacks. Those run one after the other in a thread of its own; what
    one raises
    is logged. Events: the table at the file's head.
    """

    def __init__(self, session: MasterSession) -> None:
        self._session = session
        self._watches: dict[int, _Watch] = {}
        self._handles = itertools.count(1)
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._peer: Peer | None = session._peer
        self._heard = 0  # number of the last notification over that connection
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False
        self._dropped = 0  # events, since the thread last kept up
        self._opening: tuple[Peer, bool] | None = None  # the latest connection, not taken up yet
        session.on_open = self._opened
        session.on_heartbeat = self._counted
        session.node.servers[WATCH_TARGET] = ServedObject(
            "watches", 0, WATCH_TARGET, {"changed": self._changed}, inline=True
        )

    # -- what comes in; from the reactor or the keeper ---------------------------------------------

    def _post(self, event: Callable[[], None]) -> None:
        if not self._watches:
            return
        waiting = self._events.qsize()
        if waiting >= EVENTS_MAX:
            self._dropped += 1
            if self._dropped == 1:
                logger.warning(
                    "watches of the master at %s are %d events behind: a callback takes too long; "
                    "what is dropped is read anew",
                    self._session.address,
                    EVENTS_MAX,
                )
            return
        if not waiting:
            self._dropped = 0
        self._events.put(event)

    def _opened(self, peer: Peer, anew: bool) -> None:
        with self._starting:
            waiting, self._opening = (
                self._opening,
                (peer, anew or (self._opening is not None and self._opening[1])),
            )
        if waiting is None:  # else the event that is on its way takes up this connection
            self._events.put(self._start_over)

    def _counted(self, peer: Peer, pushed: int) -> None:
        self._post(lambda: self._check(peer, pushed))

    def _changed(self, number: int, items: list[Any]) -> None:
        peer = calling_peer()
        self._post(lambda: self._apply(peer, number, items))

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            event = self._events.get()
            if event is None:
                return
            try:
                event()
            except errors.RpcError as error:  # the connection again: the next one starts over
                logger.info(
                    "watches of the master at %s wait for it: %s", self._session.address, str(error)
                )
            except Exception:
                logger.exception(
                    "watches of the master at %s go on after an error", self._session.address
                )

    def _start_over(self) -> None:
        with self._starting:
            assert self._opening is not None
            (peer, anew), self._opening = self._opening, None
        self._peer = peer
        for watch in list(self._watches.values()):
            watch.is_behind = True
            if anew:
                watch.version = -1
        self._heard = 0
        self._catch_up_all()

    def _check(self, peer: Peer | None, pushed: int) -> None:
        """Catch up: all, unless every notification up to that number came; else those that could
        not before.
        """
        if peer is not self._peer:
            return
        if pushed > self._heard:
            for watch in list(self._watches.values()):
                watch.is_behind = True
            self._heard = pushed
        self._catch_up_all()

    def _catch_up_all(self) -> None:
        for watch in list(self._watches.values()):
            if watch.is_behind:
                self._catch_up(watch)

    def _apply(self, peer: Peer | None, number: int, items: list[Any]) -> None:
        if peer is not self._peer or number <= self._heard:
            return  # over a connection that was given up, or part of what we caught up with
        if number > self._heard + 1:
            self._check(peer, number)
            return
        self._heard = number
        for watch in list(self._watches.values()):
            if not watch.is_behind:  # else it would go past what it missed
                self._take_deltas(watch, items)

    def _take_deltas(self, watch: _Watch, items: list[Any]) -> None:
        below = f"{watch.path}/"
        for version, kind, path, value, node_version in items:
            if version > watch.version >= 0 and (path == watch.path or path.startswith(below)):
                watch.version = version
                self._change(watch, path, value if kind == Kind.PUT else None, node_version)

    def _catch_up(self, watch: _Watch) -> None:
        version, _, whole, items = self._direct("watch", watch.path, watch.version)
        watch.is_behind = False
        if not whole:
            self._take_deltas(watch, items)
            watch.version = max(version, watch.version)
            return
        silent, watch.silent = watch.silent, False
        watch.version = version
        there = {path for path, _, _ in items}
        for path in [path for path in reversed(watch.known) if path not in there]:
            self._change(watch, path, None, 0)
        for path, value, node_version in items:
            if watch.known.get(path) != (value, node_version):
                self._change(watch, path, value, node_version, silent)

    def _change(
        self, watch: _Watch, path: str, value: str | None, node_version: int, silent: bool = False
    ) -> None:
        if value is None:
            watch.known.pop(path, None)
        else:
            watch.known[path] = (value, node_version)
        # an earlier callback may have cancelled it
        if silent or watch not in self._watches.values():
            return
        try:
            watch.callback(TreeEvent(path, value, node_version, watch.version))
        except Exception:
            logger.exception("the callback of a watch of %r raised", watch.path)

    # -- for users ---------------------------------------------------------------------------------

    def add(self, path: str, callback: Callback, timeout_s: float, existing: bool) -> int:
        """Call callback(event) for every change at `path` and below from now on, and with
        `existing` for what is there.

        The handle. While the master is away it begins with the next connection, or heartbeat, and
        misses nothing from then on. Raises DeadlineExceeded, Backpressure, Closed, and what the
        master refuses."""
        watch = _Watch(path, callback, silent=not existing)
        handle = next(self._handles)
        # a handler may ask, and the master's answer needs its thread
        done = Future(self._session.node.waiter)

        def begin() -> None:
            end: Callable[[], object] = partial(done.set_result, None)
            try:
                self._begin(handle, watch)
            except (errors.Rejected, errors.Closed) as error:
                end = partial(done.set_error, error)
            self._session.node.reactor.call_soon(end)  # whoever waits may have it parked

        with self._starting:
            self._check_open(path)
            if self._thread is None:
                self._peer = self._session._peer
                self._thread = threading.Thread(
                    target=self._run, name="prpc-master-watch", daemon=True
                )
                self._thread.start()
            is_here = threading.current_thread() is self._thread
            if not is_here and self._events.qsize() >= EVENTS_MAX:
                raise errors.Backpressure(
                    f"watching {path!r} at the master at {self._session.address}: "
                    f"{EVENTS_MAX} events wait for callbacks of "
                    "other watches; make those shorter, or try again later"
                )
            if not is_here:
                self._events.put(begin)  # ahead of what close() puts
        if is_here:
            self._begin(handle, watch)
        else:
            self._wait(done, handle, watch, timeout_s)
        return handle

    def _check_open(self, path: str) -> None:
        if self._closed:
            raise errors.Closed(f"{path!r} cannot be watched: this client was closed before")

    def _begin(self, handle: int, watch: _Watch) -> None:
        """In the thread. Raises Rejected, Closed."""
        self._watches[handle] = watch
        # looked at when it is there: who gives it up or closes afterwards finds it
        if watch.is_given_up or self._closed:
            self._watches.pop(handle, None)
            self._check_open(watch.path)
            return
        try:
            self._catch_up(watch)
        except errors.RemoteError as error:
            # the keeper hears of that, too, and opens another
            if error.type_name.rpartition(".")[2] != "SessionExpired":
                self._watches.pop(handle, None)
                raise errors.Rejected(
                    f"watching {watch.path!r} was refused by the master: {error.remote_message}"
                ) from error
        except errors.RpcError as error:
            logger.info(
                "the watch of %r begins with the next connection or heartbeat: %s",
                watch.path,
                str(error),
            )

    def _wait(self, done: Future, handle: int, watch: _Watch, timeout_s: float) -> None:
        where = f"watching {watch.path!r} at the master at {self._session.address}"
        try:
            done.result(timeout_s)
            return
        except TimeoutError:
            error: errors.RpcError = errors.DeadlineExceeded(
                f"{where} took more than {timeout_s} s; a callback of another watch may still be "
                "running"
            )
        except ClosedError:
            error = errors.Closed(f"{where}: this client was closed meanwhile")
        watch.is_given_up = True
        self.cancel(handle)
        raise error

    def cancel(self, handle: int) -> bool:
        """No callback of that watch begins after this; whether there was one."""
        watch = self._watches.pop(handle, None)
        if watch is None:
            return False
        if all(other.path != watch.path for other in list(self._watches.values())):
            self._events.put(lambda: self._unwatch(watch.path))
        return True

    def _unwatch(self, path: str) -> None:
        # other threads cancel theirs meanwhile
        if all(other.path != path for other in list(self._watches.values())):
            self._direct("unwatch", path)

    def _direct(self, *asked: Any) -> Any:
        return control_loop().spawn(self._session.direct(self._peer, *asked)).result()

    def close(self) -> None:
        """No callback begins after this. One that runs is not waited for long. In a fork: does
        nothing.
        """
        if self._session.node.pid != os.getpid():
            return  # before any lock: a thread that is not here may have held it at the fork
        with self._starting:
            self._closed = True
        self._watches.clear()
        self._events.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_TIMEOUT_S)
