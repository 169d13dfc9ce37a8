"""DI-engine's Supervisor: children with an object each, requests to them, and their answers as they
come.

    DI-engine's                                     this one
    a child that dies: whoever waits hangs          each request in flight is answered with an error
                                                    that names the child and how it ended
    what is sent to it then is never read           starts it again; so does the first request after
                                                    a death that no other one was told of, and is
                                                    answered with that error
    the timeout of recv_all() begins anew with      counts for each request from when it was waited
    each answer of anybody                          for
    what was given up by a timeout comes later      is dropped
    what cannot be pickled vanishes                 send() raises, or it is an error of the request
    arrays are pickled, through a thread and a      sent in their own memory by the caller; tensors,
    pipe                                            too

One thread at a time waits for all children, in poll(); others wait for it, and it hands them what
is theirs.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import select
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from prpc_engine import errors
from prpc_engine.ding.children import (
    ChildProcess,
    ChildThread,
    ChildType,
    RecvPayload,
    ReserveMethod,
    SendPayload,
)
from prpc_engine.settings.config import check_seconds
from shard import runtime

NAMED_MAX = 8  # requests that an error names

logger = logging.getLogger("prpc")


class SupervisorAnswers:
    """The answers that nobody has taken yet, and the wait for more. Owned by a Supervisor;
    thread-safe. DI-engine's programs know it as `_recv_queue`.
    """

    def __init__(self) -> None:
        # guards this, the children and what is in flight, among threads that send and receive;
        # told of each answer, and when nobody polls
        self.changed = runtime.Condition(runtime.RLock())
        self.children: list[Any] = []
        self._ready: deque[Any] = deque()
        self._bell = runtime.Bell()
        self._is_polling = False

    def put(self, payload: Any) -> None:
        """One more, as if it had come."""
        with self.changed:
            self._ready.append(payload)
            self.changed.notify_all()
            self._bell.ring()

    def empty(self) -> bool:
        return not self._ready

    def get(
        self,
        block: bool = True,
        timeout: float | None = None,
        wanted: Collection[str] | None = None,
    ) -> Any:
        """The oldest one, or of these req_ids. Raises queue.Empty where none came within `timeout`
        seconds.
        """
        if not block:
            timeout = 0.0
        deadline = None if timeout is None else runtime.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - runtime.monotonic())
            with self.changed:
                if (found := self._take(wanted)) is not None:
                    return found
                if self._is_polling:
                    if left == 0.0:
                        raise queue.Empty
                    self.changed.wait(left)
                    continue
                self._is_polling = True
                look, processes = self._looks()
            try:
                came = dict(look.poll(None if left is None else left * 1000))
            finally:
                with self.changed:
                    self._is_polling = False
                    self.changed.notify_all()
            with self.changed:
                if self._bell.fd in came:
                    self._bell.quiet()
                for child, fds in processes:
                    if not fds.isdisjoint(came):
                        child.receive()
                if (found := self._take(wanted)) is not None:
                    return found
            if left == 0.0:
                raise queue.Empty

    def wake(self) -> None:
        """There is something else to wait for."""
        self._bell.ring()

    def clear(self) -> None:
        with self.changed:
            self._ready.clear()

    def _take(self, wanted: Collection[str] | None) -> Any:
        for at, payload in enumerate(self._ready):
            if wanted is None or payload.req_id in wanted:
                del self._ready[at]
                return payload
        return None

    def _looks(self) -> tuple[select.poll, list[tuple[ChildProcess, set[int]]]]:
        """What to wait for: the bell, and of each process its socket and its end."""
        look = select.poll()
        look.register(self._bell.fd, select.POLLIN)
        processes = []
        for child in self.children:
            if isinstance(child, ChildProcess) and child.channel is not None:
                events = select.POLLIN | (select.POLLOUT if child.channel.has_unsent else 0)
                look.register(child.channel.fileno(), events)
                look.register(child.pidfd, select.POLLIN)
                processes.append((child, {child.channel.fileno(), child.pidfd}))
        return look, processes


class Supervisor:
    """Children in processes, or threads, that each have an object; its methods run one after the
    other in it. With the face of DI-engine's. Thread-safe; shutdown() by its owner.

    type_   ChildType.PROCESS or THREAD, also DI-engine's
    mp_ctx  how processes start, as multiprocessing.get_context() gives it; None: fork

    Reading an attribute that this object has not gives that of all children, in their order.
    """

    def __init__(self, type_: Any = ChildType.PROCESS, mp_ctx: Any = None) -> None:
        self._running = False
        self._type = ChildType(getattr(type_, "value", type_))
        self._context = mp_ctx or multiprocessing.get_context("fork")
        self._recv_queue = SupervisorAnswers()
        self._children: list[Any] = self._recv_queue.children
        _made_here.add(self)

    def register(self, init: Any, shm_buffer: Any = None, shm_callback: Any = None) -> None:
        """One more child, with the next number from 0 on.

        init          makes its object there, or is the object
        shm_buffer    what its processes share, such as a ShmBufferContainer
        shm_callback  called there with each answer and shm_buffer before that is sent: it may move
                      the data over and blank it. In threads neither counts
        """
        answers = self._recv_queue
        kind: Any = ChildProcess if self._type is ChildType.PROCESS else ChildThread
        child = kind(
            len(self._children),
            init,
            shm_buffer,
            shm_callback,
            answers.changed,
            answers.put,
            answers.wake,
            mp_ctx=self._context,
        )
        self._children.append(child)
        if self._running:
            child.start()

    def start_link(self) -> None:
        """Start all children. Again: does nothing."""
        if not self._running:
            self._running = True
            for child in self._children:
                child.start()

    def send(self, payload: Any) -> None:
        """Ask a child: a SendPayload, ours or DI-engine's. Does not wait: what its socket has no
        room for leaves while somebody waits in recv() or recv_all(). A child that has died is
        started again; the request runs there, unless it is the first to hear of that: then it is
        answered with NotSent. Arrays may be changed once this returns. Raises Closed before
        start_link(), BadArguments for a child that there is not, and for arguments that cannot be
        pickled.
        """
        self._check_running()
        self._child(payload.proc_id).send(payload)

    def recv(self, ignore_err: bool = False, timeout: float | None = None) -> Any:
        """The next answer of any child: a RecvPayload. Raises what its method raised, MaybeExecuted
        or NotSent where the child died first, or with `ignore_err` has that in `err`. Raises
        queue.Empty when none came within `timeout` seconds, ConfigError for what is no time.
        """
        check_seconds("timeout", timeout, or_none=True)
        payload = self._recv_queue.get(timeout=timeout)
        if payload.err is not None and not ignore_err:
            raise payload.err
        return payload

    def recv_all(
        self,
        send_payloads: Sequence[Any],
        ignore_err: bool = False,
        callback: Callable[[Any, dict[str, Any]], object] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """The answers to these requests, in their order; others stay for recv().

        ignore_err  an error stands in the answer's `err`, a TimeoutError too; else it is raised
        callback    called with each answer and the requests that are waited for yet, by req_id,
                    which it may add to
        timeout     seconds for each request, from when it is waited for; with `ignore_err` its
                    answer is dropped when it comes later
        """
        check_seconds("timeout", timeout, or_none=True)
        if not send_payloads:
            raise errors.BadArguments("recv_all() of no requests: at least one is expected")
        found: dict[str, Any] = {}
        remain = {payload.req_id: payload for payload in send_payloads}
        deadlines: dict[str, float] = {}
        while remain:
            left = self._time_left(remain, deadlines, timeout)
            try:
                answers = [self._recv_queue.get(timeout=left, wanted=remain)]
            except queue.Empty:
                answers = self._expired(remain, deadlines, timeout, ignore_err)
            for answer in answers:
                del remain[answer.req_id]
                found[answer.req_id] = answer
                if answer.err is not None and not ignore_err:
                    raise answer.err
                if callback is not None:
                    callback(answer, remain)
        return [found[payload.req_id] for payload in send_payloads]

    def _child(self, proc_id: int) -> Any:
        """The list alone would take -1 for the last, whose answers have another number."""
        if proc_id not in range(len(self._children)):
            raise errors.BadArguments(
                f"proc_id={proc_id!r:.100}: children are numbered from 0 in the order of "
                f"register(), and {len(self._children)} are registered"
            )
        return self._children[proc_id]

    @staticmethod
    def _time_left(
        remain: dict[str, Any], deadlines: dict[str, float], timeout: float | None
    ) -> float | None:
        if timeout is None:
            return None
        now = runtime.monotonic()
        for req_id in remain:
            deadlines.setdefault(req_id, now + timeout)
        return max(0.0, min(deadlines[req_id] for req_id in remain) - now)

    def _expired(
        self,
        remain: dict[str, Any],
        deadlines: dict[str, float],
        timeout: float | None,
        ignore_err: bool,
    ) -> list[Any]:
        """Answers for those whose time is over, or TimeoutError."""
        now = runtime.monotonic()
        late = [one for req_id, one in remain.items() if deadlines[req_id] <= now]
        if late and not ignore_err:
            raise TimeoutError(
                f"no answer within {timeout:g} s: " + ", ".join(map(self._named, late[:NAMED_MAX]))
            )
        answers = []
        for one in late:
            self._children[one.proc_id].give_up(one.req_id)
            error = TimeoutError(f"no answer within {timeout:g} s: {self._named(one)}")
            answers.append(RecvPayload(one.proc_id, one.req_id, one.method, err=error))
            logger.warning("%s", error)
        return answers

    def _named(self, payload: Any) -> str:
        child = self._children[payload.proc_id].describe()
        return f"{payload.method} of {child} (request {payload.req_id})"

    def restart(self, proc_id: int) -> None:
        """End that child and start it anew; what it had in flight is answered with an error.
        Raises Closed before start_link(), BadArguments for a child that there is not.
        """
        self._check_running()
        self._child(proc_id).restart()

    def shutdown(self, timeout: float | None = None) -> None:
        """End all children: the idle at once, others by SIGTERM after half a second and SIGKILL
        `timeout` seconds later (None: 5); threads that do not end are left behind. start_link()
        starts them again.
        """
        check_seconds("timeout", timeout, or_none=True)
        if not self._running:
            return
        self._running = False
        for child in self._children:
            child.ask_to_end()
        for child in self._children:
            child.shutdown(timeout)
        self._recv_queue.clear()

    def get_child_attr(self, proc_id: int, key: str) -> Any:
        """An attribute of one child's object. Raises as recv() does."""
        return self._attributes([proc_id], key)[0]

    def get_child_attrs(self, key: str) -> list[Any]:
        """The same of all children, in their order."""
        return self._attributes(range(len(self._children)), key)

    def _attributes(self, proc_ids: Collection[int], key: str) -> list[Any]:
        self._check_running()
        asked = [
            SendPayload(proc_id=each, method=ReserveMethod.GETATTR, args=[key]) for each in proc_ids
        ]
        for one in asked:
            self._child(one.proc_id).send(one)
        return [answer.data for answer in self.recv_all(asked)]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or not self.__dict__.get("_running"):
            raise AttributeError(f"{type(self).__name__} has no {key!r}, and no children that run")
        return self.get_child_attrs(key)

    def _check_running(self) -> None:
        if not self._running:
            raise errors.Closed("the supervisor's children do not run: call start_link() first")

    def forget(self) -> None:
        """In a fork: the children are the parent's."""
        self._running = False
        for child in self._children:
            child.forget()

    def __del__(self) -> None:
        if self.__dict__.get("_running"):
            self.shutdown(timeout=5)


_made_here: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _forget_in_fork() -> None:
    for each in list(_made_here):
        each.forget()


os.register_at_fork(after_in_child=_forget_in_fork)
