"""A worker of a test's group, as `python -m`:

worker_there NAME RANK WORLD_SIZE INIT_METHOD [OPTIONS as JSON]

It says "up" when it is in the group, and leaves with its standard input; a line "leave" has it call
shutdown(), which waits for the others, and then say "left".
"""

from __future__ import annotations

import json
import sys

from prpc_engine import remote as rpc
from tests.prpc_engine.remote import functions_there as functions_there


def main() -> None:
    name, rank, size, init_method, *rest = sys.argv[1:]
    options = rpc.Options(**json.loads(rest[0])) if rest else rpc.Options()
    rpc.init_rpc(
        name,
        None if rank == "-" else int(rank),
        None if size == "-" else int(size),
        init_method,
        options,
    )
    print("up", flush=True)
    if sys.stdin.readline().strip() == "leave":
        rpc.shutdown()
        print("left", flush=True)
        sys.stdin.readline()
    rpc.shutdown(graceful=False)


if __name__ == "__main__":
    main()
