"""The writing end of a queue: one copy of each item, lent to every reader of this host, and sent to
the others.

    enqueue() when             does
    a reader was lost          raises ReaderLost, which names it: ranks of a job work together, and
                               one that misses items leaves the others hanging in a collective
    all readers have left      the same
    one is max_chunks behind   waits, and says for whom: in the log, or as DeadlineExceeded
    one has not joined         keeps the item for it
    one has left by shutdown   goes on with the others

Any thread enqueues, and readers' words come in any thread that turns the reactor: one lock guards
both, and nothing waits while it is held. What could not be sent for want of room is tried again.
"""

from __future__ import annotations

import hmac
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine import errors
from prpc_engine.client.shared_message import SharedMessage, owned_message
from prpc_engine.node.slab import default_slab
from prpc_engine.rpc.call import Call
from prpc_engine.rpc.deferred import Deferred
from prpc_engine.rpc.fixed_route import FixedRoute
from prpc_engine.rpc.peer import Peer, calling_peer
from prpc_engine.vllm.handle import Handle
from prpc_engine.vllm.messages import (
    END,
    ITEM,
    JOIN,
    KEYS,
    LEAVE,
    NO_ROOM_AGAIN_S,
    READY,
    TAKEN,
    WELCOME,
)
from prpc_engine.vllm.queue_errors import QueueClosed, ReaderLost
from prpc_engine.vllm.queue_node import queue_nodes, this_host
from prpc_engine.vllm.readers import (
    QueueReader,
    QueueReaderEvent,
    QueueReaders,
    QueueReaderState,
)
from prpc_engine.vllm.waits import QueueWaits, wake
from shard import ClosedError, ShardError, ShmFull, runtime

logger = logging.getLogger("prpc")
LINGER_S = 5.0  # at shutdown(), for items that have not arrived
# More of an item's body travels beside its message, in memory that all readers share.
INLINE_BYTES_MAX = 16 << 10


@dataclass(frozen=True)
class QueueReaderStatistics:
    """A snapshot of one reader: how many items it has not dequeued, as far as it has said."""

    rank: int | None  # None: a reader of another host that has not joined
    pid: int
    host: str
    state: str  # "awaited", "up", "left", "lost"
    transport: str  # "" while it is not up
    behind: int


class JoinedReader:
    """A reader that has joined, and the way to it. Changed under the lock of its WritingEnd."""

    __slots__ = ("answer", "is_ready_told", "is_welcomed", "on_lost", "peer", "reader", "route")

    def __init__(self, reader: QueueReader, peer: Peer, route: FixedRoute) -> None:
        self.reader, self.peer, self.route = reader, peer, route
        self.answer = Deferred()
        self.answer.ends_with_caller = True
        self.is_welcomed = self.is_ready_told = False
        self.on_lost: Callable[[Peer], object] | None = None


