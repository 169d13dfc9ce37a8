"""Functions sent from one process of a group to another, over one connection per pair.

A message is a payload and, after it, 16 bytes that say what it is; a payload ends by itself, so
neither needs a length:

    offset  size  field     meaning
         0   ...  payload   CALL, TIMED: the arguments; RESULT: the value alone; both as payload.py
                            has it. ERROR: exception and traceback text; FUNCTION: the function
       -16     1  kind      CALL, RESULT, TIMED, ERROR, FUNCTION, CANCEL, STOP
       -15     1  format    of arguments and values: PICKLE, PLAIN, ARRAYS, each with APART or
                            without
       -14     2  zero
       -12     4  function  its number on this lane (CALL, TIMED, FUNCTION)
        -8     8  call_id   pairs a result with its call; 0 where none is wanted

Pickle is safe here and only here: both ends are processes that one parent started, on memory that
nobody else was handed (SECURITY.md). Buffers travel out of band (pickle protocol 5) as the
connection's blocks, so arrays of the slab cross by reference. A function is pickled once per lane
and known by number after that; one that carries state of its own is sent with each call
(functions.py).

What one end does with a call of the other:

    plain function       runs at once, in the turn that found it; its answer leaves in the same turn
    coroutine function   becomes a task of the reactor; answers when it ends
    in another class     (`in_class`) becomes a task of that class, plain or not
    of LATENCY, by a     begins as a step while others wait, in its order: those of
    lane that has        other classes would wait in the ring for all before them, and have no part
    brought others       of the time

CANCEL gives the call of that call_id up: Submitted.cancel() was called, or a task that awaits it
was cancelled. The caller's future is complete at once, and no answer follows. At the other end

    a coroutine's task       gets CancelledError at its await; its `finally` blocks run and may
                             await, and the shard drains no sooner than it has ended
    a call that was handed   is given up, too: CANCEL is sent on
    on to another shard
    any other                nothing: it was answered, or is a plain function, or never came

It comes behind its CALL, as records of one lane do not overtake each other. Where the outbox is
full it is not sent, and the task runs to its end.

What a task of another class than LATENCY submits is of its class there, unless in_class() has said
of the function which one it is of: the sender wraps it (`_Inherited`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import CoroutineType, FunctionType
from typing import Any

from numpy.typing import NDArray

from shard.errors import (
    BackpressureError,
    CancelledError,
    ClosedError,
    PeerLostError,
    RemoteProtocolError,
    ShardError,
)
from shard.group.functions import (
    ReceivedFunctions,
    SentFunctions,
    is_found_by_name,
    may_go_once,
)
from shard.group.payload import (
    APART_BYTES,
    PICKLE,
    PLAIN,
    PLAIN_TYPES,
    are_plain,
    call_pickled,
    decode,
    dump_plain,
    encode,
    load_plain,
    pickle_error,
    pickle_function,
    unpickle_error,
    unpickle_function,
)
from shard.loop.future import Future, Gathered, Waiter, call_outside_asyncio
from shard.loop.gate import Gate
from shard.loop.reactor import Reactor
from shard.loop.task import Task
from shard.loop.task_class import LATENCY, RUNNING, TaskClass, class_of, in_class, marked_class
from shard.memory.counters import LATENCY_BUCKETS, bucket
from shard.memory.slab import Slab
from shard.traces import safe_text
from shard.transport import Blocks
from shard.transport.shm_connection import ShmConnection

logger = logging.getLogger("shard")
TRAILER = struct.Struct("<BBxxIQ")
assert TRAILER.size == 16  # the table above
CALL, RESULT, TIMED, ERROR, FUNCTION, CANCEL, STOP = range(1, 8)

# Of every so many calls one is timed: its two readings of the clock cost 0.1 us, a call 5.
CALLS_PER_SAMPLE = 64
SAMPLE_MASK = CALLS_PER_SAMPLE - 1
ROOM_AGAIN_S = (
    0.001  # between tries to send what found the outbox full, where nothing tells of room
)
ERROR_AGAIN_S = 0.01  # between tries to tell of errors that found the outbox full

_pack, _unpack = TRAILER.pack, TRAILER.unpack_from


class Tally:
    """What one process did for others and asked of them; the reactor's thread alone writes it."""

    def __init__(self) -> None:
        self.calls = self.failures = self.tasks = self.cancelled = 0
        self.call_ns = [0] * LATENCY_BUCKETS  # of sampled calls to others, from submit to result
        self.run_ns = [0] * LATENCY_BUCKETS  # of sampled plain functions, from found to answered


