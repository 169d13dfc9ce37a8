"""A supervisor's children: a process or a thread each, with an object in it whose methods are
called from outside, one after the other.

    state     start()   send()                   it dies                        shutdown()
    stopped   running   starts it                -                              stopped
    died      running   starts it; the request   -                              stopped
                        is answered with an
                        error that names it
    running   -         the request is in        with requests in flight: each  stopped; what was
                        flight                   is answered with that error,   in flight is
                                                 and it is stopped; else died   answered with an
                                                                                error

Every request is answered once, or given up by whoever waited for it: what comes later is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import signal
import socket
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any
from uuid import uuid1

from prpc_engine import errors
from prpc_engine.ding.child_channel import ChildChannel, channel_pair, encoded
from shard import RemoteTraceback, runtime

# A child that is idle ends at once; one that is in a method for longer gets SIGTERM, then SIGKILL.
IDLE_END_S = 0.5
TERMINATE_S = 5.0
NAMED_MAX = 8  # requests that an error names

logger = logging.getLogger("prpc")


@dataclass
class SendPayload:
    """A request: the method of that child, with these arguments. As DI-engine's.

    req_id  any text that no other request in flight has
    """

    proc_id: int
    req_id: str = field(default_factory=lambda: uuid1().hex)
    method: Any = None
    args: Any = field(default_factory=list)
    kwargs: Any = field(default_factory=dict)


@dataclass
class RecvPayload:
    """Its answer: what the method returned, or the error. As DI-engine's."""

    proc_id: int
    req_id: str | None = None
    method: Any = None
    data: Any = None
    err: BaseException | None = None
    extra: Any = None


class ReserveMethod(Enum):
    """What is no method of the child's object."""

    SHUTDOWN = "_shutdown"
    GETATTR = "_getattr"


class ChildType(Enum):
    """What a child is."""

    PROCESS = "process"
    THREAD = "thread"


def method_of(payload: Any) -> Any:
    """Its method. DI-engine's ReserveMethod counts as ours."""
    method = payload.method
    return ReserveMethod(method.value) if isinstance(method, Enum) else method


def _run(instance: Any, method: Any, args: Any, kwargs: Any) -> Any:
    if method is ReserveMethod.GETATTR:
        return getattr(instance, args[0])
    return getattr(instance, method)(*args, **kwargs)


class Handler:
    """A child's object, and what becomes of a request there. Lives in the child.

    init  makes the object, or is it. Where it raises, each request is answered with that.
    """

    def __init__(self, proc_id: int, init: Any, shm_buffer: Any, shm_callback: Any) -> None:
        self._proc_id, self._shm_buffer, self._shm_callback = proc_id, shm_buffer, shm_callback
        self._failure: Exception | None = None
        try:
            self._instance = init() if callable(init) else init
        except Exception as error:
            self._failure = error
            logger.warning("child %d cannot begin: %s", proc_id, errors.text_of(error))

    def answer(self, req_id: str, method: Any, arguments: Callable[[], Any]) -> RecvPayload:
        """To a request whose arguments() are made here, and may raise."""
        answer = RecvPayload(self._proc_id, req_id, method)
        try:
            if self._failure is not None:
                raise self._failure
            args, kwargs = arguments()
            answer.data = _run(self._instance, method, args, kwargs)
            if self._shm_callback is not None and self._shm_buffer is not None:
                self._shm_callback(answer, self._shm_buffer)
        except Exception as error:
            answer.data, answer.err = None, error
        return answer


def run_child(
    proc_id: int, init: Any, sock: socket.socket, shm_buffer: Any, shm_callback: Any
) -> None:
    """What a child process does, until its supervisor closes the other end, or dies."""
    channel = ChildChannel(sock)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        handler = Handler(proc_id, init, shm_buffer, shm_callback)
        while True:
            frame = channel.receive()
            assert frame is not None, "this end waits"
            req_id, method = frame.header
            channel.send(_encoded_answer(handler.answer(req_id, method, frame.content)))


def _encoded_answer(answer: RecvPayload) -> list[Any]:
    header = answer.req_id, answer.method
    trace = ""
    if answer.err is not None:
        trace = "".join(traceback.format_exception(answer.err))
    try:
        return encoded(header, (answer.data, answer.err, answer.extra, trace))
    except ValueError as error:
        if answer.err is not None:
            text = f"{type(answer.err).__name__}: {errors.text_of(answer.err)}"
            return encoded(header, (None, RuntimeError(text), None, trace))
        told = errors.BadArguments(f"the result of {_name(answer.method)} cannot be sent: {error}")
        return encoded(header, (None, told, None, ""))


def _name(method: Any) -> str:
    return "reading an attribute" if method is ReserveMethod.GETATTR else f"{method}()"


