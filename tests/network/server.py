"""A server anywhere: in another network namespace, with another /dev/shm, behind a proxy.

    COMMAND... python -m tests.network.server JSON

serves Works under "works" as an RpcService made with the arguments that JSON has, and `server_id`,
until its standard input ends.
"""

from __future__ import annotations

import json
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine import RetryPolicy, RpcClient, RpcService, idempotent
from shard import Limits
from tests.program import PATIENCE_S, ROOT, Program
from tests.prpc_engine.inside import nap

NAME = "works"
SECRET = "a secret of these tests"


def pattern(start: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes by which a wrong, missing or moved one is seen."""
    return np.random.default_rng(start).integers(0, 256, nbytes, np.uint8)


def checksum(array: NDArray[np.uint8]) -> int:
    return zlib.crc32(array.data)


class Works:
    def __init__(self, service: RpcService, server_id: int) -> None:
        self._service = service
        self._server_id = server_id
        self._ran: Counter[int] = Counter()
        self._clients: dict[str, RpcClient] = {}

    @idempotent
    def where(self) -> int:
        return self._server_id

    @idempotent
    def checked(self, array: NDArray[np.uint8]) -> tuple[int, NDArray[np.uint8]]:
        """What came, by its CRC-32, and as many bytes back."""
        return checksum(array), array

    def count(self, key: int) -> int:
        """Not to be repeated."""
        self._ran[key] += 1
        return key

    @idempotent
    def ran(self) -> dict[int, int]:
        return dict(self._ran)

    async def reach(self, name: str, key: int) -> int:
        """What another service of that name, which this process connects to, makes of the key."""
        if name not in self._clients:
            self._clients[name] = self._service.create_client(
                name, retry=RetryPolicy(attempts_max=12, unsent_max=40)
            )
        result: int = await self._clients[name].submit("same", key, timeout_s=PATIENCE_S)
        return result

    @idempotent
    def same(self, key: int) -> int:
        return key

    async def hold(self) -> None:
        await nap(self._service, 3600.0)


class Serving(Program):
    """Such a process, started by `prefix`."""

    def __init__(
        self,
        prefix: Sequence[str],
        server_id: int,
        master: str,
        limits: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        text = json.dumps(
            {
                "server_id": server_id,
                "master": master,
                "secret": SECRET,
                "limits": limits or {},
                **kwargs,
            }
        )
        super().__init__("tests.network.server", text, prefix=prefix, env={"PYTHONPATH": str(ROOT)})
        self.where = "", 0  # it listens at

    def __enter__(self) -> Serving:
        host, _, port = self.read_line().rpartition(":")
        self.where = host, int(port)
        return self


def main(text: str) -> None:
    settings = json.loads(text)
    server_id = settings.pop("server_id")
    limits = Limits(**settings.pop("limits"))
    with RpcService(limits=limits, **settings) as service:
        service.create_server(NAME, Works(service, server_id), server_id=server_id)
        print(service.address, flush=True)

        def stop_at_the_end() -> None:
            sys.stdin.read()
            service.stop_serving()

        closer = threading.Thread(target=stop_at_the_end)
        closer.start()
        service.serve_forever()
        closer.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
