"""DI-engine's message queue over prpc: what its MQ_REGISTRY makes of "prpc"."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from prpc_engine.ding.exchange import START_S, Exchange, ExchangeStatistics


class PrpcMQ:
    """A message queue with the methods of DI-engine's: events by topic, to all linked nodes that
    have subscribed to it.

    listen_to  "tcp://host:port" or "ipc:///path"; None: nobody can dial it
    attach_to  such addresses, to be dialled; a link is good for both directions
    expects    those that will dial this one: what is published before they come is held for them
    name       how other nodes name this one in their logs
    start_s    seconds after the first subscribe() in which events of other topics are kept, too
    others     are taken and ignored, as DI-engine's own queues do

    Thread-safe. Raises ConfigError for an address that is none.
    """

    def __init__(
        self,
        listen_to: str | None = None,
        attach_to: Sequence[str] | None = None,
        *,
        expects: Sequence[str] = (),
        name: str = "",
        start_s: float = START_S,
        **others: Any,
    ) -> None:
        self.listen_to = listen_to
        self.attach_to = list(attach_to or [])  # DI-engine's barrier counts them
        self._exchange = Exchange(listen_to, self.attach_to, expects, name, start_s)

    def listen(self) -> None:
        """Bind, and dial the others in the background. Raises AddressInUse, ConfigError."""
        self._exchange.listen()

    def publish(self, topic: str, data: bytes | bytearray | memoryview) -> None:
        """Send an event. Waits while a node that is up has no room for it, at most until it is
        taken for stuck; never for one that is not there. After stop(): does nothing.
        """
        self._exchange.publish(topic, data)

    def subscribe(self, topic: str) -> None:
        """Get events of that topic; what any node publishes after this returns arrives."""
        self._exchange.subscribe(topic)

    def unsubscribe(self, topic: str) -> None:
        """Get them no more. A pattern such as "task.*" means all topics that it matches."""
        self._exchange.unsubscribe(topic)

    def recv(self) -> tuple[str, bytes | memoryview] | None:
        """The next event, as topic and data; waits for it. None after stop()."""
        return self._exchange.recv()

    def stop(self) -> None:
        """Let what was published leave, say goodbye, and hang up. Again: does nothing."""
        self._exchange.stop()

    def statistics(self) -> ExchangeStatistics:
        """A snapshot: which nodes are linked, and what waits for whom."""
        return self._exchange.statistics()

    def __del__(self) -> None:
        exchange = getattr(self, "_exchange", None)  # none where the constructor has raised
        # an interpreter that ends has stopped its other threads, and the kernel hangs up
        if exchange is not None and not sys.is_finalizing():
            exchange.stop(linger_s=0.0)
