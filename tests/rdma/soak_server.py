"""A process that answers over verbs, until its standard input ends.

python -m tests.rdma.soak_server MASTER NAME
"""

from __future__ import annotations

import sys
from typing import Any

from prpc_engine import RpcService
from tests.prpc_engine.inside import node_of


class Echo:
    """Handlers of a soak."""

    def __init__(self, service: RpcService) -> None:
        self._slab = node_of(service).slab

    def echo(self, value: Any) -> Any:
        """The same."""
        return value

    def leases(self) -> int:
        """What peers hold of this process's arrays."""
        return self._slab.statistics().leases


if __name__ == "__main__":
    with RpcService(sys.argv[1], transports=["verbs"]) as service:
        service.create_server(sys.argv[2], Echo(service))
        print("ready", flush=True)
        sys.stdin.read()
