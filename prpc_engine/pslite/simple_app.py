"""SimpleApp: a number and a text to some nodes, and a text back from each.

    app = SimpleApp(0, 0, request_handle=lambda data, app: app.response(data, "yes"))
    app.wait(app.request(1, "ready?", SERVER_GROUP))

Who is given no request handle answers "". Requests that come before the application is made wait
for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from prpc_engine.errors import BadArguments, ConfigError, Rejected
from prpc_engine.pslite.customer import REQUEST_TIMEOUT_S, Customer
from prpc_engine.pslite.customer_router import SIMPLE
from prpc_engine.pslite.lifecycle import get_postoffice
from prpc_engine.pslite.postoffice import Postoffice
from prpc_engine.rpc.deferred import Deferred
from shard import runtime

# for all answers: a lock for each would cost more than they ever wait for this one
_answering = runtime.Lock()


class Answer(msgspec.Struct, eq=False):
    """What becomes of one request: answered once, in its handler's turn or later, from any thread.

    A Struct because its constructor is in C: one is made for every request."""

    is_given: bool = False
    value: Any = None
    later: Deferred | None = None

    def give(self, value: Any) -> None:
        """Raises Rejected the second time."""
        with _answering:
            if self.is_given:
                raise Rejected("this request was answered before: each gets one response")
            later = self.later
            if later is None:
                self.value = value
            self.is_given = True  # last: outcome() looks at it first
        if later is not None:
            later.reply(value)

    def fail(self, error: BaseException) -> None:
        """The handler raised, in a thread of its own; where it had answered before, that stays."""
        with _answering:
            is_first, self.is_given, later = not self.is_given, True, self.later
        if is_first and later is not None:
            later.fail(error)

    def outcome(self) -> Any:
        """After the handler, once: the value, or what it comes by."""
        # the usual case, without the lock: `later` is made below only, so the value is in place
        if self.is_given:
            return self.value
        with _answering:
            if not self.is_given:
                self.later = Deferred()
            return self.value if self.later is None else self.later


@dataclass(frozen=True, eq=False)
class SimpleData:
    """A request, or with its answer as the body, a response. `sender` is a node id, `timestamp` the
    requester's.
    """

    head: int
    body: str
    sender: int
    timestamp: int
    customer_id: int
    answer: Answer | None = field(default=None, repr=False)


SimpleHandle = Callable[[SimpleData, Any], object]


class SimpleApp:
    """A SimpleApp sends a number and a text to some nodes, and gets a text back from each.

    start() comes first. Handles run one at a time, in the thread that has the reactor.

    request_handle     answers requests by response(); None: each is answered by ""
    response_handle    runs for each answer, before wait() returns; None: nothing does
    request_timeout_s  deadline of requests that are given none, in seconds
    instance           with DMLC_GROUP_SIZE > 1: which one of this process; it talks to those of its
                       own number

    postoffice         the place in the job that it belongs to; None: this process's, of start()

    Raises ConfigError where this process has such an application, or did not start that customer.
    """

    role: str | None = None  # whose place it takes in a joint process; None: the server's

    def __init__(
        self,
        app_id: int = 0,
        customer_id: int = 0,
        request_handle: SimpleHandle | None = None,
        response_handle: SimpleHandle | None = None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        instance: int = 0,
        postoffice: Postoffice | None = None,
    ) -> None:
        if type(app_id) is not int:
            name = type(self).__name__
            raise ConfigError(
                f"{name}({type(app_id).__name__}, ...): an app id is an int; "
                "the class that takes an RpcService and holds tables "
                f"is {name.replace('KV', 'Table') if name.startswith('KV') else 'TableWorker'}"
            )
        self.app_id, self.customer_id, self.instance = app_id, customer_id, instance
        self.postoffice = postoffice or get_postoffice()
        if self.role is not None and self.role not in self.postoffice.settings.roles:
            raise ConfigError(
                f"a {type(self).__name__} at a {self.postoffice.role}: "
                f"only nodes with DMLC_ROLE={self.role}, or joint, have one"
            )
        self.node = self.postoffice.node_of(customer_id, self.role, instance)
        self._customer_router = self.postoffice.customer_router(self.node)
        self._customer = Customer(self.postoffice, app_id, request_timeout_s)
        self._request_handle = request_handle
        self._response_handle = response_handle
        if request_handle is not None:
            self.postoffice.expect_requests()
        self._customer_router.add_handler(SIMPLE, app_id, self._on_simple_request)

    def set_request_handle(self, handle: SimpleHandle) -> None:
        """handle(data, app) has to call app.response(data, body), then or later. Where requests may
        be on their way already, give it to the constructor."""
        self.postoffice.expect_requests()
        self._request_handle = handle

    def set_response_handle(self, handle: SimpleHandle) -> None:
        """handle(data, app) runs for each answer in an engine thread, before wait() returns."""
        self._response_handle = handle

    def request(self, head: int, body: str, recv_id: int, timeout_s: float | None = None) -> int:
        """Ask every node of a group, or the one of that id; the timestamp for wait(). Raises
        ConfigError, BadArguments.
        """
        if not isinstance(head, int) or not isinstance(body, str):
            raise BadArguments(
                f"request({head!r}, {body!r}): the head is an int and the body a str"
            )
        nodes = self.postoffice.peers(recv_id, self.instance)
        timestamp = self._customer.new_timestamp()
        message = self.app_id, self.node, self.customer_id, timestamp, head, body
        parts = [(node, message, len(body)) for node in nodes]
        callback = partial(self._on_responses, head, nodes)
        return self._customer.request(
            timestamp, SIMPLE, parts, None, timeout_s=timeout_s, callback=callback
        )

    def response(self, data: SimpleData, body: str = "") -> None:
        """Answer a request, from any thread. Raises Rejected the second time."""
        assert data.answer is not None, "a response has no response"
        data.answer.give(body)

    def wait(self, timestamp: int, timeout_s: float | None = None) -> None:
        """Return once all have answered and the callbacks have run. Again, and from any thread.

        timeout_s: in seconds; None: until the request's own deadline. Raises what the request
        failed with, DeadlineExceeded, BadArguments for a timestamp that was not given yet.
        """
        self._customer.wait(timestamp, timeout_s)

    async def wait_async(self, timestamp: int) -> None:
        """wait() for a coroutine, until the request's own deadline."""
        await self._customer.wait_async(timestamp)

    def is_done(self, timestamp: int) -> bool:
        """Whether wait() would return, or raise, at once."""
        return self._customer.is_done(timestamp)

    def close(self) -> None:
        """Handle no more requests: they wait for the next application of this id. Again: does
        nothing.
        """
        self._customer_router.remove_handler(SIMPLE, self.app_id, self._on_simple_request)

    def _on_simple_request(
        self, sender: int, customer_id: int, timestamp: int, head: int, body: str
    ) -> Any:
        handle = self._request_handle
        if handle is None:
            return ""
        answer = Answer()
        handle(SimpleData(head, body, sender, timestamp, customer_id, answer), self)
        return answer.outcome()

    def _on_responses(
        self, head: int, nodes: tuple[int, ...], timestamp: int, answers: list[str]
    ) -> None:
        handle = self._response_handle
        if handle is not None:
            for node, body in zip(nodes, answers, strict=True):
                handle(SimpleData(head, body, node, timestamp, self.customer_id), self)