class SupervisedChild(ABC):
    """What both kinds have in common. Owned by a Supervisor; thread-safe.

    lock     of that supervisor, which guards this, too
    deliver  takes an answer
    changed  is told when there is something else to wait for
    """

    def __init__(
        self,
        proc_id: int,
        init: Any,
        shm_buffer: Any,
        shm_callback: Any,
        lock: AbstractContextManager[Any],
        deliver: Callable[[RecvPayload], object],
        changed: Callable[[], object],
    ) -> None:
        self.proc_id, self._lock = proc_id, lock
        self._init, self._shm_buffer, self._shm_callback = init, shm_buffer, shm_callback
        self._deliver, self._changed = deliver, changed
        self.in_flight: dict[Any, Any] = {}  # req_id -> method, oldest first

    @abstractmethod
    def describe(self) -> str:
        """Its name in errors."""

    @abstractmethod
    def start(self) -> None:
        """Does nothing where it runs."""

    @abstractmethod
    def send(self, payload: Any) -> None:
        """Have it run that. Raises BadArguments for arguments that cannot be sent."""

    @abstractmethod
    def ask_to_end(self) -> None:
        """The first step of shutdown(), which does not wait."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """End it, within so many seconds; None: TERMINATE_S. What is in flight is answered with an
        error.
        """

    def restart(self) -> None:
        """shutdown(), and a new one in its place, whose object is made anew."""
        self.shutdown()
        self.start()

    def give_up(self, req_id: str) -> None:
        """Nobody waits for that answer any more."""
        with self._lock:
            self.in_flight.pop(req_id, None)

    def answered(self, answer: RecvPayload) -> None:
        """What came for a request; dropped where it was given up."""
        with self._lock:
            if self.in_flight.pop(answer.req_id, self) is not self:
                self._deliver(answer)

    def fail_all(self, why: str) -> None:
        """Answer all that is in flight with an error, which may have run or not."""
        lost, self.in_flight = self.in_flight, {}
        if not lost:
            return
        names = [f"{_name(method)} ({req_id})" for req_id, method in list(lost.items())[:NAMED_MAX]]
        more = f" and {len(lost) - NAMED_MAX} more" if len(lost) > NAMED_MAX else ""
        text = f"{why} with {len(lost)} requests in flight: {', '.join(names)}{more}"
        for req_id, method in lost.items():
            error = errors.MaybeExecuted(text)
            self._deliver(RecvPayload(self.proc_id, req_id, method, err=error))


class ChildProcess(SupervisedChild):
    """A child in a process of its own."""

    def __init__(self, *args: Any, mp_ctx: Any) -> None:
        super().__init__(*args)
        self._context = mp_ctx
        self._process: Any = None
        self._pid = 0
        self._is_ending = False
        self._untold = ""  # how it died, where no request could be told
        self.channel: ChildChannel | None = None
        self.pidfd = -1

    def describe(self) -> str:
        return f"child {self.proc_id} (process {self._pid})"

    def start(self) -> None:
        with self._lock:
            if self._process is None:
                self._start()

    def _start(self) -> None:
        channel, theirs = channel_pair()
        try:
            process = self._context.Process(
                target=run_child,
                args=(self.proc_id, self._init, theirs, self._shm_buffer, self._shm_callback),
                name=f"supervisor_child_{self.proc_id}",
                daemon=True,
            )
            process.start()
            self.pidfd = os.pidfd_open(process.pid)
        except BaseException:
            channel.close()
            raise
        finally:
            theirs.close()
        self._process, self._pid, self.channel = process, process.pid, channel
        self._is_ending = False
        self._changed()

    def send(self, payload: Any) -> None:
        method = method_of(payload)
        try:
            pieces = encoded((payload.req_id, method), (tuple(payload.args), dict(payload.kwargs)))
        except ValueError as error:
            raise errors.BadArguments(
                f"arguments of {_name(method)} for child {self.proc_id}: {error}"
            ) from error
        with self._lock:
            if self._process is not None and _has_ended(self.pidfd):
                self.receive()
            if self._process is None:
                logger.warning("child %d is started again", self.proc_id)
                self._start()
                if self._untold:
                    told = errors.NotSent(f"{self._untold}; it is started again")
                    self._untold = ""
                    self._deliver(RecvPayload(self.proc_id, payload.req_id, method, err=told))
                    return
            assert self.channel is not None
            self.in_flight[payload.req_id] = method
            with contextlib.suppress(OSError):  # it has just died: receive() says so
                self.channel.send(pieces)
            if self.channel.has_unsent:
                self._changed()

    def receive(self) -> None:
        """Deliver the answers that have come, and notice its death. With the lock held."""
        channel = self.channel
        if channel is None:
            return
        is_over = _has_ended(self.pidfd)  # before: what it said until then is there
        try:
            channel.flush()
        except OSError:
            is_over = True
        try:
            while (frame := channel.receive()) is not None:
                req_id, method = frame.header
                self.answered(self._answer(req_id, method, frame.content))
        except (EOFError, OSError):
            is_over = True
        if is_over:
            self._ended()

    def _answer(self, req_id: str, method: Any, content: Callable[[], Any]) -> RecvPayload:
        answer = RecvPayload(self.proc_id, req_id, method)
        try:
            answer.data, answer.err, answer.extra, trace = content()
        except Exception as error:
            answer.err = errors.BadArguments(
                f"the answer of {self.describe()} to {_name(method)} cannot be read: "
                f"{type(error).__name__}: {errors.text_of(error)}"
            )
        else:
            if answer.err is not None:
                answer.err.__cause__ = RemoteTraceback(f"\n{trace}")
        return answer

    def _ended(self) -> None:
        """It died, or closed its end."""
        how = self._reap(TERMINATE_S)
        if self._is_ending:
            self.fail_all(f"{self.describe()} was shut down")
            return
        text = f"{self.describe()} {how}"
        logger.warning("%s; the next request to it starts it again", text)
        self._untold = "" if self.in_flight else text
        self.fail_all(text)

    def _reap(self, timeout: float) -> str:
        """Wait for its end, kill it where that takes longer, and say how it ended."""
        process, channel = self._process, self.channel
        if not _has_ended(self.pidfd, timeout):
            process.kill()
        process.join()
        code = process.exitcode
        process.close()
        os.close(self.pidfd)
        self.pidfd, self._process, self.channel = -1, None, None
        if channel is not None:
            channel.close()
        self._changed()
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name} (exit code {code})"
        return f"ended with exit code {code}"

    def ask_to_end(self) -> None:
        with self._lock:
            if self.channel is not None:
                self._is_ending = True
                self.channel.hang_up()

    def shutdown(self, timeout: float | None = None) -> None:
        with self._lock:
            self._untold = ""
            if self._process is None:
                return
            self.ask_to_end()
            text = f"{self.describe()} was shut down"
            limit = TERMINATE_S if timeout is None else timeout
            if not _has_ended(self.pidfd, min(IDLE_END_S, limit)):
                self._process.terminate()
            self._reap(limit)
            self.fail_all(text)

    def forget(self) -> None:
        """In a fork of the supervisor's process: it is not ours."""
        self._process = self.channel = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _has_ended(pidfd: int, timeout: float = 0.0) -> bool:
    """Whether that process has, or does within so many seconds. Process.join(timeout) looks at a
    pipe instead, which a process may close long before its end, and its own children keep open.
    """
    look = select.poll()
    look.register(pidfd, select.POLLIN)
    return bool(look.poll(timeout * 1000))


