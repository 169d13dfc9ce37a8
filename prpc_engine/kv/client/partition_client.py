"""One partition as a worker sees it: requests go to whoever serves it, and come again there after a
loss; pushes are numbered.

    request    event                                     next
    under way  answered, or refused                      settled
    under way  a loss: what it was sent to went away     lost: it waits for the recovery
                                                         (recovery.py)
    new        others of its lane are lost               lost: it goes behind them
    lost       somebody serves the partition             under way, in the order in which they were
                                                         asked
    lost       its deadline                              settled, by an error that says what is
                                                         known
    lost, not  another worker has restored a checkpoint  settled, by EpochChanged (locator.py)
      done

What is lost is held as any request without a connection is (prpc_engine/rpc/pending.py), with one
queue for the lane, which is up while nothing is lost.

A push keeps its number and its arrays until it is settled, and the partition's ledger knows it by
that number: so it may be sent as often as needed, and is applied once. What is kept is bounded in
numbers (ledger.WINDOW from the oldest to the newest) and in bytes.

A request that nothing happens to costs a push one entry here, and a pull nothing: its caller waits
for the call itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

from prpc_engine.errors import (
    Backpressure,
    Closed,
    ConfigError,
    DeadlineExceeded,
    MaybeExecuted,
    NotSent,
    Rejected,
    RemoteError,
    RpcError,
    Stopping,
    UnknownService,
)
from prpc_engine.kv.consistency.consistency import WorkersBehind
from prpc_engine.kv.consistency.epochs import Behind, RowsLost, is_remote, parsed
from prpc_engine.kv.consistency.ledger import WINDOW
from prpc_engine.kv.schema.services import TableClient
from prpc_engine.rpc.pending import PendingRequests
from prpc_engine.rpc.send_queue import QueueAction, QueueEvent, QueueState, SendQueue
from shard import ClosedError, Future, runtime

next_order = itertools.count(1).__next__  # of requests of all lanes, as they are asked
# of the newest in the moving mean of answers' times: it follows within some tens of pushes
ANSWER_SHARE = 1 / 16
# pushes without an answer, of one partition: a quarter of a second of what one server applies
KEPT_BYTES_MAX = 1 << 28
# Of lost requests, in one turn of the reactor: it copies them in some milliseconds, between other
# requests.
REPEATS_MAX, REPEAT_BYTES_MAX = 64, 4 << 20
_UP = QueueState.UP
# Pushes that are answered later than they are applied: what for, and what to do where it does not
# come.
ACKNOWLEDGED_WHEN = {
    "apply_replicated": "ack='replicated' waits for a copy on another server: start a second "
    "ElasticServer, with replicas=1 or more, or wait longer while copies are made",
    "apply_durable": "ack='durable' waits for a checkpoint that has it: save() before its deadline",
}


class PartitionAddress(NamedTuple):
    """Who serves a partition. arguments: what comes first in every request to it."""

    server_id: int
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class RequestStatistics:
    """What became of the requests of one worker to all its partitions; a snapshot."""

    unanswered: int
    """Pushes without an answer."""
    repeats: int
    """Requests that were sent again after a loss, so far."""
    lost: int
    """Partitions with requests that wait to be sent again, as their server is lost or elsewhere."""
    is_recovering: bool
    """Whether it looks for those partitions' servers now, or did until a moment ago."""


def fixed(client: TableClient, name: str, expected_servers: int) -> list[PartitionAddress]:
    """A partition on each server that there is: their order decides who owns which key.
    ConfigError: they are more or fewer.
    """
    server_ids = client.server_ids
    if len(server_ids) != expected_servers:
        raise ConfigError(
            f"TableWorker of {name!r}: {len(server_ids)} servers (ids {list(server_ids)}) "
            "are there, "
            f"expected_servers is {expected_servers}; say the number there will be, "
            "the same in every worker"
        )
    return [PartitionAddress(server_id) for server_id in server_ids]


