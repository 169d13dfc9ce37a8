"""The side of a topic that reads: one question under way at each publisher, answered when there is
something. What is asked and answered: publisher.py.

    a publisher          this side
    is there             is asked for what comes after the version that it has from there
    answers              has the items in its inbox, and asks on once that is short
    is not reached, or   asks again, when the master lists it, or every AGAIN_S; what was given and
     the answer is lost  lost is given again
    says where an item   fetches it from that reader, and goes on as with any answer; what it does
     is                  not get, it asks the publisher for
    says that it holds   does so for other readers of this host until it is told to let go; with a
     an item             full inbox says that it has the item, as it asks nothing
    has closed, or died  says so in the log; goes on with the others, and with who comes. What it
                         has from there stays known: the master may list it again, as it may have
                         been stopped for a while
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prpc_engine import errors
from prpc_engine.archive import DECODE_ERRORS, Archive
from prpc_engine.master.namespace import component
from prpc_engine.master.watch import TreeEvent
from prpc_engine.service.service import SERVERS_PATH, RpcService
from prpc_engine.settings.config import check_seconds
from prpc_engine.topics import deltas
from prpc_engine.topics.publisher import SERVICE, check_topic
from prpc_engine.topics.tree import HELD_BYTES_MAX, Key, patience_s
from shard import ClosedError, ForkedError, Future, control_loop, runtime

logger = logging.getLogger("prpc")
AGAIN_S = 0.1  # between two questions to a publisher that cannot be reached
# In the inbox, from which on no more are asked for: items, and bytes of those that no newer one
# replaces. Until they are received they are the publisher's memory.
INBOX_ITEMS, INBOX_BYTES = 64, 64 << 20
# So many fetches that failed in a row are no chance: others are not reached from here, and nothing
# is fetched for a while. It may be mended, and one that has died is not asked again anyway.
FETCHES_MAX, APART_S = 3, 30.0


class TakenOff(errors.Rejected):
    """This reader was too slow for a topic that disconnects such. It is a reader again with its
    next receive(); what came between is missed.
    """


@dataclass(frozen=True)
class Item:
    """What was published. `skipped`: how many before it, of the same publisher, were missed."""

    value: Any
    version: int
    publisher: int  # its server id
    skipped: int


@dataclass
class _Publisher:
    """One of them, as this side knows it."""

    incarnation: int = 0
    version: int = 0  # the last that came
    forgotten: tuple[int, int] = (0, 0)  # those two, before they were set to 0
    call: Any = None  # the question under way
    is_listed: bool = True  # by the master
    listings: int = 0  # how often the master has said so, and how often when it was last asked
    asked_at: int = 0
    weights: dict[str, NDArray[Any]] | None = None
    readings: int = 0  # threads that make an item of what was in the inbox
    is_far: bool = False  # it is on another host
    is_direct: bool = False  # what was to be fetched is asked for itself
    held: dict[Key, _Held] = field(default_factory=dict)  # for others


class _Held(NamedTuple):
    """An item for other readers of this host: its name there, and its bytes."""

    name: str
    nbytes: int


class _Received(NamedTuple):
    """An item in the inbox: whether only the latest counts, the items missed before it, and what is
    to be read of it.
    """

    server_id: int
    is_latest: bool
    skipped: int
    version: int
    base: int
    body: bytes
    blocks: list[Any]
    nbytes: int


class Subscriber:
    """Reads a topic. A context manager.

    receive() blocks; several threads may, and each item goes to one of them. In mode "latest" an
    item that was not received is replaced by a newer one of its publisher.
    """

    def __init__(self, service: RpcService, topic: str) -> None:
        check_topic(service, topic)
        self.topic = topic
        self._pid = runtime.pid()
        self._driver = service.driver
        config = service.config
        self._archive = Archive(allow_pickle=config.node.allow_pickle, limits=config.limits)
        self._id = runtime.randbits(62) | 1
        self._name = f"rank {service.rank} (process {runtime.pid()})"
        # Of the two tables and the inbox: answers come in any thread that turns the reactor.
        self._guard = runtime.Lock()
        # Of sending a question, and of the end: none may follow the word that this reader leaves,
        # or it would be one again.
        self._sending = runtime.RLock()
        self._publishers: dict[int, _Publisher] = {}
        # of those that may have published before this one could ask: it does not miss that
        self._there_before: set[int] = set()
        self._inbox: deque[_Received] = deque()
        self._errors: deque[BaseException] = deque()  # each for one receive()
        self._news: Future | None = None
        self._closed = False
        self._held = service.held_values
        self._place = " ".join(service.addresses)
        self._fetches: set[Future] = set()  # tasks of the control loop
        self._failures = 0  # of fetches, in a row
        self._apart_until = 0.0
        self._client = service.create_client(
            SERVICE + topic, expected_servers=0, idempotent=("take",)
        )
        self._there_before.update(self._client.server_ids)
        self._master = service.master_client
        # existing: a publisher that has come since the client looked is in neither list else
        self._watch = self._master.tree_watch(
            f"{SERVERS_PATH}/{component(SERVICE + topic)}", self._servers_changed, existing=True
        )
        self._ask_all()

    # -- asking ------------------------------------------------------------------------------------

    def _servers_changed(self, event: TreeEvent) -> None:
        """A publisher has come, or gone. Where handlers run."""
        self._client.servers_changed()
        number = event.path.rpartition("/")[2]
        if number.isdigit():
            if event.value is not None:
                with self._guard:
                    self._publishers.setdefault(int(number), _Publisher()).listings += 1
                self._ask(int(number), is_listed=True)
            else:
                with self._guard:
                    gone = self._gone(int(number))
                if gone and not self._closed:
                    logger.info("topic %r: publisher %s has gone", self.topic, number)

    def _gone(self, server_id: int) -> bool:
        """The master does not list it; whether that is news. With the guard held."""
        known = self._publishers.get(server_id)
        if known is None or not known.is_listed:
            return False
        known.is_listed = False
        self._there_before.discard(server_id)  # the next one of that id has come since
        self._let_go(known)
        self._forget_weights(server_id, known)
        return True

    def _forget_weights(self, server_id: int, known: _Publisher) -> None:
        """Of a publisher that is not listed, once nothing is based on them that is in the inbox,
        taken out of it or asked for, as it may be reached all the same: should it be listed again,
        it gives all of them. With the guard held.
        """
        if known.weights is None or known.is_listed or known.readings or known.call is not None:
            return
        if not any(one.server_id == server_id for one in self._inbox):
            known.weights = None
            known.forgotten = known.incarnation, known.version
            known.incarnation = known.version = 0

    def _ask_all(self) -> None:
        for server_id in self._client.server_ids:
            self._ask(server_id, is_listed=True)

    def _ask(self, server_id: int, is_listed: bool = False) -> bool:
        """`is_listed`: the master lists it; else what was known of that holds. Whether it is asked
        now, or soon.
        """
        with self._guard:
            if self._closed:
                return False
            known = self._publishers.setdefault(server_id, _Publisher())
            known.is_listed |= is_listed
            if known.call is not None:
                return True
            if self._is_full():
                return False
            known.call = True  # until there is one: nobody else asks
            known.asked_at = known.listings
            has = known.incarnation, known.version, self._place_for(known)
        try:
            with self._sending:
                if self._closed:
                    return False
                call = self._client.submit_to(
                    server_id, "take", self._id, self._name, *has, timeout_s=None
                )
        except (errors.RpcError, ClosedError):
            self._end_question(server_id, known)
            self._ask_later(server_id)
            return True
        known.call = call
        call.when_done(partial(self._answered, server_id, known))
        return True

    def _end_question(self, server_id: int, known: _Publisher) -> None:
        """The question has not left, or has no item for an answer."""
        with self._guard:
            known.call = None
            self._forget_weights(server_id, known)

    def _is_full(self) -> bool:
        """With the guard held."""
        inbox = self._inbox
        return (
            len(inbox) >= INBOX_ITEMS
            or sum(one.nbytes for one in inbox if not one.is_latest) >= INBOX_BYTES
        )

    def _ask_later(self, server_id: int) -> None:
        reactor = self._driver.reactor
        reactor.call_soon(lambda: reactor.call_later(AGAIN_S, lambda: self._ask_again(server_id)))

    def _ask_again(self, server_id: int) -> None:
        with self._guard:
            wanted = self._publishers[server_id].is_listed and not self._closed
        if wanted:
            self._ask(server_id)

    def _answered(self, server_id: int, known: _Publisher, call: Future) -> None:
        error = call.error()
        if error is not None:
            self._end_question(server_id, known)
            if not self._closed and not isinstance(error, errors.Closed | ClosedError):
                with self._guard:
                    if known.asked_at == known.listings and isinstance(
                        error, errors.NoServer | errors.UnknownService
                    ):  # else the answer may be older than what the master says
                        self._gone(server_id)
                self._ask_later(server_id)
            return
        answer = call.result()
        if not isinstance(answer, list) or not any(map(_is_elsewhere, answer[-1])):
            self._arrived(server_id, known, answer)
            return
        try:
            task = control_loop().spawn(self._fetch(server_id, known, answer))
        except (OSError, RuntimeError):  # no descriptor, or no thread, for the loop
            self._fetched(server_id, known, answer, 0)
            return
        self._fetches.add(task)
        task.when_done(self._fetches.discard)
        if self._closed:
            task.cancel()

    def _arrived(self, server_id: int, known: _Publisher, answer: Any) -> None:
        if answer is None:  # it was closed
            self._end_question(server_id, known)
            if known.asked_at != known.listings:  # and another one is there already
                self._ask_later(server_id)
            return
        news: Future | None = None
        held: Key | None = None
        with self._guard:
            if isinstance(answer, str):
                self._errors.append(
                    TakenOff(f"topic {self.topic!r}, publisher {server_id}: {answer}")
                )
            elif not self._closed:
                held = self._enter(server_id, known, answer)
            known.call = None  # last: who asks next says what has come
            news, self._news = self._news, None
        if news is not None:
            news.set_result(None)
        if not isinstance(answer, str) and not self._ask(server_id) and held is not None:
            self._tell_held(server_id, known.incarnation, held.version)

    def _tell_held(self, server_id: int, incarnation: int, version: int) -> None:
        """What the next question would say, which is not asked now: others wait for that."""
        with contextlib.suppress(errors.RpcError, ClosedError), self._sending:
            if not self._closed:
                self._client.submit_to(
                    server_id, "holds", self._id, incarnation, version, timeout_s=None
                )

    # -- other readers -----------------------------------------------------------------------------

    def _place_for(self, known: _Publisher) -> str:
        """Where readers of this host reach this one; "" to have the next item itself. With the
        guard held.
        """
        if known.is_direct or runtime.monotonic() < self._apart_until:
            known.is_direct = False
            return ""
        return self._place if known.is_far or not known.incarnation else ""

    async def _fetch(self, server_id: int, known: _Publisher, answer: list[Any]) -> None:
        """Have in an answer the items themselves; up to the first that is not to be had."""
        incarnation, entries = answer[0], answer[-1]
        found = 0
        try:
            for entry in entries:
                if _is_elsewhere(entry):
                    version, base, holds, nbytes, place, reader = entry
                    value = await self._held.fetch(
                        place.split(),
                        f"a reader of topic {self.topic!r}",
                        _name_of(incarnation, reader, Key(version, base)),
                        patience_s(nbytes),
                    )
                    entry[:] = version, base, holds, *_checked(value)
                found += 1
            self._failures = 0
        except Exception as error:  # whatever it is: the publisher has the item
            logger.debug("topic %r: item %s is not to be had: %s", self.topic, entry[0], error)
        self._driver.reactor.call_soon(partial(self._fetched, server_id, known, answer, found))

    def _fetched(self, server_id: int, known: _Publisher, answer: list[Any], found: int) -> None:
        entries = answer[-1]
        if found < len(entries):
            del entries[found:]
            known.is_direct = True
            self._failures += 1
            if self._failures >= FETCHES_MAX:
                self._failures = 0
                self._apart_until = runtime.monotonic() + APART_S
        self._arrived(server_id, known, answer)

    def _hold(self, known: _Publisher, key: Key, body: bytes, blocks: list[Any]) -> None:
        """For others to fetch. With the guard held."""
        name = _name_of(known.incarnation, self._id, key)
        self._held.hold(name, [body, blocks])
        known.held[key] = _Held(name, len(body) + sum(block.nbytes for block in blocks))
        total = sum(one.nbytes for one in known.held.values())
        for old in sorted(known.held):
            if total <= HELD_BYTES_MAX or old.version == key.version:
                break
            total -= known.held[old].nbytes
            self._held.let_go(known.held.pop(old).name)

    def _let_go(self, known: _Publisher, below: float = math.inf) -> None:
        """Of versions below that. With the guard held."""
        for key in [one for one in known.held if one.version < below]:
            self._held.let_go(known.held.pop(key).name)

    # -- what has come -----------------------------------------------------------------------------

    def _enter(self, server_id: int, known: _Publisher, answer: list[Any]) -> Key | None:
        """The last item that is held for others. With the guard held."""
        incarnation, is_latest, skipped, let_go, entries = answer
        if incarnation != known.incarnation:
            self._let_go(known)
            known.incarnation, known.version = incarnation, 0
        known.is_far = let_go is not None
        self._let_go(known, let_go or 0)
        held: Key | None = None
        for version, base, holds, body, blocks in entries:
            if holds and known.is_listed:
                held = Key(version, base)
                self._hold(known, held, body, blocks)
            if version <= known.version:
                continue  # it came before: the answer to our word that it has was lost
            if (before := self._before(server_id, known, is_latest)) is not None:
                # also those that came between two times as a reader, which nobody has counted
                skipped = max(skipped, version - before - 1)
            known.version = version
            if is_latest and not base:
                skipped += self._replaced(server_id)
            nbytes = len(body) + sum(block.nbytes for block in blocks)
            self._inbox.append(
                _Received(server_id, is_latest, skipped, version, base, body, blocks, nbytes)
            )
            skipped = 0
        return held

    def _before(self, server_id: int, known: _Publisher, is_latest: bool) -> int | None:
        """The version after which none is missing here; None: whatever comes first is the first to
        this reader. With the guard held.
        """
        if known.version:
            return known.version
        incarnation, version = known.forgotten
        if known.incarnation == incarnation:
            return version
        # one that has come since this reader has, and had published before it was asked
        return None if is_latest or server_id in self._there_before else 0

    def _replaced(self, server_id: int) -> int:
        """Items of that publisher that wait go, as a newer one is here whole; how many were
        missed.
        """
        gone = [one for one in self._inbox if one.server_id == server_id]
        for one in gone:
            self._inbox.remove(one)
        return sum(one.skipped + 1 for one in gone)

    # -- receiving ---------------------------------------------------------------------------------

    def receive(self, timeout_s: float | None = None) -> Item:
        """The next item, once there is one; of weights, all of them, in read-only arrays that the
        next receive() changes. Raises DeadlineExceeded with who publishes, TakenOff,
        Closed, ForkedError.
        """
        if self._pid != runtime.pid():
            raise ForkedError(
                f"the subscriber of topic {self.topic!r} was made in process {self._pid}, and is "
                f"used in its fork {runtime.pid()}: start processes by spawn and make it there"
            )
        check_seconds("timeout_s", timeout_s, or_none=True)
        deadline = None if timeout_s is None else runtime.monotonic() + timeout_s
        while True:
            with self._guard:
                if self._closed:
                    raise errors.Closed(f"the subscriber of topic {self.topic!r} was closed here")
                entries, error = self._next(), None
                if not entries:  # what came before it comes first
                    error = self._errors.popleft() if self._errors else None
                if not entries and error is None:
                    # of all threads that wait: which of them the next item is for, they see then
                    if self._news is None:
                        self._news = Future(self._driver)
                    news = self._news
            if error is not None:
                self._ask_all()
                raise error
            if entries:
                self._ask(entries[0].server_id)
                return self._item(entries)
            self._ask_all()
            if not self._wait(news, deadline):
                there = ", ".join(f"server {one}" for one in self._client.server_ids) or "none"
                raise errors.DeadlineExceeded(
                    f"no new item of topic {self.topic!r} came within {timeout_s:.3g} s; "
                    f"publishers: {there}"
                )

    def _wait(self, news: Future, deadline: float | None) -> bool:
        try:
            return self._driver.wait_until(news, deadline)
        except ClosedError as error:
            raise errors.Closed(
                f"topic {self.topic!r}: the service that reads it was closed meanwhile"
            ) from error

    def _next(self) -> list[_Received]:
        """The next item; where the latest counts, what leads to it as well. With the guard held."""
        if not self._inbox:
            return []
        first = self._inbox.popleft()
        self._publishers[first.server_id].readings += 1
        found = [first]
        if first.is_latest:
            found += [one for one in self._inbox if one.server_id == first.server_id]
            for one in found[1:]:
                self._inbox.remove(one)
        return found

    def try_receive(self) -> Item | None:
        """The next item that is here already, or None. Raises as receive()."""
        with self._guard:
            there = bool(self._inbox) or bool(self._errors) or self._closed
        return self.receive(0.0) if there else None

    def __iter__(self) -> Iterator[Item]:
        while True:
            yield self.receive()

    def _item(self, entries: list[_Received]) -> Item:
        last = entries[-1]
        with self._guard:
            known = self._publishers[last.server_id]
        value: Any = None
        try:
            for entry in entries:
                value = _decoded(self._archive, self.topic, entry)
                # failpoint: subscriber.reading
                value = _with_weights(known, self.topic, entry, value)
        finally:
            with self._guard:
                known.readings -= 1
                self._forget_weights(last.server_id, known)
        skipped = sum(entry.skipped for entry in entries) + len(entries) - 1
        return Item(value, last.version, last.server_id, skipped)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Read no more. Again, or in a fork: does nothing."""
        if self._pid != runtime.pid():
            return
        with self._guard:
            if self._closed:
                return
            self._closed = True
            known = [one for one, its in self._publishers.items() if its.is_listed]
            self._inbox.clear()
            for one in self._publishers.values():
                self._let_go(one)
            news, self._news = self._news, None
        if news is not None:
            news.set_result(None)
        for task in list(self._fetches):
            task.cancel()
        with self._sending:
            pass  # what is being asked has left
        try:
            self._master.cancel_watch(self._watch)
            for server_id in known:
                self._client.submit_to(server_id, "leave", self._id, timeout_s=1.0)
        except (errors.RpcError, ClosedError):
            logger.debug("topic %r: its publishers see that this reader has gone", self.topic)
        finally:
            self._client.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _is_elsewhere(entry: list[Any]) -> bool:
    """Whether an answer says where to fetch that item."""
    return isinstance(entry[4], str)


