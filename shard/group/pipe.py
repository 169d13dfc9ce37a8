"""A stream of items from shards to one shard, at the pace at which that reads.

    pipe = shard.Pipe(to=2, capacity=64)        # anywhere in the group, and sent to its shards

    await pipe.send(batch)                      # in any of them: waits while 64 items are unread
    await pipe.close()                          # there is no more

    async for batch in pipe: ...                # in shard 2

Each end's state is its shard's own, found by the pipe's number:

    end     event                       then
    outlet  send, fewer than capacity   the item goes as a call to the reading shard
            without an answer
    outlet  send, more                  waits for the answer to the oldest
    inlet   an item, fewer than         queued, answered at once
            capacity are queued
    inlet   an item, more               queued, answered when as many have been read
    inlet   an item of a shard that it  refused: what that sent before went to an inlet that is gone
            does not know, not the
            shard's first
    inlet   close                       what was sent before can be read; what comes later is
                                        refused
    inlet   closed, and all was read    its number is noted among those that have ended, and it goes
    outlet  its inlet has gone          it goes, once what it has to tell of its items was told; the
                                        last UNTOLD_MAX wait for that
    outlet  the reading shard is lost   its calls end with PeerLostError, and so does the next send
    inlet   a shard that has sent is    queued behind its items: who reads gets PeerLostError there,
            lost, before close          once, and then what others send

So a reading shard holds `capacity` items, and as many more for each shard that sends. Pipes of one
process to one shard are numbered one by one, so those that have ended are few ranges of numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from shard.checks import is_count
from shard.errors import ClosedError, PeerLostError, ShardError
from shard.group.number_set import NumberSet
from shard.group.process import this_shard
from shard.loop.future import ERROR, VALUE, Future
from shard.loop.sync import Condition
from shard.loop.waits import yield_now

CAPACITY = 64
# Outlets of pipes that have ended which a shard keeps as an item of theirs was refused, and neither
# send() nor close() has told so; some 1 KiB each. Those of pipes that are in use are not counted.
UNTOLD_MAX = 1024
# of this process's pipes to each shard
_numbers: defaultdict[int, itertools.count[int]] = defaultdict(lambda: itertools.count(1))


class Pipe:
    """Items from any shard of a group, in the order in which each of them sends, to the tasks of
    shard `to`.

    to        index of the shard that reads
    capacity  items that are queued there before senders wait, from 1 on

    Can be sent to shards. Raises ValueError. In a process that is no shard it can be made and sent
    only.
    """

    def __init__(self, to: int, capacity: int = CAPACITY) -> None:
        if not is_count(to, 0) or not is_count(capacity, 1):
            raise ValueError(
                f"Pipe(to={to!r:.100}, capacity={capacity!r:.100}): the index of a shard and a "
                "whole number from 1 on are allowed"
            )
        self.to = to
        self.capacity = capacity
        self._number = os.getpid(), next(_numbers[to])

    async def send(self, item: Any) -> None:
        """Put an item in; returns when the reading shard has room for it, or less than `capacity`
        items of this shard are on their way.

        Raises ClosedError when the pipe was closed, PeerLostError when the reading shard was lost,
        with items of earlier sends perhaps, ValueError where the group has no such shard.
        """
        outlets = this_shard().outlets
        # two of one process to two shards may have one number
        key = self.to, *self._number
        outlet = outlets.get(key) or outlets.setdefault(key, _Outlet())
        try:
            await outlet.send(self, item)
        except BaseException:
            if outlet.has_ended() and outlets.get(key) is outlet:
                del outlets[key]
            raise

    async def close(self) -> None:
        """There is no more, from no shard: who reads gets what came before, and then the end.

        Raises PeerLostError when the reading shard was lost before it had room for all that was
        sent here. In the reading shard: nobody reads any more, and what is unread is dropped.
        """
        shard = this_shard()
        if shard.index == self.to:
            inlet = self._inlet()
            inlet.close()
            _forget_inlet(self._number, inlet)
            return
        outlet = shard.outlets.pop((self.to, *self._number), None)
        if outlet is not None:
            await outlet.settled(0)
        await (await shard.submit_when_room(self.to, _close, *self._number))

    async def receive(self) -> Any:
        """The next item. Raises ClosedError after the last, and ShardError in another shard than
        `to`. Raises PeerLostError behind the items of a shard that is lost and may have had more,
        once: the next call goes on with what others send.
        """
        inlet = self._inlet()
        await inlet.changed.wait(lambda: bool(inlet.items) or inlet.closed)
        if not inlet.items:
            _forget_inlet(self._number, inlet)
            raise ClosedError(f"the pipe to shard {self.to} was closed, and all of it was read")
        return inlet.take(self.capacity)

    def __aiter__(self) -> AsyncIterator[Any]:
        """What receive() gives, to the end. Raises PeerLostError as that does: begin again for what
        others send."""
        return self._items()

    async def _items(self) -> AsyncIterator[Any]:
        while True:
            try:
                item = await self.receive()
            except ClosedError:
                return
            yield item

    def _inlet(self) -> _Inlet:
        shard = this_shard()
        if shard.index != self.to:
            raise ShardError(
                f"shard {self.to} reads this pipe; shard {shard.index} can send to it only"
            )
        return _inlet(self._number)


class _Outlet:
    """The end in a shard that sends."""

    def __init__(self) -> None:
        self.is_over = False  # there is no inlet any more
        self._is_first = True
        self._unanswered: deque[Future] = deque()

    def has_ended(self) -> bool:
        """Whether it has nothing to tell that was sent: neither an answer to come, nor an error."""
        return self.is_over and all(each.finished == VALUE for each in self._unanswered)

    async def send(self, pipe: Pipe, item: Any) -> None:
        """Send it when fewer than `capacity` are unanswered."""
        await self.settled(pipe.capacity - 1)
        shard = this_shard()
        is_first, self._is_first = self._is_first, False
        sender = shard.index, shard.incarnation
        self._unanswered.append(
            await shard.submit_when_room(
                pipe.to, _put, *pipe._number, pipe.capacity, *sender, is_first, item
            )
        )

    async def settled(self, most: int) -> None:
        """Wait until so many are unanswered. Raises what one of them ended with."""
        while self._unanswered:
            oldest = self._unanswered[0]
            if oldest.finished:
                self._unanswered.popleft()
                if oldest.finished == ERROR:
                    oldest.result()
            elif len(self._unanswered) <= most:
                return
            else:
                # not itself: who is cancelled here must not take the item back
                await _end_of(oldest)


def _end_of(future: Future) -> Future:
    ended = Future()
    future.when_done(lambda _: ended.set_result(None))
    return ended


class _Lost(NamedTuple):
    """In the place of the items that a lost shard has not sent."""

    text: str


class _Inlet:
    """The end in the shard that reads."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.changed = Condition()
        self.closed = False
        self.senders: set[tuple[int, int]] = set()
        self._answers: deque[Future] = deque()  # owed for those beyond `capacity`

    def put(self, sender: tuple[int, int], is_first: bool, item: Any, capacity: int) -> Any:
        """Queue an item: None, or the future of its answer. Raises ClosedError."""
        if self.closed:
            raise ClosedError("the pipe was closed: the item was not taken")
        if is_first:
            self.senders.add(sender)
        elif sender not in self.senders:
            raise ClosedError(
                "the shard that reads this pipe was started again, and what was sent before is lost"
            )
        self.items.append(item)
        self.changed.notify()
        if len(self.items) <= capacity:
            return None
        answer = Future()
        self._answers.append(answer)
        return answer

    def lose(self, sender: tuple[int, int], error: ShardError) -> None:
        """That shard has gone; all that came from it is here."""
        if sender in self.senders and not self.closed:
            self.senders.remove(sender)
            self.items.append(
                _Lost(f"shard {sender[0]}, which sent to this pipe, is gone: {error}")
            )
            self.changed.notify()

    def take(self, capacity: int) -> Any:
        """The oldest item; one more is answered. Raises PeerLostError."""
        item = self.items.popleft()
        while self._answers and not self._answers.popleft().set_result(None):
            pass  # whoever sent that is gone
        if type(item) is _Lost:
            raise PeerLostError(item.text)
        return item

    def end(self) -> None:
        """A sender has no more."""
        self.closed = True
        self.changed.notify_all()

    def close(self) -> None:
        """Nobody reads any more."""
        self.end()
        self.items.clear()
        while self._answers:
            self._answers.popleft().set_error(ClosedError("the pipe was closed by who read it"))