def _arguments(payload: Any) -> Any:
    return payload.args, payload.kwargs


class ChildThread(SupervisedChild):
    """A child in a thread of this process. One that does not return from a method is left behind,
    and its answer dropped.
    """

    def __init__(self, *args: Any, mp_ctx: Any = None) -> None:
        super().__init__(*args)
        self._thread: Any = None
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def describe(self) -> str:
        return f"child {self.proc_id} (a thread)"

    def start(self) -> None:
        with self._lock:
            if self._thread is None:
                requests = self._requests = queue.SimpleQueue()
                self._thread = runtime.Thread(
                    target=self._serve,
                    args=(requests,),
                    name=f"supervisor_child_{self.proc_id}",
                    daemon=True,
                )
                self._thread.start()

    def _serve(self, requests: queue.SimpleQueue[Any]) -> None:
        try:
            self._answer_all(requests)
        except BaseException as error:  # SystemExit, say: what a process would end by
            with self._lock:
                if requests is self._requests:
                    self._thread, self._requests = None, queue.SimpleQueue()
                    text = f"{self.describe()} was ended by {type(error).__name__}"
                    logger.warning("%s; the next request to it starts it again", text)
                    self.fail_all(text)

    def _answer_all(self, requests: queue.SimpleQueue[Any]) -> None:
        handler = Handler(self.proc_id, self._init, None, None)
        while (payload := requests.get()) is not None:
            given = partial(_arguments, payload)
            answer = handler.answer(payload.req_id, method_of(payload), given)
            with self._lock:
                if requests is self._requests:  # else another one is in its place
                    self.answered(answer)

    def send(self, payload: Any) -> None:
        with self._lock:
            self.start()
            self.in_flight[payload.req_id] = method_of(payload)
            self._requests.put(payload)

    def ask_to_end(self) -> None:
        with self._lock:
            if self._thread is not None:
                self._requests.put(None)

    def shutdown(self, timeout: float | None = None) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._requests.put(None)
            self._requests = queue.SimpleQueue()
            self.fail_all(f"{self.describe()} was shut down")
        thread.join(TERMINATE_S if timeout is None else timeout)  # it may want the lock
        if thread.is_alive():
            logger.warning("%s has not ended; it is left behind", self.describe())

    def forget(self) -> None:
        """In a fork there are no threads."""
        self._thread = None
