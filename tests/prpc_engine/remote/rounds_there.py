"""A worker that joins one group after another, as `python -m`:

rounds_there RANK WORLD_SIZE INIT_METHOD ROUNDS

In each it calls all workers, and leaves. It says how many groups there were.
"""

from __future__ import annotations

import os
import sys

from prpc_engine import remote as rpc


def main() -> None:
    rank, size, init_method, rounds = sys.argv[1:]
    for _ in range(int(rounds)):
        rpc.init_rpc(f"worker{rank}", int(rank), int(size), init_method)
        workers = rpc.get_worker_infos()
        assert [worker.id for worker in workers] == list(range(int(size))), workers
        pids = {rpc.rpc_sync(worker, os.getpid) for worker in workers}
        assert len(pids) == int(size), pids
        rpc.shutdown()
    print("groups", rounds, flush=True)


if __name__ == "__main__":
    main()