class PartitionRequest:
    """The future of one request to one partition, as TableWorker's verbs wait for it. It is the
    future of the first call until that is lost; after that PartitionClient sends the request
    again, and `settled` has the outcome.

    deadline: on the monotonic clock, in seconds. sequence: the push's number, 0 of a request that
    is none. undo: what this worker did on its own side as it pushed, taken back where the push has
    not run.
    """

    __slots__ = (
        "args",
        "call",
        "deadline",
        "lane",
        "may_be_in",
        "method",
        "nbytes",
        "order",
        "sequence",
        "settled",
        "undo",
    )

    def __init__(
        self,
        lane: PartitionClient,
        sequence: int,
        method: str,
        args: tuple[Any, ...],
        deadline: float,
        nbytes: int,
    ) -> None:
        self.lane = lane
        self.order = next_order()
        self.sequence = sequence  # of a push; 0: of none
        self.method = method
        self.args = args
        self.deadline = deadline
        self.nbytes = nbytes
        self.call: Future | None = None  # as first sent
        self.settled: Future | None = None  # once it was lost
        self.may_be_in: bool  # once it was lost: whether a server may have done it
        self.undo: Callable[[], object] | None = None

    def done(self) -> bool:
        """Whether it is settled, or will not be."""
        if self.settled is None:
            assert self.call is not None
            if not self.call.done():
                return False
            error = self.call.error()
            if error is None or not self.lane.is_loss(error):
                return True
            self.lane.lose(self, error)
        return self.settled is not None and (self.settled.done() or self.lane.is_closed)

    def result(self, timeout_s: float | None = None) -> Any:
        """The answer; raises the error it was settled with, TimeoutError when neither is there in
        time.
        """
        started = runtime.monotonic()
        if self.settled is None:
            assert self.call is not None
            try:
                return self.call.result(timeout_s)
            except RpcError as error:
                if not self.lane.is_loss(error):
                    self.lane.check_acknowledged(self, error)
                    raise
                settled = self.lane.lose(self, error)
        else:
            settled = self.settled
        if timeout_s is not None:
            timeout_s = max(0.0, timeout_s - (runtime.monotonic() - started))
        try:
            return settled.result(timeout_s)
        except ClosedError as error:
            raise self.lane.closed(self) from error

    def __await__(self) -> Generator[Any, None, Any]:
        if self.settled is None:
            assert self.call is not None
            try:
                return (yield from self.call.__await__())
            except RpcError as error:
                if not self.lane.is_loss(error):
                    self.lane.check_acknowledged(self, error)
                    raise
                settled = self.lane.lose(self, error)
        else:
            settled = self.settled
        try:
            return (yield from settled.__await__())
        except ClosedError as error:
            raise self.lane.closed(self) from error

    def error(self) -> BaseException | None:
        """What it was settled with, if that was an error."""
        settled = self.settled or self.call
        return settled.error() if settled is not None and settled.done() else None

    def is_taken_back(self) -> bool:
        """Whether the partition took it back as its workers were behind: it has not run there."""
        error = self.error()
        return error is not None and is_remote(error, WorkersBehind)

    def give_up(self) -> None:
        """Its caller will change the arrays: it is not sent again."""
        self.lane.give_up(self)


