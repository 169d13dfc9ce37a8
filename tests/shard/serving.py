"""A listener for one connection, which a test says the other side of."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from tests.transport_contract import PATIENCE_S


class ServedBy:
    """An address where handle(sock) runs in a thread for one connection."""

    def __init__(self, handle: Callable[[socket.socket], object]) -> None:
        self._handle = handle
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        sock, _ = self._listening.accept()
        with sock:
            try:
                self._handle(sock)
            except OSError:
                return  # the other side's business, which the test looks at

    def __enter__(self) -> str:
        self._thread.start()
        host, port = self._listening.getsockname()
        return f"tcp://{host}:{port}"

    def __exit__(self, *error: object) -> None:
        self._thread.join(PATIENCE_S)
        self._listening.close()
