"""A reading end of a queue: items as they came, until somebody dequeues them.

    taken <= received <= taken + max_chunks        noted: of `taken`, what the writer was told

    dequeue() when               does
    an item is here              gives it, and tells the writer where that may have waited for it
    shutdown() was called        raises QueueClosed, also in a thread that waits
    the writer is gone, and no   raises WriterLost
     item is left

The writer is told at once when it has no more room as far as this end knows, and else only after
half as many items as it may have under way: so it never waits for a word that is not sent, and most
items cost none.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine import errors
from prpc_engine.archive import DECODE_ERRORS
from prpc_engine.rpc.call import Call
from prpc_engine.rpc.fixed_route import FixedRoute
from prpc_engine.rpc.peer import Peer
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
from prpc_engine.vllm.queue_errors import QueueClosed, WriterLost
from prpc_engine.vllm.queue_node import queue_nodes, this_host
from prpc_engine.vllm.waits import QueueWaits, wake
from shard import ClosedError, Future, RemoteProtocolError, ShardError, runtime

logger = logging.getLogger("prpc")
# For the writer's process to answer, which may be busy with what holds the interpreter: loading
# weights takes a minute. One that is not there refuses at once.
JOIN_S = 120.0
LEAVE_S = 1.0  # at shutdown(), for the writer to hear of it
Blocks = Sequence[NDArray[np.uint8]]


class ReadingEnd:
    """Owned by a MessageQueue. Thread-safe. The constructor waits until the writer has let it in.
    Raises WriterLost for a queue that is gone, ConfigError for a rank that has no place,
    AuthenticationFailed, DeadlineExceeded.
    """

    def __init__(self, handle: Handle, rank: int) -> None:
        self._handle, self.rank = handle, rank
        self._pid = runtime.pid()
        # Decoders are for one thread at a time; a class that is unpickled may dequeue in turn.
        self._decoding = runtime.RLock()
        self._inbox: deque[tuple[int, Any, Blocks]] = deque()
        self._received = self._taken = self._noted = 0
        self._ticket, self._max_chunks = -1, 1
        self._is_ready = self._is_closed = self._is_to_note_again = False
        self._end: int | None = None  # the number of the last item
        self._gone: WriterLost | None = None
        self._node = node = queue_nodes().acquire()
        self._driver = node.driver
        self._waits = QueueWaits(node.driver, self._closed)
        self._guard = self._waits.guard
        methods = {
            WELCOME: self._welcome,
            ITEM: self._item,
            READY: self._ready,
            END: self._ended,
        }
        self._target = node.serve(methods)
        self._route = FixedRoute(handle.target, str(handle))
        self._peer: Peer | None = None
        self._call: Call | None = None
        try:
            self._join()
        except BaseException:
            self.close(is_dropped=True)
            raise

    def _join(self) -> None:
        handle, node = self._handle, self._node
        deadline = runtime.monotonic() + JOIN_S
        try:
            peer = node.node.peer_at(handle.addresses, JOIN_S, str(handle))
            self._peer = peer
            arguments = (handle.token, self.rank, self._target, self._pid, this_host())
            call = peer.request(self._route, JOIN, KEYS[JOIN], arguments, None, True)
        except errors.AuthenticationFailed:
            raise
        except errors.NotSent as error:
            raise WriterLost(
                f"{handle} cannot be reached: {errors.text_of(error)}; its process may have ended: "
                "make another queue",
                handle.pid,
            ) from error
        self._call = call
        while True:
            with self._guard:
                if self._ticket >= 0 or call.finished:
                    break
                change = self._waits.next_change()
            call.when_done(change.set_result)
            if not self._driver.wait_until(change, deadline):
                raise errors.DeadlineExceeded(
                    f"{handle} has not let reader {self.rank} in after {JOIN_S:.0f} s: its process "
                    "is stopped, or something in it holds the interpreter"
                )
        if self._ticket < 0:
            self._refused(call)
        call.when_done(self._over)

    def _refused(self, call: Call) -> None:
        error = call.error()
        if error is None:
            raise errors.ConfigError(f"reader {self.rank} was not let in: {call.result()}")
        if isinstance(error, errors.UnknownService):
            raise WriterLost(f"{self._handle} was shut down there", self._handle.pid, True)
        raise WriterLost(f"{self._handle} is lost: {self._why(call)}", self._handle.pid) from error

    def _why(self, call: Future) -> str:
        """What the connection says of its end, where it has ended: the call's own text is about
        calls.
        """
        lost = None if self._peer is None else self._peer.connection.error
        found = lost or call.error()
        return "it hung up" if found is None else errors.text_of(found)

    def statistics(self) -> tuple[int, int]:
        """How many items have come, and how many of those were dequeued."""
        with self._guard:
            return self._received, self._taken

    # -- what the writer says; in the reactor ------------------------------------------------------

    def _welcome(self, ticket: int, max_chunks: int) -> None:
        with self._guard:
            self._ticket, self._max_chunks = ticket, max_chunks
            waiting = self._waits.take_waiting()
        wake(waiting)

    def _item(self, number: int, body: Any, blocks: list[NDArray[np.uint8]]) -> None:
        with self._guard:
            if self._is_closed:
                return
            is_next = number == self._received + 1
            if is_next:
                self._received = number
                self._inbox.append((number, body, blocks))
            count = self._due_note()
            waiting = self._waits.take_waiting()
        wake(waiting)
        if count:
            self._note(count)
        if not is_next and self._peer is not None:
            self._peer.connection.close(
                RemoteProtocolError(f"item {number} came before those that it follows")
            )

    def _ready(self) -> None:
        with self._guard:
            self._is_ready = True
            waiting = self._waits.take_waiting()
        wake(waiting)

    def _ended(self, last: int) -> None:
        with self._guard:
            self._end = last
            waiting = self._waits.take_waiting()
        wake(waiting)

    def _over(self, call: Future) -> None:
        """The writer has hung up, or is gone."""
        with self._guard:
            if self._is_closed or self._gone is not None:
                return
            has_shut_down = self._end is not None
            why = "has shut down" if has_shut_down else f"is lost: {self._why(call)}"
            self._gone = WriterLost(
                f"the writer of {self._handle} {why}; reader {self.rank} has had "
                f"{self._received} items from it",
                self._handle.pid,
                has_shut_down,
            )
            waiting = self._waits.take_waiting()
        if not has_shut_down:
            logger.warning("%s", self._gone.args[0])
        wake(waiting)

    # -- items -------------------------------------------------------------------------------------

    def dequeue(self, timeout: float | None, indefinite: bool) -> Any:
        """See MessageQueue.dequeue()."""
        self._node.node.check_process()

        def take() -> tuple[tuple[int, Any, Blocks], int] | None:
            if self._is_closed:
                raise self._closed()
            if self._inbox:
                item = self._inbox.popleft()
                self._taken += 1
                return item, self._due_note()
            self._check_writer()
            return None

        item, count = self._waits.wait(
            take,
            timeout,
            lambda: f"reader {self.rank} of {self._handle}: no item {self._taken + 1}",
            " was enqueued within {}",
            " has come for {}: its writer is there, and enqueues none",
            tells=not indefinite,
        )
        if count:
            self._note(count)
        return self._decode(*item)

    def _decode(self, number: int, body: Any, blocks: Blocks) -> Any:
        data = body if isinstance(body, bytes) else memoryview(body)
        try:
            with self._decoding:
                (value,) = self._node.archive.decode(data, list(blocks))
        except DECODE_ERRORS as error:
            raise errors.BadArguments(
                f"item {number} of {self._handle} cannot be read: {errors.text_of(error)}"
            ) from error
        return value

    def _closed(self) -> QueueClosed:
        return QueueClosed(f"cancelled: reader {self.rank} of {self._handle} was shut down here")

    def _check_writer(self) -> None:
        """Raises WriterLost. With the guard held."""
        if self._gone is not None:
            # another each time: one that is raised collects tracebacks, and what these hold
            gone = self._gone
            raise WriterLost(gone.args[0], gone.pid, gone.has_shut_down)

    def _due_note(self) -> int:
        """The number to tell the writer now; 0: none. It counts as told. With the guard held."""
        untold = self._taken - self._noted
        if untold <= 0:
            return 0
        is_full = self._received - self._noted >= self._max_chunks
        if not is_full and untold * 2 < self._max_chunks:
            return 0
        self._noted = self._taken
        return self._taken

    def _note(self, count: int) -> None:
        peer = self._peer
        assert peer is not None, "what was taken came from it"
        try:
            peer.notify(self._route, TAKEN, KEYS[TAKEN], (self._ticket, count))
        except errors.Backpressure:
            with self._guard:
                is_new, self._is_to_note_again = not self._is_to_note_again, True
            if is_new:
                reactor = self._driver.reactor
                reactor.call_soon(partial(reactor.call_later, NO_ROOM_AGAIN_S, self._note_again))
        except (errors.RpcError, ShardError):
            return  # its loss is about to be told

    def _note_again(self) -> None:
        with self._guard:
            self._is_to_note_again = False
            self._noted = count = self._taken
        self._note(count)

    def wait_until_ready(self, timeout: float | None) -> None:
        """See MessageQueue.wait_until_ready()."""
        self._node.node.check_process()

        def is_ready() -> bool | None:
            if self._is_closed:
                raise self._closed()
            if self._is_ready:
                return True
            self._check_writer()
            return None

        self._waits.wait(
            is_ready,
            timeout,
            lambda: f"reader {self.rank} waits for other readers of {self._handle}, or its writer",
            ", after {}",
            ", {} longer",
        )

    # -- the end -----------------------------------------------------------------------------------

    def close(self, is_dropped: bool = False) -> None:
        """Wake who waits here, tell the writer, and hang up. is_dropped: the writer is to take
        this reader for lost. Again, or in a fork: does nothing.
        """
        if self._pid != runtime.pid():
            return
        with self._guard:
            if self._is_closed:
                return
            self._is_closed = True
            self._inbox.clear()
            waiting = self._waits.take_waiting()
        wake(waiting)
        try:
            self._leave(is_dropped)
        except ClosedError:
            logger.debug("%s: its node was closed meanwhile", self._handle)
        finally:
            self._node.withdraw(self._target)
            queue_nodes().release(self._node)

    def _leave(self, is_dropped: bool) -> None:
        peer, call = self._peer, self._call
        if peer is None or call is None or call.finished:
            return
        if self._ticket >= 0:
            try:
                left = peer.request(
                    self._route, LEAVE, KEYS[LEAVE], (self._ticket, is_dropped), LEAVE_S, True
                )
            except (errors.RpcError, ShardError):
                return  # it is gone
            if not self._driver.leads_here():
                self._driver.wait(left, LEAVE_S)
        call.cancel()