class PartitionClient:
    """A partition client sends a worker's requests to one partition, and again after a loss.

    It numbers pushes and keeps them until they are settled, so each is applied once. Owned by one
    worker. Any thread may ask. States of a request: the table at the file's head.

    identity: of the worker's incarnation; mend: is called with the lane when requests of it are
    lost; push_method: what pushes are sent to; is_placed: whether another server may come to serve
    this partition; waiter: of the client's calls, for a first request that is lost at once;
    outdated: makes what is raised of what a server says that holds a newer epoch (epochs.py).
    """

    def __init__(
        self,
        client: TableClient,
        name: str,
        partition: int,
        address: PartitionAddress,
        identity: int,
        mend: Callable[[PartitionClient], None],
        push_method: str = "apply",
        is_placed: bool = False,
        waiter: Any = None,
        outdated: Callable[[str], Exception] = RpcError,
    ) -> None:
        self.address = address
        self.partition = partition
        self.is_placed = is_placed
        self.outdated = outdated
        self.repeats = 0  # requests sent again
        self.answer_s = 0.0  # a moving mean of how long pushes take; 0.0: none was answered
        self._client = client
        self._name = name
        self._identity = identity
        self._mend = mend
        self._push_method = push_method
        self._waiter = waiter
        self._sending = runtime.Lock()  # held while something is sent again
        # of what follows; a loss after close() is settled, and so forgotten, where it is told
        self._lock = runtime.RLock()
        self._sequence = 0  # of the newest push
        self._unacknowledged: dict[int, PartitionRequest] = {}
        self._kept_bytes = 0
        self._reason: BaseException | None = None  # of the last loss
        # those that are lost; made at the first loss, as the waiter is known then
        self._pending: PendingRequests[PartitionRequest] | None = None
        self._queue: SendQueue[PartitionRequest] = SendQueue(_order, is_up=True)

    # -- requests ----------------------------------------------------------------------------------

    def ask(self, method: str, timeout_s: float, *args: Any) -> PartitionRequest:
        """What may be done twice: a pull, or making a table."""
        request = PartitionRequest(self, 0, method, args, runtime.monotonic() + timeout_s, 0)
        self._begin(request, timeout_s)
        return request

    def push(self, verb: str, timeout_s: float, table: str, *arrays: Any) -> PartitionRequest:
        """A verb that changes the table, applied once. The arrays stay as they are until it is
        settled or given up.

        Raises Backpressure when too many, or too large ones, have no answer yet.
        """
        nbytes = 0
        for array in arrays:
            nbytes += array.nbytes
        unacknowledged = self._unacknowledged
        with self._lock:
            sequence = self._sequence + 1
            if unacknowledged and (
                sequence - next(iter(unacknowledged)) >= WINDOW
                or self._kept_bytes + nbytes > KEPT_BYTES_MAX
            ):
                raise Backpressure(
                    f"{verb} to table {parsed(table)[0]!r} of {self._name!r}: "
                    f"{len(unacknowledged)} pushes of "
                    f"{self._kept_bytes} bytes to {self} have no answer; {WINDOW} pushes and "
                    f"{KEPT_BYTES_MAX} bytes are allowed: wait for some of them"
                )
            self._sequence = sequence
            args = (self._identity, sequence, verb, table, *arrays)
            request = PartitionRequest(
                self, sequence, self._push_method, args, runtime.monotonic() + timeout_s, nbytes
            )
            unacknowledged[sequence] = request
            self._kept_bytes += nbytes
        try:
            self._begin(request, timeout_s)
        except BaseException:
            self.forget(request)
            raise
        if request.call is not None:
            request.call.when_done(request_answered(request, request.deadline - timeout_s))
        return request

    def push_again(self, taken_back: PartitionRequest) -> PartitionRequest | None:
        """A push that the partition took back, under a number of its own; None: its deadline is
        over. Raises as push().
        """
        left_s = taken_back.deadline - runtime.monotonic()
        if left_s <= 0:
            return None
        _, _, verb, table, *arrays = taken_back.args
        again = self.push(verb, left_s, table, *arrays)
        again.undo = taken_back.undo
        return again

    def _begin(self, request: PartitionRequest, timeout_s: float) -> None:
        if self._queue.state is not _UP:  # is_whole, in every request
            assert self._pending is not None, "it was lost"
            # With the guard: else repeat_some() could find the queue empty between this look and
            # _wait(), which would begin another loss, and no recovery would be told of it.
            with self._lock, self._pending.guard:
                if not self.is_whole:
                    request.settled, request.may_be_in = Future(self._waiter), False
                    self._wait(request)
                    return
        address = self.address
        try:
            call = self._client.submit_to(
                address.server_id,
                request.method,
                *address.arguments,
                *request.args,
                timeout_s=timeout_s,
            )
        except RpcError as error:
            if self._waiter is None or not self.is_loss(error):
                raise
            self.lose(request, error)
            return
        request.call = call
        if self._waiter is None:
            self._waiter = call.waiter

    def unanswered(self) -> int:
        """Pushes without an answer."""
        return len(self._unacknowledged)

    def answered_above(self, sequence: int) -> int:
        """Pushes with a greater number than that which are over."""
        with self._lock:
            return max(
                0, self._sequence - sequence - sum(each > sequence for each in self._unacknowledged)
            )

    # -- losses ------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether nothing is lost: what is new is sent at once."""
        return self._queue.state is _UP

    def is_loss(self, error: BaseException) -> bool:
        """Whether what ended with that error is to be sent again: also where no other server may
        come, as one that was stopped or cut off for longer than its lease is not registered for a
        while, and has its rows all the same."""
        if isinstance(error, MaybeExecuted | NotSent) or is_remote(error, Behind):
            return True
        return self.is_placed and (isinstance(error, Stopping | UnknownService) or is_moved(error))

    def _is_loss_again(self, error: BaseException) -> bool:
        """The same of what was lost before: a server without room says nothing of what it took
        then.
        """
        return isinstance(error, Backpressure) or self.is_loss(error)

    def lose(self, request: PartitionRequest, error: BaseException) -> Future:
        """A request under way has been lost; what settles it in the end. Again: the same."""
        with self._lock:
            settled = request.settled
            if settled is not None:
                return settled
            settled = request.settled = Future(self._waiter)
            request.may_be_in, self._reason = _may_be_in(error), error
            is_first = self._wait(request)
        if is_first:
            self._mend(self)
        return settled

    def _wait(self, request: PartitionRequest) -> bool:
        """It is lost, and waits to be sent; whether it is the first one, and somebody is to mend
        the lane. With the lock held.
        """
        if self._pending is None:
            self._pending = PendingRequests(
                self._waiter.reactor,
                lambda late: self.settle(late, self._late(late)),
                lambda left: self.settle(left, self.closed(left)),
            )
        pending = self._pending
        with pending.guard:
            if self.is_whole and not pending.is_closed:
                pending.tell(self._queue, QueueEvent.LOST)
            pending.hold(request, request.deadline, request.nbytes)
            return QueueAction.CONNECT in pending.offer(request, self._queue)

    def repeat(self) -> Future:
        """Send what is lost to where the partition is now, in order; the future of whether the lane
        is whole then. In turns of the reactor, some in each. From any thread.
        """
        whole, sent = Future(self._waiter), set[PartitionRequest]()
        reactor = self._waiter.reactor

        def turn() -> None:
            try:
                is_whole = self.repeat_some(sent)
            except Exception as error:  # whatever it is, the recovery waits for this
                whole.set_error(error)
                return
            if is_whole is None:
                reactor.call_soon(turn)
            else:
                whole.set_result(is_whole)

        reactor.call_soon(turn)
        return whole

    def repeat_some(self, sent: set[PartitionRequest]) -> bool | None:
        """One turn of repeat(): whether the lane is whole; None: there is more to send. `sent`:
        what was, in turns before.
        """
        pending = self._pending
        if pending is None or self.is_whole:
            return True
        if self._queue.state is QueueState.CONNECTING:
            pending.tell(self._queue, QueueEvent.CONNECTED)
        requests = pending.take(self._queue, REPEATS_MAX, REPEAT_BYTES_MAX)
        if not requests:
            return True
        # refused at once: the next round asks where the partition is
        if not sent.isdisjoint(requests):
            self._put_back(requests)
            return False
        sent.update(requests)
        for number, request in enumerate(requests):
            left_s = request.deadline - runtime.monotonic()
            if left_s <= 0:
                self.settle(request, self._late(request))
            elif not self._send_again(request, left_s):
                self._put_back(requests[number:])
                return False
        return None

    def _put_back(self, requests: list[PartitionRequest]) -> None:
        """They wait for the next round."""
        with self._lock:
            for request in requests:
                if request.settled is not None and not request.settled.done():
                    self._wait(request)
            assert self._pending is not None, "they were taken from it"
            self._pending.tell(self._queue, QueueEvent.LOST)

    def _send_again(self, request: PartitionRequest, left_s: float) -> bool:
        address = self.address
        assert request.settled is not None
        try:
            with self._sending:
                assert self._pending is not None, "it waited there"
                # given up meanwhile
                if request.settled.done() or not self._pending.sending(request):
                    return True
                call = self._client.submit_to(
                    address.server_id,
                    request.method,
                    *address.arguments,
                    *request.args,
                    timeout_s=left_s,
                )
        except Exception as error:  # whatever it is, somebody waits for this request
            if self._is_loss_again(error):
                self._reason = error
                return False
            self.settle(request, self._final(request, error))
            return True
        self.repeats += 1
        call.when_done(lambda done: self._answered_again(request, done))
        return True

    def _answered_again(self, request: PartitionRequest, call: Future) -> None:
        error = call.error()
        assert request.settled is not None
        if error is not None and self._is_loss_again(error):
            with self._lock:
                if request.settled.done():  # given up meanwhile
                    return
                request.may_be_in |= _may_be_in(error)
                self._reason = error
                is_first = self._wait(request)
            if is_first:
                self._mend(self)
            return
        self.forget(request, error)
        if error is None:
            request.settled.set_result(call.result())
        else:
            request.settled.set_error(self._final(request, error))

    def refuse(self, before: int, error: BaseException) -> bool:
        """Settle the lost pulls and pushes that no server has done, and that were asked before that
        one, with that error: whether there were any."""

        def is_refused(request: PartitionRequest) -> bool:
            return (
                request.order < before
                and not request.may_be_in
                and (bool(request.sequence) or request.method.startswith("pull"))
            )

        refused = [] if self._pending is None else self._pending.pick(self._queue, is_refused)
        for request in refused:
            self.settle(request, error)
        return bool(refused)

    def close(self) -> None:
        """This side is closed: settle all that are lost, and whatever will be."""
        pending = self._pending
        if pending is None:
            return
        with pending.guard:
            if self._queue.state is QueueState.DRAINING:
                pending.tell(self._queue, QueueEvent.LOST)
            if self._queue.state is QueueState.CONNECTING:
                pending.tell(self._queue, QueueEvent.GAVE_UP)
                pending.tell(self._queue, QueueEvent.FOUND)  # what is new finds out by itself
        pending.close()

    def settle(self, request: PartitionRequest, error: BaseException) -> None:
        """End a lost request with an error, in the reactor's thread: whoever waits for it may have
        that parked.
        """
        self.forget(request)
        settled = request.settled
        assert settled is not None
        self._waiter.reactor.call_soon(lambda: settled.set_error(error))

    def give_up(self, request: PartitionRequest) -> None:
        """Cancel that request, whose caller will change its arrays: it is not sent again."""
        with self._lock:
            settled = request.settled = request.settled or Future(self._waiter)
            settled.cancel()  # a loss from now on is nobody's
        with self._sending:  # by now nobody reads its arrays
            self.forget(request)

    def forget(self, request: PartitionRequest, error: BaseException | None = None) -> None:
        """A push has no need to be kept any longer, nor its arrays, however long somebody keeps the
        request; but for one that ended with WorkersBehind, which push_again() may send.
        """
        if error is None or not is_remote(error, WorkersBehind):
            request.args = ()
        if request.settled is not None and self._pending is not None:
            self._pending.end(request)
        with self._lock:
            if self._unacknowledged.pop(request.sequence, None) is not None:
                self._kept_bytes -= request.nbytes

    # -- errors ------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return f"partition {self.partition} of {self._name!r} (server {self.address.server_id})"

    def _final(self, request: PartitionRequest, error: BaseException) -> BaseException:
        """What a request that was lost once ends with:
        it may have run then, whatever is said now.
        """
        if isinstance(error, DeadlineExceeded):  # it knows of the last attempt alone
            return self._late(request, error)
        if not request.sequence or not isinstance(error, NotSent | Rejected):
            return error
        return MaybeExecuted(
            f"push {request.sequence} to {self} was sent, and may have been applied, once; "
            f"no server can be asked: {error}"
        )

    def check_acknowledged(self, request: PartitionRequest, error: RpcError) -> None:
        """Raise DeadlineExceeded, of a push that was not lost and not acknowledged by its deadline,
        where more was waited for than that it is applied.
        """
        when = ACKNOWLEDGED_WHEN.get(request.method)
        if when is not None and isinstance(error, DeadlineExceeded):
            said = self._unanswered(request, "at its deadline")
            raise DeadlineExceeded(f"{said}. {when}, or look why that server is slow") from error

    def _late(
        self, request: PartitionRequest, error: DeadlineExceeded | None = None
    ) -> DeadlineExceeded | RowsLost:
        """What a lost request ends with at its deadline; `error`: of the attempt under way then.
        RowsLost: its server did answer, and still holds an older epoch of the table.
        """
        if error is None and self._reason is not None and is_remote(self._reason, Behind):
            # who began the table again has died half way, as far as can be seen from here
            return RowsLost(f"{request.method} to {self}: {self._reason}")
        said = self._unanswered(request, "at its deadline")
        last = self._reason if error is None else f"{error}; before that: {self._reason}"
        return DeadlineExceeded(
            f"{said}. Last: {last}. Look at that server, or allow a larger timeout_s"
        )

    @property
    def waits_for(self) -> str:
        """What its lost requests wait for; for logs."""
        return f"{self}: {str(self._reason).partition(chr(10))[0]}"

    @property
    def is_closed(self) -> bool:
        """Whether nobody will send again what is lost: this side is closed."""
        return self._waiter is not None and self._waiter.closing

    def closed(self, request: PartitionRequest) -> Closed:
        """What whoever waits for a lost request is told once this side is closed: nobody sends it
        again.
        """
        return Closed(
            f"{self._unanswered(request, 'as the service is closed here')}. Last: {self._reason}"
        )

    def _unanswered(self, request: PartitionRequest, when: str) -> str:
        what = f"push {request.sequence}" if request.sequence else request.method
        known = "; it may have been applied, once" if request.sequence else ""
        return f"{what} to {self} has no answer {when}{known}"


def request_answered(request: PartitionRequest, sent: float) -> Callable[[Future], None]:
    """What is called when the first attempt of a push has ended."""

    def answered(call: Future) -> None:
        lane, error = request.lane, call.error()
        if error is not None and lane.is_loss(error):
            lane.lose(request, error)
        else:
            lane.forget(request, error)
            took_s = runtime.monotonic() - sent
            lane.answer_s += (took_s - lane.answer_s) * (ANSWER_SHARE if lane.answer_s else 1.0)

    return answered


def _order(request: PartitionRequest) -> int:
    return request.order


def _may_be_in(error: BaseException) -> bool:
    """Whether a server may have done what was lost so."""
    return not isinstance(error, NotSent | Rejected | RemoteError)


def is_moved(error: BaseException) -> bool:
    """Whether a server said that it does not serve the partition at that epoch."""
    return isinstance(error, RemoteError) and error.type_name.endswith(".Moved")
