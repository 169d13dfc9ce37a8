"""This engine with its client in an asyncio loop: the same calls, awaited."""

from __future__ import annotations

from collections.abc import Awaitable

from ..harness import Place
from . import prpc
from .face import AwaitedPeer, Job


class Connected(AwaitedPeer):
    """The client's side."""

    def __init__(self, place: Place, job: Job, transport: str, polling: bool) -> None:
        super().__init__(place, job)
        blocking = prpc.Connected(place, job, transport, polling)
        self.exits.enter_context(blocking)
        self.server = blocking.server
        self._submit = blocking.client.submit

    def begin(self, payload: bytes) -> Awaitable[bytes]:
        under_way: Awaitable[bytes] = self._submit("echo", payload)
        return under_way
