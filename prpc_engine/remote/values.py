"""The RRefs of one worker: what becomes of them here, and what their owners are told.

    an RRef                      here                              the owner is told
    is made by remote()          numbered; kept until it is made   create, of value and fork
    is put into a message        kept until the owner has heard    passed, of a new fork
    is taken from a message      kept until the owner has heard    claimed
    was put into one that is     noted, once the owner has heard   dropped, in the end
     not sent
    was put into a call that     noted, once the owner has heard   may_be_lost
     failed
    is collected as garbage      noted; told by the reactor        dropped, some at a time

All of these are sent until the owner answers or has left, and heard twice they change nothing
(references.py). `dropped` follows the answer to `passed` or `claimed` of the same fork: the RRef is
kept until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from prpc_engine import errors
from prpc_engine.remote.calls import RemoteCalls, as_runtime_error
from prpc_engine.remote.current import ValueAddress, WorkerInfo
from prpc_engine.remote.functions import ValueGone
from prpc_engine.remote.future import Future
from prpc_engine.remote.numbering import Numbering
from prpc_engine.remote.references import (
    GRACE_S,
    NOBODY,
    UNCLAIMED_S,
    ForkId,
    References,
    ValueId,
)
from prpc_engine.remote.rref import RRef
from shard import runtime

LOOK_S = UNCLAIMED_S / 4  # between two looks at references that nobody has claimed


class Values:
    """The values that this worker owns, and its RRefs to those of others. Owned by a Worker.

    Verbs may be called from any thread. Those with a timeout block.
    """

    def __init__(self, calls: RemoteCalls) -> None:
        self._calls = calls
        self._members = calls.members
        self._reactor = calls.driver.reactor
        self._me = calls.members.incarnation
        self._is_over = False
        # of the references: handlers, destructors and threads of the application change them
        self._guard = runtime.RLock()
        self._references: References[Future] = References(calls.future, _forget)
        self._numbering = Numbering(self._me)
        # RRefs whose owner has not answered yet, by the owner's incarnation and fork
        self._telling: dict[tuple[int, ForkId], RRef[Any]] = {}
        # of these: what is done once it has
        self._afterwards: dict[tuple[int, ForkId], Callable[[ValueAddress, ForkId], None]] = {}
        self._drops: deque[tuple[ValueAddress, ForkId]] = deque()
        self._gone: set[int] = set()  # workers, but for those that came back
        self._looks = False  # at references that nobody has claimed
        calls.take_back = partial(self._tell_afterwards, "dropped")
        calls.may_be_lost = partial(self._tell_afterwards, "may_be_lost")

    # -- as a holder -------------------------------------------------------------------------------

    def own(self, value: Any) -> tuple[ValueAddress, ForkId]:
        """A value of this worker's own."""
        address = self._numbering.address(self._members.rank, self._me)
        fork_id = self._numbering.fork(self._me)
        future = self.enter(address.value_id, fork_id)
        assert future is not None, "the number is new"
        future.set_result(value)
        return address, fork_id

    def is_own(self, address: ValueAddress) -> bool:
        """Whether the value is here."""
        return address.incarnation == self._me

    def owner(self, address: ValueAddress) -> WorkerInfo:
        """Who has it. Raises UnknownWorker."""
        return self._members.info_of(address.owner)

    def describe(self, address: ValueAddress) -> str:
        """For texts."""
        creator, number = address.value_id
        owner = self._members.describe(address.owner)
        return f"value {number} of {self._members.named(creator)}, owned by {owner}"

    def pass_on(self, rref: RRef[Any]) -> list[int]:
        """What stands for it in a message. Tells the owner, without waiting."""
        holder = self._calls.destination
        address = rref.address
        fork_id = self._numbering.fork(address.incarnation)
        self._calls.passed(address, fork_id)
        if self.is_own(address):
            self.passed(address.value_id, fork_id, holder)
        else:
            self._telling[address.incarnation, fork_id] = rref
            self._tell(rref, fork_id, "passed", holder)
        return [address.owner, address.incarnation, *address.value_id, *fork_id]

    def receive(self, address: ValueAddress, fork_id: ForkId) -> RRef[Any]:
        """Another worker passed it on. In the middle of reading a message: nothing is sent here."""
        rref = RRef.made(self, address, fork_id, None)
        if self.is_own(address):
            self.claimed(address.value_id, fork_id, self._me)
        else:
            rref.is_known = False
            self._telling[address.incarnation, fork_id] = rref
            self._reactor.call_soon(lambda: self._tell(rref, fork_id, "claimed", self._me))
        return rref

    def _tell(self, rref: RRef[Any], fork_id: ForkId, verb: str, holder: int) -> None:
        owner, incarnation, value_id = rref.address
        key = incarnation, fork_id

        def ended(is_heard: bool) -> None:
            with self._guard:
                self._telling.pop(key, None)
                afterwards = self._afterwards.pop(key, None)
            if afterwards is not None:
                afterwards(rref.address, fork_id)
            if verb == "claimed" and is_heard:
                rref.is_known = True

        self._calls.tell_until_heard(
            owner, incarnation, verb, *value_id, *fork_id, holder, then=ended
        )

    def _tell_afterwards(self, verb: str, passed: Sequence[tuple[ValueAddress, ForkId]]) -> None:
        """These were passed on, and not sent, or perhaps lost. An owner that has not heard of one
        yet would not know what is meant.
        """

        def tell(address: ValueAddress, fork_id: ForkId) -> None:
            owner, incarnation, value_id = address
            if verb == "dropped":
                self.drop_soon(address, fork_id)
            elif self.is_own(address):
                self.may_be_lost(value_id, fork_id)
            else:
                self._calls.tell_until_heard(owner, incarnation, verb, *value_id, *fork_id)

        for address, fork_id in passed:
            key = address.incarnation, fork_id
            with self._guard:
                is_told = key not in self._telling
                if not is_told:
                    self._afterwards[key] = tell
            if is_told:
                tell(address, fork_id)

    def drop_soon(self, address: ValueAddress, fork_id: ForkId) -> None:
        """An RRef is gone. From a destructor, so in any thread, in the middle of anything."""
        is_first = not self._drops
        self._drops.append((address, fork_id))
        if is_first and not self._is_over:
            self._reactor.call_soon(self._tell_drops)

    def _tell_drops(self) -> None:
        of_owner: dict[tuple[int, int], list[list[int]]] = {}
        while self._drops:
            (owner, incarnation, value_id), fork_id = self._drops.popleft()
            of_owner.setdefault((owner, incarnation), []).append([*value_id, *fork_id])
        for (owner, incarnation), forks in of_owner.items():
            if incarnation == self._me:
                self.dropped(forks)
            else:
                self._calls.tell_until_heard(owner, incarnation, "dropped", forks)

    # -- verbs of RRefs ----------------------------------------------------------------------------

    def create(
        self,
        owner: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout: float | None,
    ) -> RRef[Any]:
        """Have a worker make a value, without waiting for it."""
        address = self._numbering.address(owner, self._members.incarnation_of(owner))
        fork_id = self._numbering.fork(address.incarnation)
        header = (address.incarnation, *address.value_id, *fork_id)
        with self._numbering.sending(address, fork_id):
            created = self._calls.submit(owner, "create", header, function, args, kwargs, timeout)
        return _kept_created(RRef.made(self, address, fork_id, created))

    def _check_open(self) -> None:
        if self._is_over:
            raise as_runtime_error(
                errors.Closed(
                    f"worker {self._members.name!r}, which this RRef is of, has left its group: "
                    "shutdown() was called here"
                )
            )

    def fetch(self, rref: RRef[Any], timeout: float | None) -> Any:
        """See RRef.to_here()."""
        self._check_open()
        limit_s = self._calls.timeout(timeout)
        give_up_at = None if limit_s is None else runtime.monotonic() + limit_s
        self._wait_created(rref, rref.created, limit_s)
        owner, incarnation, value_id = rref.address
        if self.is_own(rref.address):
            value = self.find(value_id)  # another worker has it made, perhaps
            self._wait_created(rref, value, _left(give_up_at))
            return value.result()
        return self._calls.ask(owner, "fetch", incarnation, *value_id, timeout_s=_left(give_up_at))

    def _wait_created(self, rref: RRef[Any], created: Future | None, limit_s: float | None) -> None:
        if created is None:
            return
        try:
            created.result(limit_s)
        except TimeoutError:
            if created.done():
                raise
            late = f"{rref!r} is still being made after {limit_s:.3g} s"
            raise as_runtime_error(errors.DeadlineExceeded(late)) from None

    def submit_method(
        self,
        rref: RRef[Any],
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float | None,
    ) -> Future:
        """See RRef.rpc_async()."""
        self._check_open()
        owner, incarnation, value_id = rref.address
        header = (incarnation, *value_id, name)

        def send() -> Future:
            sent = self._calls.submit(owner, "method", header, None, args, kwargs, timeout)
            return _kept_until(sent, rref)

        created = rref.created
        if created is None:
            return send()
        if created.done():
            created.result()  # raises what kept it from being made
            return send()
        outcome = self._calls.future()

        def go_on(done: Future) -> None:
            try:
                done.result()
                later = send()
            except Exception as error:
                outcome.set_error(error)
            else:
                later.when_done(lambda _: later.pass_on(outcome))

        created.add_done_callback(go_on)
        return outcome

    def call_method(
        self,
        rref: RRef[Any],
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float | None,
    ) -> Any:
        """See RRef.rpc_sync()."""
        self._check_open()
        self._wait_created(rref, rref.created, self._calls.timeout(timeout))
        owner, incarnation, value_id = rref.address
        header = (incarnation, *value_id, name)
        return self._calls.call(owner, "method", header, None, args, kwargs, timeout)

    def create_by_method(
        self,
        rref: RRef[Any],
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float | None,
    ) -> RRef[Any]:
        """See RRef.remote()."""
        self._check_open()
        self._wait_created(rref, rref.created, self._calls.timeout(timeout))
        owner, incarnation, value_id = rref.address
        made = self._numbering.address(owner, incarnation)
        fork_id = self._numbering.fork(incarnation)
        header = (incarnation, *value_id, name, *made.value_id, *fork_id)
        with self._numbering.sending(made, fork_id):
            created = self._calls.submit(
                owner, "create_by_method", header, None, args, kwargs, timeout
            )
        return _kept_created(RRef.made(self, made, fork_id, _kept_until(created, rref)))

    # -- as the owner ------------------------------------------------------------------------------

    def enter(self, value_id: ValueId, fork_id: ForkId) -> Future | None:
        """Its creator wants it made: what its value goes into; None where that was so before."""
        with self._guard:
            return self._references.create(value_id, fork_id, value_id[0], runtime.monotonic())

    def find(self, value_id: ValueId) -> Future:
        """The future of a value that is here, or is to be. Raises ValueGone."""
        with self._guard:
            future = self._references.find(value_id)
        if future is None:
            creator, number = value_id
            raise ValueGone(
                f"value {number} of {self._members.named(creator)} is not at "
                f"{self._members.describe(self._members.rank)} any more: no worker referred to "
                "it (references of a worker that is silent for longer than its lease do not "
                "count), or its creator died before it was made"
            )
        return future

    def passed(self, value_id: ValueId, fork_id: ForkId, holder: int) -> bool:
        """From a parent."""
        with self._guard:
            is_there = self._references.passed(value_id, fork_id, holder, runtime.monotonic())
        if holder == NOBODY:
            self._look_for_unclaimed()
        return is_there

    def may_be_lost(self, value_id: ValueId, fork_id: ForkId) -> None:
        """From a parent."""
        with self._guard:
            is_waited_for = self._references.may_be_lost(value_id, fork_id, runtime.monotonic())
        if is_waited_for:
            self._look_for_unclaimed()

    def _look_for_unclaimed(self) -> None:
        if not self._looks:
            self._looks = True
            self._reactor.call_soon(lambda: self._reactor.call_later(LOOK_S, self._look))

    def _look(self) -> None:
        with self._guard:
            waiting = self._references.give_up_unclaimed(runtime.monotonic())
        self._looks = waiting > 0
        if waiting:
            self._reactor.call_later(LOOK_S, self._look)

    def claimed(self, value_id: ValueId, fork_id: ForkId, holder: int) -> bool:
        """From a holder."""
        with self._guard:
            return self._references.claimed(value_id, fork_id, holder, runtime.monotonic())

    def dropped(self, forks: Sequence[Sequence[int]]) -> None:
        """From a holder: creator, number, parent and number of each."""
        for creator, number, parent, fork in forks:
            with self._guard:
                orphan = self._references.dropped((creator, number), (parent, fork))
            if orphan is not None:
                named = self._members.named(creator)
                orphan.set_error(
                    ValueGone(f"the call by which {named} was to have this value made has failed")
                )

    def worker_gone(self, incarnation: int, named: str) -> None:
        """That worker has left or died: its references count no longer, in GRACE_S seconds."""
        if incarnation == self._me:
            return  # the others took this one for dead

        def end() -> None:
            if incarnation not in self._gone:
                return  # it is back
            with self._guard:
                orphans = self._references.worker_gone(incarnation)
            self._look_for_unclaimed()
            for future in orphans:
                future.set_error(
                    ValueGone(f"{named}, which was to have this value made, has left or died")
                )

        self._gone.add(incarnation)
        self._reactor.call_soon(lambda: self._reactor.call_later(GRACE_S, end))

    def worker_back(self, incarnation: int) -> None:
        """It was only silent; what of its references has ended by now is told where it is used."""
        self._gone.discard(incarnation)
        with self._guard:
            self._references.worker_back(incarnation)

    def statistics(self) -> dict[str, int]:
        """How many values are here, and references to them are known."""
        with self._guard:
            return {"values": len(self._references), "references": self._references.forks}

    def clear(self) -> None:
        """At the end: nothing is kept."""
        self._is_over = True
        with self._guard:
            self._references.clear()
        self._telling.clear()


def _forget(future: Future) -> None:
    """Nobody refers to that value any more: it goes with its future."""


def _kept_created(rref: RRef[Any]) -> RRef[Any]:
    """The RRef to what is being made, kept until it is: its owner, which may be this worker, would
    otherwise hear first that it was dropped.
    """
    assert rref.created is not None, "this worker has it made"
    _kept_until(rref.created, rref)
    return rref


def _kept_until(answered: Future, rref: RRef[Any]) -> Future:
    """That future, which keeps a reference until it is done: the caller may have dropped it, and
    the owner would hear of that before the call.
    """

    def answer_came(_: object, kept: RRef[Any] = rref) -> None:
        """What refers to it until then."""

    answered.when_done(answer_came)
    return answered


def _left(give_up_at: float | None) -> float | None:
    return None if give_up_at is None else max(0.0, give_up_at - runtime.monotonic())