def _checked(value: object) -> tuple[bytes, list[Any]]:
    """Body and blocks, as another reader has answered. Raises ValueError."""
    match value:
        case [bytes(body), [*blocks]]:
            if all(
                isinstance(one, np.ndarray) and one.dtype == np.uint8 and one.ndim == 1
                for one in blocks
            ):
                return body, blocks
    raise ValueError(f"a reader has answered with no item: {value!r:.100}")


def _name_of(incarnation: int, reader_id: int, key: Key) -> str:
    """Of what a reader holds. Nobody knows an incarnation whom that publisher has not answered."""
    return f"{incarnation:x}.{reader_id:x}.{key.version}.{key.base}"


def _decoded(archive: Archive, topic: str, entry: _Received) -> Any:
    try:
        (value,) = archive.decode(entry.body, list(entry.blocks))
    except DECODE_ERRORS as error:
        raise errors.BadArguments(
            f"item {entry.version} of topic {topic!r} cannot be read: {error}"
        ) from error
    return value


def _with_weights(known: _Publisher, topic: str, entry: _Received, value: Any) -> Any:
    if not entry.base:
        if isinstance(value, dict) and all(type(one) is np.ndarray for one in value.values()):
            known.weights = value
        return value
    if known.weights is None:
        raise errors.BadArguments(
            f"item {entry.version} of topic {topic!r} is what has changed since item {entry.base}, "
            "which did not come"
        )
    for name, array in known.weights.items():
        if not array.flags.writeable:  # as they came
            known.weights[name] = np.array(array, order="C")
    deltas.apply(value, known.weights)
    return {name: _read_only(array) for name, array in known.weights.items()}


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory: the next changes are applied to it, and would be to what is written."""
    view = array[...]
    view.flags.writeable = False
    return view
