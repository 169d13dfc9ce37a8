"""grpcio's asyncio side: grpc.aio client and server, the same unary call as grpc.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import grpc.aio

from ..child import Announce
from ..harness import Place
from .face import WAIT_S_MAX, AwaitedPeer, Job
from .grpc import ECHO, OPTIONS, SERVICE


async def _echo(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    return request


def serve(announce: Announce) -> None:
    """Answer until killed."""
    asyncio.run(_serve(announce))


async def _serve(announce: Announce) -> None:
    server = grpc.aio.server(options=OPTIONS)
    handlers = {ECHO: grpc.unary_unary_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    announce(f"127.0.0.1:{port}")
    await server.wait_for_termination()


class Connected(AwaitedPeer):
    """The client's side."""

    def __init__(self, place: Place, job: Job) -> None:
        super().__init__(place, job)
        self._channel = self.run(self._open(self.start(serve)))
        self.exits.callback(lambda: self.run(self._channel.close()))
        self._call = self._channel.unary_unary(f"/{SERVICE}/{ECHO}")

    @staticmethod
    async def _open(address: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=OPTIONS)  # belongs to the loop that runs

    def begin(self, payload: bytes) -> Awaitable[bytes]:
        under_way: Awaitable[bytes] = self._call(payload, timeout=WAIT_S_MAX)
        return under_way
