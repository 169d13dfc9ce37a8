"""SimpleApp: a number and a text to some nodes, and a text back from each.

    app = SimpleApp(0, 0, request_handle=lambda data, app: app.response(data, "yes"))
    app.wait(app.request(1, "ready?", SERVER_GROUP))

Who is given no request handle answers "". Requests that come before the application is made wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prpc_engine.deferred import Deferred
from prpc_engine.errors import BadArguments, Rejected
from prpc_engine.kv.pslite.customer import REQUEST_TIMEOUT_S, Customer
from prpc_engine.kv.pslite.lifecycle import get_postoffice

KIND = "simple"


class Answer:
    """What becomes of one request: answered once, in its handler's turn or later, from any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._is_given = False
        self._value: Any = None
        self._later: Deferred | None = None

    def give(self, value: Any) -> None:
        """Raises Rejected the second time."""
        with self._guard:
            if self._is_given:
                raise Rejected("this request was answered before: each gets one response")
            self._is_given, later = True, self._later
            if later is None:
                self._value = value
        if later is not None:
            later.reply(value)

    def outcome(self) -> Any:
        """After the handler: the value, or what it comes by."""
        with self._guard:
            if not self._is_given:
                self._later = Deferred()
            return self._later if self._later is not None else self._value


@dataclass(frozen=True, eq=False)
class SimpleData:
    """A request, or with its answer as the body, a response. `sender` is a node id, `timestamp` the requester's."""

    head: int
    body: str
    sender: int
    timestamp: int
    customer_id: int
    answer: Answer | None = field(default=None, repr=False)


SimpleHandle = Callable[[SimpleData, Any], object]


class SimpleApp:
    """See the file's head. start() comes first. Handles run one at a time, in the thread that has the reactor.

    Raises ConfigError where this process has such an application, or did not start that customer.
    """

    def __init__(
        self,
        app_id: int = 0,
        customer_id: int = 0,
        request_handle: SimpleHandle | None = None,
        response_handle: SimpleHandle | None = None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self.app_id, self.customer_id = app_id, customer_id
        self.postoffice = get_postoffice()
        self._customer = Customer(self.postoffice, app_id, customer_id, request_timeout_s)
        self._request_handle = request_handle
        self._response_handle = response_handle
        self.postoffice.add_handler(KIND, app_id, customer_id, self._on_simple_request)

    def set_request_handle(self, handle: SimpleHandle) -> None:
        """handle(data, app) has to call app.response(data, body), then or later. Where requests may be on their way already, give
        it to the constructor."""
        self._request_handle = handle

    def set_response_handle(self, handle: SimpleHandle) -> None:
        """handle(data, app) runs for each answer, before wait() returns."""
        self._response_handle = handle

    def request(self, head: int, body: str, recv_id: int, timeout_s: float | None = None) -> int:
        """Ask every node of a group, or the one of that id; the timestamp for wait(). Raises ConfigError, BadArguments."""
        if not isinstance(head, int) or not isinstance(body, str):
            raise BadArguments(f"request({head!r}, {body!r}): the head is an int and the body a str")
        nodes = self.postoffice.members(recv_id)
        parts = [(node, (head, body), len(body)) for node in nodes]
        return self._customer.request(KIND, parts, partial(self._on_responses, head, nodes), timeout_s=timeout_s)

    def response(self, data: SimpleData, body: str = "") -> None:
        """Answer a request, from any thread. Raises Rejected the second time."""
        assert data.answer is not None, "a response has no response"
        data.answer.give(body)

    def wait(self, timestamp: int, timeout_s: float | None = None) -> None:
        """Return once all have answered, or raise: see Customer.wait()."""
        self._customer.wait(timestamp, timeout_s)

    def is_done(self, timestamp: int) -> bool:
        """Whether wait() would return, or raise, at once."""
        return self._customer.is_done(timestamp)

    def close(self) -> None:
        """Handle no more requests: they wait for the next application of this id."""
        self.postoffice.remove_handler(KIND, self.app_id, self.customer_id)

    def _on_simple_request(self, sender: int, customer_id: int, timestamp: int, head: int, body: str) -> Any:
        handle = self._request_handle
        if handle is None:
            return ""
        answer = Answer()
        handle(SimpleData(head, body, sender, timestamp, customer_id, answer), self)
        return answer.outcome()

    def _on_responses(self, head: int, nodes: tuple[int, ...], timestamp: int, answers: list[str]) -> None:
        handle = self._response_handle
        if handle is not None:
            for node, body in zip(nodes, answers, strict=True):
                handle(SimpleData(head, body, node, timestamp, self.customer_id), self)
