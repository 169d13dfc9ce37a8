"""The side of a topic that has the items: one copy of each, lent to every reader of this host;
other hosts are sent one each (tree.py).

    a reader asks    [incarnation, version, place]     `place`: where readers of its host reach it;
                                                       "": nowhere, or not this time
    the answer       [incarnation, whether the latest  `let_go`: of what it holds for others, all
                     counts, skipped, let_go,          below that version; None: it is on this host
                     entries]                          and tells no place
      or             text                              why it was taken off
      or             None                              this publisher was closed
    an entry         [version, base, holds, body,      `holds`: it keeps this for others
                     blocks]
      or where it is [version, base, holds, nbytes,    at a reader with that id, on the node with
                     place, reader]                    these addresses
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine import errors
from prpc_engine.archive import Archive
from prpc_engine.client.shared_message import SharedMessage, owned_message
from prpc_engine.node.slab import default_slab
from prpc_engine.rpc.context import who_asked
from prpc_engine.rpc.deferred import Deferred
from prpc_engine.service.service import RpcService
from prpc_engine.settings.config import check_seconds
from prpc_engine.topics import deltas
from prpc_engine.topics.backlog import CAPACITY, Backlog, Disconnected, Given, Mode, Slow
from prpc_engine.topics.deltas import Weights
from prpc_engine.topics.tree import Key, OnItsWay, ReaderTree, host_of
from shard import BETWEEN_HOSTS, ClosedError, ForkedError, Future, is_count, runtime

logger = logging.getLogger("prpc")
SERVICE = "topic."
# For a reader whose connection is lost to come back over another, before it counts as gone.
AWAY_S = 2.0
# Of the slab, what may wait in a queue: as much as copies for one peer may take of it, so that the
# calls of the process have the rest. A slab that is full would cost each reader a copy of its own.
SLAB_PART = 2


def check_topic(service: object, topic: object) -> None:
    """Raises ConfigError for what is none."""
    if not isinstance(service, RpcService):
        raise errors.ConfigError(f"service={service!r:.100}: an RpcService is expected")
    if not isinstance(topic, str) or not topic:
        raise errors.ConfigError(f"topic={topic!r:.100}: a name is expected, such as 'weights'")


@dataclass(frozen=True)
class ReaderStatistics:
    """A snapshot of one reader: how many items it is behind, how many it was never given, and the
    bytes of those that wait for it. In mode "latest" it may leave out more by itself, which
    `skipped` of its items counts, too.
    """

    name: str
    behind: int
    skipped: int
    waiting_bytes: int = 0


class TopicMessage:
    """One item as it is sent, and for weights what has changed since another version."""

    __slots__ = ("_weights", "base", "changes", "whole")

    def __init__(
        self,
        whole: SharedMessage | None,
        changes: SharedMessage | None = None,
        base: int = 0,
        weights: Weights | None = None,
    ) -> None:
        self.whole = whole
        self.changes = changes
        self.base = base
        self._weights = weights

    @property
    def nbytes(self) -> int:
        """Of its arrays, and all else that it holds."""
        message = self.changes or self.whole
        return 0 if message is None else _size(message.body, message.blocks)

    def for_reader(self, confirmed: int, make: Any) -> tuple[int, SharedMessage]:
        """What a reader gets that has that version: (what it is based on or 0, the message)."""
        if self.changes is not None and confirmed == self.base:
            return self.base, self.changes
        if self.whole is None:
            assert self._weights is not None, "an item is whole, or of weights"
            self.whole = make(self._weights.whole())
        return 0, self.whole


def _size(body: bytes, blocks: Sequence[NDArray[np.uint8]]) -> int:
    return len(body) + sum(block.nbytes for block in blocks)


@dataclass
class _Question:
    """Of a reader that waits. given: what it is to get, once that is on its host."""

    answer: Deferred
    confirmed: int
    given: Given | None = None


class Publisher:
    """Publishes items of one topic to all who read it, in this process's name.

    service   of this process
    topic     a name; several processes may publish to one, and readers get the items of each in
              order
    mode      "queue": each reader gets each item; "latest": the newest, and what came between is
              skipped
    capacity  items that may wait for one reader, of a queue
    slow      what becomes of a reader that so many wait for: "block" publish(), "drop_oldest", or
              "disconnect" it
    bytes_max  bytes that may wait for one reader, of a queue, and so the largest item; None: half
              of what this process's slab may grow to (PRPC_SLAB_BYTES_MAX)

    Owned by who made it: close() it, or use it in a `with` block. publish() may be called from any
    thread. Raises ConfigError.
    """

    def __init__(
        self,
        service: RpcService,
        topic: str,
        mode: Mode = "queue",
        capacity: int = CAPACITY,
        slow: Slow = "block",
        bytes_max: int | None = None,
    ) -> None:
        check_topic(service, topic)
        self.topic = topic
        self._pid = runtime.pid()
        self._own_host = host_of(service.addresses)
        if bytes_max is None:
            bytes_max = default_slab().limit_bytes // SLAB_PART
        self._backlog = Backlog(mode, capacity, slow, bytes_max)
        self._driver = service.driver
        config = service.config
        self._archive = Archive(allow_pickle=config.node.allow_pickle, limits=config.limits)
        self._incarnation = runtime.randbits(62) | 1
        # Of backlog and tree: threads publish, and the engine's answers readers.
        self._guard = runtime.Lock()
        self._tree = ReaderTree(keeps_newest=mode == "latest")
        self._looks_at = math.inf  # again whether a reader waits for too slow a one
        self._asking: dict[int, _Question] = {}  # readers that wait
        self._room: Future | None = None  # done when a reader has taken something, or left
        self._peers: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        self._weights: Weights | None = None
        self._closed = False
        self._server = service.create_server(
            SERVICE + topic, {"take": self._take, "holds": self._holds, "leave": self._leave}
        )

    # -- publishing --------------------------------------------------------------------------------

    def publish(
        self, value: Any, *, changed_since: int | None = None, timeout_s: float | None = 30.0
    ) -> int:
        """Publish a value; its version, from 1 on. It may be changed at once, but for arrays of
        prpc_engine.empty().

        changed_since  of weights, a dict of arrays: readers that have this version of them, the
                       last that was published so, get what has changed; others get all. Give 0 for
                       the first
        timeout_s      to wait for readers where slow="block"

        Raises Backpressure with who is behind, BadArguments, Closed, ForkedError.
        """
        self._check_process()
        check_seconds("timeout_s", timeout_s, or_none=True)
        if changed_since is not None:
            return self._publish_weights(value, changed_since)
        message = TopicMessage(self._encode(value))
        nbytes = message.nbytes
        deadline = None if timeout_s is None else runtime.monotonic() + timeout_s
        while True:
            with self._guard:
                self._check_open()
                full = self._backlog.full(nbytes)
                if not full:
                    version = self._backlog.publish(message)
                    self._weights = None
                    answers = self._answers()
                    break
                behind = ", ".join(
                    f"{len(one.waiting)} items wait for {one.name}, of {one.waiting_bytes} bytes"
                    for one in full
                )
                room = self._next_change()
            if not self._wait(room, deadline):
                raise errors.Backpressure(
                    f"topic {self.topic!r}: {behind}, after {timeout_s:.3g} s: too slow for one of "
                    f"{nbytes} bytes more, where {self._backlog.capacity} items and "
                    f"{self._backlog.bytes_max} bytes may wait; publish less, or make the topic "
                    'with a larger capacity or bytes_max, slow="drop_oldest" or "disconnect", or '
                    'mode="latest"'
                )
        self._answer(answers)
        return version

    def _publish_weights(self, state: Mapping[str, NDArray[Any]], changed_since: int) -> int:
        if self._backlog.mode != "latest":
            raise errors.ConfigError(
                f'changed_since={changed_since!r:.100} is for topics of mode="latest"'
            )
        with self._guard:
            self._check_open()
            if changed_since not in (0, self._backlog.version):
                raise self._other_version(changed_since)
            weights = self._weights
        changes: deltas.Changes = {}
        if changed_since == 0 or weights is None:
            weights = Weights(state)
            message = TopicMessage(None, weights=weights)
        else:
            changes = weights.changes(state)  # the long part, which nobody waits for
            message = TopicMessage(None, self._encode(changes), changed_since, weights)
        with self._guard:
            self._check_open()
            if message.changes is not None and self._backlog.version != changed_since:
                raise self._other_version(changed_since)  # of another thread, meanwhile
            weights.advance(changes)
            version = self._backlog.publish(message)
            self._weights = weights
            answers = self._answers()
        self._answer(answers)
        return version

    def _other_version(self, changed_since: int) -> errors.ConfigError:
        return errors.ConfigError(
            f"changed_since={changed_since!r:.100}: the version published last, "
            f"{self._backlog.version}, is allowed, or 0 for whole weights"
        )

    def _encode(self, value: Any) -> SharedMessage:
        return owned_message(self._encode_checked, default_slab(), (value,), may_lend=True)

    def _encode_checked(
        self, arguments: tuple[Any, ...]
    ) -> tuple[bytes, Sequence[NDArray[np.uint8]]]:
        """Before a byte of it is copied."""
        body, blocks = self._archive.encode_arguments(arguments)
        nbytes = _size(body, blocks)
        if not self._backlog.fits(nbytes):
            raise errors.BadArguments(
                f"topic {self.topic!r}: an item of {nbytes} bytes, of which at most "
                f"{self._backlog.bytes_max} may wait for a reader: publish it in parts, or make "
                "the topic with a larger bytes_max"
            )
        return body, blocks

    def _check_process(self) -> None:
        if self._pid != runtime.pid():
            raise ForkedError(
                f"the publisher of topic {self.topic!r} was made in process {self._pid}, and is "
                f"used in its fork {runtime.pid()}: start processes by spawn and make it there"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise errors.Closed(f"the publisher of topic {self.topic!r} was closed here")

    # -- readers -----------------------------------------------------------------------------------

    def _take(self, reader_id: int, name: str, incarnation: int, confirmed: int, place: str) -> Any:
        """An answer, once there is something: see the head of the file. In the engine's thread."""
        is_far = self._watch(reader_id)
        with self._guard:
            backlog = self._backlog
            if incarnation != self._incarnation:
                confirmed = 0
            if reader_id not in backlog.readers:
                backlog.join(reader_id, name)
            backlog.readers[reader_id].is_far = is_far
            before = self._asking.pop(reader_id, None)
            room, self._room = self._room, None
            is_news = is_far and self._place(reader_id, place, confirmed)
            answer: Any = Deferred()
            answer.ends_with_caller = True
            self._asking[reader_id] = _Question(answer, confirmed)
            message = self._message(reader_id)
            if message is not None:
                answer = message
                del self._asking[reader_id]
            answers = self._answers() if is_news else []
        if before is not None:
            before.answer.cancel()
        if room is not None:
            room.set_result(None)
        self._answer(answers)
        return answer

    def _place(self, reader_id: int, place: str, confirmed: int) -> bool:
        """What a question says to the tree; whether others may go on by that. With the guard
        held.
        """
        if not place:
            return self._tree.failed(reader_id)
        if host_of(place.split()) == self._own_host:
            return False
        self._tree.join(reader_id, place)
        return self._tree.asks(reader_id, confirmed)

    def _holds(self, reader_id: int, incarnation: int, version: int) -> None:
        """A reader that asks for nothing now has all up to that version. In the engine's thread."""
        with self._guard:
            is_news = incarnation == self._incarnation and self._tree.arrived(reader_id, version)
            answers = self._answers() if is_news else []
        self._answer(answers)

    def _message(self, reader_id: int) -> list[Any] | str | None:
        """What a reader that asks gets now; None: it waits. With the guard held."""
        question = self._asking[reader_id]
        if question.given is None:
            try:
                given = self._backlog.take(reader_id, question.confirmed)
            except Disconnected as error:
                self._tree.leave(reader_id)
                return str(error)
        else:
            given = question.given
        let_go, is_let_go = None, False
        if self._backlog.readers[reader_id].is_far:
            let_go = self._backlog.version + 1
            if self._tree.carries(reader_id):
                let_go = self._backlog.needed_from(self._tree.sharing(reader_id))
                is_let_go = self._tree.let_go(reader_id, let_go)
        entries = self._entries(reader_id, given, question.confirmed)
        if not entries and given.entries:
            question.given = given  # what it is to let go of, it hears with that
        if not entries and (given.entries or not is_let_go):
            return None
        is_latest = self._backlog.mode == "latest"
        return [self._incarnation, is_latest, given.skipped if entries else 0, let_go, entries]

    def _entries(self, reader_id: int, given: Given, confirmed: int) -> list[Any]:
        """Those of the items that a reader need not wait for, up to the first other one."""
        entries: list[Any] = []
        is_placed = reader_id in self._tree
        total = sum(entry.item.nbytes for entry in given.entries) if is_placed else 0
        for entry in given.entries:
            base, (body, blocks) = entry.item.for_reader(confirmed, self._encode)
            confirmed = version = entry.version
            if not is_placed:
                entries.append([version, base, False, body, list(blocks)])
                continue
            nbytes = sum(block.nbytes for block in blocks)
            now = runtime.monotonic()
            way = self._tree.way(reader_id, Key(version, base), nbytes, total, now)
            if isinstance(way, OnItsWay):
                self._look_at(way.until_s, now)
                break
            if way.place:
                entries.append([version, base, way.holds, nbytes, way.place, way.holder])
            else:
                entries.append([version, base, way.holds, body, list(blocks)])
        return entries

    def _look_at(self, until_s: float, now: float) -> None:
        """Answer, at that time, readers that wait for one that is too slow. With the guard held."""
        if until_s >= self._looks_at:
            return
        self._looks_at = until_s
        reactor = self._driver.reactor
        reactor.call_soon(lambda: reactor.call_later(until_s - now, self._look))

    def _look(self) -> None:
        with self._guard:
            self._looks_at = math.inf
            answers = [] if self._closed else self._answers()
        self._answer(answers)

    def _wait(self, room: Future, deadline: float | None) -> bool:
        try:
            return self._driver.wait_until(room, deadline)
        except ClosedError as error:
            raise errors.Closed(
                f"topic {self.topic!r}: the service that publishes was closed meanwhile"
            ) from error

    def _next_change(self) -> Future:
        """Done when a reader comes, has taken something, or leaves. With the guard held."""
        if self._room is None:
            self._room = Future(self._driver)
        return self._room

    def _answers(self) -> list[tuple[Deferred, Any]]:
        """For readers that wait, what they get now. With the guard held."""
        answers: list[tuple[Deferred, Any]] = []
        for reader_id in [one for one in self._backlog.readers if one in self._asking]:
            message = self._message(reader_id)
            if message is not None:
                answers.append((self._asking.pop(reader_id).answer, message))
        return answers

    @staticmethod
    def _answer(answers: Sequence[tuple[Deferred, Any]]) -> None:
        for answer, message in answers:
            answer.reply(message)

    def _leave(self, reader_id: int) -> None:
        with self._guard:
            self._backlog.leave(reader_id)
            asking = self._asking.pop(reader_id, None)
            room, self._room = self._room, None
            answers = self._answers() if self._tree.leave(reader_id) else []
        if asking is not None:
            asking.answer.reply(None)
        if room is not None:
            room.set_result(None)
        self._answer(answers)

    def _watch(self, reader_id: int) -> bool:
        """A reader whose connection is lost for longer than AWAY_S is gone. Whether it asks over a
        network.
        """
        peer: Any = who_asked()
        with self._guard:
            readers = self._peers.get(peer)
            if readers is None and not self._closed:  # else nobody would remove it any more
                readers = self._peers[peer] = set()
                peer.when_lost.append(self._lost)
            if readers is not None:
                readers.add(reader_id)
        return bool(peer.connection.transport in BETWEEN_HOSTS)

    def _lost(self, peer: Any) -> None:
        with self._guard:
            readers = self._peers.pop(peer, None)
        if readers:
            with self._guard:
                back = set[int]().union(*self._peers.values())
                # at once: others may wait for what was on its way to them
                left = [self._tree.leave(reader_id) for reader_id in readers - back]
                answers = self._answers() if any(left) else []
            self._answer(answers)
            self._driver.reactor.call_later(AWAY_S, lambda: self._end_lost(readers))

    def _end_lost(self, readers: set[int]) -> None:
        with self._guard:
            back = set[int]().union(*self._peers.values())
        for reader_id in readers - back:
            with self._guard:
                reader = self._backlog.readers.get(reader_id)
            if reader is not None:
                logger.warning(
                    "topic %r: %s is gone, %d items behind",
                    self.topic,
                    reader.name,
                    reader.behind,
                )
                self._leave(reader_id)

    def readers(self) -> list[ReaderStatistics]:
        """Who reads, and how far each is behind."""
        with self._guard:
            return [
                ReaderStatistics(one.name, one.behind, one.skipped, one.waiting_bytes)
                for one in self._backlog.readers.values()
            ]

    def wait_for_readers(self, count: int, timeout_s: float | None = 30.0) -> None:
        """Wait until so many read. Raises DeadlineExceeded with who does, ConfigError, Closed."""
        self._check_process()
        check_seconds("timeout_s", timeout_s, or_none=True)
        if not is_count(count):
            raise errors.ConfigError(f"count={count!r:.100}: a whole number is allowed")
        deadline = None if timeout_s is None else runtime.monotonic() + timeout_s
        while True:
            with self._guard:
                self._check_open()
                names = [one.name for one in self._backlog.readers.values()]
                if len(names) >= count:
                    return
                room = self._next_change()
            if not self._wait(room, deadline):
                raise errors.DeadlineExceeded(
                    f"topic {self.topic!r} has {len(names)} of {count} readers after "
                    f"{timeout_s:.3g} s: {', '.join(names) or 'none'}"
                )

    def close(self) -> None:
        """Publish no more; what readers have not taken is gone. Again, or in a fork: does
        nothing.
        """
        if self._pid != runtime.pid():
            return
        with self._guard:
            if self._closed:
                return
            self._closed = True
            asking = list(self._asking.values())
            self._asking.clear()
            room, self._room = self._room, None
            # a connection outlasts its topics, and would keep this one and what it has
            for peer in list(self._peers):
                peer.when_lost.remove(self._lost)
            self._peers.clear()
        for question in asking:
            question.answer.reply(None)
        if room is not None:
            room.set_result(None)
        self._server.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
