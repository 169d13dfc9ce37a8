"""A worker whose CUDA devices are memory of the host, as `python -m`:

worker_on_host NAME RANK WORLD_SIZE INIT_METHOD FOLDER DEVICES [direct]

It says "up" when it is in the group, and leaves with its standard input.
"""

from __future__ import annotations

import sys
from pathlib import Path

from prpc_engine import remote as rpc
from tests.prpc_engine.cuda.on_host import use_host_devices


def main() -> None:
    name, rank, size, init_method, folder, devices, *direct = sys.argv[1:]
    use_host_devices(Path(folder), int(devices))
    options = rpc.Options(gpu_direct=bool(direct))
    rpc.init_rpc(name, int(rank), int(size), init_method, options)
    print("up", flush=True)
    sys.stdin.readline()
    rpc.shutdown(graceful=False)


if __name__ == "__main__":
    main()
