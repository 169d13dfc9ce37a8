"""Messages that arrived and were not received, and the threads that wait for one: what dealers are
made of.

what                          ends a wait of
Mailbox.terminate(), close()  everybody at that mailbox, with Terminated; restart() takes
                              terminate() back
Ending.end_waits(), end()     one dealer, at whichever mailbox it waits; end() for good
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

from prpc_engine import errors
from prpc_engine.rpc.message import TIMEOUT_S_MAX
from prpc_engine.settings.config import check_timeout
from shard import ClosedError, Future, Waiter, runtime


class Terminated(errors.Closed):
    """The dealer, its client, its server or its service was closed; or terminated, and then
    restart() lets it go on.
    """


class Ending:
    """The waits of one dealer, and what ends them for good. From any thread."""

    def __init__(self) -> None:
        self.error: errors.RpcError | None = None
        self._waits: dict[Future, None] = {}

    def check(self) -> None:
        """Raises what has ended them."""
        if self.error is not None:
            raise copy.copy(self.error)  # each its own: a traceback is written into it

    @contextlib.contextmanager
    def may_end(self, wait: Future) -> Iterator[None]:
        """Inside of this that future is given up when they end."""
        self._waits[wait] = None
        try:
            if self.error is not None:  # after the caller's check
                wait.cancel(copy.copy(self.error))
            yield
        finally:
            self._waits.pop(wait, None)

    def end_waits(self, error: errors.RpcError) -> None:
        """Those under way now."""
        for wait in list(self._waits):
            wait.cancel(copy.copy(error))

    def end(self, error: errors.RpcError) -> None:
        """Those under way and those to come."""
        self.error = self.error or error
        self.end_waits(error)


class Mailbox:
    """Messages that arrived and were not received, and who waits for one. From any thread.

    `is_stale(message)` says as one is about to be received that nobody wants it any more."""

    def __init__(
        self,
        name: str,
        waiter: Waiter | None,
        is_stale: Callable[[Any], bool] = lambda message: False,
    ) -> None:
        self.name = name
        self.is_terminated = False
        self._closed = ""  # why
        self._waiter = waiter
        self._is_stale = is_stale
        # by ticket, in order: any can be taken out without a search
        self._messages: OrderedDict[int, Any] = OrderedDict()
        self._next_ticket = itertools.count().__next__
        self._waiting: deque[Future] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def waiting(self) -> int:
        """How many wait for a message now."""
        return len(self._waiting)

    def put(self, message: Any) -> int:
        """A message arrived; a ticket to remove() it by."""
        ticket = self._next_ticket()
        self._messages[ticket] = message
        self._wake_one()
        return ticket

    def remove(self, ticket: int) -> None:
        """Nobody wants that message any more; nothing to do where it was received."""
        self._messages.pop(ticket, None)

    def _wake_one(self) -> None:
        with contextlib.suppress(IndexError):  # nobody waits
            while not self._waiting.popleft().set_result(None):
                pass

    def get(self, timeout_s: float | None, ending: Ending | None = None) -> Any:
        """The next message. Raises TimeoutError, Terminated, what `ending` says, and ConfigError
        for an impossible timeout.
        """
        if timeout_s is not None:
            check_timeout(timeout_s, TIMEOUT_S_MAX)
        deadline = None if timeout_s is None else runtime.monotonic() + timeout_s
        ending = ending or Ending()
        while True:
            ending.check()
            if self.is_terminated:
                raise self.terminated()
            try:
                message = self._messages.popitem(last=False)[1]
            except KeyError:
                pass
            else:
                if not self._is_stale(message):
                    return message
                continue
            arrived = Future(self._waiter)
            self._waiting.append(arrived)
            if self._messages or self.is_terminated:  # after our look
                arrived.set_result(None)
            try:
                with ending.may_end(arrived):
                    arrived.result(
                        None if deadline is None else max(0.0, deadline - runtime.monotonic())
                    )
            except TimeoutError:
                if self._give_up(arrived):
                    raise TimeoutError(
                        f"{self.name} received nothing within {timeout_s} s"
                    ) from None
            except BaseException as error:  # terminated or closed meanwhile, or Ctrl-C
                if not self._give_up(arrived):
                    self._wake_one()  # in our place
                if isinstance(error, ClosedError):  # of the driver
                    raise Terminated(
                        f"{self.name} waits no longer: its service was closed here"
                    ) from error
                raise

    def _give_up(self, arrived: Future) -> bool:
        """Wait for it no longer; False when it was woken at the last moment."""
        with contextlib.suppress(ValueError):  # who woke it took it out
            self._waiting.remove(arrived)
        return arrived.set_result(None)

    def terminated(self) -> Terminated:
        """What ends a wait."""
        return Terminated(self._closed or f"{self.name} was terminated; restart() lets it go on")

    def terminate(self) -> None:
        """End every wait with Terminated, now and from now on; what has arrived is kept."""
        self.is_terminated = True
        with contextlib.suppress(IndexError):  # nobody waits any more
            while True:
                # restart() does not take this back
                self._waiting.popleft().set_error(self.terminated())

    def close(self, why: str) -> None:
        """As terminate(), for good."""
        self._closed = self._closed or why
        self.terminate()

    def restart(self) -> None:
        """Wait again, unless it was closed."""
        self.is_terminated = bool(self._closed)