_ENDED = _Inlet()  # in the place of each that was closed and read to its end
_ENDED.closed = True
# of those, in this shard, the numbers by process
_ended: defaultdict[int, NumberSet] = defaultdict(NumberSet)
_untold: deque[tuple[int, int, int]] = deque()


def _inlet(number: tuple[int, int]) -> _Inlet:
    inlets = this_shard().inlets
    found = inlets.get(number)
    if found is None:
        pid, count = number
        if pid in _ended and count in _ended[pid]:
            return _ENDED
        found = inlets[number] = _Inlet()
    assert isinstance(found, _Inlet)
    return found


def _forget_inlet(number: tuple[int, int], inlet: _Inlet) -> None:
    """It was closed, and nothing in it is left to be read."""
    pid, count = number
    _ended[pid].add(count)
    shard = this_shard()
    shard.inlets.pop(number, None)
    senders, inlet.senders = inlet.senders, set()
    for index, _ in senders:
        shard.reactor.spawn(_tell_of_its_end(index, number))


async def _tell_of_its_end(index: int, number: tuple[int, int]) -> None:
    """A shard that has sent, behind the answers to what it sent."""
    await yield_now()  # in this very shard: the one to what it sends now
    shard = this_shard()
    with contextlib.suppress(ShardError):  # it is gone, and its outlet with it
        await (await shard.submit_when_room(index, _forget_outlet, shard.index, *number))


def _forget_outlet(to: int, pid: int, number: int) -> None:
    outlets = this_shard().outlets
    key = to, pid, number
    outlet = outlets.get(key)
    if outlet is None or outlet.is_over:
        return
    outlet.is_over = True
    if outlet.has_ended():
        del outlets[key]
        return
    _untold.append(key)
    if len(_untold) > UNTOLD_MAX:
        outlets.pop(_untold.popleft(), None)


# All but the item are plain numbers: they travel as such (payload.py).
def _put(
    pid: int, number: int, capacity: int, index: int, incarnation: int, is_first: bool, item: Any
) -> Any:
    inlet = _inlet((pid, number))
    if inlet is _ENDED:
        this_shard().reactor.spawn(_tell_of_its_end(index, (pid, number)))
    return inlet.put((index, incarnation), is_first, item, capacity)


def _close(pid: int, number: int) -> None:
    inlet = _inlet((pid, number))
    inlet.end()
    if not inlet.items:
        _forget_inlet((pid, number), inlet)
