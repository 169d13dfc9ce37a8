"""One server of a service: a table of methods, and what becomes of a request that names one.

    handler                   runs                                             answers
    plain function            at once, in the turn that its request arrived    with its value, in that turn
                              in                                               a Future or Deferred: when that is done
    async def                 as a task of the reactor (job.py)                with its value
    generator, async or not   as a task; only for client.stream()              with items as they are taken, then the end

Every request is answered: with the value, or with what went wrong. Two methods are there by themselves: prpc.health and
prpc.describe.
"""

from __future__ import annotations

import inspect
import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from prpc_engine.allow import AllowList
from prpc_engine.archive import DECODE_ERRORS
from prpc_engine.call import Call
from prpc_engine.deferred import Deferred
from prpc_engine.errors import ConfigError, DeadlineExceeded
from prpc_engine.halves import Inbox, Window
from prpc_engine.job import Job
from prpc_engine.message import CREDIT, TO_CALLER, Status, method_key
from shard import CONTEXT, CancelledError, Future, Gate, Reactor, Task, class_of

if TYPE_CHECKING:
    from prpc_engine.peer import Peer

# Tasks of one server at a time: what an overload may hold of our memory.
TASKS_MAX = 1024
# Calls that wait for one of them to end, and the bytes of their arguments: beyond either the caller is told to slow down.
QUEUE_CALLS_MAX = 65536
QUEUE_BYTES_MAX = 1 << 30

HEALTH, DESCRIBE = "prpc.health", "prpc.describe"
_LATER = frozenset({CoroutineType, GeneratorType, AsyncGeneratorType, Future, Deferred, Task, Call})
_STREAMS = (GeneratorType, AsyncGeneratorType)
Function = TypeVar("Function", bound=Callable[..., Any])


def idempotent(function: Function) -> Function:
    """Decorator: running this method twice is as good as once, so a client may send it again when it does not know."""
    function.prpc_idempotent = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class ServerStatistics:
    """What one server did."""

    requests: int = 0  # and notifications, whose handler ran or is queued
    failures: int = 0  # handlers that raised, for requests and notifications
    rejected: int = 0  # refused before a handler ran
    expired: int = 0  # whose deadline had passed before their handler could run
    cancelled: int = 0  # given up by their callers
    tasks: int = 0  # running now
    queued: int = 0  # waiting for one of those to end


@dataclass(frozen=True)
class Method:
    """What is known of one method; `signature` is None where Python knows none."""

    name: str
    signature: inspect.Signature | None
    kind: str  # "plain", "task", "stream"
    is_idempotent: bool
    text: str  # the first line of its docstring


