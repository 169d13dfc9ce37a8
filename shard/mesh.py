"""Functions sent from one process of a group to another, over one connection per pair.

    offset  size  field     meaning
         0     1  kind      CALL, RESULT, ERROR, FUNCTION, STOP
         1     3  zero
         4     4  function  its number on this lane (CALL, FUNCTION)
         8     8  call_id   pairs a result with its call; 0 where none is wanted
        16   ...  pickle    CALL: the arguments; RESULT: the value; ERROR: (exception, traceback text); FUNCTION: the function

Pickle is safe here and only here: both ends are processes that one parent started, on memory that nobody else was handed
(SECURITY.md). Buffers travel out of band (pickle protocol 5) as the connection's blocks, so arrays of the slab cross by
reference. A function is pickled once per lane and known by number after that.
"""

from __future__ import annotations

import inspect
import itertools
import pickle
import struct
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shard.errors import PeerLostError, RemoteProtocolError, ShardError
from shard.future import Future, Waiter
from shard.reactor import Reactor
from shard.task import Task
from shard.transport import Blocks, Connection

HEADER = struct.Struct("<BxxxIQ")
assert HEADER.size == 16  # the table above
CALL, RESULT, ERROR, FUNCTION, STOP = 1, 2, 3, 4, 5

# Functions known by number on one lane; beyond it (lambdas made in a loop) each is sent along with its call.
FUNCTIONS_MAX = 4096


class RemoteTraceback(Exception):
    """The cause of an exception that was raised in another shard: its traceback there, as text."""


class Tally:
    """What one process ran for others; the reactor's thread alone writes it."""

    def __init__(self) -> None:
        self.calls = self.failures = self.tasks = 0


