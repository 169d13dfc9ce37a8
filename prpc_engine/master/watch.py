"""Watches of the master's tree, at the client: deltas come in, gaps are filled, callbacks are
called.

    where              what runs there                     what is its own
    the node's         what the master says is passed on   nothing
     reactor
    control loop       one event after the other: goes     watches, versions, what is known below
                       from version to version, asks       each path
                       for what was missed
    an engine thread   the callbacks, one after the        which one runs
                       other, as handlers run
    any thread         add(), cancel(), close()            nothing

So a callback may ask the master, watch and unwatch, and one that takes long keeps neither what
comes in nor heartbeats waiting. The control loop has everything below a watched path as of one
version:

    comes in                             what it does
    deltas with the next number          applies those that are newer than the watch, and has the
                                         callbacks called
    a number too high, or a heartbeat's  something was missed: watches again from the version it has
    another connection to the master     the same
    another session                      watches from the beginning, and calls back for what differs
    a heartbeat, and a watch is behind   watches that one again: the master had been asked, and too
                                         slow to answer
    deltas, and EVENTS_MAX wait for      drops them, all watches are behind: they are watched again
     callbacks                           when the callbacks have caught up

EVENTS_MAX messages wait for the control loop while it asks the master; what comes next then has too
high a number.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prpc_engine import errors
from prpc_engine.master.protocol import WATCH_TARGET
from prpc_engine.master.session import CLOSE_TIMEOUT_S, MasterSession
from prpc_engine.master.tree import Kind
from prpc_engine.rpc.job import pass_on_interrupt
from prpc_engine.rpc.peer import Peer, calling_peer
from prpc_engine.rpc.server import ServedObject
from shard import ClosedError, Future, control_loop

logger = logging.getLogger("prpc")
# Messages that wait for the control loop, of up to a MiB a value, and changes that wait for
# callbacks, but for those of one look. Who is so many behind reads anew, one request a watch.
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
    is_given_up: bool = False  # by who added it: no callback begins any more
    known: dict[str, tuple[str, int]] = field(default_factory=dict)  # path -> value, version


class Watches:
    """Calls users' callbacks for changes of the master's tree, and reads anew what was missed.

    session  whose on_open and on_heartbeat it sets, and whose node it serves WATCH_TARGET at

    Owned by who owns the session, and closed before it. add(), cancel() and close() may be called
    from any thread, and by callbacks. Those run one after the other where the handlers of this
    process run; what one raises is logged. Events: the table at the file's head.
    """

    def __init__(self, session: MasterSession) -> None:
        self._session = session
        self._node = session.node
        self._handles = itertools.count(1)
        # Entered in the control loop, taken out by any thread.
        self._watches: dict[int, _Watch] = {}
        self._closed = False
        # For the control loop: events in their order, and what it goes by.
        self._events: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        self._is_busy = False  # a coroutine is at them
        self._peer: Peer | None = None
        self._heard = 0  # number of the last notification over that connection
        self._waits = False  # for callbacks, with what was dropped meanwhile
        # For an engine thread: whom to call with what; or a future that is done in its turn.
        self._calls: deque[tuple[_Watch, TreeEvent] | Future] = deque()
        self._caller = 0  # ident of the thread that is inside a callback
        self._called = Future()  # done when that has returned
        session.on_open = self._opened
        session.on_heartbeat = self._counted
        session.node.servers[WATCH_TARGET] = ServedObject(
            "watches", 0, WATCH_TARGET, {"changed": self._changed}, inline=True
        )

    # -- what comes in; in the reactor -------------------------------------------------------------

    def _post(self, event: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have it run in the control loop, after those before it."""
        self._events.append(event)
        control_loop().spawn(self._work())

    def _post_message(self, event: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if not self._watches:
            return
        if len(self._events) < EVENTS_MAX:  # else the number of the next one says so
            self._post(event)

    def _opened(self, peer: Peer, anew: bool) -> None:
        self._post(partial(self._start_over, peer, anew))

    def _counted(self, peer: Peer, pushed: int) -> None:
        self._post_message(partial(self._check, peer, pushed))

    def _changed(self, number: int, items: list[Any]) -> None:
        self._post_message(partial(self._apply, calling_peer(), number, items))

    # -- in the control loop -----------------------------------------------------------------------

    async def _work(self) -> None:
        if self._is_busy:
            return  # another one takes what was posted
        self._is_busy = True
        try:
            while self._events:
                event = self._events.popleft()
                try:
                    await event()
                except errors.RpcError as error:  # the connection again: the next one starts over
                    logger.info(
                        "watches of the master at %s wait for it: %s",
                        self._session.address,
                        str(error).partition("\n")[0],
                    )
                except Exception:
                    logger.exception(
                        "watches of the master at %s go on after an error", self._session.address
                    )
        finally:
            self._is_busy = False

    async def _start_over(self, peer: Peer, anew: bool) -> None:
        self._peer = peer
        for watch in self._living():
            watch.is_behind = True
            if anew:
                watch.version = -1
        self._heard = 0
        await self._catch_up_all()

    def _living(self) -> list[_Watch]:
        return list(self._watches.values())  # in one step: other threads cancel theirs meanwhile

    async def _check(self, peer: Peer | None, pushed: int) -> None:
        """Catch up: all, unless every notification up to that number came; else those that could
        not before.
        """
        if peer is not self._peer:
            return
        if pushed > self._heard:
            for watch in self._living():
                watch.is_behind = True
            self._heard = pushed
        await self._catch_up_all()

    async def _catch_up_all(self) -> None:
        for watch in self._living():
            if len(self._calls) >= EVENTS_MAX:
                self._wait_for_callbacks()
                return
            if watch.is_behind and not watch.is_given_up:
                await self._catch_up(watch)

    async def _apply(self, peer: Peer | None, number: int, items: list[Any]) -> None:
        # failpoint: watches.changed
        if peer is not self._peer or number <= self._heard:
            return  # over a connection that was given up, or part of what we caught up with
        if number > self._heard + 1:
            await self._check(peer, number)
            return
        self._heard = number
        if len(self._calls) >= EVENTS_MAX:
            for watch in self._living():
                watch.is_behind = True
            self._wait_for_callbacks()
            return
        for watch in self._living():
            if not watch.is_behind:  # else it would go past what it missed
                self._take_deltas(watch, items)

    def _wait_for_callbacks(self) -> None:
        """Those that are behind catch up when the callbacks have."""
        if not self._waits:
            self._waits = True
            logger.warning(
                "watches of the master at %s are %d events behind: a callback takes too long; "
                "what is dropped is read anew",
                self._session.address,
                EVENTS_MAX,
            )
        if not self._calls:  # they have, meanwhile
            self._post(self._go_on)

    async def _go_on(self) -> None:
        self._waits = False
        await self._catch_up_all()

    def _take_deltas(self, watch: _Watch, items: list[Any]) -> None:
        below = f"{watch.path}/"
        for version, kind, path, value, node_version in items:
            if version > watch.version >= 0 and (path == watch.path or path.startswith(below)):
                watch.version = version
                self._change(watch, path, value if kind == Kind.PUT else None, node_version)

    async def _catch_up(self, watch: _Watch) -> None:
        version, _, whole, items = await self._session.direct(
            self._peer, "watch", watch.path, watch.version
        )
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
        if not silent:
            self._call_soon((watch, TreeEvent(path, value, node_version, watch.version)))

    # -- the callbacks, in an engine thread --------------------------------------------------------

    def _call_soon(self, call: tuple[_Watch, TreeEvent] | Future) -> None:
        self._calls.append(call)
        # failpoint: watches.queued
        self._node.reactor.call_in_engine(self._call_next)

    def _call_next(self) -> None:
        """Call one callback. While it waits for a call of its own others run here; not a second
        callback.
        """
        if self._caller or not self._calls:
            return
        call = self._calls.popleft()
        if isinstance(call, Future):
            call.set_result(None)
        elif not call[0].is_given_up:
            self._caller, self._called = threading.get_ident(), Future(self._node.waiter)
            try:
                Context().run(call[0].callback, call[1])
            except BaseException as error:  # one that exits ends neither the engine nor the others
                logger.exception("the callback of a watch of %r raised", call[0].path)
                pass_on_interrupt(error, self._node.reactor)
            finally:
                self._caller = 0
                self._called.set_result(None)
        if self._calls:
            self._node.reactor.call_in_engine(self._call_next)
        elif self._waits:
            self._post(self._go_on)

    # -- for users ---------------------------------------------------------------------------------

    def begin(self, path: str, callback: Callback, existing: bool) -> tuple[int, Future]:
        """As add(), without waiting: the handle, and a future of its beginning. Raises
        Backpressure, Closed, and ForkedError in a fork of the process that opened the session.
        """
        handle, _, done = self._begin_soon(path, callback, existing)
        return handle, done

    def add(self, path: str, callback: Callback, timeout_s: float, existing: bool) -> int:
        """Call callback(event) for every change at `path` and below from now on, and with
        `existing` for what is there.

        The handle. While the master is away it begins with the next connection, or heartbeat, and
        misses nothing from then on. Raises DeadlineExceeded, Backpressure, Closed, and what the
        master refuses."""
        handle, watch, done = self._begin_soon(path, callback, existing)
        where = f"watching {path!r} at the master at {self._session.address}"
        try:
            done.result(timeout_s)
            if not watch.is_given_up:
                return handle
            error: errors.RpcError = errors.Closed(f"{where}: this client was closed meanwhile")
        except TimeoutError:
            error = errors.DeadlineExceeded(
                f"{where} took more than {timeout_s} s; a callback of another watch may still be "
                "running"
            )
        except ClosedError:
            error = errors.Closed(f"{where}: this client was closed meanwhile")
        watch.is_given_up = True
        self.cancel(handle)
        raise error

    def _begin_soon(
        self, path: str, callback: Callback, existing: bool
    ) -> tuple[int, _Watch, Future]:
        self._node.check_process()
        self._check_open(path)
        in_callback = self._caller == threading.get_ident()
        if not in_callback and max(len(self._calls), len(self._events)) >= EVENTS_MAX:
            raise errors.Backpressure(
                f"watching {path!r} at the master at {self._session.address}: "
                f"{EVENTS_MAX} events wait for callbacks of "
                "other watches; make those shorter, or try again later"
            )
        watch = _Watch(path, callback, silent=not existing)
        handle, done = next(self._handles), Future(self._node.waiter)
        # It begins when its first callbacks have been called; within a callback they come after
        # that.
        after_calls = existing and not in_callback

        def begin() -> None:  # in the reactor: after the news of that connection
            self._post(partial(self._begin, handle, watch, self._session.peer, done, after_calls))

        self._node.reactor.call_soon(begin)
        return handle, watch, done

    def _check_open(self, path: str) -> None:
        if self._closed:
            raise errors.Closed(f"{path!r} cannot be watched: this client was closed before")

    async def _begin(
        self, handle: int, watch: _Watch, peer: Peer | None, done: Future, after_calls: bool
    ) -> None:
        end: Callable[[], object] = partial(done.set_result, None)
        try:
            await self._enter(handle, watch, peer)
        except (errors.Rejected, errors.Closed) as error:
            end = partial(done.set_error, error)
        else:
            if after_calls:
                self._call_soon(done)
                return
        self._node.reactor.call_soon(end)

    async def _enter(self, handle: int, watch: _Watch, peer: Peer | None) -> None:
        """Raises Rejected, Closed."""
        if self._peer is None:
            self._peer = peer  # the session was open before there were watches
        self._watches[handle] = watch
        # looked at when it is there: who gives it up or closes afterwards finds it
        if watch.is_given_up or self._closed:
            self._watches.pop(handle, None)
            self._check_open(watch.path)
            return
        try:
            await self._catch_up(watch)
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

    def cancel(self, handle: int) -> bool:
        """No callback of that watch begins after this; whether there was one."""
        watch = self._watches.pop(handle, None)
        if watch is None:
            return False
        watch.is_given_up = True
        if not self._is_watched(watch.path) and self._node.pid == os.getpid():
            self._post(partial(self._unwatch, watch.path))
        return True

    def _is_watched(self, path: str) -> bool:
        return any(other.path == path for other in self._living())

    async def _unwatch(self, path: str) -> None:
        if not self._is_watched(path):
            # where this fails, the master sends changes until the session ends, to no callback
            with suppress(errors.RpcError):
                await self._session.direct(self._peer, "unwatch", path)

    def close(self) -> None:
        """No callback begins after this. One that runs is not waited for long. In a fork: does
        nothing.
        """
        if self._node.pid != os.getpid():
            return
        self._closed = True
        for watch in self._living():
            watch.is_given_up = True
        self._watches.clear()
        caller, called = self._caller, self._called
        if caller not in (0, threading.get_ident()) and not control_loop().is_here():
            with suppress(TimeoutError, ClosedError):
                called.result(CLOSE_TIMEOUT_S)
