"""A process that serves tables over verbs, until its standard input ends.

python -m tests.rdma.table_server MASTER
"""

from __future__ import annotations

import sys

from prpc_engine import RpcService
from prpc_engine.kv import TableServer

if __name__ == "__main__":
    with RpcService(sys.argv[1], transports=["verbs", "tcp"]) as service:
        TableServer(service)
        print("ready", flush=True)
        sys.stdin.read()