class WritingEnd:
    """Owned by a MessageQueue. Thread-safe. Raises ConfigError."""

    def __init__(self, readers: QueueReaders, host: str) -> None:
        self._readers = readers
        self._pid = runtime.pid()
        self._items: deque[tuple[Any, Sequence[NDArray[np.uint8]]]] = deque()  # not sent to all
        self._joined: list[JoinedReader] = []  # by ticket
        self._is_ready = False  # wait_until_ready() has seen all readers
        self._is_closed = self._is_to_try_again = False
        self._token = runtime.token_hex(16)
        self._node = node = queue_nodes().acquire(host)
        self._driver = node.driver
        self._waits = QueueWaits(node.driver, self._closed_meanwhile)
        self._guard = self._waits.guard
        methods = {JOIN: self._join, TAKEN: self._taken, LEAVE: self._leave}
        self._target = node.serve(methods)
        self._name = f"the queue of process {self._pid}"

    def handle(self) -> Handle:
        """For readers."""
        readers = self._readers
        return Handle(
            readers.local_ranks,
            readers.n_reader,
            self._node.addresses,
            self._target,
            self._token,
            this_host(),
            self._pid,
        )

    def statistics(self) -> tuple[int, tuple[QueueReaderStatistics, ...]]:
        """How many items were enqueued, and each reader."""
        with self._guard:
            transports = {
                one.reader: one.peer.connection.transport
                for one in self._joined
                if one.reader.state is QueueReaderState.UP
            }
            count = self._readers.enqueued
            return count, tuple(
                QueueReaderStatistics(
                    rank=reader.rank,
                    pid=reader.pid,
                    host=reader.host,
                    state=reader.state.name.lower(),
                    transport=transports.get(reader, ""),
                    behind=count - reader.taken,
                )
                for reader in self._readers.all
            )

    # -- items -------------------------------------------------------------------------------------

    def enqueue(self, value: Any, timeout: float | None) -> None:
        """See MessageQueue.enqueue()."""
        self._node.node.check_process()
        item = self._encode(value)
        behind: list[QueueReader] = []

        def put() -> bool | None:
            self._check()
            behind[:] = self._readers.behind()
            if behind:
                return None
            self._items.append(item)
            self._readers.enqueued += 1
            self._send_all()
            return True

        self._waits.wait(
            put,
            timeout,
            lambda: (
                f"{self._name}: no room for item {self._readers.enqueued + 1}: "
                f"{self._readers.max_chunks} items wait for {', '.join(map(str, behind))}"
            ),
            ", after {}; see what they do, or make the queue with more max_chunks",
            "; enqueue() has waited {} longer for them",
        )

    def _encode(self, value: Any) -> tuple[Any, Sequence[NDArray[np.uint8]]]:
        slab = default_slab()
        message: SharedMessage = owned_message(
            self._node.archive.encode_arguments, slab, (value,), may_lend=True
        )
        self._check_limits(message)
        if len(message.body) <= INLINE_BYTES_MAX:
            return message
        body = np.frombuffer(message.body, np.uint8)
        try:
            shared = slab.empty(len(message.body), np.uint8)
        except ShmFull:
            return body, message.blocks  # each connection does what it can
        shared[:] = body
        return shared, message.blocks

    def _check_limits(self, message: SharedMessage) -> None:
        """What no connection would take is no item. Raises BadArguments."""
        limits, blocks = self._node.node.limits, message.blocks
        nbytes = len(message.body) + sum(block.nbytes for block in blocks)
        # one more may be the body
        for what, found, name in (
            ("arrays", len(blocks) + 1, "blocks_max"),
            ("bytes", nbytes, "blocks_bytes_max"),
        ):
            allowed = getattr(limits, name)
            if found > allowed:
                raise errors.BadArguments(
                    f"an item of {found} {what} cannot be enqueued: at most {allowed} are allowed "
                    f"(limit {name}); join arrays, or divide it into several items"
                )

    def _check(self) -> None:
        """With the guard held."""
        if self._is_closed:
            raise QueueClosed(f"{self._name} was shut down here")
        lost = self._readers.lost
        if lost is not None:
            raise ReaderLost(
                f"{self._name} has lost {lost}: {lost.why}; items go to nobody any more: end the "
                "job, or start it again with another queue",
                lost.rank,
                lost.pid,
            )
        if self._readers.all_have_left:
            raise ReaderLost(f"all {self._readers.n_reader} readers of {self._name} have shut down")

    def _send_all(self) -> None:
        """What may leave does. With the guard held."""
        for joined in self._joined:
            if joined.reader.state is QueueReaderState.UP:
                self._send(joined)
        items, kept = self._items, self._readers.kept_from()
        first = self._readers.enqueued - len(items) + 1
        for _ in range(kept - first):
            items.popleft()

    def _send(self, joined: JoinedReader) -> None:
        """With the guard held."""
        reader, peer, route = joined.reader, joined.peer, joined.route
        count, items = self._readers.enqueued, self._items
        try:
            if not joined.is_welcomed:
                ticket = self._joined.index(joined)
                peer.notify(route, WELCOME, KEYS[WELCOME], (ticket, self._readers.max_chunks))
                joined.is_welcomed = True
            if self._is_ready and not joined.is_ready_told:
                peer.notify(route, READY, KEYS[READY], ())
                joined.is_ready_told = True
            while reader.sent < count:
                body, blocks = items[reader.sent - count]
                peer.notify(
                    route, ITEM, KEYS[ITEM], (reader.sent + 1, body, list(blocks)), stable=True
                )
                reader.sent += 1
        except (errors.Backpressure, errors.ShmFull):
            self._try_again_later()
        except errors.BadArguments as error:  # beyond a limit, which the text names
            self._lose(joined, f"item {reader.sent + 1} cannot be sent: {errors.text_of(error)}")
        except (errors.NotSent, errors.Closed):
            return  # its loss is about to be told

    def _try_again_later(self) -> None:
        if not self._is_to_try_again:
            self._is_to_try_again = True
            reactor = self._driver.reactor
            reactor.call_soon(partial(reactor.call_later, NO_ROOM_AGAIN_S, self._try_again))

    def _try_again(self) -> None:
        with self._guard:
            self._is_to_try_again = False
            self._send_all()
            waiting = self._waits.take_waiting()
        wake(waiting)

    def _closed_meanwhile(self) -> QueueClosed:
        return QueueClosed(f"{self._name} was shut down here meanwhile")

    def wait_until_ready(self, timeout: float | None) -> None:
        """See MessageQueue.wait_until_ready()."""
        self._node.node.check_process()
        missing: list[QueueReader] = []

        def is_ready() -> bool | None:
            if not self._readers.all_have_left:  # they were all there
                self._check()
            missing[:] = self._readers.in_state(QueueReaderState.AWAITED)
            if missing:
                return None
            self._is_ready = True
            self._send_all()
            return True

        self._waits.wait(
            is_ready,
            timeout,
            lambda: f"{self._name} waits for {', '.join(map(str, missing))}",
            ", after {}",
            ", {} longer",
        )

    # -- what readers say --------------------------------------------------------------------------

    def _join(self, token: str, rank: int, target: int, pid: int, host: str) -> Any:
        peer = _caller()
        if not isinstance(token, str) or not hmac.compare_digest(
            token.encode(), self._token.encode()
        ):
            return f"{self._name} is another one than that of the handle"
        with self._guard:
            if self._is_closed:
                return f"{self._name} was shut down"
            try:
                reader = self._readers.join(int(rank), int(pid), str(host)[:100])
            except errors.ConfigError as error:
                return f"{self._name}: {errors.text_of(error)}"
            joined = JoinedReader(reader, peer, FixedRoute(int(target), str(reader)))
            joined.on_lost = partial(self._peer_lost, joined)
            joined.answer.on_cancel = partial(self._given_up, joined)
            peer.when_lost.append(joined.on_lost)
            self._joined.append(joined)
            self._send_all()
            waiting = self._waits.take_waiting()
        wake(waiting)
        return joined.answer

    def _of_caller(self, ticket: int) -> JoinedReader | None:
        """Who says it is the reader with that ticket; None: it is another one. With the guard
        held.
        """
        if not 0 <= ticket < len(self._joined):
            return None
        joined = self._joined[ticket]
        return joined if joined.peer is calling_peer() else None

    def _taken(self, ticket: int, count: int) -> None:
        with self._guard:
            joined = self._of_caller(ticket)
            if joined is None:
                return
            self._readers.take(joined.reader, count)
            waiting = self._waits.take_waiting()
        wake(waiting)

    def _leave(self, ticket: int, is_dropped: bool) -> None:
        with self._guard:
            joined = self._of_caller(ticket)
            if joined is None:
                return
            if is_dropped:
                self._lose(joined, "its program let go of the queue without shutdown()")
            elif self._readers.follow(joined.reader, QueueReaderEvent.LEFT):
                logger.info("%s: %s has shut down", self._name, joined.reader)
            self._let_go(joined)
            self._send_all()
            waiting = self._waits.take_waiting()
        wake(waiting)

    def _peer_lost(self, joined: JoinedReader, peer: Peer) -> None:
        with self._guard:
            self._lose(joined, errors.text_of(peer.connection.error or ClosedError("closed")))
            joined.on_lost = None  # the peer is walking through its list
            self._let_go(joined)
            waiting = self._waits.take_waiting()
        wake(waiting)

    def _given_up(self, joined: JoinedReader, _: BaseException) -> bool:
        """The reader did not wait for its welcome; or its connection is gone, which is told
        by _peer_lost().
        """
        if joined.peer.connection.error is None:
            with self._guard:
                self._lose(joined, "it has given up joining")
                waiting = self._waits.take_waiting()
            wake(waiting)
        return False

    def _lose(self, joined: JoinedReader, why: str) -> None:
        """With the guard held."""
        if self._readers.follow(joined.reader, QueueReaderEvent.LOST):
            joined.reader.why = why
            level = logging.DEBUG if self._is_closed else logging.WARNING
            logger.log(level, "%s has lost %s: %s", self._name, joined.reader, why)

    @staticmethod
    def _let_go(joined: JoinedReader) -> None:
        """It is told nothing any more. With the guard held."""
        on_lost, joined.on_lost = joined.on_lost, None
        if on_lost is not None and on_lost in joined.peer.when_lost:
            joined.peer.when_lost.remove(on_lost)
        joined.answer.reply(None)

    # -- the end -----------------------------------------------------------------------------------

    def close(self, linger_s: float = LINGER_S) -> None:
        """Let what was enqueued arrive, say that no more comes, and hang up. Again, or in a fork:
        does nothing.
        """
        if self._pid != runtime.pid():
            return
        with self._guard:
            if self._is_closed:
                return
            self._is_closed = True
            waiting = self._waits.take_waiting()
        wake(waiting)
        deadline = runtime.monotonic() + linger_s
        try:
            if not self._driver.leads_here():
                self._linger(deadline)
        except ClosedError:
            logger.debug("%s: its node was closed meanwhile", self._name)
        finally:
            with self._guard:
                for joined in self._joined:
                    self._let_go(joined)
                self._items.clear()
            self._node.withdraw(self._target)
            queue_nodes().release(self._node)

    def _linger(self, deadline: float) -> None:
        while True:
            with self._guard:
                count = self._readers.enqueued
                up = [one for one in self._joined if one.reader.state is QueueReaderState.UP]
                late = [one.reader for one in up if one.reader.sent < count]
                change = self._waits.next_change()
            if not late:
                break
            if not self._driver.wait_until(change, deadline):
                logger.warning(
                    "%s was shut down with items that were never sent to %s",
                    self._name,
                    ", ".join(map(str, late)),
                )
                break
        left_s = max(0.0, deadline - runtime.monotonic())
        ends = [_ask_to_end(one, count, left_s) for one in up]
        for end in ends:
            if end is not None:
                self._driver.wait_until(end, deadline)


def _ask_to_end(joined: JoinedReader, count: int, timeout_s: float) -> Call | None:
    try:
        return joined.peer.request(joined.route, END, KEYS[END], (count,), timeout_s, True)
    except (errors.RpcError, ShardError):
        return None  # it is gone


def _caller() -> Peer:
    peer = calling_peer()
    assert peer is not None, "these are handlers"
    return peer
