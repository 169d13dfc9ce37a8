"""One server of a service: a table of methods, and what becomes of a request that names one.

A plain function runs in the turn that its request arrives in; an `async def` becomes a task of the reactor and is cut at the
caller's deadline. Either way the request is answered: with the value, or with what went wrong.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.errors import ConfigError, DeadlineExceeded
from prpc_engine.message import Status, method_key

if TYPE_CHECKING:
    from prpc_engine.peer import Peer

# Tasks of one server at a time, so that callers learn of an overload instead of filling our memory.
TASKS_MAX = 65536

_calling: Peer | None = None


def calling_peer() -> Peer | None:
    """Who made the request that is being handled. For a handler to ask first thing: once it waits, others are handled."""
    return _calling


@dataclass(frozen=True)
class ServerStatistics:
    """What one server did."""

    requests: int = 0  # and notifications
    failures: int = 0  # handlers that raised, for requests and notifications
    rejected: int = 0  # refused before a handler ran
    tasks: int = 0  # of `async def` handlers, running now


@dataclass(frozen=True)
class Method:
    """What is known of one method; `signature` is None where Python knows none."""

    name: str
    signature: inspect.Signature | None


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


class Server:
    """Methods under one target number. Owned by its node; called in the reactor's thread."""

    def __init__(self, service: str, server_id: int, target: int, served: object) -> None:
        self.service = service
        self.server_id = server_id
        self.target = target
        self.requests = self.failures = self.rejected = self.tasks = 0
        self._functions: dict[int, Callable[..., Any]] = {}
        self._methods: dict[int, Method] = {}
        for name, function in public_methods(served).items():
            key = method_key(name)
            if key in self._methods:
                raise ConfigError(f"methods {name!r} and {self._methods[key].name!r} have the same CRC-32: rename one of them")
            try:
                signature = inspect.signature(function)
            except (TypeError, ValueError):  # some builtins have none
                signature = None
            self._methods[key] = Method(name, signature)
            self._functions[key] = function

    def statistics(self) -> ServerStatistics:
        """A snapshot."""
        return ServerStatistics(self.requests, self.failures, self.rejected, self.tasks)

    @property
    def method_names(self) -> list[str]:
        """Sorted."""
        return sorted(method.name for method in self._methods.values())

    def request(
        self, peer: Peer, call_id: int, key: int, timeout_ms: int, body: memoryview, blocks: list[NDArray[np.uint8]] | tuple[()]
    ) -> None:
        """Handle one request, or with call_id 0 one notification. `body` is good until the handler runs."""
        global _calling
        function = self._functions.get(key)
        if function is None:
            self.rejected += 1
            peer.fail(call_id, Status.UNKNOWN_METHOD, "", self.service, ", ".join(self.method_names))
            return
        try:
            if blocks:
                arguments = peer.decoder.decode(body, blocks)
                blocks.clear()
            else:
                arguments = peer.decoder.decode_plain(body)
        except (ValueError, RecursionError) as error:
            self.rejected += 1
            peer.fail(call_id, Status.BAD_ARGUMENTS, "ArchiveError", str(error), "")
            return
        self.requests += 1
        _calling = peer
        try:
            value = function(*arguments)
        except (Exception, SystemExit) as error:  # a handler that exits ends its call, not the reactor
            self._function_raised(peer, call_id, key, arguments, error)
            return
        del arguments  # the caller gets its blocks back before the answer, unless the handler keeps them
        if type(value) is not bytes and inspect.iscoroutine(value):
            self._run_task(peer, call_id, timeout_ms, value)
        elif call_id and not peer.reply(call_id, value):
            self.failures += 1

    def _function_raised(self, peer: Peer, call_id: int, key: int, arguments: Sequence[Any], error: BaseException) -> None:
        method = self._methods[key]
        if isinstance(error, TypeError) and not _fits(method, arguments):
            self.rejected += 1
            peer.fail(call_id, Status.BAD_ARGUMENTS, "TypeError", str(error), f"{method.name}{method.signature}")
        else:
            self._raised(peer, call_id, error)

    def _raised(self, peer: Peer, call_id: int, error: BaseException) -> None:
        self.failures += 1
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        peer.fail(call_id, Status.HANDLER_RAISED, name, str(error), "".join(traceback.format_exception(error)))

    def _run_task(self, peer: Peer, call_id: int, timeout_ms: int, coroutine: Any) -> None:
        if self.tasks >= TASKS_MAX:
            coroutine.close()
            self.rejected += 1
            peer.fail(call_id, Status.BACKPRESSURE, "", f"{TASKS_MAX} tasks are running in {self.service!r}", "")
            return
        self.tasks += 1
        task = peer.reactor.spawn(coroutine)
        timer = None
        if timeout_ms and not task.finished:
            late = DeadlineExceeded(f"the caller's {timeout_ms} ms are over")
            timer = peer.reactor.call_later(timeout_ms / 1000, lambda: task.cancel(late))

        def finished(_: Any) -> None:
            self.tasks -= 1
            if timer is not None:
                timer.cancel()
            error = task.error()
            if isinstance(error, DeadlineExceeded):
                peer.fail(call_id, Status.DEADLINE, "DeadlineExceeded", str(error), "")
            elif error is not None:
                self._raised(peer, call_id, error)
            elif call_id and not peer.reply(call_id, task.result()):
                self.failures += 1

        task.add_done_callback(finished)


def _fits(method: Method, arguments: Sequence[Any]) -> bool:
    """Whether the arguments fit the signature: a TypeError then came from inside the handler."""
    if method.signature is None:
        return True
    try:
        method.signature.bind(*arguments)
    except TypeError:
        return False
    return True