class Submitted(Future, kw_only=True):
    """The future of a function that was sent to another shard by submit_to(). It completes with the
    function's value or error, or with the error that ended the lane; cancel() gives it up.
    """

    lane: ShardChannel
    call_id: int

    def cancel(self, error: BaseException | None = None) -> bool:
        """Give it up: a task is cancelled over there, at its await (its `finally` blocks run); a
        plain function that has begun runs to its end.

        Completes with `error`, a CancelledError by default. False when it was complete before.
        """
        return self.lane.cancel(self, error)


class ShardChannel:
    """Calls to one other process of the group, and from it. Owned by the process at this end."""

    def __init__(
        self,
        connection: ShmConnection,
        reactor: Reactor,
        waiter: Waiter | None,
        slab: Slab,
        tally: Tally,
        gate: Gate,
        on_stop: Callable[[], None],
        on_lost: Callable[[ShardChannel, ShardError], None],
    ) -> None:
        """`slab`: this process's, for what is copied to be sent; `gate`: the other end's tasks pass
        it; `on_stop`: it says STOP; `on_lost`: the lane ended, whoever ended it."""
        self.connection = connection
        self._send = connection.send
        self._reactor = reactor
        self._waiter = waiter
        self._slab = slab
        self._tally = tally
        self._gate = gate
        self._on_stop = on_stop
        self._on_lost = on_lost
        self._in_flight: dict[int, Submitted] = {}
        self._sampled: dict[int, int] = {}  # call id -> when it was submitted, in ns
        self._tasks: dict[int, Future] = {}  # of the other end, by call id
        self._given_up: set[Task] = set()  # cancelled by the other end, and not ended yet
        # errors that wait for room in the outbox: one a call in flight at most
        self._untold: deque[bytes] = deque()
        self._call_ids = itertools.count(1)
        self._sent = SentFunctions()
        self._numbers = self._sent.numbers
        self._functions = ReceivedFunctions()
        self._has_classes = False  # the other end has sent a function of another class than LATENCY
        self._deferred = 0  # plain functions that wait as steps
        connection.on_message = self._on_message
        connection.on_close = self._on_close

    @property
    def in_flight(self) -> int:
        """Calls that wait for their result."""
        return len(self._in_flight)

    def tasks(self) -> list[Task]:
        """Those of the other end that have not ended."""
        works = [*map(_work_of, self._tasks.values()), *self._given_up]
        return [each for each in works if type(each) is Task and not each.finished]

    def attach(self) -> None:
        """Take part in the reactor's turns from now on."""
        self.connection.attach(self._reactor)

    def submit(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Submitted:
        """Run function(*args) at the other end; the future of its result. A coroutine function runs
        as a task there.

        Raises PeerLostError, BackpressureError, LocalProtocolError (over a limit), ShmFull,
        TypeError for what is no function, and what pickling raises.
        """
        if RUNNING.others and RUNNING.value is not LATENCY and marked_class(function) is None:
            function = _Inherited(function, RUNNING.value)
        try:
            number = self._numbers.get(function)
        except TypeError:  # it has no hash, so it carries state
            return self._submit_pickled(function, args)
        if number is None:
            number = self._number_of(function)
            if number is None:
                return self._submit_pickled(function, args)
        call_id = next(self._call_ids)
        kind = CALL if call_id & SAMPLE_MASK else TIMED
        form = PLAIN
        blocks: Sequence[NDArray[Any]] = ()
        if not are_plain(map(type, args)) or len(payload := dump_plain(args)) > APART_BYTES:
            form, payload, blocks = encode(args, self._slab)
        body = payload + _pack(kind, form, number, call_id)
        future = Submitted(self._waiter, lane=self, call_id=call_id)
        self._in_flight[call_id] = future
        if kind == TIMED:
            self._sampled[call_id] = time.perf_counter_ns()
        try:
            # failpoint: mesh.before_call
            self._send(body, blocks)
        except BaseException:
            # the lane may have ended since, and its calls with it
            self._in_flight.pop(call_id, None)
            self._sampled.pop(call_id, None)
            raise
        # failpoint: mesh.after_call
        return future

    def _submit_pickled(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Submitted:
        """The same, of a function that goes with each call."""
        task_class = class_of(function)
        if type(function) is _Inherited:
            function = function.function
        run: Callable[..., Any] = call_pickled
        if not task_class == LATENCY == RUNNING.value:
            run = _Inherited(call_pickled, task_class)
        return self.submit(run, (pickle_function(function), args))

    def _number_of(self, function: Callable[..., Any]) -> int | None:
        """That which the other end knows the function by, which is told of it if need be; None for
        one that must go with each call."""
        number = self._sent.find(function)
        if number is not None or not may_go_once(function):
            return number
        pickled = pickle_function(function)
        if not self._sent.make_room(pickled):
            return None
        number = next(self._call_ids)  # never used twice
        self._send(pickled + _pack(FUNCTION, PICKLE, number, 0))
        self._sent.keep(function, number)
        return number

    def cancel(self, future: Submitted, error: BaseException | None) -> bool:
        """Give a call up, and tell the other end so; False when it was complete before.

        error: what it completes with; None: a CancelledError. A function that has begun may run to
        its end there.
        """
        if self._in_flight.pop(future.call_id, None) is None:
            return False
        self._sampled.pop(future.call_id, None)
        # it is gone, or too much waits for it: nobody waits for the result all the same
        with contextlib.suppress(ShardError):
            self._send(_pack(CANCEL, PICKLE, 0, future.call_id))
        if error is None:
            error = CancelledError(
                f"a call to {self.connection.peer} was cancelled here; it may have run"
            )
        return future.set_error(error)

    def room(self) -> Future:
        """A future done when it is worth trying again to send what found too much waiting: the
        oldest call has been answered, or ROOM_AGAIN_S has passed."""
        room = Future(self._waiter)
        again = partial(room.set_result, None)
        # RuntimeError: another thread submits
        with contextlib.suppress(StopIteration, RuntimeError):
            next(iter(self._in_flight.values())).when_done(lambda _: again())
        self._reactor.call_soon(partial(self._reactor.call_later, ROOM_AGAIN_S, again))
        return room

    def refuse(self, reason: str) -> None:
        """Answer every further call of the other end with ClosedError(reason)."""
        self._functions = _Refusal(reason)

    def stop(self) -> None:
        """Tell the other end to finish."""
        self._send(_pack(STOP, PICKLE, 0, 0))

    def close(self) -> None:
        """End the lane. In the reactor's thread."""
        self.connection.close()

    # -- the other end speaks ----------------------------------------------------------------------

    def _on_message(self, body: memoryview, blocks: Blocks = ()) -> None:
        try:
            kind, form, number, call_id = _unpack(body, -16)
        except struct.error as error:
            raise RemoteProtocolError(
                f"message of {len(body)} bytes, at least 16 expected"
            ) from error
        if kind == CALL:
            self._tally.calls += 1
            try:
                # failpoint: mesh.before_run
                if form == PLAIN:
                    value = self._functions[number](*load_plain(body))
                else:
                    value = self._functions[number](*decode(form, body, blocks))
                    if blocks:
                        blocks.clear()  # what the function did not keep goes back before the answer
                # failpoint: mesh.after_run
                if (
                    type(value) in PLAIN_TYPES
                    and len(payload := dump_plain((value,))) <= APART_BYTES
                ):
                    self._send(payload + _pack(RESULT, PLAIN, 0, call_id))
                elif type(value) in _LATER:
                    self._answer_later(call_id, value)
                else:
                    self._answer(call_id, value)
                # failpoint: mesh.after_answer
            except BaseException as error:
                # whatever a function raises, an exit too, ends its call and not the shard
                self._answer_error(call_id, error)
        elif kind == RESULT:
            # failpoint: mesh.result_received
            future = self._in_flight.pop(call_id, None)
            if future is None:
                return  # cancelled
            if not call_id & SAMPLE_MASK:
                self._count_call(call_id)
            try:
                (value,) = load_plain(body) if form == PLAIN else decode(form, body, blocks)
            except Exception as error:
                why = f"{type(error).__name__}: {safe_text(error)}"
                future.set_error(ShardError(f"the result cannot be read here: {why}"))
            else:
                future.set_result(value)
        elif kind == TIMED:  # a call whose time is taken
            began = time.perf_counter_ns()
            self._on_message(
                memoryview(bytes(body[:-16]) + _pack(CALL, form, number, call_id)), blocks
            )
            self._tally.run_ns[bucket(time.perf_counter_ns() - began)] += 1
        else:
            self._on_rare(kind, number, call_id, body, blocks)

    def _answer(self, call_id: int, value: Any) -> None:
        form, payload, blocks = encode((value,), self._slab)
        self._send(payload + _pack(RESULT, form, 0, call_id), blocks)

    def _on_rare(
        self, kind: int, number: int, call_id: int, body: memoryview, blocks: Blocks
    ) -> None:
        if kind == ERROR:
            future = self._in_flight.pop(call_id, None)
            self._sampled.pop(call_id, None)
            if future is not None:
                future.set_error(unpickle_error(body))
        elif kind == FUNCTION:
            # failpoint: mesh.function_received
            pickled = body[: -TRAILER.size]
            self._functions.keep(
                number, self._in_its_class(unpickle_function(pickled)), len(pickled)
            )
        elif kind == CANCEL:
            task = self._tasks.pop(call_id, None)
            if task is not None:
                self._tally.cancelled += 1
                self._cancel(task)
        elif kind == STOP:
            self._on_stop()
        else:
            raise RemoteProtocolError(f"message of unknown kind {kind}")

    def _in_its_class(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as its calls run here: at once, or as a task of the class that it was put
        into.
        """
        task_class = class_of(function)
        if task_class == LATENCY:
            return self._in_turn(function) if self._has_classes else function
        if not self._has_classes:
            self._has_classes = True
            self._reactor.ask_always(self.connection)
            for number, earlier in self._functions.items():
                self._functions[number] = self._in_turn(earlier)
        return lambda *args: self._reactor.spawn(_run(function, args), queue=task_class)

    def _in_turn(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of LATENCY as its calls run here where there are classes: at once if no call
        waits, before it or behind it, else as a step.
        """

        def run(*args: Any) -> Any:
            if not (self._deferred or self._reactor.is_shared() or self.connection.has_work()):
                return function(*args)
            self._gate.enter()  # a shard that stops ends what it has taken on
            self._deferred += 1
            future = _Deferred()
            self._reactor.call_soon(lambda: self._run_deferred(function, args, future))
            return future

        return run

    def _run_deferred(
        self, function: Callable[..., Any], args: tuple[Any, ...], future: _Deferred
    ) -> None:
        self._deferred -= 1
        try:
            if future.finished:
                return  # cancelled meanwhile
            value = function(*args)
            if type(value) in _LATER:
                value = self._begin(value)
                future.begun = value
                value.when_done(lambda done: self._end_deferred(done, future))
            else:
                future.set_result(value)
        except BaseException as error:
            # whatever a function raises, an exit too, ends its call and not the shard
            future.set_error(error)
        finally:
            self._gate.leave()

    def _end_deferred(self, done: Future, future: _Deferred) -> None:
        error = done.error()
        if error is None:
            future.set_result(done.result())
        else:
            future.set_error(error)
        if type(done) is Task:
            self._gate.leave()

    def _begin(self, value: Any) -> Any:
        """What is answered when it is done: the task of a coroutine, which passes the gate, or the
        future. A future that is no task holds up no shutdown.
        """
        task = self._reactor.spawn(value) if type(value) is CoroutineType else value
        if type(task) is Task:
            self._tally.tasks += 1
            self._gate.enter()
        return task

    def _answer_later(self, call_id: int, value: Any) -> None:
        """A coroutine or a future: the answer follows when it is done."""
        task = self._begin(value)
        self._tasks[call_id] = task
        task.when_done(lambda done: self._answer_done(call_id, done))

    def _cancel(self, task: Future) -> None:
        """Its caller gave it up, and gets no answer."""
        task = _work_of(task)
        task.cancel(CancelledError("the caller cancelled it"))
        if type(task) is Task:
            self._given_up.add(task)
            task.step()  # at once: what follows on the lane finds it cancelled

    def _answer_done(self, call_id: int, done: Future) -> None:
        is_awaited = self._tasks.pop(call_id, None) is not None
        if not is_awaited:  # by the caller, who cancelled it
            work = _work_of(done)
            if type(work) is Task:
                self._given_up.discard(work)
                work.tell_unheard()
            if type(done) is Task:
                self._gate.leave()
            return
        try:
            value = done.result()
            if type(value) in PLAIN_TYPES and len(payload := dump_plain((value,))) <= APART_BYTES:
                self._send(payload + _pack(RESULT, PLAIN, 0, call_id))
            else:
                self._answer(call_id, value)
        except BaseException as error:
            self._answer_error(call_id, error)
        finally:
            if type(done) is Task:
                self._gate.leave()

    def _answer_error(self, call_id: int, error: BaseException) -> None:
        self._tally.failures += 1
        message = pickle_error(error) + _pack(ERROR, PICKLE, 0, call_id)
        self._send_error(message, safe_text(error))

    def _send_error(self, message: bytes, text: str) -> None:
        """Tell the caller, when there is room: a call that nobody tells of waits for ever."""
        if self.connection.error is not None:
            return  # who asked is gone
        try:
            self._send(message)
        except PeerLostError:
            return  # gone meanwhile
        except BackpressureError:  # also of a result that found no room
            self._untold.append(message)
            if len(self._untold) == 1:
                self._reactor.call_later(ERROR_AGAIN_S, self._send_untold)
        except ShardError as unsent:
            logger.warning(
                "%s was not told that its call failed (%s): %s",
                self.connection.peer,
                text,
                str(unsent),
            )

    def _send_untold(self) -> None:
        while self._untold:
            try:
                self._send(self._untold[0])
            except BackpressureError:
                self._reactor.call_later(ERROR_AGAIN_S, self._send_untold)
                return
            except (PeerLostError, ClosedError):  # with the connection its calls have ended
                self._untold.clear()
                return
            except ShardError as error:
                logger.warning(
                    "%s was not told that its call failed: %s", self.connection.peer, str(error)
                )
            self._untold.popleft()

    def _count_call(self, call_id: int) -> None:
        began = self._sampled.pop(call_id, None)
        if began is not None:
            self._tally.call_ns[bucket(time.perf_counter_ns() - began)] += 1

    def _on_close(self, connection: ShmConnection, error: ShardError) -> None:
        in_flight, self._in_flight = self._in_flight, {}
        self._sampled.clear()
        self._on_lost(self, error)
        # a submit() of another thread may have the table in its hands
        for future in list(in_flight.values()):
            future.set_error(type(error)(f"{error}; the function may have run"))


class _Deferred(Future, kw_only=True):
    """The answer to a call of a function that waits as a step."""

    begun: Future | None = None  # what the function has returned, where that is awaited


# What a function returns whose answer comes later.
_LATER = frozenset({CoroutineType, Future, Gathered, Task, Submitted, _Deferred})


def is_answered_later(value: object) -> bool:
    """Whether it is to be awaited: a coroutine, a task or a future of the engine."""
    return type(value) in _LATER


def _work_of(answered: Future) -> Future:
    """What is to be cancelled where that is given up."""
    if type(answered) is _Deferred and answered.begun is not None:
        return answered.begun
    return answered


async def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A function of another class than LATENCY, plain or not, as a task."""
    value = call_outside_asyncio(function, *args)
    return await value if type(value) in _LATER else value


class _Inherited:
    """A function that goes in a class which is not its own: that of the task which submits it."""

    def __init__(self, function: Callable[..., Any], task_class: TaskClass) -> None:
        self.function = function
        # a function by value is looked at each time that it is sent: its code may have changed
        self.is_sent_once = may_go_once(function) and (
            type(function) is not FunctionType or is_found_by_name(function)
        )
        in_class(task_class)(self)

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is _Inherited
            and self.function == other.function
            and class_of(self) == class_of(other)
        )

    def __hash__(self) -> int:
        return hash((self.function, class_of(self)))

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class _Refusal(ReceivedFunctions):
    """The functions of a lane that takes on no more calls: whichever is asked for, it is not to be
    had.
    """

    def __init__(self, reason: str) -> None:
        super().__init__()
        self._reason = reason

    def keep(self, number: int, function: Callable[..., Any], pickled_bytes: int) -> None:
        """Functions that still arrive are not kept."""

    def __missing__(self, number: int) -> Callable[..., Any]:
        raise ClosedError(self._reason)


def run_here(reactor: Reactor, function: Callable[..., Any], args: tuple[Any, ...]) -> Future:
    """A call to the process that one is in: no message, the same rules."""
    task_class = marked_class(function) or RUNNING.value
    if not task_class == LATENCY == RUNNING.value:  # the one or the other is timed
        return reactor.spawn(_run(function, args), queue=task_class)
    try:
        value = function(*args)
    except BaseException as error:
        future = Future()
        future.set_error(error)
        return future
    if type(value) in _LATER:
        return reactor.spawn(value, queue=LATENCY) if type(value) is CoroutineType else value
    future = Future()
    future.set_result(value)
    return future