class Lane:
    """Calls to one other process of the group, and from it. Owned by the process at this end."""

    def __init__(
        self,
        connection: Connection[Any],
        reactor: Reactor,
        waiter: Waiter | None,
        tally: Tally,
        on_stop: Callable[[], None],
        on_lost: Callable[[ShardError], None],
    ) -> None:
        self._connection = connection
        self._reactor = reactor
        self._waiter = waiter
        self._tally = tally
        self._on_stop = on_stop
        self._on_lost = on_lost
        self._in_flight: dict[int, Future] = {}
        self._call_ids = itertools.count(1)
        self._numbers: dict[Callable[..., Any], int] = {}
        self._functions: dict[int, Callable[..., Any]] = {}
        connection.on_message = self._on_message
        connection.on_close = self._on_close

    @property
    def in_flight(self) -> int:
        """Calls that wait for their result."""
        return len(self._in_flight)

    def attach(self) -> None:
        """Take part in the reactor's turns from now on."""
        self._connection.attach(self._reactor)

    def submit(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Future:
        """Run function(*args) at the other end; the future of its result. A coroutine function runs as a task there."""
        blocks: list[NDArray[Any]] = []
        arguments = pickle.dumps(args, 5, buffer_callback=_collector(blocks))
        number = self._numbers.get(function)
        if number is None:
            number = self._send_function(function)
        call_id = next(self._call_ids)
        future = Future(self._waiter)
        self._in_flight[call_id] = future
        try:
            self._connection.send(HEADER.pack(CALL, number, call_id) + arguments, blocks)
        except BaseException:
            del self._in_flight[call_id]
            raise
        return future

    def _send_function(self, function: Callable[..., Any]) -> int:
        if len(self._numbers) >= FUNCTIONS_MAX:
            self._numbers.clear()
        number = next(self._call_ids)  # never used twice
        self._connection.send(HEADER.pack(FUNCTION, number, 0) + _pickle_function(function))
        self._numbers[function] = number
        return number

    def stop(self) -> None:
        """Tell the other end to finish."""
        self._connection.send(HEADER.pack(STOP, 0, 0))

    def close(self) -> None:
        """End the lane. In the reactor's thread."""
        self._connection.close()

    # -- the other end speaks ------------------------------------------------------------------------------------------

    def _on_message(self, body: memoryview, blocks: Blocks = ()) -> None:
        kind, number, call_id = HEADER.unpack_from(body)
        if kind == CALL:
            self._run(number, call_id, body[HEADER.size :], blocks)
        elif kind == RESULT or kind == ERROR:
            future = self._in_flight.pop(call_id, None)
            if future is not None:
                self._finish(future, kind, body[HEADER.size :], blocks)
        elif kind == FUNCTION:
            if len(self._functions) >= FUNCTIONS_MAX:
                self._functions.pop(next(iter(self._functions)))
            self._functions[number] = _unpickle_function(body[HEADER.size :])
        elif kind == STOP:
            self._on_stop()
        else:
            raise RemoteProtocolError(f"message of unknown kind {kind}")

    def _run(self, number: int, call_id: int, arguments: memoryview, blocks: Blocks) -> None:
        tally = self._tally
        tally.calls += 1
        try:
            value = self._functions[number](*pickle.loads(arguments, buffers=blocks))
            if inspect.iscoroutine(value):
                tally.tasks += 1
                task = self._reactor.spawn(value)
                task.add_done_callback(lambda done: self._answer_task(call_id, task))
                return
        except Exception as error:
            self._answer_error(call_id, error)
        else:
            self._answer(call_id, value)

    def _answer_task(self, call_id: int, task: Task) -> None:
        error = task.error()
        if error is None:
            self._answer(call_id, task.result())
        else:
            self._answer_error(call_id, error)

    def _answer(self, call_id: int, value: Any) -> None:
        blocks: list[NDArray[Any]] = []
        try:
            payload = pickle.dumps(value, 5, buffer_callback=_collector(blocks))
            self._connection.send(HEADER.pack(RESULT, 0, call_id) + payload, blocks)
        except PeerLostError:
            return  # who asked is gone
        except Exception as error:
            self._answer_error(call_id, error)

    def _answer_error(self, call_id: int, error: BaseException) -> None:
        self._tally.failures += 1
        text = "".join(traceback.format_exception(error))
        try:
            payload = pickle.dumps((error, text), 5)
            pickle.loads(payload)  # an exception may pickle and yet not load: then the caller gets its text
        except Exception:
            payload = pickle.dumps((ShardError(f"{type(error).__qualname__}: {error}"), text), 5)
        try:
            self._connection.send(HEADER.pack(ERROR, 0, call_id) + payload)
        except PeerLostError:
            return  # who asked is gone

    def _finish(self, future: Future, kind: int, payload: memoryview, blocks: Blocks) -> None:
        try:
            value = pickle.loads(payload, buffers=blocks)
        except Exception as error:
            future.set_error(ShardError(f"the result cannot be read here: {type(error).__name__}: {error}"))
            return
        if kind == RESULT:
            future.set_result(value)
        else:
            raised, text = value
            raised.__cause__ = RemoteTraceback("\n" + text)
            future.set_error(raised)

    def _on_close(self, connection: Connection[Any], error: ShardError) -> None:
        in_flight, self._in_flight = self._in_flight, {}
        for future in in_flight.values():
            future.set_error(type(error)(f"{error}; the function may have run"))
        self._on_lost(error)


def _collector(blocks: list[NDArray[Any]]) -> Callable[[pickle.PickleBuffer], None]:
    """What pickle calls with each out-of-band buffer; None from it means: not in the pickle."""

    def collect(buffer: pickle.PickleBuffer) -> None:
        blocks.append(np.asarray(buffer.raw()))

    return collect


def _pickle_function(function: Callable[..., Any]) -> bytes:
    """By name where it has one, else (lambdas, functions of __main__) by value through dill, which multiprocess brings."""
    try:
        return b"p" + pickle.dumps(function, 5)
    except (pickle.PicklingError, AttributeError, TypeError):
        import dill  # 40 ms, and only lambdas need it

        return b"d" + bytes(dill.dumps(function))


def _unpickle_function(payload: memoryview) -> Callable[..., Any]:
    try:
        if payload[0] == ord("d"):
            import dill

            function = dill.loads(bytes(payload[1:]))
        else:
            function = pickle.loads(payload[1:])
    except Exception as error:
        reason = ShardError(f"the function cannot be found in this shard: {type(error).__name__}: {error}")

        def refuse(*args: Any) -> None:
            raise reason

        return refuse
    assert callable(function)
    return function  # type: ignore[no-any-return]
