"""One server of a service: a table of methods, and what becomes of a request that names one.

    handler                  runs                                      answers
    plain function           at once, in the turn that its request     with its value, in that
                             arrived in                                turn; a Future or Deferred:
                                                                       when that is done
    async def                as a task of the reactor (job.py)         with its value
    plain function, @bulk    as a task in its class, in one step       with its value
    plain function, @once    as a job, at once or when its turn comes  with its value, as above
    generator, async or not  as a task; only for client.stream()       with items as they are
                                                                       taken, then the end

Every request is answered: with the value, or with what went wrong. Two methods are there by
themselves: prpc.health and prpc.describe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive import DECODE_ERRORS, PLAIN_BYTES_MAX, Handover, handovers_in
from prpc_engine.errors import ConfigError, text_of
from prpc_engine.rpc.call import Call
from prpc_engine.rpc.deferred import Deferred, canceller
from prpc_engine.rpc.failure_codes import told
from prpc_engine.rpc.flow_control import Inbox, Window
from prpc_engine.rpc.job import Caller, Expired, Job, discard, is_a, pass_on_interrupt, pump
from prpc_engine.rpc.job_state import JobEvent, JobState
from prpc_engine.rpc.jobs import Jobs
from prpc_engine.rpc.marks import Marks, marks_of
from prpc_engine.rpc.message import (
    CREDIT,
    OPEN,
    REPEAT,
    REQUEST,
    TO_CALLER,
    Status,
    method_key,
)
from prpc_engine.rpc.method import Method, as_task, describe, public_methods
from prpc_engine.rpc.once import ANSWERS_BYTES_MAX, ANSWERS_MAX
from prpc_engine.rpc.repeats import Repeats, WayBack
from prpc_engine.rpc.timing import MethodTimer, MethodTiming, Timing
from prpc_engine.settings.allow import AllowList, permitted
from shard import (
    CONTEXT,
    Future,
    Gate,
    Gathered,
    RemoteProtocolError,
    Task,
    class_of,
    is_count,
)

# Tasks of one server at a time: what an overload may hold of our memory.
TASKS_MAX = 1024
# Calls that wait for one of them to end, and the bytes of their arguments: beyond either the caller
# is told to slow down.
QUEUE_CALLS_MAX = 65536
QUEUE_BYTES_MAX = 1 << 30

# looked up once: it costs as much as to ask the table
NO_PLACE, PLACE, CALLED = JobEvent.NO_PLACE, JobEvent.PLACE, JobEvent.CALLED
WAITS, DEFERRED, RETURNED = JobEvent.WAITS, JobEvent.DEFERRED, JobEvent.RETURNED
OVER = JobState.OVER
_YIELDS = "{!r} yields its results: call it by client.stream()"
_NOT_ONCE = "it is not marked once, so that nothing is remembered of it"
HEALTH, DESCRIBE = "prpc.health", "prpc.describe"
_LATER = frozenset(
    {CoroutineType, GeneratorType, AsyncGeneratorType, Future, Deferred, Gathered, Task, Call}
)
_STREAMS = (GeneratorType, AsyncGeneratorType)
# of one message, ours: emptied as soon as they are not needed any longer
Blocks = list[NDArray[np.uint8]] | tuple[()]


@dataclass(frozen=True)
class ServedStatistics:
    """A snapshot of one server: how many requests it ran, refused and dropped since it began, and
    how many run and wait now.
    """

    requests: int = 0  # and notifications, whose handler ran or is queued
    failures: int = 0  # handlers that raised, for requests and notifications
    rejected: int = 0  # refused before a handler ran: the sum of `refused`
    expired: int = 0  # whose deadline had passed before their handler could run
    cancelled: int = 0  # given up by their callers
    tasks: int = 0  # running now; those that were cancelled and clean up, too
    queued: int = 0  # waiting for one of those to end
    repeated: int = 0  # calls of `once` methods that came again, and were not run again
    forgotten: int = 0  # answers to calls of `once` methods that fell out of what is kept
    # how many, by reason: names of message.Status in lower case
    refused: Mapping[str, int] = field(default_factory=dict)
    # by method; with RpcService(timing=True) only
    timings: Mapping[str, MethodTiming] = field(default_factory=dict)


@dataclass(frozen=True)
class Bounds:
    """Of one server. Raises ConfigError for what is not possible.

    tasks_max          `async def` handlers and streams that run at a time
    queue_calls_max    calls that wait for one of them to end; plain functions may owe tasks_max +
                       queue_calls_max later answers
    queue_bytes_max    bytes of the arguments of those that wait
    answers_max        answers to calls of `once` methods that are kept for callers that ask again;
                       once.py says why so many
    answers_bytes_max  bytes of those
    """

    tasks_max: int = TASKS_MAX
    queue_calls_max: int = QUEUE_CALLS_MAX
    queue_bytes_max: int = QUEUE_BYTES_MAX
    answers_max: int = ANSWERS_MAX
    answers_bytes_max: int = ANSWERS_BYTES_MAX

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not is_count(value, least := 1 if name == "tasks_max" else 0):
                raise ConfigError(
                    f"{name}={value!r}: a whole number of at least {least} is allowed"
                )


class ServedObject:
    """Methods under one target number. Owned by its node; called in the reactor's thread."""

    def __init__(
        self,
        service: str,
        server_id: int,
        target: int,
        served: object,
        bounds: Bounds | None = None,
        allow: AllowList | None = None,
        timing: Timing | None = None,
        inline: bool = False,
    ) -> None:
        self.service = service
        # its handlers may run in any thread that turns the reactor, an application's that waits too
        self.inline = inline
        # None: nothing to ask
        self._allow = allow if allow is not None and allow.guards(service) else None
        self.server_id = server_id
        self.target = target
        self.bounds = bounds or Bounds()
        self.jobs = Gate(f"server {server_id} of {service!r}")  # running and queued ones are inside
        self._jobs = Jobs(
            service, self.jobs, self._has_place, self._start, self._drop, self._tell_error
        )
        self.requests = self.failures = self.cancelled = 0
        self.refused: dict[str, int] = {}  # by reason
        self._timers: dict[str, MethodTimer] = {}
        self._repeats = Repeats(self.bounds.answers_max, self.bounds.answers_bytes_max)
        self._plain: dict[int, Callable[..., Any]] = {}  # what runs at once
        self._others: dict[int, Callable[..., Any]] = {}
        self._methods: dict[int, Method] = {}
        own = {HEALTH: self.health, DESCRIBE: self.describe}
        for name, function in [*public_methods(served).items(), *own.items()]:
            key = method_key(name)
            if key in self._methods:
                raise ConfigError(
                    f"methods {name!r} and {self._methods[key].name!r} have the same CRC-32: "
                    "rename one of them"
                )
            method = self._methods[key] = describe(name, function)
            if timing is not None and method.kind != "stream":
                timer = self._timers[name] = MethodTimer(
                    f"{name!r} of server {server_id} of {service!r}", timing
                )
                function = timer.wrap(function)
            if method.kind == "plain" and not method.is_once:
                self._plain[key] = function
            else:
                self._others[key] = as_task(method, function) if method.kind == "task" else function

    # -- what it tells of itself -------------------------------------------------------------------

    def statistics(self) -> ServedStatistics:
        """A snapshot."""
        refused = dict(self.refused)
        return ServedStatistics(
            requests=self.requests,
            failures=self.failures,
            rejected=sum(refused.values()),
            expired=self._jobs.expired,
            cancelled=self.cancelled + self._jobs.cancelled_in_queue,
            tasks=self._jobs.tasks,
            queued=len(self._jobs.queue),
            repeated=self._repeats.answered,
            forgotten=self._repeats.window.forgotten,
            refused=refused,
            timings={name: timer.statistics() for name, timer in self._timers.items()},
        )

    def health(self) -> dict[str, Any]:
        """Whether it takes on work, and how much it has."""
        state = "stopping" if self.jobs.closed else "serving"
        work = {"tasks": self._jobs.tasks, "queued": len(self._jobs.queue)}
        return {"service": self.service, "server_id": self.server_id, "state": state, **work}

    def describe(self) -> dict[str, dict[str, Any]]:
        """Its methods by name: signature, kind ("plain", "task", "stream"), idempotent, once, first
        line of the docstring.
        """
        return {
            method.name: {
                "signature": str(method.signature or "(...)"),
                "kind": method.kind,
                "idempotent": method.is_idempotent,
                "once": method.is_once,
                "text": method.text,
            }
            for method in self._methods.values()
            if method.name not in (HEALTH, DESCRIBE)
        }

    def marks(self) -> Marks | None:
        """Those of its methods, for the master's record."""
        return marks_of(
            {
                method.name: {"idempotent": method.is_idempotent, "once": method.is_once}
                for method in self._methods.values()
            }
        )

    @property
    def method_names(self) -> list[str]:
        """Sorted."""
        return sorted({method.name for method in self._methods.values()} - {HEALTH, DESCRIBE})

    def stop(self) -> Future:
        """Take on nothing new; the future is done when what has begun is answered."""
        self._others.update(
            {
                key: function
                for key, function in self._plain.items()
                if self._methods[key].name != HEALTH
            }
        )
        self._plain = {
            key: self._plain[key] for key in self._plain if self._methods[key].name == HEALTH
        }
        return self.jobs.close()

    def cut(self, again: bool = True) -> int:
        """After stop(), for who does not wait any longer: end what has begun, streams too, and tell
        the callers; how many. What clean up after that are inside the gate until they have.
        `again`: those that were cancelled before, too.
        """
        return self._jobs.cut(again)

    # -- requests ----------------------------------------------------------------------------------

    def request(
        self,
        peer: Caller,
        call_id: int,
        key: int,
        timeout_ms: int,
        body: memoryview | bytes,
        blocks: Blocks,
    ) -> None:
        """Handle one request, or with call_id 0 one notification. `body` is good until the handler
        runs.
        """
        function = self._plain.get(key)
        if function is None:
            self._take_on(peer, call_id, key, timeout_ms, body, blocks, REQUEST)
            return
        if self._allow is not None and self._forbids(peer, call_id, key):
            return
        try:
            if blocks:
                arguments = peer.decoder.decode(body, blocks)
                blocks.clear()
            else:
                decode_plain = peer.decode_plain
                arguments = (
                    decode_plain(body)
                    if len(body) <= PLAIN_BYTES_MAX
                    else peer.decoder.decode(body, ())
                )
        except DECODE_ERRORS as error:
            self._refuse(peer, call_id, Status.BAD_ARGUMENTS, "ArchiveError", str(error))
            return
        self.requests += 1
        me, asked = get_ident(), CONTEXT.others  # as CONTEXT.value, without its calls
        outer = asked.get(me)
        asked[me] = peer, timeout_ms
        try:
            value = function(*arguments) if self.inline else Context().run(function, *arguments)
        except BaseException as error:  # whatever it is, it ends this call, and not the reactor
            self._raised(peer, call_id, error, key, arguments)
            pass_on_interrupt(error, peer.reactor)
        else:
            # the caller gets its blocks back before the answer, unless the handler keeps them
            del arguments
            if type(value) in _LATER:
                if self._has_room(peer, call_id):
                    job = self._job(peer, call_id, key, timeout_ms, (), 0, False)
                    self._jobs.follow(job, CALLED)
                    self._answer_later(job, value)
                else:
                    discard(value)
            elif call_id and not peer.reply(call_id, value):
                self.failures += 1
        finally:
            # last: once the answer has left, it costs the caller nothing
            if outer is None:
                asked.pop(me, None)
            else:
                asked[me] = outer

    def open(
        self,
        peer: Caller,
        call_id: int,
        key: int,
        timeout_ms: int,
        body: memoryview,
        blocks: Blocks,
    ) -> None:
        """Begin a stream."""
        self._take_on(peer, call_id, key, timeout_ms, body, blocks, OPEN)

    def repeat(
        self,
        peer: Caller,
        call_id: int,
        key: int,
        timeout_ms: int,
        body: memoryview,
        blocks: Blocks,
    ) -> None:
        """Handle a request that was sent before, over a connection that was lost."""
        self._take_on(peer, call_id, key, timeout_ms, body, blocks, REPEAT)

    def _take_on(
        self,
        peer: Caller,
        call_id: int,
        key: int,
        timeout_ms: int,
        body: memoryview | bytes,
        blocks: Blocks,
        kind: int,
    ) -> None:
        """A REQUEST or REPEAT that needs a job, or the OPEN of a stream."""
        method = self._methods.get(key)
        if method is None:
            names = permitted(
                self._allow, peer.connection.peer_identity, self.service, self.method_names
            )
            self._refuse(peer, call_id, Status.UNKNOWN_METHOD, "", self.service, ", ".join(names))
            return
        if self._allow is not None and self._forbids(peer, call_id, key):
            return
        if self._is_doubled(peer, call_id):
            return
        is_once = method.is_once and call_id != 0 and kind != OPEN
        reason = (
            self._repeats.refusal(peer, call_id, key, kind == REPEAT)
            if is_once
            else _NOT_ONCE
            if kind == REPEAT
            else None
        )
        if reason is not None:
            self._refuse(peer, call_id, Status.FORGOTTEN, "", reason)
            return
        if is_once and self._repeats.answer(peer, call_id):
            return
        if self.jobs.closed:
            self._refuse(peer, call_id, Status.STOPPING, "", f"{self.service!r} is stopping here")
            return
        if method.kind == "stream" and kind != OPEN:
            self._refuse(peer, call_id, Status.BAD_ARGUMENTS, "", _YIELDS.format(method.name))
            return
        try:
            nbytes = len(body) + sum(block.nbytes for block in blocks)
        except MemoryError as error:  # there is none for the arrays
            self._refuse(peer, call_id, Status.BAD_ARGUMENTS, "MemoryError", str(error))
            return
        jobs = self._jobs
        has_place = jobs.tasks < self.bounds.tasks_max
        if not has_place and (
            len(jobs.queue) >= self.bounds.queue_calls_max
            or jobs.queue_bytes + nbytes > self.bounds.queue_bytes_max
        ):
            text = (
                f"{jobs.tasks} tasks run and {len(jobs.queue)} calls of {jobs.queue_bytes} "
                f"bytes wait in {self.service!r}"
            )
            self._refuse(peer, call_id, Status.BACKPRESSURE, "", text)
            return
        try:
            arguments = peer.decoder.decode(body, blocks)
        except DECODE_ERRORS as error:
            self._refuse(peer, call_id, Status.BAD_ARGUMENTS, "ArchiveError", str(error))
            return
        handovers: Sequence[Handover] = ()
        if blocks:
            handovers = handovers_in(blocks)
            blocks.clear()
        self.requests += 1
        job = self._job(peer, call_id, key, timeout_ms, arguments, nbytes, kind == OPEN)
        if is_once:
            self._repeats.begin(job)
        job.handovers = handovers
        jobs.follow(job, PLACE if has_place else NO_PLACE)

    def _has_place(self) -> bool:
        return self._jobs.tasks < self.bounds.tasks_max

    def _has_room(self, peer: Caller, call_id: int) -> bool:
        """Whether one more plain function may answer later: as many may as run and wait. Else its
        caller has been told: that the call was cancelled, and not refused, as the function has run.
        """
        if self._is_doubled(peer, call_id):
            return False
        if self.jobs.closed:  # by what ran while the function waited
            why = f"{self.service!r} was closed before it was done"
        elif self._jobs.tasks >= self.bounds.tasks_max + self.bounds.queue_calls_max:
            why = f"{self._jobs.tasks} calls of {self.service!r} are to be answered later already"
        else:
            return True
        self.cancelled += 1
        peer.fail(call_id, Status.CANCELLED, "CancelledError", why, "")
        return False

    def _is_doubled(self, peer: Caller, call_id: int) -> bool:
        """Whether the caller uses a number again before its call is answered: it is hung up on, as
        answers have no other name.
        """
        if call_id not in peer.running:
            return False
        peer.connection.close(
            RemoteProtocolError(f"call {call_id} was asked again before it was answered")
        )
        return True

    def _job(
        self,
        peer: Caller,
        call_id: int,
        key: int,
        timeout_ms: int,
        arguments: Sequence[Any],
        nbytes: int,
        is_stream: bool,
    ) -> Job:
        deadline = peer.reactor.clock() + timeout_ms / 1000 if timeout_ms else 0.0
        job = Job(peer, call_id, timeout_ms, deadline, key, arguments, nbytes)
        if is_stream:
            job.window = Window(None)
            job.inbox = Inbox(None, lambda items: peer.send_note(CREDIT, call_id, TO_CALLER, items))
        self._jobs.enter(job)
        return job

    def _end_early(self, job: Job, error: BaseException) -> None:
        """It is to end with that error, which job.end() has noted."""
        self._jobs.follow(job, JobEvent.ENDED_EARLY)

    def _start(self, job: Job) -> None:
        """Call its handler."""
        function = self._others.get(job.key) or self._plain[job.key]
        outer, CONTEXT.value = CONTEXT.value, job
        arguments, job.arguments, job.handovers = job.arguments, (), ()
        try:
            value = Context().run(function, *arguments)  # its context is its own
        except BaseException as error:
            self._jobs.follow(job, RETURNED, self._raised_at_once, job, error, arguments)
            pass_on_interrupt(error, job.peer.reactor)
        else:
            del arguments
            if type(value) in _LATER:
                self._answer_later(job, value)
            else:
                self._jobs.follow(job, RETURNED, self._answer, job, value)
        finally:
            CONTEXT.value = outer

    def _answer_later(self, job: Job, value: Any) -> None:
        """`value` is a coroutine, a generator, or a future:
        the job is answered when that is done.
        """
        outer, CONTEXT.value = CONTEXT.value, job
        try:
            done = Context().run(self._task, job, value)
        except BaseException as error:  # Ctrl-C, in its first step
            self._jobs.follow(job, RETURNED, self._tell_error, job, error)
            pass_on_interrupt(error, job.peer.reactor)
            return
        finally:
            CONTEXT.value = outer
        if done.finished:  # it never waited
            self._ended(job, done)
        elif isinstance(done, Task):
            job.task = done
            done.when_done(lambda ended: self._ended(job, ended))
            self._jobs.follow(job, WAITS)
        else:  # any thread may complete it, and what follows is the reactor's
            job.ends_with_caller = isinstance(done, Deferred) and done.ends_with_caller
            reactor = job.peer.reactor
            soon = reactor.call_soon if self.inline else reactor.call_in_engine
            job.cancel = canceller(done, partial(self._end_early, job))
            done.when_done(lambda ended: soon(lambda: self._ended(job, ended)))
            self._jobs.follow(job, DEFERRED)

    def _task(self, job: Job, value: Any) -> Future:
        if isinstance(value, Future):
            return value
        if isinstance(value, _STREAMS):
            if job.window is None:
                value.close() if isinstance(value, GeneratorType) else None
                failed = Future()
                failed.set_error(TypeError(_YIELDS.format(self._methods[job.key].name)))
                return failed
            name = value.__qualname__
            value = pump(job, value)
            value.__qualname__ = name  # in the log it is the handler
        return job.peer.reactor.spawn(value, queue=class_of(self._others.get(job.key, pump)))

    def _ended(self, job: Job, done: Future) -> None:
        """What it was to bring is there."""
        error = done.error()
        if job.state is OVER:
            assert isinstance(done, Task), "others end when they are cut"
            self._jobs.follow(job, RETURNED, done.tell_unheard)
        elif error is not None:
            self._jobs.follow(job, RETURNED, self._tell_error, job, error)
        else:
            self._jobs.follow(job, RETURNED, self._answer, job, done.result())

    def _drop(self, job: Job) -> None:
        """It was queued, and never ran."""
        for handover in job.handovers:
            handover.give_back()
        if job.is_once:
            self._repeats.drop(job)

    # -- answers -----------------------------------------------------------------------------------

    def _way_back(self, job: Job) -> Caller | WayBack:
        return WayBack(self._repeats, job) if job.is_once else job.peer

    def _answer(self, job: Job, value: Any) -> None:
        if job.call_id and not self._way_back(job).reply(job.call_id, value):
            self.failures += 1

    def _raised_at_once(self, job: Job, error: BaseException, arguments: Sequence[Any]) -> None:
        self._raised(self._way_back(job), job.call_id, error, job.key, arguments)

    def _tell_error(self, job: Job, error: BaseException) -> None:
        """Its own, or what it was ended with."""
        if not job.was_ended(error):
            self._raised(self._way_back(job), job.call_id, error)
            return
        is_late = is_a(error, Expired)
        self.cancelled += not is_late
        status, name = (
            (Status.DEADLINE, "DeadlineExceeded")
            if is_late
            else (Status.CANCELLED, "CancelledError")
        )
        self._way_back(job).fail(job.call_id, status, name, text_of(error), "")

    def _forbids(self, peer: Caller, call_id: int, key: int) -> bool:
        """Whether the caller may not call that method; it has been told so."""
        assert self._allow is not None
        text = self._allow.refusal(
            peer.connection.peer_identity, self.service, self._methods[key].name
        )
        if text is not None:
            self._refuse(peer, call_id, Status.NOT_ALLOWED, "", text)
        return text is not None

    def _refuse(
        self,
        way: Caller | WayBack,
        call_id: int,
        status: Status,
        name: str,
        text: str,
        more: str = "",
    ) -> None:
        self.refused[status.name.lower()] = self.refused.get(status.name.lower(), 0) + 1
        way.fail(call_id, status, name, text, more)

    def _raised(
        self,
        way: Caller | WayBack,
        call_id: int,
        error: BaseException,
        key: int = 0,
        arguments: Sequence[Any] | None = None,
    ) -> None:
        """A handler did; at once, when called with these arguments, which may not fit it."""
        if (
            arguments is not None
            and is_a(error, TypeError)
            and not (method := self._methods[key]).fits(arguments)
        ):
            text = text_of(error)
            self._refuse(
                way,
                call_id,
                Status.BAD_ARGUMENTS,
                "TypeError",
                text,
                f"{method.name}{method.signature}",
            )
        else:
            self.failures += 1
            way.fail(call_id, Status.HANDLER_RAISED, *told(error))


def answers_at_once(server: ServedObject, key: int) -> bool:
    """Whether any thread that leads may run that method to its end, whoever asks."""
    return server.inline and server._allow is None and key in server._plain