@dataclass(frozen=True)
class Bounds:
    """Of one server. Raises ConfigError for what is not possible."""

    tasks_max: int = TASKS_MAX
    queue_calls_max: int = QUEUE_CALLS_MAX
    queue_bytes_max: int = QUEUE_BYTES_MAX

    def __post_init__(self) -> None:
        for name, least in (("tasks_max", 1), ("queue_calls_max", 0), ("queue_bytes_max", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r}: a whole number of at least {least} is allowed")


def public_methods(served: object) -> dict[str, Callable[..., Any]]:
    """What a server exposes of an object: its public methods, or the functions of a dict. Raises ConfigError."""
    if isinstance(served, Mapping):
        functions = dict(served)
        for name, function in functions.items():
            if not isinstance(name, str) or not callable(function):
                raise ConfigError(f"a dict of functions maps str to callables; it has {name!r}: {function!r}")
    else:
        functions = {
            name: getattr(served, name)
            for name in dir(served)
            if not name.startswith("_") and callable(getattr(served, name)) and not isinstance(getattr(served, name), type)
        }
    if not functions:
        raise ConfigError(f"{served!r} has no public method to serve: pass an object with public methods, or a dict of functions")
    return functions


def _describe(name: str, function: Callable[..., Any]) -> Method:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        signature = None
    kind = "plain"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        kind = "stream"
    elif inspect.iscoroutinefunction(function) or class_of(function) is not class_of(_describe):
        kind = "task"
    text = (inspect.getdoc(function) or "").partition("\n")[0]
    return Method(name, signature, kind, bool(getattr(function, "prpc_idempotent", False)), text)


class Server:
    """Methods under one target number. Owned by its node; called in the reactor's thread."""

    def __init__(
        self,
        service: str,
        server_id: int,
        target: int,
        served: object,
        bounds: Bounds | None = None,
        allow: AllowList | None = None,
    ) -> None:
        self.service = service
        self._allow = allow if allow is not None and allow.guards(service) else None  # None: nothing to ask
        self.server_id = server_id
        self.target = target
        self.bounds = bounds or Bounds()
        self.jobs = Gate(f"server {server_id} of {service!r}")  # running and queued ones are inside
        self.requests = self.failures = self.rejected = self.expired = self.cancelled = self.tasks = 0
        self._queue: deque[Job] = deque()
        self._queue_bytes = 0
        self._starting = False
        self._plain: dict[int, Callable[..., Any]] = {}  # what runs at once
        self._others: dict[int, Callable[..., Any]] = {}
        self._methods: dict[int, Method] = {}
        own = {HEALTH: self.health, DESCRIBE: self.describe}
        for name, function in [*public_methods(served).items(), *own.items()]:
            key = method_key(name)
            if key in self._methods:
                raise ConfigError(f"methods {name!r} and {self._methods[key].name!r} have the same CRC-32: rename one of them")
            method = self._methods[key] = _describe(name, function)
            (self._plain if method.kind == "plain" else self._others)[key] = function

    # -- what it tells of itself -----------------------------------------------------------------------------------------

    def statistics(self) -> ServerStatistics:
        """A snapshot."""
        return ServerStatistics(
            self.requests, self.failures, self.rejected, self.expired, self.cancelled, self.tasks, len(self._queue)
        )

    def health(self) -> dict[str, Any]:
        """Whether it takes on work, and how much it has."""
        state = "stopping" if self.jobs.closed else "serving"
        return {
            "service": self.service,
            "server_id": self.server_id,
            "state": state,
            "tasks": self.tasks,
            "queued": len(self._queue),
        }

    def describe(self) -> dict[str, dict[str, Any]]:
        """Its methods by name: signature, kind ("plain", "task", "stream"), whether idempotent, first line of the docstring."""
        return {
            method.name: {
                "signature": str(method.signature or "(...)"),
                "kind": method.kind,
                "idempotent": method.is_idempotent,
                "text": method.text,
            }
            for method in self._methods.values()
            if method.name not in (HEALTH, DESCRIBE)
        }

    @property
    def method_names(self) -> list[str]:
        """Sorted."""
        return sorted(self.describe())

    def stop(self) -> Future:
        """Take on nothing new; the future is done when what has begun is answered."""
        self._others.update({key: function for key, function in self._plain.items() if self._methods[key].name != HEALTH})
        self._plain = {key: self._plain[key] for key in self._plain if self._methods[key].name == HEALTH}
        return self.jobs.close()

    # -- requests --------------------------------------------------------------------------------------------------------

    def request(
        self, peer: Peer, call_id: int, key: int, timeout_ms: int, body: memoryview, blocks: list[NDArray[np.uint8]] | tuple[()]
    ) -> None:
        """Handle one request, or with call_id 0 one notification. `body` is good until the handler runs."""
        function = self._plain.get(key)
        if function is None:
            self._take_on(peer, call_id, key, timeout_ms, body, blocks, False)
            return
        if self._allow is not None and self._forbids(peer, call_id, key):
            return
        try:
            if blocks:
                arguments = peer.decoder.decode(body, blocks)
                blocks.clear()
            else:
                arguments = peer.decoder.decode_plain(body)
        except DECODE_ERRORS as error:
            self._refuse(peer, call_id, Status.BAD_ARGUMENTS, "ArchiveError", str(error))
            return
        self.requests += 1
        outer, CONTEXT.value = CONTEXT.value, (peer, timeout_ms)
        try:
            value = function(*arguments)
        except (Exception, SystemExit) as error:  # a handler that exits ends its call, not the reactor
            self._function_raised(peer, call_id, key, arguments, error)
            return
        finally:
            CONTEXT.value = outer
        del arguments  # the caller gets its blocks back before the answer, unless the handler keeps them
        if type(value) in _LATER:
            self._answer_later(self._job(peer, call_id, key, timeout_ms, (), 0, False), value)
        elif call_id and not peer.reply(call_id, value):
            self.failures += 1

    def open(
        self, peer: Peer, call_id: int, key: int, timeout_ms: int, body: memoryview, blocks: list[NDArray[np.uint8]] | tuple[()]
    ) -> None:
        """Begin a stream."""
        self._take_on(peer, call_id, key, timeout_ms, body, blocks, True)

    def _take_on(
        self,
        peer: Peer,
        call_id: int,
        key: int,
        timeout_ms: int,
        body: memoryview,
        blocks: list[NDArray[np.uint8]] | tuple[()],
        is_stream: bool,
    ) -> None:
        """A request that needs a job: of an `async def`, or a stream."""
        method = self._methods.get(key)
        if method is None:
            self._refuse(peer, call_id, Status.UNKNOWN_METHOD, "", self.service, ", ".join(self.method_names))
            return
        if self._allow is not None and self._forbids(peer, call_id, key):
            return
        if self.jobs.closed:
            self._refuse(peer, call_id, Status.STOPPING, "", f"{self.service!r} is stopping here")
            return
        if method.kind == "stream" and not is_stream:
            text = f"{method.name!r} yields its results: call it by client.stream()"
            self._refuse(peer, call_id, Status.BAD_ARGUMENTS, "", text)
            return
        nbytes = len(body) + sum(block.nbytes for block in blocks)
        if self.tasks >= self.bounds.tasks_max and (
            len(self._queue) >= self.bounds.queue_calls_max or self._queue_bytes + nbytes > self.bounds.queue_bytes_max
        ):
            text = f"{self.tasks} tasks run and {len(self._queue)} calls of {self._queue_bytes} bytes wait in {self.service!r}"
            self._refuse(peer, call_id, Status.BACKPRESSURE, "", text)
            return
        try:
            arguments = peer.decoder.decode(body, blocks)
        except DECODE_ERRORS as error:
            self._refuse(peer, call_id, Status.BAD_ARGUMENTS, "ArchiveError", str(error))
            return
        if blocks:
            blocks.clear()
        self.requests += 1
        job = self._job(peer, call_id, key, timeout_ms, arguments, nbytes, is_stream)
        if self.tasks < self.bounds.tasks_max:
            self._start(job)
        else:
            self._queue.append(job)
            self._queue_bytes += nbytes
            job.is_queued = True
            job.cancel = lambda error: self._drop(job)

    def _job(
        self, peer: Peer, call_id: int, key: int, timeout_ms: int, arguments: Sequence[Any], nbytes: int, is_stream: bool
    ) -> Job:
        deadline = peer.reactor.clock() + timeout_ms / 1000 if timeout_ms else 0.0
        job = Job(peer, call_id, timeout_ms, deadline, key, arguments, nbytes)
        if is_stream:
            job.window = Window(None)
            job.inbox = Inbox(None, lambda items: peer.send_note(CREDIT, call_id, TO_CALLER, items))
        self.jobs.enter()
        if call_id:
            peer.running[call_id] = job
        return job

    def _start(self, job: Job) -> None:
        """Call its handler."""
        function = self._others.get(job.key) or self._plain[job.key]
        outer, CONTEXT.value = CONTEXT.value, job
        arguments, job.arguments = job.arguments, ()
        job.is_queued = False
        self.tasks += 1
        try:
            value = function(*arguments)
        except (Exception, SystemExit) as error:
            self._leave(job)
            self._function_raised(job.peer, job.call_id, job.key, arguments, error)
            return
        else:
            del arguments
            if type(value) in _LATER:
                self.tasks -= 1  # counted anew
                self._answer_later(job, value)
            else:
                self._leave(job)
                self._answer(job, value)
        finally:
            CONTEXT.value = outer

    def _answer_later(self, job: Job, value: Any) -> None:
        """`value` is a coroutine, a generator, or a future: the job is answered when that is done."""
        self.tasks += 1
        outer, CONTEXT.value = CONTEXT.value, job
        try:
            done = self._task(job, value)
        finally:
            CONTEXT.value = outer
        # A Deferred is not held from here, so that it is answered for when its handler lets go of it.
        job.cancel = done.cancel if type(done) is not Deferred else lambda error: self._cut(job, error)
        if job.timeout_ms and not done.finished:
            job.timer = job.peer.reactor.timers.call_at(job.deadline, lambda: self._late(job))
        done.add_done_callback(lambda ended: self._ended(job, ended))

    def _late(self, job: Job) -> None:
        job.timer = None
        if job.cancel is not None:
            job.cancel(DeadlineExceeded(f"the caller's {job.timeout_ms} ms are over"))

    def _task(self, job: Job, value: Any) -> Future:
        if isinstance(value, Future):
            return value
        reactor: Reactor = job.peer.reactor
        if isinstance(value, _STREAMS):
            if job.window is None:
                value.close() if isinstance(value, GeneratorType) else None
                failed = Future()
                failed.set_error(TypeError(f"{self._methods[job.key].name!r} yields its results: call it by client.stream()"))
                return failed
            value = _pump(job, value)
        return reactor.spawn(value, queue=class_of(self._others.get(job.key, _pump)))

    def _ended(self, job: Job, done: Future) -> None:
        """Answer, and start what waits."""
        if job.call_id and job.peer.running.get(job.call_id) is not job:
            return  # cut before; a Deferred's answer comes too late
        error = done.error()
        if error is not None:
            self._cut(job, error)
        else:
            self._leave(job)
            self._answer(job, done.result())

    def _cut(self, job: Job, error: BaseException) -> None:
        """It ends with an error."""
        self._leave(job)
        if isinstance(error, DeadlineExceeded):
            job.peer.fail(job.call_id, Status.DEADLINE, "DeadlineExceeded", str(error), "")
        elif isinstance(error, CancelledError):
            self.cancelled += 1
            job.peer.fail(job.call_id, Status.CANCELLED, "CancelledError", str(error), "")
        else:
            self._raised(job.peer, job.call_id, error)

    def _leave(self, job: Job) -> None:
        """The job is over: its place goes to the next one."""
        self.tasks -= 1
        self._let_go(job)
        if self._starting:
            return  # one that began below ended at once
        self._starting = True
        try:
            self._start_waiting()
        finally:
            self._starting = False

    def _start_waiting(self) -> None:
        while self._queue and self.tasks < self.bounds.tasks_max:
            waiting = self._queue.popleft()
            self._queue_bytes -= waiting.nbytes
            if waiting.timeout_ms and waiting.deadline <= waiting.peer.reactor.clock():
                self.expired += 1
                self._let_go(waiting)
                text = f"it waited {waiting.timeout_ms} ms for one of {self.bounds.tasks_max} tasks to end, and did not run"
                waiting.peer.fail(waiting.call_id, Status.DEADLINE, "DeadlineExceeded", text, "")
            else:
                self._start(waiting)

    def _let_go(self, job: Job) -> None:
        if job.call_id:
            job.peer.running.pop(job.call_id, None)
        if job.timer is not None:
            job.timer.cancel()
        if job.inbox is not None:
            job.inbox.finish(CancelledError("the call is over"))
        job.cancel = None
        self.jobs.leave()

    def _drop(self, job: Job) -> None:
        """A queued job is not wanted any more."""
        self._queue.remove(job)
        self._queue_bytes -= job.nbytes
        self.cancelled += 1
        self._let_go(job)

    # -- answers -----------------------------------------------------------------------------------------------------------

    def _answer(self, job: Job, value: Any) -> None:
        if job.call_id and not job.peer.reply(job.call_id, value):
            self.failures += 1

    def _forbids(self, peer: Peer, call_id: int, key: int) -> bool:
        """Whether the caller may not call that method; it has been told so."""
        assert self._allow is not None
        text = self._allow.refusal(peer.connection.peer_identity, self.service, self._methods[key].name)
        if text is not None:
            self._refuse(peer, call_id, Status.NOT_ALLOWED, "", text)
        return text is not None

    def _refuse(self, peer: Peer, call_id: int, status: Status, name: str, text: str, more: str = "") -> None:
        self.rejected += 1
        peer.fail(call_id, status, name, text, more)

    def _function_raised(self, peer: Peer, call_id: int, key: int, arguments: Sequence[Any], error: BaseException) -> None:
        method = self._methods[key]
        if isinstance(error, TypeError) and not _fits(method, arguments):
            self._refuse(peer, call_id, Status.BAD_ARGUMENTS, "TypeError", str(error), f"{method.name}{method.signature}")
        else:
            self._raised(peer, call_id, error)

    def _raised(self, peer: Peer, call_id: int, error: BaseException) -> None:
        self.failures += 1
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        peer.fail(call_id, Status.HANDLER_RAISED, name, str(error), "".join(traceback.format_exception(error)))


async def _pump(job: Job, items: Generator[Any, None, Any] | AsyncGeneratorType[Any, None]) -> None:
    """Send what a handler yields, as far as its caller takes it."""
    window, peer, call_id = job.window, job.peer, job.call_id
    assert window is not None
    try:
        if not isinstance(items, AsyncGeneratorType):
            for item in items:
                while (credit := window.take()) is not None:
                    await credit
                peer.send_item(call_id, TO_CALLER, item)
        else:
            async for item in items:
                while (credit := window.take()) is not None:
                    await credit
                peer.send_item(call_id, TO_CALLER, item)
    finally:
        if not isinstance(items, AsyncGeneratorType):
            items.close()
        else:
            await items.aclose()


def _fits(method: Method, arguments: Sequence[Any]) -> bool:
    """Whether the arguments fit the signature: a TypeError then came from inside the handler."""
    if method.signature is None:
        return True
    try:
        method.signature.bind(*arguments)
    except TypeError:
        return False
    return True
