"""A process with a plain server of tables, until its input ends.

python -m tests.prpc_engine.kv.table_server MASTER SERVER_ID
"""

from __future__ import annotations

import sys

from prpc_engine import RpcService
from prpc_engine.kv import TableServer

if __name__ == "__main__":
    with RpcService(sys.argv[1]) as service:
        made = TableServer(service, server_id=int(sys.argv[2]))
        print(made.server.server_id, flush=True)
        sys.stdin.read()
