"""Servers that cannot be connected to: they take a connection and never say a word, as a host
behind a broken network does.
"""

from __future__ import annotations

import socket
from types import TracebackType

from prpc_engine.master.registry import ServerEntry


class Blackhole:
    """A context manager; when it ends, whoever connects to it learns at once that nobody is
    there.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._address = "tcp://{}:{}".format(*self._listener.getsockname())

    def entry(self, service: str, server_id: int) -> ServerEntry:
        """As the master would list it."""
        return ServerEntry(service, server_id, 16, 99, (self._address,))

    def close(self) -> None:
        """Refuse whoever is connecting, and who comes later."""
        self._listener.close()

    def __enter__(self) -> Blackhole:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
