"""Which application gets what arrives at one node id. Where it is not there yet, the request waits
for it, within bounds.

    handler of the application  what follows
    is there                    it is called, in the reactor's thread, in order of arrival
    is not there yet            the request waits; when the handler comes, those that wait are first

A handler gives the answer, or a Future of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from prpc_engine import errors
from prpc_engine.pslite.reliable import follow
from shard import Future, Reactor, runtime

EARLY_MESSAGES_MAX, EARLY_BYTES_MAX = 4096, 256 << 20  # that wait for a handler
KV, SIMPLE = "kv", "simple"  # kinds of requests

Handler = Callable[..., Any]


class CustomerRouter:
    """A customer router gives what arrives at one node id to the application that it is for.

    Owned by the Postoffice. Handlers come and go from any thread; messages come in the reactor's.
    name: of the node, for texts. add_handler() raises ConfigError where there is one already;
    take() raises Backpressure when too many messages wait for handlers.
    """

    def __init__(self, name: str, reactor: Reactor) -> None:
        self._name, self._reactor = name, reactor
        # of both: customers come in any thread, requests in the reactor's
        self._guard = runtime.Lock()
        self.handlers: dict[str, dict[int, Handler]] = {KV: {}, SIMPLE: {}}  # by kind, app id
        # by numbers, which grow
        self.early: dict[tuple[str, int], dict[int, tuple[Future, tuple[Any, ...]]]] = {}
        self._early_number = 0
        self.early_messages = self._early_bytes = 0

    def add_handler(self, kind: str, app_id: int, handler: Handler) -> None:
        """From now on that application gets its messages: first those that wait. From any thread.
        Raises ConfigError where it has a handler."""
        with self._guard:
            if app_id in self.handlers[kind]:
                raise errors.ConfigError(
                    f"app {app_id} has an application at {self._name} in this process: close() "
                    "that, or take another app id"
                )
            self.handlers[kind][app_id] = handler
        # there, where all others are handled
        self._reactor.call_soon(partial(self._handle_early, kind, app_id))

    def remove_handler(self, kind: str, app_id: int, handler: Handler) -> None:
        """Messages of that application wait again, unless another handler gets them by now. From
        any thread.
        """
        with self._guard:
            if self.handlers[kind].get(app_id) == handler:
                del self.handlers[kind][app_id]

    def take(
        self, kind: str, app_id: int, message: tuple[Any, ...], arrays: tuple[Any, ...] = ()
    ) -> Any:
        """The answer, or a Future of it; `arrays` are those in the message, for its size. Raises
        Backpressure.
        """
        key = kind, app_id
        handler = self.handlers[kind].get(app_id)
        if handler is not None and key not in self.early:
            return handler(*message)
        nbytes = sum(each.nbytes for each in arrays if isinstance(each, np.ndarray))
        if (
            self.early_messages >= EARLY_MESSAGES_MAX
            or self._early_bytes + nbytes > EARLY_BYTES_MAX
        ):
            raise errors.Backpressure(
                f"{self.early_messages} messages of {self._early_bytes} bytes wait for handlers "
                f"at {self._name}, this is for app {app_id}: make its KVServer or SimpleApp there, "
                "and set its request handle"
            )
        answer = Future()
        self.early_messages += 1
        self._early_bytes += nbytes
        self._early_number += 1
        self.early.setdefault(key, {})[self._early_number] = answer, message
        answer.when_done(partial(self._count_out, key, self._early_number, nbytes))
        return answer

    def _count_out(self, key: tuple[str, int], number: int, nbytes: int, answer: Future) -> None:
        self.early.get(key, {}).pop(number, None)  # given up by its sender: it keeps nothing here
        self.early_messages -= 1
        self._early_bytes -= nbytes

    def _handle_early(self, kind: str, app_id: int) -> None:
        """In the reactor's thread; what comes meanwhile waits behind. A handler may remove itself,
        and turn it deeper.
        """
        key = kind, app_id
        while (waiting := self.early.get(key)) and (
            handler := self.handlers[kind].get(app_id)
        ) is not None:
            answer, message = waiting.pop(next(iter(waiting)))
            try:
                follow(answer, handler(*message))
            except (Exception, SystemExit) as error:  # whatever it is, others wait behind it
                answer.set_error(error)
        if not waiting:
            self.early.pop(key, None)
